"""Track storages of a dry run from allocation to free, whatever references them.

The tracker does not use graphs, plans or programs. A storage is born when an op returns
it. It dies when its last reference is gone, whether autograd's or a region's. Fake
tensors do not show the workspaces of kernels, so those are added afterwards from
separate measurements of every distinct op.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ckplan.applying.rerunning import snapshot
from ckplan.applying.tensors.op_traits import RUNNING_STATISTICS, TRAINING, traits_of
from ckplan.applying.tensors.retained import tensors_in
from ckplan.simulating.curve import Curve
from ckplan.tracing.costs.cost_cache import Cost
from ckplan.tracing.faking.fake_outputs import SET_STORAGE_OPS
from ckplan.tracing.faking.inplace_formulas import InplaceFormulas
from ckplan.tracing.recording.recorder import nodes_below
from ckplan.tracing.recording.recording import RawOp, TensorMeta, describe, meta
from ckplan.tracing.recording.storages import fills_storage
from ckplan.training.randomness import draws, observed_rng_states

NOT_AN_OP = -1


class Birth(NamedTuple):
    """Storages allocated by the same op."""

    op: int  # index among the distinct ops, or NOT_AN_OP
    storages: tuple[int, ...]
    accumulates_into: int = (
        -1
    )  # storage of the gradient that the op may add to in place


class Death(NamedTuple):
    """A storage without references."""

    storage: int


class Phase(NamedTuple):
    """Start of a phase of the measured step."""

    name: str


@dataclass
class StorageLog:
    """Events that a storage tracker logged, in order."""

    events: list[Birth | Death | Phase] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)  # by storage number
    ops: list[RawOp] = field(default_factory=list)  # distinct ones

    def names(self, phase: str) -> set[str]:
        """Names of the ops that ran in a phase of the measured step."""
        found: set[str] = set()
        now = ""
        for event in self.events:
            if isinstance(event, Phase):
                now = event.name
            elif now == phase and isinstance(event, Birth) and event.op != NOT_AN_OP:
                found.add(self.ops[event.op].func.overloadpacket.__name__)
        return found

    def curve(self, costs: Sequence[Cost]) -> Curve:
        """Live bytes from the first phase on.

        Args:
            costs: Cost of each of ``ops``, with the workspace of its kernel.
        """
        levels = _Levels(self, costs)
        for event in self._as_the_engine_does():
            levels.add(event)
        return Curve(tuple(levels.points), (*levels.starts[-3:], levels.seconds))

    def _as_the_engine_does(self) -> Iterator[Birth | Death | Phase]:
        """Events, with gradients added in place if the first has no other reference.

        The autograd engine does this in a plain run, but never under a dispatch mode.
        """
        births = [i for i, e in enumerate(self.events) if isinstance(e, Birth)]
        until = dict(pairwise([*births, len(self.events)]))
        same: set[int] = (
            set()
        )  # storages that are reused in place, so their deaths are skipped
        for place, event in enumerate(self.events):
            if isinstance(event, Birth) and event.accumulates_into >= 0:
                death = Death(event.accumulates_into)
                sizes = {
                    self.bytes[s] for s in (*event.storages, event.accumulates_into)
                }
                if death in self.events[place : until[place]] and len(sizes) == 1:
                    same.add(event.accumulates_into)
                    continue
            if not (isinstance(event, Death) and event.storage in same):
                yield event


class _Levels:
    """Sums live bytes, and records them from the first phase on."""

    def __init__(self, log: StorageLog, costs: Sequence[Cost]) -> None:
        self.points: list[tuple[float, int]] = []
        self.starts: list[float] = []
        self.seconds = 0.0
        self._bytes = list(log.bytes)
        self._costs = costs
        self._level = 0

    def add(self, event: Birth | Death | Phase) -> None:
        """Add the next event."""
        if isinstance(event, Phase):
            self._begin(event)
        elif isinstance(event, Death):
            self._level -= self._bytes[event.storage]
            self._note(self._level)
        else:
            self._be_born(event)

    def _begin(self, phase: Phase) -> None:
        del phase
        self.starts.append(self.seconds)
        self._note(self._level)

    def _be_born(self, birth: Birth) -> None:
        cost = self._costs[birth.op] if birth.op != NOT_AN_OP else None
        made = sum(self._bytes[storage] for storage in birth.storages)
        if cost is not None and birth.storages:
            hidden = max(0, cost.held_bytes - made)  # freed with the first output
            self._bytes[birth.storages[0]] += hidden
            made += hidden
        self._note(self._level + max(made, cost.peak_bytes if cost else 0))
        self._level += made
        if self.starts and cost is not None:
            self.seconds += cost.seconds
        self._note(self._level)

    def _note(self, level: int) -> None:
        if self.starts:
            self.points.append((self.seconds, level))


class StorageTracker(TorchDispatchMode):
    """Logs births and deaths of storages while it is active.

    Args:
        on_cuda: Whether the step emulates a GPU.
    """

    def __init__(self, *, on_cuda: bool = False) -> None:
        super().__init__()
        self.log = StorageLog()
        self._numbers: dict[int, int] = {}  # address of a live storage -> its number
        self._distinct: dict[str, int] = {}
        self._in_node = False
        self._in_place = InplaceFormulas(on_cuda=on_cuda)
        self._moved: set[int] = set()  # addresses of running statistics

    @contextmanager
    def watching(self, *, random_states: bool = True) -> Iterator[None]:
        """Activate the tracker and its patches.

        Args:
            random_states: Count states of the CPU generator, which no op returns.
        """
        if not random_states:
            with self:
                yield
            return
        shows_same = mock.patch.object(snapshot, "shows_same", self._shows_same)
        with (
            observed_rng_states(lambda state: self.register([state])),
            shows_same,
            self,
        ):
            yield

    def register(self, tensors: Iterable[torch.Tensor]) -> None:
        """Log storages of tensors that no op returned."""
        storages = self._new(tensors)
        if storages:
            self.log.events.append(Birth(NOT_AN_OP, storages))

    def count_as_zero_bytes(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count zero bytes for tensors that are not in the device's memory."""
        for tensor in tensors:
            self.log.bytes[self._numbers[tensor.untyped_storage()._cdata]] = 0

    def begin(self, phase: str) -> None:
        """Log the start of a phase of the measured step."""
        self.log.events.append(Phase(phase))

    def watch_nodes(self, loss: torch.Tensor) -> None:
        """Separate ops of backward nodes from ops of the engine between nodes."""
        for node in nodes_below(loss):
            self._in_place.watch(node)
            node.register_prehook(self._node_begins)
            node.register_hook(self._node_ends)

    def _node_begins(self, grads: object) -> None:
        del grads
        self._in_node = True

    def _node_ends(self, grad_inputs: object, grad_outputs: object) -> None:
        del grad_inputs, grad_outputs
        self._in_node = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        func, args = self._in_place.engine_op(func, args)
        accumulates_into = self._adds_to(func, args)
        if traits_of(func).batch_norm and args[TRAINING]:
            running = tensors_in(args[RUNNING_STATISTICS])
            self._moved.update(x.untyped_storage()._cdata for x in running)
        if draws(func, args, kwargs):
            _draw(kwargs.get("generator"))
        out = func(*args, **kwargs)
        self._in_place.track_output(func, out)
        returned = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        storages = self._new(returned)
        if storages or (func._schema.is_mutable and func not in SET_STORAGE_OPS):
            op = self._number_op(func, args, kwargs, returned)
            self.log.events.append(Birth(op, storages, accumulates_into))
        return out

    def _shows_same(self, buffer: torch.Tensor, copy: torch.Tensor) -> bool:
        """Whether a buffer is unchanged; ``snapshot`` compares values on CPU."""
        del copy
        moved = buffer.untyped_storage()._cdata in self._moved
        return buffer.device.type != "cpu" or not moved

    def _new(self, tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
        """Assign numbers to new storages."""
        found = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._numbers:
                number = len(self.log.bytes)
                found.append(number)
                self._numbers[storage._cdata] = number
                self.log.bytes.append(storage.nbytes())
                end = weakref.finalize(storage, self._died, storage._cdata, number)
                end.atexit = False
        return tuple(found)

    def _died(self, address: int, number: int) -> None:
        self._numbers.pop(address, None)
        self.log.events.append(Death(number))

    def _adds_to(self, func: Any, args: tuple[Any, ...]) -> int:
        """Storage of the first of two gradients that the engine adds, or -1."""
        between_nodes = _is_backward() and not self._in_node
        if func is not torch.ops.aten.add.Tensor or not between_nodes:
            return -1
        first = args[0]
        if first._is_view():  # its base references the same storage
            return -1
        if not fills_storage(first):
            return -1
        return self._numbers.get(first.untyped_storage()._cdata, -1)

    def _number_op(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        returned: Iterable[torch.Tensor],
    ) -> int:
        flat, spec = pytree.tree_flatten((args, kwargs))
        described = tuple(map(meta, flat))
        results = tuple(map(describe, returned))
        op = _raw_op(func, described, spec, results)
        key = f"{func}{described}{op.in_grad_mode}"
        if key not in self._distinct:
            self._distinct[key] = len(self.log.ops)
            self.log.ops.append(op)
        return self._distinct[key]


def _draw(generator: torch.Generator | None) -> None:
    """Advance a generator, which fake ops do not, so that a region detects the draw."""
    with _disable_current_modes():
        torch.rand(1, generator=generator)


def _is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _raw_op(
    func: Any,
    described: tuple[Any, ...],
    spec: pytree.TreeSpec,
    results: tuple[Any, ...],
) -> RawOp:
    """The fields of an op that ``calibrate`` needs."""
    leaves = (*described, *results)
    moved_bytes = sum(x.num_bytes for x in leaves if isinstance(x, TensorMeta))
    grad = torch.is_grad_enabled()
    return RawOp(
        func, -1, (), (), (), described, spec, results, 0, moved_bytes, False, grad
    )
