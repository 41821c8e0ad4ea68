"""A lower bound on the overhead of any schedule of ops under a budget.

Consider one moment of the step. Every value that backward needs after it is either
alive, and counts against the budget, or is recomputed later together with its own
inputs. Choosing the alive values that minimise recompute seconds is the program of
``closure_problem.py``. The optimum of its relaxation to fractions bounds the cost of
any schedule that only recomputes ops and uses the encodings of the graph. The lower
convex hull of the cuts is that optimum for every budget at once.

Every moment gives a bound, and the largest is used. The moments are the peak of the
unplanned step (the end of forward if that peak is not in backward) and the peak of the
smallest plan, where the bound is tight. A choice can free enough at one of two moments
and too little at the other, so weighted averages of two moments are used too: an op
recomputed after the later moment is also recomputed after the earlier one, and is paid
once.

Seconds are the same as in plans: a recomputed op takes its own seconds and the
engine's, and dropping a tensor has the one-time costs of ``engine_costs.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

from ckplan.graph.graph import Graph
from ckplan.graph.records import BEFORE_STEP, Encoding
from ckplan.simulating.program import Flow
from ckplan.simulating.simulate import Simulator
from ckplan.solving.closure_problem import NANOSECOND, ClosureProblem, Demand, SavedSet
from ckplan.solving.engine_costs import MinEngineCosts

_WEIGHTS = ((1, 1), (1, 3), (3, 1))  # of the two moments of an average


def gap(overhead: float, bound_overhead: float) -> float:
    """Most extra time of a planned step over the bound, as a fraction of the bound."""
    return (1 + overhead) / (1 + bound_overhead) - 1


class LowerBound:
    """The bound of one graph, for any budget."""

    def __init__(self, simulator: Simulator, tight: Iterable[int] = ()) -> None:
        """Choose the moments.

        Args:
            simulator: The simulator of the graph.
            tight: Ops of backward at which good plans have many live bytes.
        """
        self._simulator = simulator
        self._graph = graph = simulator.graph
        self._one_time_costs = MinEngineCosts(graph)
        self._ops: list[int] = []
        if graph.num_forward and graph.step_seconds:
            peak = simulator.unplanned_bytes.index(max(simulator.unplanned_bytes)) // 2
            known = [op for op in tight if graph.phase(op) == "backward"]
            at_peak = graph.phase(peak) == "backward"
            self._ops = sorted({peak if at_peak else graph.num_forward - 1, *known})

    def overhead(self, budget_bytes: int) -> float:
        """Least overhead, a fraction of the step, of any schedule under a budget."""
        single = [one.overhead(budget_bytes) for one in self._each]
        if len(single) < 2 or not min(single):
            return max(single, default=0.0)
        return max(*single, *(one.overhead(budget_bytes) for one in self._averages))

    @cached_property
    def _each(self) -> list[_BoundAt]:
        return [self._bound_at([moment], [1]) for moment in self._moments]

    @cached_property
    def _averages(self) -> list[_BoundAt]:
        return [
            self._bound_at(pair, weights)
            for pair in combinations(self._moments, 2)
            for weights in _WEIGHTS
        ]

    @cached_property
    def _moments(self) -> list[_Moment]:
        flow, values = self._values
        one_time_costs = self._one_time_costs
        return [
            _moment(self._simulator, flow, values, one_time_costs, op)
            for op in self._ops
        ]

    @cached_property
    def _values(self) -> tuple[Flow, list[int]]:
        return forward_values(self._graph)

    @cached_property
    def _encodings(self) -> dict[int, Encoding]:
        return forward_encodings(self._graph, self._values[0])

    def _bound_at(self, moments: Sequence[_Moment], weights: Sequence[int]) -> _BoundAt:
        """The bound of the weighted average of moments, earliest first."""
        graph, (flow, _) = self._graph, self._values

        def nanoseconds(step: int) -> int:
            return round(graph.recompute_op_seconds[step] / NANOSECOND)

        weighted = list(zip(moments, weights, strict=True))
        demands = [replace(one.demand, weight=weight) for one, weight in weighted]
        one_time_costs = self._one_time_costs.known
        closure = ClosureProblem(
            flow, demands, nanoseconds, self._encodings, one_time_costs
        )
        fixed_bytes = sum(weight * one.fixed_bytes for one, weight in weighted)
        return _BoundAt(graph, closure, fixed_bytes, sum(weights))


@dataclass(frozen=True, slots=True)
class _Moment:
    """One op: bytes that no plan can drop, and the values that backward needs."""

    fixed_bytes: int
    demand: Demand


class _BoundAt:
    """The bound of one moment, or of a weighted average of several."""

    def __init__(
        self, graph: Graph, closure: ClosureProblem, fixed_bytes: int, weight: int
    ) -> None:
        self._graph = graph
        self._closure = closure
        self._fixed_bytes = fixed_bytes  # weighted sum over moments
        self._weight = weight  # sum over moments
        fast, small = closure.fastest(), closure.smallest()
        self._cuts = [fast] if small.kept_bytes >= fast.kept_bytes else [fast, small]

    def overhead(self, budget_bytes: int) -> float:
        nanoseconds = self._least(self._weight * budget_bytes - self._fixed_bytes)
        seconds = self._graph.num_batches * nanoseconds * NANOSECOND
        waited = self._graph.waiting_seconds  # which recomputation may fill
        return max(seconds - waited, 0.0) / self._graph.step_seconds

    def _least(self, allowed_bytes: int) -> float:
        """Least nanoseconds, on the convex hull, if at most so many bytes are kept.

        Vertices of the hull are computed when a budget needs them, and cached.
        """
        cuts = self._cuts  # most bytes first
        if cuts[0].kept_bytes <= allowed_bytes:
            return cuts[0].nanoseconds
        if cuts[-1].kept_bytes >= allowed_bytes:
            return cuts[-1].nanoseconds
        place = next(i for i, cut in enumerate(cuts) if cut.kept_bytes <= allowed_bytes)
        fast, small = cuts[place - 1], cuts[place]
        while (middle := self._closure.vertex_between(fast, small)) is not None:
            cuts.append(middle)
            if middle.kept_bytes > allowed_bytes:
                fast = middle
            else:
                small = middle
        cuts.sort(key=lambda cut: -cut.kept_bytes)
        return _on_line(fast, small, allowed_bytes)


def _moment(
    simulator: Simulator,
    flow: Flow,
    values: Sequence[int],
    one_time_costs: MinEngineCosts,
    op: int,
) -> _Moment:
    """The values of forward that backward needs after an op."""
    graph = simulator.graph
    alive_for_free = _alive_regardless(graph, op)
    droppable = _held_for_later_use(graph, op) - alive_for_free
    droppable_bytes = sum(graph.storages[storage].bytes for storage in droppable)
    copies = {v for v in range(len(flow.storage_of)) if not flow.is_current(v)}
    bytes_of = {
        value: 0
        if storage in alive_for_free and value not in copies
        else graph.storages[storage].bytes
        for value, storage in enumerate(flow.storage_of)
    }
    needed: dict[int, None] = {}
    one_time_costs_of: dict[int, set[int]] = defaultdict(set)
    for value, saved in zip(values, graph.saved, strict=True):
        later = saved.every_use and saved.every_use[-1][0] > op
        if later and flow.is_current(value):
            needed[value] = None
            number = one_time_costs.cost_of_dropping(saved)
            if number is not None:
                one_time_costs_of[value].add(number)
    fixed_bytes = simulator.unplanned_bytes[2 * op + 1] - droppable_bytes
    return _Moment(
        fixed_bytes,
        Demand(list(needed), bytes_of, copies, one_time_costs_of=one_time_costs_of),
    )


def _on_line(fast: SavedSet, small: SavedSet, kept_bytes: int) -> float:
    share = (fast.kept_bytes - kept_bytes) / (fast.kept_bytes - small.kept_bytes)
    return fast.nanoseconds + share * (small.nanoseconds - fast.nanoseconds)


def forward_values(graph: Graph) -> tuple[Flow, list[int]]:
    """All values of forward, and the value of every saved tensor."""
    flow = Flow()
    values: list[int] = []
    num_ops = 0
    for saved in graph.saved:
        for op in graph.ops[num_ops : saved.packed_at]:
            flow.add(op)
        num_ops = max(num_ops, saved.packed_at)
        values.append(flow.value(saved.storage))
    for op in graph.ops[num_ops : graph.num_forward]:
        flow.add(op)
    return flow, values


def forward_encodings(graph: Graph, flow: Flow) -> dict[int, Encoding]:
    """Encodings by the value of forward that each can replace."""
    return {
        flow.returned[one.op][one.output]: one
        for one in graph.encodings
        if one.op < graph.num_forward
    }


def _alive_regardless(graph: Graph, moment: int) -> set[int]:
    """Storages alive at a moment in every plan: retained by the step, or in use."""
    in_use = {s.storage for s in graph.saved if s.is_used_at(moment)}
    return in_use | {
        number
        for number, storage in enumerate(graph.storages)
        if storage.last >= moment
        or (storage.maker == BEFORE_STEP and storage.last != BEFORE_STEP)
    }


def _held_for_later_use(graph: Graph, moment: int) -> set[int]:
    """Storages retained at a moment by saved tensors that are used later or never.

    After a backward that keeps the graph, all may be made again.
    """
    keeps = bool(graph.kept_backwards)
    return {
        s.storage
        for s in graph.saved
        if s.unpacked_at > moment
        or (s.last_held >= moment and (keeps or s.unpacked_at < 0))
    }
