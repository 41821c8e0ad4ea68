"""Baselines: common strategies on whole layers, in the same simulator.

The layers of these strategies are the largest family of sibling calls of one module
type: the blocks of a transformer, the bottlenecks of a ResNet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.plan.region import RERUN, Region
from ckplan.simulating.simulate import Simulator, Timeline
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.menu import Menus
from ckplan.solving.replays import ReplayedPlan
from ckplan.solving.solution import Baseline

_T = TypeVar("_T")

EXHAUSTIVE_MAX_LAYERS = 64
"""Up to this number of layers, all variants are tried; beyond it, a subset."""

_MOST_LIMITS = 16  # most limits of Chen's search
_NEARLY_ALL = (
    0.9  # a family of smaller calls is preferred if it owns this share of the bytes
)


def find_repeated_layers(graph: Graph, menus: Menus) -> list[int]:
    """Calls of the module type that is usually recomputed, in forward order."""
    families: dict[str, list[int]] = defaultdict(list)
    for children in graph.children.values():
        kinds = [graph.calls[child].module for child in children]
        for child, kind in zip(children, kinds, strict=True):
            if kinds.count(kind) > 1:
                families[kind].append(child)
    sizes = {
        kind: sum(menus.droppable_bytes(call) for call in _outermost(graph, calls))
        for kind, calls in families.items()
    }
    most = max(sizes.values(), default=0)
    if not most:
        return []
    large = [kind for kind, size in sizes.items() if size >= _NEARLY_ALL * most]
    finest = max(large, key=lambda kind: (len(families[kind]), sizes[kind], kind))
    return _outermost(graph, families[finest])


def _outermost(graph: Graph, calls: Iterable[int]) -> list[int]:
    """The outermost of some calls, in order."""
    found: list[int] = []
    for call in sorted(calls):
        if not found or not graph.is_within(call, found[-1]):
            found.append(call)
    return found


class StandardBaselines:
    """Strategies that do not depend on the budget, each simulated once."""

    def __init__(self, simulator: Simulator, menus: Menus, unplanned: Timeline) -> None:
        layers = [
            layer
            for layer in find_repeated_layers(simulator.graph, menus)
            if can_recompute(simulator, Region(layer, RERUN))
        ]
        self._unplanned = unplanned
        self._segmented = [
            (simulator.run(plan), plan) for plan in _chen(simulator, menus, layers)
        ]
        built = (_built(plan) for _, plan in self._segmented)
        self._built = [
            (simulator.run(plan), plan)
            for plan in dict.fromkeys(built)
            if all(can_recompute(simulator, region) for region in plan)
        ]
        every_call = tuple(Region(layer, RERUN) for layer in layers)
        self.every_call = [(simulator.run(every_call), every_call)] if layers else []
        """Every layer on its own, with its timeline; empty without layers."""

    @property
    def plans(self) -> list[ReplayedPlan]:
        """The strategies that are plans, with their timelines."""
        return [*self.every_call, *self._built]

    def baselines(self, limit: MemoryLimit) -> tuple[Baseline, ...]:
        """Baselines "none", "every call" and "chen" (the best of its limits)."""
        found = [("none", self._unplanned)]
        for every_call, _ in self.every_call:
            segmented = [line for line, _ in self._segmented] or [self._unplanned]
            best = cheapest_or_smallest(segmented, limit, lambda timeline: timeline)
            found += ("every call", every_call), ("chen", best)
        return tuple(Baseline.of(name, timeline, limit) for name, timeline in found)


def cheapest_or_smallest(
    found: Iterable[_T], limit: MemoryLimit, timeline_of: Callable[[_T], Timeline]
) -> _T:
    """The cheapest that fits, or the smallest if none does."""

    def cost(one: _T) -> tuple[float, int]:
        return timeline_of(one).recompute_seconds, timeline_of(one).peak_bytes

    by_cost = sorted(found, key=cost)
    fitting = (one for one in by_cost if limit.allows(timeline_of(one)))
    smallest = min(by_cost, key=lambda one: timeline_of(one).peak_bytes)
    return next(fitting, smallest)


def _built(plan: Iterable[Region]) -> tuple[Region, ...]:
    """The same segments op by op: runs of calls are not rerun as modules."""
    return tuple(r if r.last is None else Region(r.call, last=r.last) for r in plan)


def can_recompute(simulator: Simulator, region: Region) -> bool:
    """Whether a region can be rebuilt."""
    try:
        simulator.effect(region)
    except PlanError:
        return False
    return True


def run_lengths(num_layers: int) -> list[int]:
    """Lengths of the runs that layers can be cut into, from one layer to all of them.

    For many layers, only the shortest length for each number of runs is returned.
    Longer runs mostly need more memory, and every length is simulated.
    """
    lengths = range(1, num_layers + 1)
    if num_layers <= EXHAUSTIVE_MAX_LAYERS:
        return list(lengths)
    shortest = {-(-num_layers // length): length for length in reversed(lengths)}
    return list(reversed(shortest.values()))


def min_regions_to_fit(
    simulator: Simulator, regions: Sequence[Region], limit: MemoryLimit
) -> int:
    """The least number of first regions that fits; all of them if none does.

    For many regions, the peak is assumed not to rise with their number.
    """

    def fits(count: int) -> bool:
        return limit.allows(simulator.run(regions[:count]))

    counts = range(len(regions))
    if len(regions) <= EXHAUSTIVE_MAX_LAYERS:
        return next(filter(fits, counts), len(regions))
    return 0 if fits(0) else bisect_left(counts, True, key=fits)


def _chen(
    simulator: Simulator, menus: Menus, layers: Sequence[int]
) -> Iterator[tuple[Region, ...]]:
    """Segments by Algorithm 3 of Chen et al., for several of its budgets ``b``.

    T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory
    Cost", 2016: a new segment begins when the activations since the last one exceed
    ``b``. The last segment is not recomputed. Of all ``b``, the cheapest that fits is
    taken, or the smallest if none does.
    """
    sizes = [menus.droppable_bytes(layer) for layer in layers]
    tried: dict[tuple[tuple[int, int], ...], None] = {}
    limits = list(accumulate(sizes))
    for limit in limits[:: max(1, len(limits) // _MOST_LIMITS)]:
        tried[tuple(_segments(simulator.graph, layers, sizes, limit))] = None
    for segments in tried:
        regions = tuple(
            Region(first, RERUN, last=None if first == last else last)
            for first, last in segments[:-1]
        )
        if all(can_recompute(simulator, region) for region in regions):
            yield regions


def _segments(
    graph: Graph, layers: Sequence[int], sizes: Sequence[int], limit: int
) -> list[tuple[int, int]]:
    """Runs of siblings (first, last), each closed when it exceeds a limit."""
    segments: list[tuple[int, int]] = []
    first = last = -1
    segment_bytes = 0
    for layer, size in zip(layers, sizes, strict=True):
        same_parent = graph.calls[layer].parent == graph.calls[last].parent
        if first >= 0 and (segment_bytes > limit or not same_parent):
            segments.append((first, last))
            first = -1
        if first < 0:
            first, segment_bytes = layer, 0
        last = layer
        segment_bytes += size
    return [*segments, (first, last)]
