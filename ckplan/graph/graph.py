"""The graph: the costs of one training step, as data.

A ``Graph`` is a recorded step: ops in execution order, the storages they read and
make, the tensors that autograd saves, and the module calls that ran the ops. Its
records are in ``records.py`` and its checks in ``consistency.py``. ``file.py`` reads
and writes it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ckplan.graph.consistency import check_consistent
from ckplan.graph.fqn import relative_path
from ckplan.graph.lifetimes import Lifetimes, lifetimes_of
from ckplan.graph.queues import Span, span, visible_share
from ckplan.graph.records import (
    BEFORE_STEP,
    KINDS,
    OUTSIDE_CALLS,
    Encoding,
    Hazard,
    RecordedStep,
    Saved,
)

if TYPE_CHECKING:
    import networkx

FORMAT_VERSION = 9


@dataclass(frozen=True, repr=False)
class Graph(RecordedStep):
    """One training step: checked records, and values derived from them."""

    def __post_init__(self) -> None:
        """Raise ``GraphError`` if the records are inconsistent."""
        check_consistent(self, FORMAT_VERSION)

    @cached_property
    def unused_workspaces(self) -> frozenset[int]:
        """Workspaces of cuBLAS that exist, but that no op of backward uses."""
        return frozenset(
            number
            for number, one in enumerate(self.storages)
            if one.kind == "temporary" and one.last == BEFORE_STEP
        )

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """When every storage of the unplanned step is made and freed."""
        return lifetimes_of(self, self.saved_of, self.unused_workspaces)

    @cached_property
    def casts(self) -> dict[int, int]:
        """Autocast's copy of a parameter in another dtype -> the op that makes it."""
        return {
            storage: number
            for number, op in enumerate(self.ops[: self.num_forward])
            if op.name == "_to_copy"
            and all(self.storages[s].kind == "parameter" for s in op.reads)
            for storage in self.creates[number]
            if storage not in self._writers
        }

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of the unplanned step; on a GPU, until the device is done.

        It is a step of the optimizer, with all the batches that it accumulates.
        """
        if not self.is_launched:
            return self.step_total(self.critical_seconds)
        return self.step_span(self.batch_span).seconds

    @cached_property
    def is_launched(self) -> bool:
        """Whether a CPU launches the ops on a device that runs beside it."""
        return any(op.launch_seconds for op in self.ops)

    @cached_property
    def batch_span(self) -> Span:
        """Forward and backward of one batch, unplanned, in both queues."""
        device, launch = self.device_and_launch
        return span(launch[: self.backward_stop], device[: self.backward_stop])

    def step_span(self, batch: Span) -> Span:
        """A step of the optimizer in both queues, from forward and backward."""
        device, launch = self.device_and_launch
        stop = self.backward_stop
        return batch.times(self.num_batches).then(span(launch[stop:], device[stop:]))

    @cached_property
    def waiting_seconds(self) -> float:
        """Seconds of the unplanned step that its busier queue waits for the other."""
        return self.step_seconds - self.step_total(self.critical_seconds)

    def step_total(self, op_seconds: Sequence[float]) -> float:
        """Seconds of all batches and of the optimizer, from those of every op."""
        stop = self.backward_stop
        return self.num_batches * sum(op_seconds[:stop]) + sum(op_seconds[stop:])

    @cached_property
    def critical_seconds(self) -> tuple[float, ...]:
        """Seconds of every op on the busier side: the device, or the launching CPU."""
        return max(self.device_and_launch, key=self.step_total)

    @cached_property
    def engine_is_critical(self) -> bool:
        """Whether the engine's CPU time adds to the busier side of the step.

        The CPU runs its own ops, or launches those of a GPU.
        """
        _, launch = self.device_and_launch
        return self.critical_seconds is launch or not self.is_launched

    @cached_property
    def engine_share(self) -> float:
        """Share of the engine's CPU time that adds to the step, as solvers estimate."""
        if self.engine_is_critical:
            return 1.0
        saves = [saved.packed_at for saved in self.saved]
        halves = self.num_forward, self.backward_stop
        costs = self.engine.watch_seconds, self.engine.rerun_seconds
        return visible_share(*self.device_and_launch, halves, saves, costs)

    @cached_property
    def recompute_op_seconds(self) -> tuple[float, ...]:
        """Seconds that every op adds to the busier side when it reruns."""
        more = self.engine.rerun_seconds if self.engine_is_critical else 0.0
        again = self.engine.again
        return tuple(again * seconds + more for seconds in self.critical_seconds)

    @cached_property
    def device_and_launch(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds of every op on the device, and to launch it; the latter may be 0."""
        device = tuple(op.seconds for op in self.ops)
        return device, tuple(op.launch_seconds for op in self.ops)

    @cached_property
    def bytes_by_kind(self) -> dict[str, int]:
        """Kind -> sum of storage bytes, even if not alive at the same time."""
        total = dict.fromkeys(KINDS, 0)
        for storage in self.storages:
            total[storage.kind] += storage.bytes
        return total

    @cached_property
    def encoding_of(self) -> dict[tuple[int, int], Encoding]:
        """(op, output) -> its possible encoding."""
        return {(one.op, one.output): one for one in self.encodings}

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Call -> the calls directly inside it, in order."""
        inside: dict[int, list[int]] = {OUTSIDE_CALLS: []}
        for index, call in enumerate(self.calls):
            inside[index] = []
            inside[call.parent].append(index)
        return inside

    @cached_property
    def creates(self) -> tuple[tuple[int, ...], ...]:
        """``Op.creates`` of every op, cached."""
        return tuple(op.creates for op in self.ops)

    @cached_property
    def saved_of(self) -> dict[int, list[int]]:
        """Storage -> indices of the saved tensors that hold it, in order."""
        found: dict[int, list[int]] = {}
        for index, saved in enumerate(self.saved):
            found.setdefault(saved.storage, []).append(index)
        return found

    @cached_property
    def _writers(self) -> dict[int, list[int]]:
        """Storage -> ops that change it in place, in order."""
        found: dict[int, list[int]] = {}
        for index, op in enumerate(self.ops):
            for storage in op.writes:
                found.setdefault(storage, []).append(index)
        return found

    def is_changed(self, storage: int, start: int, stop: int) -> bool:
        """Whether an op of ``[start, stop)`` changes a storage in place."""
        writers = self._writers.get(storage, ())
        place = bisect_left(writers, start)
        return place < len(writers) and writers[place] < stop

    def phase(self, moment: int) -> str:
        """``forward``, ``backward`` or ``optimizer``."""
        if moment < self.num_forward:
            return "forward"
        return "backward" if moment < self.backward_stop else "optimizer"

    def place(self, moment: int) -> str:
        """The place of a moment in words: ``backward of transformer.h.11``."""
        phase = self.phase(moment)
        call = self.ops[moment].call if self.ops else OUTSIDE_CALLS
        if phase == "optimizer":
            return "optimizer step"
        if call == OUTSIDE_CALLS:
            return f"{phase} of the loss"
        found = self.calls[call]
        return f"{phase} of {found.fqn or found.module}"

    def line_of(self, storage: int) -> str:
        """The line of the model that made a storage; "" if not known."""
        maker = self.storages[storage].maker
        return "" if maker == BEFORE_STEP else self.ops[maker].line

    def relative_path(self, call: int, region: int) -> str:
        """Module path of ``call`` below ``region``; "" for the region itself."""
        return relative_path(self.calls[call].fqn, self.calls[region].fqn)

    def path(self, call: int) -> list[int]:
        """A call and the calls around it, the outermost first."""
        found: list[int] = []
        while call != OUTSIDE_CALLS:
            found.append(call)
            call = self.calls[call].parent
        return found[::-1]

    def is_within(self, call: int, region: int) -> bool:
        """Whether ``call`` is ``region`` or runs inside it."""
        while call > region:
            call = self.calls[call].parent
        return call == region

    def is_inside(self, call: int, first: int, last: int | None = None) -> bool:
        """Whether ``call`` is in the region of ``first``, or of the run to ``last``."""
        parent, stop = self.calls[first].parent, first if last is None else last
        while call > stop or self.calls[call].parent != parent:
            call = self.calls[call].parent
            if call == OUTSIDE_CALLS:
                return False
        return first <= call

    def signature(self, index: int, last: int | None = None) -> str:
        """A hash, equal for calls with the same ops, sizes and saved tensors.

        With ``last``, it covers a run of sibling calls and their parent's ops between.
        """
        call = self.calls[index]
        start, stop = call.start, self.calls[index if last is None else last].stop
        seen: dict[int, int] = {}

        def local(storage: int) -> tuple[int, int, int, bool]:
            found = self.storages[storage]
            inside = start <= found.maker < stop
            number = seen.setdefault(storage, len(seen))
            is_cast = storage in self.casts
            # Autocast empties its cache after all calls. The distance to that moment
            # must not change the signature.
            last = inside and (min(found.last, stop) if is_cast else found.last) - start
            return number, found.bytes, last, is_cast

        parts: list[object] = [call.module]
        parts += [[local(s) for s in group] for group in (call.arguments, call.state)]
        for op in self.ops[start:stop]:
            where = self.relative_path(op.call, index) if last is None else ""
            ids = [[local(s) for s in group] for group in (op.reads, op.outputs)]
            parts.append((op.name, where, ids, op.writes and local(op.writes[0])))
            parts.append((op.flops, op.workspace))
        found = (self.saved[i] for i in self.saved_in(index, last))
        parts += [(local(s.storage)[0], s.packed_at - start) for s in found]
        parts += [
            (one.op - start, one.output, one.name, one.bytes)
            for one in self.encodings_in(index, last)
        ]
        parts += [
            (max(hazard.call - index, -1), hazard.reason, hazard.guarded_by)
            for hazard in self.hazards_in(index, last)
        ]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def saved_in(self, call: int, last: int | None = None) -> list[int]:
        """Indices of the saved tensors of a call, inner calls included, in order.

        With ``last``, it covers a run of sibling calls and their parent's ops between.
        """
        stop_call = call if last is None else last
        first, stop = self.calls[call].start, self.calls[stop_call].stop
        parent = self.calls[call].parent

        def mine(saved: Saved) -> bool:
            if saved.call == parent:
                return call != stop_call and first < saved.packed_at < stop
            within_last = self.is_within(saved.call, stop_call)
            return call <= saved.call and (within_last or saved.call < stop_call)

        low = bisect_left(self.saved, first, key=lambda saved: saved.packed_at)
        high = bisect_right(self.saved, stop, key=lambda saved: saved.packed_at)
        return [i for i in range(low, high) if mine(self.saved[i])]

    def encodings_in(self, call: int, last: int | None = None) -> Sequence[Encoding]:
        """The encodings of outputs of a call, or of a run of calls."""
        stop_call = call if last is None else last
        start, stop = self.calls[call].start, self.calls[stop_call].stop
        low = bisect_left(self.encodings, start, key=lambda one: one.op)
        high = bisect_left(self.encodings, stop, key=lambda one: one.op)
        return self.encodings[low:high]

    def hazards_in(self, call: int, last: int | None = None) -> Sequence[Hazard]:
        """The hazards of a call, or of a run of calls; inner calls included."""
        stop = self.calls[call if last is None else last].stop
        after = bisect_left(self.calls, stop, lo=call + 1, key=lambda one: one.start)
        low = bisect_left(self.hazards, call, key=lambda one: one.call)
        high = bisect_left(self.hazards, after, key=lambda one: one.call)
        parent = self.calls[call].parent
        between = () if last is None else self._hazards_of.get(parent, ())
        return [*between, *self.hazards[low:high]]

    @cached_property
    def self_recomputed(self) -> tuple[Hazard, ...]:
        """The hazards of calls that the model itself reruns in backward."""
        return tuple(hazard for hazard in self.hazards if hazard.kind == "again")

    @cached_property
    def _hazards_of(self) -> dict[int, list[Hazard]]:
        found: dict[int, list[Hazard]] = {}
        for hazard in self.hazards:
            found.setdefault(hazard.call, []).append(hazard)
        return found

    def to_networkx(self) -> networkx.DiGraph[int]:
        """The ops as a DAG: an edge from a storage's last writer to each reader."""
        import networkx

        dag: networkx.DiGraph[int] = networkx.DiGraph(name=self.model)
        maker: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            dag.add_node(index, name=op.name, seconds=op.seconds)
            for storage in {*op.reads, *op.writes}:
                if storage in maker:
                    size = self.storages[storage].bytes
                    dag.add_edge(maker[storage], index, storage=storage, bytes=size)
            for storage in (*op.outputs, *op.writes):
                maker[storage] = index
        return dag
