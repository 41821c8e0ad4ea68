"""Watch a region's forward op by op: what was not seen before is written down.

A dispatch mode writes down the ops and saved-tensor hooks let go of what the plan
drops. Beside it, a function mode writes down the calls that led to the ops, so that the
next forward need only be seen to make the same calls (``replay.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ckplan.applying.call_log import CallLog
from ckplan.applying.calls import UnknownArgumentError, storage_of
from ckplan.applying.likeness import likeness
from ckplan.applying.random_state import random_state
from ckplan.applying.recompute import (
    Dropped,
    Handle,
    Held,
    Kept,
    Rebuilder,
    Ref,
    Step,
    hold,
    keep,
    tensors_in,
    unpack,
)
from ckplan.applying.template import Packed, Template, make_template
from ckplan.encodings import Encoded, encode
from ckplan.errors import ApplyError
from ckplan.names import relative_path
from ckplan.program import EXTERNAL, Flow, Part, compile_program
from ckplan.training.filling import adds_to_nothing, fills, makes_empty
from ckplan.training.randomness import draws, may_draw
from ckplan.training.shapes import decided_by_values

OpKey = tuple[str, str, int]
"""Path of the module below the region, op name, occurrence."""

Saves = Mapping[OpKey, frozenset[int] | None]
"""Outputs to keep; None for all of them."""

Encodes = Mapping[OpKey, Mapping[int | None, str]]
"""Outputs to keep in a smaller form, and in which."""

BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
RUNNING_STATISTICS = slice(3, 5)  # arguments of all three, as is the next
TRAINING = 5


class _Facts(NamedTuple):
    """What the recorder must know of an op, looked up once."""

    name: str
    is_view: bool
    writes: tuple[tuple[int, str], ...]  # arguments changed in place
    may_draw: bool
    batch_norm: bool
    dynamic: bool  # values may decide how much it returns
    fills: bool  # where it writes, what was there does not matter
    makes_empty: bool  # for others to fill
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
    norm, collective = name in BATCH_NORMS, func.namespace == "c10d"
    random = may_draw(func)
    return _Facts(
        name,
        func.is_view,
        writes,
        random,
        norm,
        dynamic,
        fills(func),
        makes_empty(func),
        collective,
    )


class _Access(NamedTuple):
    """The storages of an op, as ``program.Flow`` wants them."""

    reads: list[int]
    writes: list[int]
    outputs: list[int]


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

    def __init__(
        self,
        name: str,
        top: str,
        saves: Saves,
        encodes: Encodes,
        *,
        looks: bool = False,
    ) -> None:
        """Be ready to watch.

        Args:
            name: What errors call the region.
            top: FQN of the module that paths of its ops begin below.
            saves: Outputs to keep.
            encodes: Outputs to keep in a smaller form.
            looks: Whether what is rebuilt is compared with what was dropped.
        """
        super().__init__()
        self._looks = looks
        self.name = name
        self.dropped_bytes = 0
        self.path: list[str] = [top]  # FQNs of the modules that run, innermost last
        self.template: Template | None = None
        self._saves = saves
        self._encodes = encodes
        self._names = _Names(top, {*saves, *encodes})
        self._inner: list[_Inner] = []
        self._open = [0]  # inner regions that run now, counted from 1
        self.flow = Flow()
        self.steps: dict[int, Step] = {}
        self.states: dict[int, torch.Tensor] = {}
        self.numbers: dict[int, int] = {}  # address of a storage -> its number
        self._addresses: list[StorageWeakRef] = []  # keep addresses from being reused
        self.num_bytes: list[int] = []  # of each storage
        self.inside: set[int] = set()  # storages that the region made
        self.held: dict[int, Held] = {}  # value -> tensor
        # Storages that others than ops may write: nobody filled them yet, or their
        # bytes were handed out, and to that there is no end.
        self._unfilled: dict[int, torch.Tensor] = {}
        self._handed_out: set[int] = set()
        self.encoded: dict[int, Encoded] = {}  # value -> its smaller form
        self.wanted: list[tuple[int, int]] = []  # dropped saved tensors: value, part
        self._seen: set[int] = set()  # their values
        self.packed: list[Packed] = []
        self.packed_values: list[int] = []
        self._fresh = 0  # how many of them there were when the last op began
        self.log = CallLog(self)
        self.call_of: list[int] = []  # step -> call
        self._handle = Handle()
        self._contexts = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the guard against being compiled costs more than recording an op

    def open(self) -> None:
        """Begin to watch."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)
        for context in (hooks, self.log, self):
            self._contexts.enter_context(context)

    def begin_inner(self, top: str, saves: Saves) -> None:
        """A region inside this one begins."""
        names = _Names(top, saves.keys())
        start = len(self.flow.inputs)
        self._inner.append(_Inner(start, self._open[-1], saves, names))
        self._open.append(len(self._inner))

    def end_inner(self) -> set[OpKey]:
        """The region that began last ends; returns the saves that named an op."""
        inner = self._inner[self._open.pop() - 1]
        inner.stop = len(self.flow.inputs)
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
        flow = self.flow
        while len(self._open) > 1:
            self.end_inner()
        parts = tuple(
            Part(one.start, one.stop, frozenset(one.kept), one.outer)
            for one in self._inner
        )
        for storage, tensor in self._unfilled.items():
            self.held[flow.value(storage)] = hold(tensor)
        kept = [value for value in self.held if flow.maker_of[value] != EXTERNAL]
        program = compile_program(flow, self.wanted, kept, self.encoded.keys(), parts)
        if program.lost:
            raise ApplyError(
                f"cannot rebuild {self.name}: its forward changes an input in place",
                needed="a region whose inputs are still there in backward",
                hint="leave this call out of the plan, or name a larger one",
            )
        steps = {step: self.steps[step] for step in sorted(program.runs())}
        self._handle.rebuilder = Rebuilder(
            self.name, program, steps, self.held, self.encoded, self.states
        )
        self.template = make_template(self, parts, program, steps)
        self.log.close()
        self._unfilled.clear()
        for leftovers in (self.held, self.encoded, self.states, self.steps):
            leftovers.clear()

    def abandon(self) -> None:
        """Forward was interrupted: watch no longer."""
        self._contexts.close()

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
        self._look_at_values(func, facts, args)
        fresh, self._fresh = self._fresh, len(self.packed_values)
        reads: list[int] = []
        refs = [self._take(x, reads) for x in args]
        named = {key: self._take(x, reads) for key, x in kwargs.items()}
        random = facts.may_draw and draws(func, args, kwargs)
        generator = kwargs.get("generator") if random else None
        device = _device_of(args, kwargs)
        state = random_state(device, generator) if random else None
        out = func(*args, **kwargs)
        returned = tensors_in(out)
        known = len(self._addresses)
        outputs = [self.number(tensor, inside=True) for tensor in returned]
        writes = self._written(facts, args, kwargs) if facts.writes else []
        moved = tensors_in([*args, *kwargs.values()]) if facts.collective else []
        writes += dict.fromkeys(map(self.number, moved))
        if len(self._addresses) > known or writes:
            if facts.batch_norm and args[TRAINING]:
                refs[RUNNING_STATISTICS] = None, None  # must not be updated twice
            number = self.flow.add(_Access(reads, writes, outputs))
            grad = torch.is_grad_enabled()
            self.steps[number] = Step(func, refs, named, generator, device, grad)
            self.call_of.append(self.log.current)
            if state is not None:
                self.states[number] = state
            if facts.makes_empty:
                self._unfilled.update(zip(outputs, returned, strict=True))
            elif self._unfilled and adds_to_nothing(func, kwargs):
                self._unfilled.pop(reads[0], None)
            if writes:
                self._overwrite(facts, fresh, number, writes)
            for tensor in moved:  # what came from elsewhere stays
                self.log.broken = True
                self.held[self.flow.value(self.number(tensor))] = hold(tensor)
            if self._names.named or self._inner:
                self._save(facts.name, number, returned)
        return out

    def _look_at_values(self, func: Any, facts: _Facts, args: tuple[Any, ...]) -> None:
        """Calls do not tell what ops return whose shape, or number, values decide."""
        if func is torch.ops.aten._local_scalar_dense.default:
            self.log.read = True
        if facts.dynamic and decided_by_values(func, tensors_in(args)):
            self.log.broken = True

    def _overwrite(
        self, facts: _Facts, fresh: int, number: int, writes: Collection[int]
    ) -> None:
        """An op wrote values: what they were is there no more."""
        overwrites = self.flow.overwrites[number]
        for value in overwrites:
            self.held.pop(value, None)
        if facts.fills:
            for storage in {*writes} - self._handed_out:
                self._unfilled.pop(storage, None)
        if not facts.name.endswith("_"):
            self._fill(fresh, overwrites)

    def _fill(self, fresh: int, filled: Mapping[int, int]) -> None:
        """What was saved for an op that fills it, autograd means as it is then.

        Such as the noise of ``rrelu_with_noise``, which is no new version.
        """
        for place in range(fresh, len(self.packed_values)):
            old = self.packed_values[place]
            if old not in filled:
                continue
            new = self._handle.filled[old] = filled[old]
            self.packed_values[place] = new
            self._seen.add(new)
            entry = self.packed[place]
            if entry.ref is not None:
                ref = entry.ref._replace(value=new)
                self.packed[place] = entry._replace(ref=ref)
                self.wanted.remove((old, entry.part))
                self.wanted.append((new, entry.part))

    def _take(self, argument: Any, reads: list[int]) -> Any:
        """An argument as a step keeps it, its storages added to what the op reads."""
        if isinstance(argument, torch.Tensor):
            number = self.number(argument)
            reads.append(number)
            return _ref(argument, self.flow.value(number))
        if isinstance(argument, (list, tuple)):
            return [self._take(item, reads) for item in argument]
        return argument

    def number(self, tensor: torch.Tensor, *, inside: bool = False) -> int:
        """The number of a tensor's storage; one that came from outside is held."""
        try:
            storage = storage_of(tensor)
        except UnknownArgumentError:
            raise ApplyError(
                f"cannot rebuild {self.name}: it uses tensors without bytes of their "
                f"own ({str(tensor.layout).removeprefix('torch.')})",
                needed="strided tensors",
                hint="leave this call out of the plan, or run it again (by: rerun)",
            ) from None
        number = self.numbers.get(storage._cdata)
        if number is None:
            number = len(self._addresses)
            self._addresses.append(StorageWeakRef(storage))
            self.num_bytes.append(storage.nbytes())
            self.numbers[storage._cdata] = number
            if inside:
                self.inside.add(number)
            else:
                self.held[self.flow.value(number)] = hold(tensor)
        return number

    def hand_out(self, tensor: torch.Tensor) -> None:
        """Somebody may write a tensor's bytes past torch."""
        if self.value_inside(tensor) >= 0:
            number = self.number(tensor)
            self._handed_out.add(number)
            self._unfilled[number] = tensor

    def value_inside(self, tensor: torch.Tensor) -> int:
        """The value of a tensor that the region made; -1 for another."""
        try:
            number = self.numbers.get(storage_of(tensor)._cdata)
        except UnknownArgumentError:
            return -1
        return self.flow.value(number) if number in self.inside else -1

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
        values = self.flow.returned[number]
        for part in self._open[1:]:
            inner = self._inner[part - 1]
            inner.kept.update(_named(values, inner.saves, inner.names.key(fqn, name)))
        saved = _named(values, self._saves, key)
        if any(at >= len(values) for at in self._saves.get(key) or ()):
            self._names.found.discard(key)  # it has no such output
        for value, tensor in zip(values, returned, strict=True):
            if value in saved:
                self.held[value] = hold(tensor)
        if key in self._encodes:
            forms = self._encodes[key]
            for position, value in enumerate(values):
                form = forms.get(position, forms.get(None))
                small = encode(form, returned[position]) if form else None
                if small is not None:
                    self.encoded[value] = small

    def _pack(self, tensor: torch.Tensor) -> Kept | Dropped:
        with self.log.paused():  # own functions pack outside of any call
            return self._packed_as(tensor)

    def _packed_as(self, tensor: torch.Tensor) -> Kept | Dropped:
        value = self.value_inside(tensor)
        self.packed_values.append(value)
        if value < 0 or value in self.held:
            self.packed.append(Packed(tensor.size(), None))
            return keep(tensor, self.name)
        if value not in self._seen:
            self.dropped_bytes += tensor.untyped_storage().nbytes()
        part = self._open[-1]
        self._seen.add(value)
        self.wanted.append((value, part))
        ref = _ref(tensor, value)
        self.packed.append(Packed(ref.size, ref, part))
        like = likeness(tensor) if self._looks else None
        return Dropped(self._handle, ref, part, like)

    @property
    def num_packed(self) -> int:
        """How many tensors autograd saved so far."""
        return len(self.packed)


def _named(values: Sequence[int], saves: Saves, key: OpKey) -> Sequence[int]:
    """Those among an op's values that a plan saves."""
    outputs = saves.get(key, frozenset())
    return (
        values
        if outputs is None
        else [values[at] for at in sorted(outputs) if at < len(values)]
    )


def _ref(tensor: torch.Tensor, value: int) -> Ref:
    offset = tensor.storage_offset()
    bits = tensor.is_conj(), tensor.is_neg()
    return Ref(value, tensor.size(), tensor.stride(), offset, tensor.dtype, *bits)


def _device_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    if args and isinstance(args[0], torch.Tensor):
        return args[0].device
    return torch.device(kwargs.get("device") or "cpu")
