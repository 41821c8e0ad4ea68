"""Record a region's forward op by op.

A dispatch mode records the ops, and saved-tensor hooks drop tensors that the plan does
not keep. A function mode records the calls that led to the ops, so that the next
forward needs only a guard check of its calls (``guards/checker.py``).
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckplan.applying.moving.mover import Form, Mover, warn_of_kept
from ckplan.applying.rebuilding.rebuilder import Rebuilder
from ckplan.applying.rebuilding.schedule import Schedule
from ckplan.applying.rebuilding.step import Step, depth_of
from ckplan.applying.recording.call_log import CallLog
from ckplan.applying.recording.module_path import ModulePath
from ckplan.applying.recording.op_keys import Encodes, Inner, Names, OpKey, Saves
from ckplan.applying.recording.saved_tensors import (
    Dropped,
    Handle,
    Packing,
    otherwise_saved,
    unpack,
)
from ckplan.applying.tensors.compiled import uncompiled
from ckplan.applying.tensors.kept import Kept
from ckplan.applying.tensors.op_traits import (
    RUNNING_STATISTICS,
    TRAINING,
    OpTraits,
    traits_of,
)
from ckplan.applying.tensors.random_state import device_of_draw, random_state
from ckplan.applying.tensors.retained import ref_of, retain, retain_copy, tensors_in
from ckplan.applying.tensors.storages import Storages
from ckplan.errors import ApplyError
from ckplan.plan.names import OpName
from ckplan.simulating.program import EXTERNAL, NestedRegion, Program, compile_program
from ckplan.training.data_dependent import has_data_dependent_shape
from ckplan.training.randomness import draws
from ckplan.training.uninitialized import has_zero_beta


class _Access(NamedTuple):
    """The storages of an op, as ``program.Flow`` needs them."""

    reads: list[int]
    writes: list[int]
    outputs: list[int]


class Recorder(TorchDispatchMode):
    """One forward of a region, recorded op by op."""

    def __init__(
        self,
        name: str,
        top: str,
        saves: Saves,
        encodes: Encodes,
        mover: Mover,
        *,
        checks_digest: bool = False,
    ) -> None:
        """Set up the recorder.

        Args:
            name: Name of the region in errors.
            top: FQN of the module that op paths are relative to.
            saves: Outputs to keep.
            encodes: Outputs to encode or move.
            mover: Encodes and moves.
            checks_digest: Whether rebuilt tensors are compared with dropped ones.
        """
        super().__init__()
        self.name = name
        self.watches = False  # else it only rebuilds tensors dropped before
        self.path = ModulePath(top)
        self._encodes, self._mover = encodes, mover
        self.names = Names.of(top, saves, encodes)
        self.paths: list[str] = []  # step -> FQN of the module that ran it
        self.inner: list[Inner] = []
        self.open_inner = [0]  # inner regions that run now, counted from 1
        self.steps: dict[int, Step] = {}
        self.states: dict[int, torch.Tensor] = {}
        self.statistics: dict[int, int] = {}  # those running -> step that reads them
        self.encoded: dict[int, Form] = {}  # value -> its other form
        self.storages = Storages(name)
        self.packing = Packing(name, self.storages, checks_digest=checks_digest)
        self.log = CallLog(self.storages, self.packing)
        self.call_of: list[int] = []  # step -> call
        self.gone: set[int] = set()  # after a guard miss: steps that cannot run again
        # Once it is over:
        self.parts: tuple[NestedRegion, ...] = ()
        self.schedule: Schedule | None = None  # of its program
        self._contexts = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the guard against being compiled costs more than recording an op

    def open(self) -> None:
        """Begin to record."""
        self.watches = True
        hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, unpack)
        for context in (uncompiled(), hooks, self.log, self):
            self._contexts.enter_context(context)

    @property
    def recorder(self) -> Recorder:
        """This recorder: it records the whole forward."""
        return self

    @property
    def handle(self) -> Handle:
        """What its dropped tensors share, until it is closed."""
        return self.packing.handle

    def go_on(self) -> None:
        """Begin to record ops in the middle of a forward."""
        self.watches = True
        self._contexts.enter_context(self)

    def begin_inner(self, top: str, saves: Saves) -> None:
        """Begin a nested region."""
        names = Names.of(top, saves)
        start = len(self.storages.flow.inputs)
        self.inner.append(Inner(start, self.open_inner[-1], names))
        self.open_inner.append(len(self.inner))

    def end_inner(self) -> set[OpKey]:
        """End the innermost nested region; return the saves that named an op."""
        inner = self.inner[self.open_inner.pop() - 1]
        inner.stop = len(self.storages.flow.inputs)
        return inner.names.found

    def close(self) -> None:
        """End the forward; compile the program and retain only what it needs.

        Raises:
            ApplyError: The region overwrote an input that it would have to rebuild
            from.
        """
        self._contexts.close()
        storages, packing = self.storages, self.packing
        flow, retained = storages.flow, storages.retained
        while len(self.open_inner) > 1:
            self.end_inner()
        parts = tuple(
            NestedRegion(one.start, one.stop, frozenset(one.kept), one.outer)
            for one in self.inner
        )
        storages.hold_unfilled()
        kept = [value for value in retained if flow.maker_of[value] != EXTERNAL]
        program = compile_program(
            flow, packing.dropped, kept, self.encoded.keys(), parts
        )
        if program.overwritten_inputs:
            raise ApplyError(
                f"cannot rebuild {self.name}: its forward changes an input in place",
                needed="a region whose inputs are still there in backward",
                hint="leave this call out of the plan, or name a larger one",
            )
        if program.runs().keys() & self.gone or not program.retained <= retained.keys():
            raise otherwise_saved(self.name)
        for value in () if self.watches else program.retained:
            retained[value].moved(self.name)
        self.parts, self.schedule = parts, self.schedule_of(program)
        packing.handle.rebuilder = Rebuilder(
            self.name, self.schedule, retained, self.encoded, self.states
        )
        del packing.handle  # autograd holds this as long as any saved tensor

    def schedule_of(self, program: Program) -> Schedule:
        """The compiled form of a program of this forward."""
        packed, drawn = self.packing.packed, self.states.keys()
        return Schedule(program, self.steps, packed, drawn)

    def release(self) -> None:
        """Free everything retained from the forward."""
        self.log.close()
        storages = self.storages
        for one in (storages.unfilled, storages.retained, self.encoded, self.states):
            one.clear()

    def abandon(self) -> None:
        """Stop recording: the forward was interrupted."""
        self._contexts.close()
        self.release()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        traits = traits_of(func)
        kwargs = kwargs or {}
        if traits.makes_nothing:
            return self._pass(func, args, kwargs)
        self._look_at_values(func, traits, args)
        storages, fresh = self.storages, self.packing.begin_op()
        given: list[tuple[torch.Tensor, int]] = []
        refs = [self._take(x, given) for x in args]
        named = {key: self._take(x, given) for key, x in kwargs.items()}
        reads = [storages.flow.storage_of[value] for _, value in given]
        read = [] if traits.batch_norm else given
        self.log.broken |= storages.retain_written(read, self.encoded)
        random = traits.may_draw and draws(func, args, kwargs)
        generator = kwargs.get("generator") if random else None
        device = device_of_draw(args, kwargs)
        state = random_state(device, generator) if random else None
        out = func(*args, **kwargs)
        returned = tensors_in(out)
        known = len(storages.num_bytes)
        outputs = [storages.number(tensor, inside=True) for tensor in returned]
        writes = self._written(traits, args, kwargs) if traits.writes else []
        moved = [tensor for tensor, _ in given] if traits.collective else []
        writes += dict.fromkeys(map(storages.number, moved))
        if len(storages.num_bytes) > known or writes:
            if traits.batch_norm:
                writes += self._meet_norm(args, refs)
            number = storages.flow.add(_Access(reads, writes, outputs))
            grad = torch.is_grad_enabled()
            values = storages.flow.returned[number]
            views = tuple(map(ref_of, returned, values))
            depth = depth_of(out)
            dtype = torch.get_default_dtype()
            self.steps[number] = Step(
                func, refs, named, generator, device, grad, dtype, views, depth
            )
            self.paths.append(self.path.fqns[-1])
            self.call_of.append(self.log.current)
            if state is not None:
                self.states[number] = state
            if traits.returns_uninitialized:
                storages.unfilled.update(zip(outputs, returned, strict=True))
            elif storages.unfilled and has_zero_beta(func, kwargs):
                storages.unfilled.pop(reads[0], None)
            if writes:
                self._overwrite(traits, number, writes)
                own = refs[0] if traits.in_place else None
                self.packing.fill(fresh, storages.flow.overwrites[number], own)
            for tensor in moved:  # what came from elsewhere stays
                self.log.broken = True
                storages.retained[storages.value(tensor)] = retain(tensor)
            if self.names.named or self.inner:
                self._save(traits.name, number, returned)
        return out

    def _meet_norm(self, args: tuple[Any, ...], refs: list[Any]) -> list[int]:
        """Hold the running statistics that a norm goes by as they are.

        Returns:
            The storages of those that it moves although an earlier one went by them.
        """
        running, flow = tensors_in(args[RUNNING_STATISTICS]), self.storages.flow
        values = [self.storages.value(tensor) for tensor in running]
        if args[TRAINING]:
            refs[RUNNING_STATISTICS] = None, None  # must not be updated twice
            return [flow.storage_of[v] for v in values if v in self.statistics]
        for value, tensor in zip(values, running, strict=True):
            known = value in self.statistics or flow.maker_of[value] != EXTERNAL
            if not known:
                self.statistics[value] = len(flow.inputs)
                self.storages.retained[value] = retain_copy(tensor)
        return []

    def _look_at_values(
        self, func: Any, traits: OpTraits, args: tuple[Any, ...]
    ) -> None:
        """Mark the log as broken if output shapes or numbers depend on data."""
        if func is torch.ops.aten._local_scalar_dense.default:
            self.log.read = True
        if traits.dynamic and has_data_dependent_shape(func, tensors_in(args)):
            self.log.broken = True

    def _overwrite(
        self, traits: OpTraits, number: int, writes: Collection[int]
    ) -> None:
        """Handle an op that overwrote values: forget their old content."""
        for value in self.storages.flow.overwrites[number]:
            self.storages.retained.pop(value, None)
        if traits.ignores_old_content:
            self.storages.fill(writes)

    def _pass(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that makes nothing."""
        if func.overloadpacket is torch.ops.aten.set_:
            self.log.leave(*args[:2])
        return func(*args, **kwargs)

    def _take(self, argument: Any, given: list[tuple[torch.Tensor, int]]) -> Any:
        """An argument as a step keeps it; its tensors are added, with their values."""
        if isinstance(argument, torch.Tensor):
            value = self.storages.value(argument)
            given.append((argument, value))
            return ref_of(argument, value)
        if isinstance(argument, (list, tuple)):
            return [self._take(item, given) for item in argument]
        return argument

    def _written(
        self, traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[int]:
        changed = (
            args[position] if position < len(args) else kwargs.get(name)
            for position, name in traits.writes
        )
        written = (t for value in changed for t in tensors_in(value))
        return [self.storages.note_written(tensor) for tensor in written]

    def _save(self, name: str, number: int, returned: list[torch.Tensor]) -> None:
        """Retain or encode the outputs that the plan names."""
        values = self.storages.flow.returned[number]
        place = self.path.fqns[-1], name, len(values)
        key = self.names.key(*place)
        for part in self.open_inner[1:]:
            inner = self.inner[part - 1]
            inner.kept.update(inner.names.kept(inner.names.key(*place), values))
        saved = self.names.kept(key, values)
        for value, tensor in zip(values, returned, strict=True):
            if value in saved:
                self.storages.retained[value] = retain(tensor)
        if key in self._encodes:
            forms = self._encodes[key]
            for position, value in enumerate(values):
                form = forms.get(position, forms.get(None))
                if form is None:
                    continue
                in_place = value in self.storages.flow.overwrites[number].values()
                tensor = returned[position]
                small = self._mover.encode(form, tensor, in_place=in_place)
                if small is not None:
                    self.encoded[value] = small
                else:
                    warn_of_kept(form, self.name, str(OpName(*key)))

    def pack(self, tensor: torch.Tensor) -> Kept | Dropped:
        """Keep what autograd saves, or drop it."""
        with self.log.paused():  # custom functions pack outside of any call
            return self.packing.pack(tensor, self.open_inner[-1])
