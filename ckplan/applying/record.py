"""Watch a region's forward op by op: what was not seen before is written down.

A dispatch mode writes down the ops and saved-tensor hooks let go of what the plan
drops. Beside it, a function mode writes down the calls that led to the ops, so that the
next forward need only be seen to make the same calls (``replay.py``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ckplan.applying.calls import (
    Geometry,
    Slots,
    UnknownArgumentError,
    asks_only,
    geometry_of,
    switches,
    version_of,
)
from ckplan.applying.recompute import (
    Dropped,
    Handle,
    Held,
    Kept,
    Rebuilder,
    Ref,
    Step,
    hold,
    random_state,
    tensors_in,
    unpack,
)
from ckplan.encodings import BITS, Encoded, encode
from ckplan.errors import ApplyError
from ckplan.names import relative_path
from ckplan.program import EXTERNAL, Flow, Part, Program, compile_program
from ckplan.training.randomness import draws, may_draw
from ckplan.training.shapes import decided_by_values

OpKey = tuple[str, str, int]
"""Path of the module below the region, op name, occurrence."""

Saves = Mapping[OpKey, frozenset[int] | None]
"""Outputs to keep; None for all of them."""

Encodes = Mapping[OpKey, Mapping[int | None, str]]
"""Outputs to keep in a smaller form, and in which."""

_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
_RUNNING_STATISTICS = slice(3, 5)  # arguments of all three, as is the next
_TRAINING = 5
_SCALINGS = ("div_", "mul_")
_MOST_UNSEEN_BYTES = 4096  # of values that are rebuilt though the plan keeps them


class Capture(NamedTuple):
    """A tensor that the region keeps when a call returned it or autograd saved it."""

    place: int  # number of the tensor among those returned, or of the saved tensor
    value: int
    form: str | None  # to be encoded, or to be held as it is


class Given(NamedTuple):
    """A tensor from elsewhere that a call of the region takes."""

    geometry: Geometry
    storage: int  # equal for those that share one


class Packed(NamedTuple):
    """What autograd saved."""

    size: torch.Size
    ref: Ref | None  # of a tensor that is dropped
    part: int = 0  # the inner region that saved it, counted from 1


class CallRecord(NamedTuple):
    """One call of a torch function."""

    func: Callable[..., Any]
    arguments: Any  # frozen
    switches: tuple[bool, ...]
    random_steps: tuple[int, ...]  # that draw first in it
    captures: tuple[Capture, ...]
    packed_before: int  # how many tensors autograd had saved
    packed_after: int


@dataclass(frozen=True)
class Template:
    """A forward written down, for forwards that make the same calls."""

    calls: tuple[CallRecord, ...]
    given: tuple[Given, ...]
    packed: tuple[Packed, ...]
    captures: Mapping[int, Capture]  # of saved tensors, by their number
    value_of: Mapping[int, int]  # storage of a given tensor -> its value
    flow: Flow
    parts: tuple[Part, ...]
    program: Program
    steps: Mapping[int, Step]
    found: frozenset[OpKey]
    dropped_bytes: int


class _Facts(NamedTuple):
    """What the recorder must know of an op, looked up once."""

    name: str
    is_view: bool
    writes: tuple[tuple[int, str], ...]  # arguments changed in place
    may_draw: bool
    batch_norm: bool
    dynamic: bool  # values may decide how much it returns
    collective: bool  # its schema is silent on what it changes


@cache
def _facts(func: Any) -> _Facts:
    writes = tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    name = func.overloadpacket.__name__
    dynamic = torch.Tag.dynamic_output_shape in func.tags
    norm, collective = name in _BATCH_NORMS, func.namespace == "c10d"
    random = may_draw(func)
    return _Facts(name, func.is_view, writes, random, norm, dynamic, collective)


class _Access(NamedTuple):
    """The storages of an op, as ``program.Flow`` wants them."""

    reads: list[int]
    writes: list[int]
    outputs: list[int]


@dataclass(slots=True)
class _Call:
    """A call as it is written down."""

    func: Callable[..., Any]
    arguments: Any
    switches: tuple[bool, ...]
    packed_before: int
    packed_after: int = 0
    returned: Sequence[tuple[int, Geometry | None]] = ()  # value, or -1, of each tensor


@dataclass(slots=True)
class _Names:
    """What a plan calls the ops below a module."""

    top: str  # FQN of the module
    named: Collection[OpKey]
    found: set[OpKey] = field(default_factory=set)  # of those named
    seen: list[OpKey] = field(default_factory=list)  # all
    _occurrences: dict[tuple[str, str], int] = field(
        default_factory=lambda: defaultdict(int)
    )

    def key(self, fqn: str, name: str) -> OpKey:
        """The name of the op that runs now, in a module."""
        place = (relative_path(fqn, self.top), name)
        key = (*place, self._occurrences[place])
        self._occurrences[place] += 1
        self.seen.append(key)
        if key in self.named:
            self.found.add(key)
        return key


@dataclass(slots=True)
class _Inner:
    """A region inside, as it is written down."""

    start: int  # first step
    outer: int
    saves: Saves
    names: _Names
    stop: int = -1
    kept: set[int] = field(default_factory=set)  # values


class Recorder(TorchDispatchMode):
    """One forward of a region, seen op by op."""

    def __init__(self, name: str, top: str, saves: Saves, encodes: Encodes) -> None:
        """Be ready to watch.

        Args:
            name: What errors call the region.
            top: FQN of the module that paths of its ops begin below.
            saves: Outputs to keep.
            encodes: Outputs to keep in a smaller form.
        """
        super().__init__()
        self.name = name
        self.dropped_bytes = 0
        self.path: list[str] = [top]  # FQNs of the modules that run, innermost last
        self.template: Template | None = None
        self._saves = saves
        self._encodes = encodes
        self._names = _Names(top, {*saves, *encodes})
        self._inner: list[_Inner] = []
        self._open = [0]  # inner regions that run now, counted from 1
        self._flow = Flow()
        self._steps: dict[int, Step] = {}
        self._states: dict[int, torch.Tensor] = {}
        self._numbers: dict[int, int] = {}  # address of a storage -> its number
        self._addresses: list[StorageWeakRef] = []  # keep addresses from being reused
        self._inside: set[int] = set()  # storages that the region made
        self._held: dict[int, Held] = {}  # value -> tensor
        self._encoded: dict[int, Encoded] = {}  # value -> its smaller form
        self._wanted: list[tuple[int, int]] = []  # dropped saved tensors: value, part
        self._seen: set[int] = set()  # their values
        self._packed: list[Packed] = []
        self._packed_values: list[int] = []
        self._log = _CallLog(self)
        self._call_of: list[int] = []  # step -> call
        self._handle = Handle()
        self._contexts = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the guard against being compiled costs more than recording an op

    def open(self) -> None:
        """Begin to watch."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)
        for context in (hooks, self._log, self):
            self._contexts.enter_context(context)

    def begin_inner(self, top: str, saves: Saves) -> None:
        """A region inside this one begins."""
        names = _Names(top, saves.keys())
        start = len(self._flow.inputs)
        self._inner.append(_Inner(start, self._open[-1], saves, names))
        self._open.append(len(self._inner))

    def end_inner(self) -> set[OpKey]:
        """The region that began last ends; returns the saves that named an op."""
        inner = self._inner[self._open.pop() - 1]
        inner.stop = len(self._flow.inputs)
        return inner.names.found

    @property
    def found(self) -> set[OpKey]:
        """Saves and encodings that named an op."""
        return self._names.found

    @property
    def seen(self) -> list[OpKey]:
        """All ops, if any were named."""
        return self._names.seen

    def close(self) -> None:
        """Forward is over: find the program and hold only what it needs.

        Raises:
            ApplyError: The region overwrote an input that it would have to rebuild
            from.
        """
        self._contexts.close()
        flow = self._flow
        while len(self._open) > 1:
            self.end_inner()
        parts = tuple(
            Part(one.start, one.stop, frozenset(one.kept), one.outer)
            for one in self._inner
        )
        kept = [value for value in self._held if flow.maker_of[value] != EXTERNAL]
        program = compile_program(flow, self._wanted, kept, self._encoded.keys(), parts)
        if program.lost:
            raise ApplyError(
                f"cannot rebuild {self.name}: its forward changes an input in place",
                needed="a region whose inputs are still there in backward",
                hint="leave this call out of the plan, or name a larger one",
            )
        steps = {step: self._steps[step] for step in sorted(program.runs())}
        self._handle.rebuilder = Rebuilder(
            self.name, program, steps, self._held, self._encoded, self._states
        )
        self.template = self._make_template(parts, program, steps)
        self._log.close()
        for leftovers in (self._held, self._encoded, self._states, self._steps):
            leftovers.clear()

    def abandon(self) -> None:
        """Forward was interrupted: watch no longer."""
        self._contexts.close()

    # -- ops -------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        facts = _facts(func)
        if facts.is_view:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        reads: list[int] = []
        refs = [self._take(x, reads) for x in args]
        named = {key: self._take(x, reads) for key, x in kwargs.items()}
        random = facts.may_draw and draws(func, args, kwargs)
        generator = kwargs.get("generator") if random else None
        device = _device_of(args, kwargs)
        state = random_state(device, generator) if random else None
        if facts.dynamic and decided_by_values(func, tensors_in(args)):
            self._log.broken = True  # calls do not tell what such an op returns
        out = func(*args, **kwargs)
        returned = tensors_in(out)
        known = len(self._addresses)
        outputs = [self.number(tensor, inside=True) for tensor in returned]
        writes = self._written(facts, args, kwargs) if facts.writes else []
        moved = tensors_in([*args, *kwargs.values()]) if facts.collective else []
        writes += dict.fromkeys(map(self.number, moved))
        if len(self._addresses) > known or writes:
            if facts.batch_norm and args[_TRAINING]:
                refs[_RUNNING_STATISTICS] = None, None  # must not be updated twice
            number = self._flow.add(_Access(reads, writes, outputs))
            grad = torch.is_grad_enabled()
            self._steps[number] = Step(func, refs, named, generator, device, grad)
            self._call_of.append(self._log.current)
            if state is not None:
                self._states[number] = state
            for value in self._flow.overwrites[number]:
                self._held.pop(value, None)
            for tensor in moved:  # what came from elsewhere stays
                self._log.broken = True
                self._held[self._flow.value(self.number(tensor))] = hold(tensor)
            if self._names.named or self._inner:
                self._save(facts.name, number, returned)
        return out

    def _take(self, argument: Any, reads: list[int]) -> Any:
        """An argument as a step keeps it, its storages added to what the op reads."""
        if isinstance(argument, torch.Tensor):
            number = self.number(argument)
            reads.append(number)
            return _ref(argument, self._flow.value(number))
        if isinstance(argument, (list, tuple)):
            return [self._take(item, reads) for item in argument]
        return argument

    def number(self, tensor: torch.Tensor, *, inside: bool = False) -> int:
        """The number of a tensor's storage; one that came from outside is held."""
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = len(self._addresses)
            self._addresses.append(StorageWeakRef(storage))
            self._numbers[storage._cdata] = number
            if inside:
                self._inside.add(number)
            else:
                self._held[self._flow.value(number)] = hold(tensor)
        return number

    def value_inside(self, tensor: torch.Tensor) -> int:
        """The value of a tensor that the region made; -1 for one it was given."""
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        return self._flow.value(number) if number in self._inside else -1

    def _written(
        self, facts: _Facts, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[int]:
        changed = (
            args[position] if position < len(args) else kwargs.get(name)
            for position, name in facts.writes
        )
        return [self.number(t) for value in changed for t in tensors_in(value)]

    def _save(self, name: str, number: int, returned: list[torch.Tensor]) -> None:
        """Hold or encode the outputs that the plan names."""
        fqn = self.path[-1]
        key = self._names.key(fqn, name)
        values = self._flow.returned[number]
        for part in self._open[1:]:
            inner = self._inner[part - 1]
            inner.kept.update(_named(values, inner.saves, inner.names.key(fqn, name)))
        saved = _named(values, self._saves, key)
        if any(at >= len(values) for at in self._saves.get(key) or ()):
            self._names.found.discard(key)  # it has no such output
        for value, tensor in zip(values, returned, strict=True):
            if value in saved:
                self._held[value] = hold(tensor)
        if key in self._encodes:
            forms = self._encodes[key]
            for position, value in enumerate(values):
                form = forms.get(position, forms.get(None))
                small = encode(form, returned[position]) if form else None
                if small is not None:
                    self._encoded[value] = small

    def _pack(self, tensor: torch.Tensor) -> Kept | Dropped:
        with self._log.paused():  # own functions pack outside of any call
            return self._packed_as(tensor)

    def _packed_as(self, tensor: torch.Tensor) -> Kept | Dropped:
        value = -1 if tensor.is_conj() else self.value_inside(tensor)
        self._packed_values.append(value)
        if value < 0 or value in self._held:
            self._packed.append(Packed(tensor.size(), None))
            return Kept(tensor, version_of(tensor), self.name)
        if value not in self._seen:
            self.dropped_bytes += tensor.untyped_storage().nbytes()
        part = self._open[-1]
        self._seen.add(value)
        self._wanted.append((value, part))
        ref = _ref(tensor, value)
        self._packed.append(Packed(ref.size, ref, part))
        return Dropped(self._handle, ref, part)

    @property
    def num_packed(self) -> int:
        """How many tensors autograd saved so far."""
        return len(self._packed)

    # -- the template ----------------------------------------------------------------

    def _make_template(
        self, parts: tuple[Part, ...], program: Program, steps: Mapping[int, Step]
    ) -> Template | None:
        """What later forwards can be compared with; None if calls do not tell all."""
        log, flow = self._log, self._flow
        if log.broken or -1 in self._call_of:
            return None
        given = [
            Given(geometry, self._numbers.get(storage.cdata, -1 - place))
            for place, (geometry, storage) in enumerate(log.given)
        ]
        there = {one.storage for one in given}
        outside = [v for v in program.holds if flow.maker_of[v] == EXTERNAL]
        if any(one.storage in self._inside for one in given) or not there.issuperset(
            flow.storage_of[value] for value in outside
        ):
            return None
        program, steps = self._seen_from_calls(parts, program, steps)
        captures = self._captures(program)
        random_steps = self._first_draws(program)
        if captures is None or random_steps is None:
            return None
        of_calls, of_packed = captures
        calls = tuple(
            CallRecord(
                call.func,
                call.arguments,
                call.switches,
                tuple(random_steps.get(number, ())),
                tuple(of_calls.get(number, ())),
                call.packed_before,
                call.packed_after,
            )
            for number, call in enumerate(log.calls)
        )
        return Template(
            calls,
            tuple(given),
            tuple(self._packed),
            of_packed,
            {flow.storage_of[v]: v for v, m in enumerate(flow.maker_of) if m < 0},
            flow,
            parts,
            program,
            steps,
            frozenset(self.found),
            self.dropped_bytes,
        )

    def _seen_from_calls(
        self, parts: tuple[Part, ...], program: Program, steps: Mapping[int, Step]
    ) -> tuple[Program, Mapping[int, Step]]:
        """The same program, but that what no call shows is rebuilt if it is tiny.

        Such are the scalars that ops make for each other inside of one torch function.
        """
        flow = self._flow
        unseen = {
            value
            for value in program.holds
            if flow.maker_of[value] != EXTERNAL
            and self._where_returned(value, None) is None
            and self._where_packed(value, None) is None
        }
        held_bytes = sum(
            self._held[value].tensor.untyped_storage().nbytes() for value in unseen
        )
        if not unseen or held_bytes > _MOST_UNSEEN_BYTES:
            return program, steps
        kept = [v for v in program.holds - unseen if flow.maker_of[v] != EXTERNAL]
        other = compile_program(flow, self._wanted, kept, self._encoded.keys(), parts)
        if other.lost:
            return program, steps
        return other, {step: self._steps[step] for step in sorted(other.runs())}

    def _captures(
        self, program: Program
    ) -> tuple[dict[int, list[Capture]], dict[int, Capture]] | None:
        """Where a later forward sees what it must hold: returned, or saved."""
        flow = self._flow
        wanted: list[tuple[int, int, str | None]] = [
            (value, value, None)
            for value in program.holds
            if flow.maker_of[value] != EXTERNAL
        ]
        wanted += [
            (value, same, self._encoded[value].form)
            for value in program.decodes
            for same in (self._scaled(value),)
        ]
        of_calls: dict[int, list[Capture]] = defaultdict(list)
        of_packed: dict[int, Capture] = {}
        for value, same, form in wanted:
            shape = self._encoded[value] if form else None
            place = self._where_returned(same, shape)
            if place is not None:
                of_calls[place[0]].append(Capture(place[1], value, form))
                continue
            packed = self._where_packed(same, shape)
            if packed is None or packed in of_packed:
                return None
            of_packed[packed] = Capture(packed, value, form)
        return of_calls, of_packed

    def _scaled(self, value: int) -> int:
        """What a draw of zeros and ones became by scaling: the same bits."""
        flow, same = self._flow, value
        while self._encoded[value].form == BITS and not flow.is_current(same):
            step = next(s for s, old in enumerate(flow.overwrites) if same in old)
            func, args, *_ = self._steps[step]
            if _facts(func).name not in _SCALINGS or not _is_factor(args[1]):
                break
            same = flow.overwrites[step][same]
        return same

    def _where_returned(
        self, value: int, small: Encoded | None
    ) -> tuple[int, int] | None:
        for number, call in enumerate(self._log.calls):
            for place, (returned, geometry) in enumerate(call.returned):
                fits = geometry and (small is None or _fits(small, geometry))
                if returned == value and fits:
                    return number, place
        return None

    def _where_packed(self, value: int, small: Encoded | None) -> int | None:
        for place, (packed, entry) in enumerate(
            zip(self._packed_values, self._packed, strict=True)
        ):
            if packed == value:
                ref = entry.ref
                if small is None or (ref is not None and _fits(small, ref)):
                    return place
        return None

    def _first_draws(self, program: Program) -> dict[int, list[int]] | None:
        """The steps before which a call's random state is theirs; by call."""
        first: dict[tuple[int, torch.device], int] = {}
        for step in self._states:
            key = (self._call_of[step], self._steps[step].device)
            first.setdefault(key, step)
        needed = program.runs().keys() & self._states.keys()
        drawn = {step: key[0] for key, step in first.items()}
        if any(
            step not in drawn or self._steps[step].generator is not None
            for step in needed
        ):
            return None
        found: dict[int, list[int]] = defaultdict(list)
        for step in sorted(needed):
            found[drawn[step]].append(step)
        return found


class _CallLog(TorchFunctionMode):
    """Writes down the functions that a forward calls."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.given: list[tuple[Geometry, StorageWeakRef]] = []
        self.broken = False  # a call cannot be compared with another
        self.current = -1
        self._is_paused = False
        self._recorder = recorder
        self._slots = Slots(self._meet)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.broken or self._is_paused or asks_only(func):
            return func(*args, **kwargs)
        try:
            arguments = self._slots.freeze((args, kwargs))
        except UnknownArgumentError:
            self.broken = True
            return func(*args, **kwargs)
        call = _Call(func, arguments, switches(), self._recorder.num_packed)
        self.current = len(self.calls)
        try:
            out = func(*args, **kwargs)
        except BaseException:
            self.broken = True
            raise
        finally:
            self.current = -1
        self._slots.returned(out)
        call.packed_after = self._recorder.num_packed
        call.returned = [self._describe(tensor) for tensor in tensors_in(out)]
        self.calls.append(call)
        return out

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls that the region makes itself are not the forward's."""
        self._is_paused = True
        yield
        self._is_paused = False

    def close(self) -> None:
        """The forward is over: what was written down is in the template."""
        self._slots.close()
        del self._recorder

    def _meet(self, tensor: torch.Tensor) -> None:
        self.given.append(
            (geometry_of(tensor), StorageWeakRef(tensor.untyped_storage()))
        )

    def _describe(self, tensor: torch.Tensor) -> tuple[int, Geometry | None]:
        try:
            return self._recorder.value_inside(tensor), geometry_of(tensor)
        except UnknownArgumentError:
            return -1, None


def _named(values: Sequence[int], saves: Saves, key: OpKey) -> Sequence[int]:
    """Those among an op's values that a plan saves."""
    outputs = saves.get(key, frozenset())
    return (
        values
        if outputs is None
        else [values[at] for at in sorted(outputs) if at < len(values)]
    )


def _fits(small: Encoded, tensor: Geometry | Ref) -> bool:
    """Whether a tensor has the geometry of what was encoded."""
    same = tensor.size == small.size and tensor.stride == small.stride
    return same and tensor.dtype == small.dtype and tensor.offset == 0


def _is_factor(number: object) -> bool:
    """Whether scaling by it keeps zeros and what is not zero apart."""
    return isinstance(number, (int, float)) and math.isfinite(number) and number != 0


def _ref(tensor: torch.Tensor, value: int) -> Ref:
    offset = tensor.storage_offset()
    return Ref(value, tensor.size(), tensor.stride(), offset, tensor.dtype)


def _device_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    if args and isinstance(args[0], torch.Tensor):
        return args[0].device
    return torch.device(kwargs.get("device") or "cpu")
