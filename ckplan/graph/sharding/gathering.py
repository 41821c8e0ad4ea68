"""The collectives of one step, as ops to insert: gathers and reductions."""

from __future__ import annotations

from collections.abc import Iterator

from ckplan.graph.graph import Graph
from ckplan.graph.records import GATHER, Workspace
from ckplan.graph.sharding.editing import Insert, LastHolders, NewStorage
from ckplan.graph.sharding.state import ROOT, State, Unit

_REDUCE = "reduce_scatter"
_BUCKET_BYTES = 25 << 20  # of the gradients that ZeRO reduces at once


def fully_sharded(
    graph: Graph, state: State, num_ranks: int, lasts: LastHolders
) -> list[Insert]:
    """The collectives of ``fully_shard``, on every unit and on the whole model.

    As its source has it (torch 2.13, ``distributed/fsdp/_fully_shard``), with nothing
    but defaults: a unit is gathered into one buffer and copied out of it, is let go
    after its forward, and gathered again for its backward; the whole model's own
    parameters stay from forward to backward. In forward the buffer lives until the
    next unit is copied out of its own; in backward it is gathered one unit ahead. The
    buffer that gradients are reduced from lives until the next unit has its own.

    Args:
        graph: The step of one process.
        state: Its parameters, gradients and units.
        num_ranks: Number of ranks.
        lasts: Output: gradient -> the op that holds it last.
    """
    units = _FullySharded(graph, state, num_ranks)
    return [
        *units.reduce_inserts(lasts),
        *units.forward_inserts(),
        *units.backward_inserts(),
    ]


class _FullySharded:
    def __init__(self, graph: Graph, state: State, num_ranks: int) -> None:
        self._graph = graph
        self._state = state
        self._num_ranks = num_ranks
        self._share = state.row_shares(num_ranks)
        self._spans = backward_spans(graph)
        self._passes = unit_passes(state)

    def _whole_bytes(self, unit: Unit) -> int:
        """Bytes of a gathered unit, with padding."""
        n = self._num_ranks
        return n * sum(parameter.share_bytes(n) for parameter in unit.parameters)

    def _gather(self, before: int, unit: Unit, call: int) -> NewStorage:
        """Gather a unit into a buffer."""
        size = self._whole_bytes(unit)
        op = Insert(before, GATHER, call, workspace=self._copied_by_gloo(size))
        return op.make(size)

    def _copied_by_gloo(self, size: int) -> Workspace:
        """On CPU, gloo runs the collectives on a copy."""
        on_cpu = self._graph.fingerprint.get("device") == "cpu"
        return Workspace((size,) if on_cpu else ())

    def _copy_out(
        self, before: int, unit: Unit, call: int, buffer: NewStorage
    ) -> NewStorage:
        op = Insert(before, GATHER, call)
        buffer.last = op
        return op.make(self._whole_bytes(unit))

    def forward_inserts(self) -> Iterator[Insert]:
        held: NewStorage | None = None
        for unit, call in self._passes:
            found = self._graph.calls[call]
            buffer = self._gather(found.start, unit, call)
            whole = self._copy_out(found.start, unit, call, buffer)
            if held is not None:
                held.last = whole.maker
            whole.last = found.stop - 1
            if unit.fqn == ROOT:
                whole.last = self._graph.backward_stop - 1
            held = buffer
            yield from (buffer.maker, whole.maker)
        if held is not None:  # until the model returns
            held.last = self._graph.calls[0].stop - 1

    def backward_inserts(self) -> Iterator[Insert]:
        calls, spans = self._graph.calls, self._spans
        order = sorted(self._passes, key=lambda p: (-calls[p[1]].stop, p[1]))
        prefetched: NewStorage | None = None
        for place, (unit, call) in enumerate(order):
            if call not in spans:
                continue
            first, last = spans[call]
            if unit.fqn != ROOT:
                if prefetched is None:
                    prefetched = self._gather(first, unit, call)
                    yield prefetched.maker
                whole = self._copy_out(first, unit, call, prefetched)
                whole.last = last
                yield whole.maker
            prefetched = None
            if place + 1 < len(order):
                prefetched = self._gather(first, *order[place + 1])
                prefetched.last = self._graph.backward_stop - 1  # if no unit uses it
                yield prefetched.maker

    def reduce_inserts(self, lasts: LastHolders) -> Iterator[Insert]:
        """Reduce the gradients of a unit after the backward of its first call."""
        held: NewStorage | None = None
        units = [unit for unit in self._state.units if unit.gradients]
        op: Insert | None = None
        for unit in sorted(units, key=self._backward_stop):
            before, call = self._backward_stop(unit), unit.calls[0]
            sizes = (self._graph.storages[g].bytes for g in unit.gradients)
            shares = sum(map(self._share, sizes))
            into = Insert(before, _REDUCE, call)
            lasts |= dict.fromkeys(unit.gradients, into)
            if held is not None:
                held.last = before - 1
            held = into.make(self._num_ranks * shares)
            op = Insert(before, _REDUCE, call, [], self._copied_by_gloo(held.bytes))
            held.last = op
            made = op.make(shares, "gradient")
            if not self._state.accumulates:
                made.last = len(self._graph.ops)
            yield from (into, op)

    def _backward_stop(self, unit: Unit) -> int:
        """The op before which the backward of a unit is complete."""
        if unit.fqn == ROOT:
            return self._graph.backward_stop
        last = self._spans[unit.calls[0]][1] if unit.calls[0] in self._spans else -1
        ready = self._state.ready
        return 1 + max(last, *(ready[gradient] for gradient in unit.gradients))


def gathered_flat(graph: Graph, state: State, num_ranks: int) -> list[Insert]:
    """The gathers of ZeRO stage 3: every unit twice, and one unit ahead.

    The whole model's own parameters stay from forward to backward.
    """
    calls, spans = graph.calls, backward_spans(graph)
    forward = [(u, c, calls[c].start, calls[c].stop - 1) for u, c in unit_passes(state)]
    backward = [
        (u, c, *spans[c]) for u, c, *_ in forward if u.fqn != ROOT and c in spans
    ]
    found: list[Insert] = []
    for order in (forward, sorted(backward, key=lambda one: one[2])):
        before = order[0][2] if order else 0
        for unit, call, first, last in order:
            op = Insert(min(before, first), GATHER, call)
            size = sum(parameter.bytes for parameter in unit.parameters)
            made = op.make(-(-size // num_ranks) * num_ranks)
            made.last = graph.backward_stop - 1 if unit.fqn == ROOT else last
            found.append(op)
            before = first
    return found


def reduced_in_buckets(
    graph: Graph, state: State, num_ranks: int, lasts: LastHolders
) -> list[Insert]:
    """The reductions of ZeRO stages 2 and 3: each bucket is reduced once it is full."""
    found: list[Insert] = []
    bucket: list[int] = []

    def reduce_bucket(before: int) -> None:
        op = Insert(before, _REDUCE, graph.ops[state.ready[bucket[-1]]].call)
        size = sum(graph.storages[gradient].bytes for gradient in bucket)
        made = op.make(-(-size // num_ranks), "gradient")
        if not state.accumulates:
            made.last = len(graph.ops)
        lasts.update(dict.fromkeys(bucket, op))
        found.append(op)
        bucket.clear()

    for gradient in state.gradients:
        bucket.append(gradient)
        if sum(graph.storages[g].bytes for g in bucket) >= _BUCKET_BYTES:
            reduce_bucket(state.ready[gradient] + 1)
    if bucket:
        reduce_bucket(graph.backward_stop)
    return found


def unit_passes(state: State) -> list[tuple[Unit, int]]:
    """Every call of every unit that has parameters of its own, in forward order."""
    found = [(u, call) for u in state.units if u.parameters for call in u.calls]
    return sorted(found, key=lambda one: one[1])


def backward_spans(graph: Graph) -> dict[int, tuple[int, int]]:
    """Call -> first and last op of its backward, calls inside it included."""
    spans: dict[int, tuple[int, int]] = {}
    for number in range(graph.num_forward, graph.backward_stop):
        for call in graph.path(graph.ops[number].call):
            spans[call] = spans.get(call, (number, number))[0], number
    return spans
