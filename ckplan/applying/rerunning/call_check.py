"""Compare the calls of torch functions of a second run with those of the first.

The first forward of a module learns its calls (``KnownCalls``): later ones, and their
second runs, compare arguments with compiled matchers, which costs a fraction of hashing
them. From the first call that differs on, a run is compared by hashes.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ckplan.applying.rebuilding.digest import holds_same
from ckplan.applying.rerunning.unseen_writes import UnseenWrites
from ckplan.applying.tensors.arguments import (
    Slots,
    is_query,
    storage_of,
    switches,
    version_of,
)
from ckplan.applying.tensors.expected_calls import ExpectedCall, ExpectedCalls
from ckplan.applying.tensors.foreign import digest_of_foreign
from ckplan.applying.tensors.geometry import (
    Geometry,
    GeometryCheck,
    UnknownArgumentError,
    geometry_of,
)
from ckplan.applying.tensors.matchers import Matchers
from ckplan.applying.tensors.random_state import random_state
from ckplan.applying.tensors.retained import tensors_in
from ckplan.applying.tensors.sharing import Shared, exactly

_NOT_COMPARED = 0
_NOT_FOLLOWED = (
    torch.Tensor.detach,
    torch._C._set_grad_enabled,
)  # autograd calls these itself
_MOST_MISSES = 8  # of a module's forwards: then its calls are learned no more


class StopRerunError(Exception):
    """Ends a second run: all that backward needs is there."""


class DifferentError(RuntimeError):
    """Stops a second run that differs; its region raises the error at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCall(ExpectedCall):
    """A call of a torch function in a learned forward."""

    num_met: int  # tensors from outside that were met before
    num_digests: int  # of the calls and tensors before


@dataclass(frozen=True)
class KnownCalls:
    """The calls of a learned forward."""

    calls: Sequence[KnownCall]
    outside: Sequence[GeometryCheck]  # of tensors from outside, as they were met
    digests: Sequence[int]


@dataclass
class CallMemory:
    """The calls that the forwards of a module have in common."""

    known: KnownCalls | None = None
    misses: int = 0  # forwards that made other calls


class _Learned(NamedTuple):
    """A call, before its matcher is made."""

    func: Any
    arguments: Any
    switches: tuple[Any, ...]
    num_met: int
    num_digests: int
    numbers: list[int]
    is_tensor: bool  # what it returned


class CallCheck(ExpectedCalls[KnownCall]):
    """The calls of one run."""

    def __init__(
        self,
        memory: CallMemory,
        expected: CallCheck | None = None,
        put_back: Collection[int] = (),
    ) -> None:
        """Begin a run.

        Args:
            memory: Of the module's forwards.
            expected: The first run, for the second.
            put_back: The ids of restored tensors.
        """
        known = memory.known if expected is None else expected.known
        super().__init__(() if known is None else known.calls)
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self.different = ""  # the first call that differs
        self.unseen = UnseenWrites()
        self.foreign: dict[int, bytes] = {}  # met tensor -> digest of its bytes
        self.stopped = False
        self.known: KnownCalls | None = known
        self.digests: Sequence[int] = [] if known is None else known.digests
        self.met_versions: list[int] = []  # of the tensors from outside
        self.memory = memory
        self._expected = expected
        self._put_back = put_back
        self._slots: Slots | None = None if known else Slots(self._meet_hashed)
        learns = expected is None and known is None
        self._learned: list[_Learned] | None = (
            [] if learns and memory.misses < _MOST_MISSES else None
        )
        self._outside: list[Geometry] = []  # of tensors met, while it learns

    def other(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Handle a call that is not the one that was learned."""
        if self.stopped:
            raise StopRerunError
        if is_query(func) or func in _NOT_FOLLOWED:
            return func(*args, **kwargs)
        if self.known is not None:
            self._leave_known()
        return self._hashed(func, args, kwargs)

    def stop(self) -> StopRerunError:
        """Make the exception that ends the run; every later call raises it again."""
        self.stopped, self.next = True, None
        return StopRerunError()

    def close(self) -> None:
        """End the run; keep only digests."""
        if self.next is not None and self._expected is None:  # it ended early
            self._leave_known()
        if self._learned is not None:
            self.memory.known = self._learn(self._learned)
        self._learned, self._expected = None, None
        if self._slots is not None:
            self._slots.close()
        self.made.clear()

    def number(self, call: KnownCall, out: Any) -> bool:
        """Number the tensors that a known call returned."""
        for number, tensor in zip(call.numbers, tensors_in(out), strict=False):
            if number == len(self.made):
                self.made.append(weakref.ref(tensor))
                self.versions.append(version_of(tensor))
        return True

    def meet(self, number: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor from outside is as it was learned."""
        assert self.known is not None
        if not self.known.outside[number].passes(tensor):
            return False
        self._meet(tensor)
        if self.different:
            raise DifferentError(self.different)
        return True

    def _meet(self, tensor: torch.Tensor) -> None:
        """Note a tensor from outside, and check that its values are the same."""
        place, version, expected = len(self.met), version_of(tensor), self._expected
        self.met.append(weakref.ref(tensor))
        self.met_versions.append(version)
        if type(tensor) is not _Parameter:
            self._note_foreign(tensor, place)
        if expected is None or self.different or id(tensor) in self._put_back:
            return
        if self.foreign.get(place) != expected.foreign.get(place):
            self.different = f"it reads another {_shown(tensor)}"
            return
        first = expected.met[place]() if place < len(expected.met) else None
        if first is None:
            return
        if first is tensor:
            if expected.met_versions[place] != version:
                self.different = (
                    f"it reads a {_shown(tensor)} that was changed in place"
                )
        elif (
            expected.met_versions[place] == version_of(first)
            and first.shape == tensor.shape  # others are told by their geometry
            and not holds_same(first, tensor)
        ):
            self.different = f"it reads another {_shown(tensor)}"

    def _note_foreign(self, tensor: torch.Tensor, place: int) -> None:
        """Note the bytes of a tensor that shares them with others."""
        with suppress(UnknownArgumentError):
            digest = digest_of_foreign(storage_of(tensor))
            if digest is not None:
                self.foreign[place] = digest

    def _leave_known(self) -> None:
        """Go on with hashes: the next call is not the one that was learned."""
        assert self.known is not None
        call = self.next
        if call is not None:
            self.digests = self.known.digests[: call.num_digests]
            del self.met[call.num_met :], self.met_versions[call.num_met :]
        self.digests = [*self.digests]
        self._slots = Slots(self._meet_hashed)
        self._slots.resume(self.made, self.met)
        self.known = self.next = None
        if self._expected is None:
            self.memory.known = None
            self.memory.misses += 1

    # -- by hashes ---------------------------------------------------------------------

    def _hashed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots = self._slots
        assert slots is not None, "internal error: it compares known calls"
        generator = kwargs.get("generator")
        if generator is not None:
            self._draw(generator)
        before = len(self.met), len(self.digests)
        now = switches(func)
        arguments = self._follow(slots, func, args, kwargs, now)
        if self.different:
            raise DifferentError(self.different)
        try:
            out = func(*args, **kwargs)
        except BaseException:
            self._learned = None  # the forward may go on
            raise
        slots.returned(out)
        if self.unseen.follow(func, args, out, slots.is_outside):
            self._learned = None
        if self._learned is not None:
            numbers = [slots.number_of(tensor) for tensor in tensors_in(out)]
            is_one = isinstance(out, torch.Tensor)
            self._learned.append(
                _Learned(func, arguments, now, *before, numbers, is_one)
            )
        return out

    def _follow(
        self, slots: Slots, func: Any, args: Any, kwargs: Any, now: tuple[Any, ...]
    ) -> Any:
        arguments: Any = None
        try:
            arguments = slots.freeze(args, kwargs)
            digest = hash((func, arguments, now))
        except (UnknownArgumentError, TypeError):
            digest, self._learned = _NOT_COMPARED, None
        self._note(digest, getattr(func, "__name__", str(func)))
        return arguments

    def _meet_hashed(self, tensor: torch.Tensor) -> None:
        try:
            geometry = geometry_of(tensor)
            digest = hash(geometry)
            self._outside.append(geometry)
        except UnknownArgumentError:
            digest, self._learned = _NOT_COMPARED, None
        self._note(digest, f"a tensor of shape {tuple(tensor.shape)}")
        self._meet(tensor)

    def _note(self, digest: int, what: str) -> None:
        place = len(self.digests)
        assert isinstance(self.digests, list)
        self.digests.append(digest)
        if self._expected is None or self.different:
            return
        expected = self._expected.digests
        known = place < len(expected)
        if not known or expected[place] != digest:
            self.different = what

    def _draw(self, generator: torch.Generator) -> None:
        """Keep the state of a generator as it is drawn from first.

        A second run knows the generators of the first one. Another one, which the
        forward makes, must have the state that the one in its place had.
        """
        self._learned = None  # its state is to be kept
        if any(one is generator for one, _ in self.generators):
            return
        expected = [] if self._expected is None else self._expected.generators
        same = next((one for one in expected if one[0] is generator), None)
        state = same[1] if same else random_state(generator.device, generator)
        place = len(self.generators)
        self.generators.append((generator, state))
        if self._expected is None or same:
            return
        alike = place < len(expected) and expected[place][0].device == generator.device
        if not (alike and torch.equal(expected[place][1], state)):
            self.different = self.different or "another random generator"

    def _learn(self, learned: Sequence[_Learned]) -> KnownCalls:
        matchers, num_made, calls = Matchers(), 0, []
        for one in learned:
            is_new = one.is_tensor and one.numbers == [num_made]
            num_made = max([num_made, *(number + 1 for number in one.numbers)])
            calls.append(
                KnownCall(
                    func=one.func,
                    matches=matchers.make(one.arguments),
                    switches=one.switches,
                    numbers=tuple(one.numbers),
                    returns_new=is_new,
                    num_met=one.num_met,
                    num_digests=one.num_digests,
                )
            )
        outside = tuple(map(GeometryCheck.of, self._outside))
        found = KnownCalls(tuple(calls), outside, tuple(self.digests))
        return _KNOWN.one(exactly(found), found)


_Parameter = torch.nn.Parameter  # saves looking up
_KNOWN: Shared[KnownCalls] = Shared()  # of modules that are alike


def _shown(tensor: torch.Tensor) -> str:
    return f"tensor of shape {tuple(tensor.shape)}"
