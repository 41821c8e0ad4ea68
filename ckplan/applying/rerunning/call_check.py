"""Compare the calls of torch functions of a second run with those of the first.

The first forward of a module learns its calls (``KnownCalls``): later ones, and their
second runs, compare arguments with compiled matchers, which costs a fraction of hashing
them. From the first call that differs on, a run is compared by hashes.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ckplan.applying.rebuilding.digest import holds_same
from ckplan.applying.tensors.arguments import (
    Slots,
    are_switched,
    is_query,
    switches,
    version_of,
)
from ckplan.applying.tensors.geometry import (
    Geometry,
    GeometryCheck,
    UnknownArgumentError,
    geometry_of,
)
from ckplan.applying.tensors.matchers import Matcher, Matchers
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


@dataclass(frozen=True, slots=True)
class KnownCall:
    """A call of a torch function in a learned forward."""

    func: Any
    matches: Matcher
    grad_mode: bool
    default_dtype: torch.dtype
    simple: bool  # without autocast; other switches do not count
    switches: tuple[Any, ...]
    numbers: tuple[int, ...]  # of the tensors that it returned
    returns_new: bool  # one tensor, which no call had returned or taken before
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


class CallCheck(TorchFunctionMode):
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
        super().__init__()
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self.different = ""  # the first call that differs
        self.stopped = False
        first = memory.known if expected is None else expected.known
        self.known: KnownCalls | None = first
        self.digests: Sequence[int] = [] if first is None else first.digests
        self.met: list[weakref.ref[torch.Tensor]] = []  # from outside
        self.versions: list[int] = []  # of these
        self.memory = memory
        self._expected = expected
        self._put_back = put_back
        self._made: list[weakref.ref[torch.Tensor]] = []
        self._calls = iter(() if first is None else first.calls)
        self._next = next(self._calls, None)
        self._slots: Slots | None = None if first else Slots(self._meet_hashed)
        learns = expected is None and first is None
        self._learned: list[_Learned] | None = (
            [] if learns and memory.misses < _MOST_MISSES else None
        )
        self._outside: list[Geometry] = []  # of tensors met, while it learns

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self.stopped:
            raise StopRerunError
        call = self._next
        if (
            call is not None
            and (call.func is func or call.func == func)
            and _is_grad_enabled() is call.grad_mode
            and _get_default_dtype() is call.default_dtype
            and call.matches(args, kwargs, self._made, (), self.met, self)
            and (
                not _is_autocast_enabled()
                if call.simple
                else are_switched(call.switches, func)
            )
        ):
            out = func(*args, **kwargs) if kwargs else func(*args)
            if call.returns_new and type(out) is _Tensor:
                self._made.append(weakref.ref(out))
            else:
                self._number(call, out)
            self._next = next(self._calls, None)
            return out
        kwargs = kwargs or {}
        if is_query(func) or func in _NOT_FOLLOWED:
            return func(*args, **kwargs)
        if self.known is not None:
            self._leave_known()
        return self._hashed(func, args, kwargs)

    def stop(self) -> StopRerunError:
        """Make the exception that ends the run; every later call raises it again."""
        self.stopped = True
        return StopRerunError()

    def close(self) -> None:
        """End the run; keep only digests."""
        if self._next is not None and self._expected is None:  # it ended early
            self._leave_known()
        if self._learned is not None:
            self.memory.known = self._learn(self._learned)
        self._learned, self._expected = None, None
        if self._slots is not None:
            self._slots.close()
        self._made.clear()

    def _number(self, call: KnownCall, out: Any) -> None:
        """Number the tensors that a known call returned."""
        for number, tensor in zip(call.numbers, tensors_in(out), strict=False):
            if number == len(self._made):
                self._made.append(weakref.ref(tensor))

    def meet(self, number: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor from outside is as it was learned."""
        assert self.known is not None
        if not self.known.outside[number].passes(tensor):
            return False
        if self._expected is None:
            self.met.append(weakref.ref(tensor))
            self.versions.append(version_of(tensor))
            return True
        self._meet(tensor)
        if self.different:
            raise DifferentError(self.different)
        return True

    def _meet(self, tensor: torch.Tensor) -> None:
        """Note a tensor from outside, and check that its values are the same."""
        place, version, expected = len(self.met), version_of(tensor), self._expected
        self.met.append(weakref.ref(tensor))
        self.versions.append(version)
        if expected is None or self.different or id(tensor) in self._put_back:
            return
        first = expected.met[place]() if place < len(expected.met) else None
        if first is None:
            return
        if first is tensor:
            if expected.versions[place] != version:
                self.different = (
                    f"it reads a {_shown(tensor)} that was changed in place"
                )
        elif (
            expected.versions[place] == version_of(first)
            and first.shape == tensor.shape  # others are told by their geometry
            and not holds_same(first, tensor)
        ):
            self.different = f"it reads another {_shown(tensor)}"

    def _leave_known(self) -> None:
        """Go on with hashes: the next call is not the one that was learned."""
        assert self.known is not None
        call = self._next
        if call is not None:
            self.digests = self.known.digests[: call.num_digests]
            del self.met[call.num_met :], self.versions[call.num_met :]
        self.digests = [*self.digests]
        self._slots = Slots(self._meet_hashed)
        self._slots.resume(self._made, self.met)
        self.known = self._next = None
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
        out = func(*args, **kwargs)
        slots.returned(out)
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
        self._learned = None  # its state is to be kept
        known = self.generators if self._expected is None else self._expected.generators
        if any(one is generator for one, _ in known):
            return
        if self._expected is None:
            state = random_state(generator.device, generator)
            self.generators.append((generator, state))
        else:
            self.different = self.different or "another random generator"

    def _learn(self, learned: Sequence[_Learned]) -> KnownCalls:
        matchers, num_made, calls = Matchers(), 0, []
        for one in learned:
            is_new = one.is_tensor and one.numbers == [num_made]
            num_made = max([num_made, *(number + 1 for number in one.numbers)])
            calls.append(
                KnownCall(
                    one.func,
                    matchers.make(one.arguments),
                    one.switches[0],
                    one.switches[1],
                    one.switches[2:] == (False, False),
                    one.switches,
                    tuple(one.numbers),
                    is_new,
                    one.num_met,
                    one.num_digests,
                )
            )
        outside = tuple(map(GeometryCheck.of, self._outside))
        found = KnownCalls(tuple(calls), outside, tuple(self.digests))
        return _KNOWN.one(exactly(found), found)


_KNOWN: Shared[KnownCalls] = Shared()  # of modules that are alike


def _shown(tensor: torch.Tensor) -> str:
    return f"tensor of shape {tuple(tensor.shape)}"


_Tensor = torch.Tensor  # saves looking up
_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled = torch._C._is_any_autocast_enabled
_get_default_dtype = torch.get_default_dtype
