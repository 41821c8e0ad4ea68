"""Segmentations: the units of a chain, calls of which none lies inside another.

A call is one unit, or is divided into its children if it owns more than a share of the
droppable bytes and they own most of it. Large units are cheap to rebuild; small units
have small bursts. The recurrence of ``chain.py`` chooses. If tensors between calls take
most of the memory, neighbours are joined to runs, which keep only their inputs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from typing import TypeAlias

from ckplan.graph.graph import Graph
from ckplan.graph.records import OUTSIDE_CALLS
from ckplan.simulating.simulate import Simulator
from ckplan.solving.chain import ChainFrontier, Link, solve_chain
from ckplan.solving.menu import Menus, Option
from ckplan.solving.unit_bytes import Unit

MIN_DIVIDED_SHARE = 1 / 32
"""Share of all droppable bytes: calls that own less are not divided."""

LARGE_CALL_OPS, DOMINANT_PART_SHARE = 1000, 0.95
"""A call is not a unit if it has more than so many ops and one of its children owns
more than this share of it."""

RUN_SHARES = (1 / 8, 1 / 32)
ALL_RUN_LENGTHS_MAX_OPS = 256
"""Most ops of a step for which runs of every length are tried."""

_Options: TypeAlias = Callable[[Unit], Sequence[Option]]
_CHILDREN_MUST_HOLD = 0.5  # of their parent's droppable bytes


@dataclass(frozen=True, slots=True)
class CallNode:
    """A call, and the calls that it can be divided into."""

    call: int
    parts: tuple[CallNode, ...] = ()
    is_unit: bool = True  # whether the whole call can be a unit

    @property
    def unit(self) -> Unit:
        """The call as one unit."""
        return self.call, None


def full_call_tree(graph: Graph) -> tuple[CallNode, ...]:
    """The outermost calls in forward order, all divided: any call can begin a run."""

    def nodes(calls: Iterable[int]) -> tuple[CallNode, ...]:
        return tuple(CallNode(call, nodes(graph.children[call])) for call in calls)

    return nodes(graph.children[OUTSIDE_CALLS])


def pruned_call_tree(graph: Graph, menus: Menus) -> tuple[CallNode, ...]:
    """The outermost calls with droppable bytes, in forward order."""
    size, total = menus.droppable_bytes, menus.all_droppable_bytes

    def nodes(calls: Sequence[int]) -> tuple[CallNode, ...]:
        return tuple(node(call) for call in calls if size(call))

    def node(call: int) -> CallNode:
        inside, found = parts(call), graph.calls[call]
        most = max((size(part.call) for part in inside), default=0)
        is_large = found.stop - found.start > LARGE_CALL_OPS
        return CallNode(
            call, inside, not is_large or most <= DOMINANT_PART_SHARE * size(call)
        )

    def parts(call: int) -> tuple[CallNode, ...]:
        children = graph.children[call]
        inside = sum(map(size, children))
        children_own_most = children and inside >= _CHILDREN_MUST_HOLD * size(call)
        return (
            nodes(children)
            if children_own_most and size(call) > MIN_DIVIDED_SHARE * total
            else ()
        )

    return nodes(graph.children[OUTSIDE_CALLS])


def candidate_units(nodes: Sequence[CallNode]) -> Iterator[Unit]:
    """Every call that can be a unit."""
    for node in nodes:
        if node.is_unit:
            yield node.unit
        yield from candidate_units(node.parts)


def leaf_units(nodes: Sequence[CallNode]) -> Iterator[Unit]:
    """The segmentation into the smallest units."""
    for node in nodes:
        yield from leaf_units(node.parts) if node.parts else (node.unit,)


def all_units(graph: Graph) -> Iterator[Unit]:
    """Every call, and every run of siblings."""
    for call in range(len(graph.calls)):
        yield call, None
    for parent, calls in graph.children.items():
        if parent != OUTSIDE_CALLS:
            yield from combinations(calls, 2)


def tree_frontier(
    simulator: Simulator,
    nodes: Sequence[CallNode],
    options: _Options,
    *,
    runs: bool = False,
    most_points: int | None = None,
) -> ChainFrontier:
    """The frontier over all ways to divide calls and to join them to runs.

    Args:
        simulator: The simulator of the graph.
        nodes: The outermost calls.
        options: The menu of a unit.
        runs: Whether every run of siblings can be a unit.
        most_points: Most points of a frontier; see ``chain.py``.
    """
    windows = [(0, len(simulator.unplanned_bytes) - 1)]
    tail = ChainFrontier.end(0, most_points)
    return _divided(simulator, nodes, options, windows, tail, runs=runs)


def _divided(
    simulator: Simulator,
    nodes: Sequence[CallNode],
    options: _Options,
    windows: Sequence[tuple[int, int]],
    tail: ChainFrontier,
    *,
    runs: bool,
) -> ChainFrontier:
    """F before the first node; ``tail`` is F after the last."""
    gaps = _live_between_units(simulator, [node.unit for node in nodes], windows)
    after = [tail.raised_to(gaps[-1])]
    for place in range(len(nodes) - 1, -1, -1):
        node, gap = nodes[place], gaps[place]
        view = simulator.view(*node.unit)
        ways: list[ChainFrontier] = []
        if node.is_unit:
            ways.append(after[0].before(Link(node.unit, options(node.unit), gap)))
        if node.parts:
            own = [view.forward_window(), view.backward_window()]
            parts = _divided(simulator, node.parts, options, own, after[0], runs=runs)
            ways.append(parts.raised_to(gap))
        for last, found in enumerate(after[1:] if runs else (), place + 1):
            if are_siblings(simulator.graph, node.call, nodes[last].call):
                run = (node.call, nodes[last].call)
                ways.append(found.before(Link(run, options(run), gap)))
        after.insert(0, ChainFrontier.either(ways))
    return after[0]


def uniform_segmentations(
    graph: Graph, menus: Menus
) -> dict[int, list[tuple[Unit, ...]]]:
    """Segmentations into runs of equal length, by that length in calls.

    A call is replaced by its children even if these own no droppable bytes, since the
    tensors between them can be all there is to drop.
    """
    roots = graph.children[OUTSIDE_CALLS]
    total = menus.all_droppable_bytes
    found: dict[int, dict[tuple[Unit, ...], None]] = {}
    for share in RUN_SHARES:
        groups: list[list[int]] = [[]]
        stack = list(reversed(roots))
        while stack:
            call = stack.pop()
            children = graph.children[call]
            if menus.droppable_bytes(call) > share * total and len(children) > 1:
                stack += reversed(children)
            elif graph.saved_in(call):
                if groups[-1] and not are_siblings(graph, groups[-1][-1], call):
                    groups.append([])
                groups[-1].append(call)
        longest = max(map(len, groups))
        few = len(graph.ops) <= ALL_RUN_LENGTHS_MAX_OPS
        for length in range(2, longest) if few else _lengths(longest):
            segmentation = tuple(
                unit for group in groups for unit in _runs(group, length)
            )
            found.setdefault(length, {})[segmentation] = None
    return {length: list(covers) for length, covers in sorted(found.items())}


def _lengths(longest: int) -> Iterator[int]:
    """Lengths of runs, in calls: 2, 3, 4, 6, 8, 12, 16, ..."""
    shorter, longer = 2, 3
    while shorter < longest:
        yield shorter
        shorter, longer = longer, 2 * shorter


def are_siblings(graph: Graph, one: int, other: int) -> bool:
    """Whether a run can begin with one call and end with the other."""
    parent = graph.calls[one].parent
    return parent == graph.calls[other].parent != OUTSIDE_CALLS


def _runs(calls: Sequence[int], length: int) -> Iterator[Unit]:
    for start in range(0, len(calls), length):
        run = calls[start : start + length]
        yield run[0], run[-1] if len(run) > 1 else None


def segmentation_frontier(
    simulator: Simulator, segmentation: Sequence[Unit], options: _Options
) -> ChainFrontier:
    """The frontier over the units of a segmentation."""
    gaps = _live_between_units(
        simulator, segmentation, [(0, len(simulator.unplanned_bytes) - 1)]
    )
    links = [
        Link(unit, options(unit), gap)
        for unit, gap in zip(segmentation, gaps[:-1], strict=True)
    ]
    return solve_chain(links, gaps[-1])


def _live_between_units(
    simulator: Simulator, units: Sequence[Unit], windows: Sequence[tuple[int, int]]
) -> list[int]:
    """Most live bytes over the half moments where no unit runs.

    The list has one entry for every number of first units that have dropped.
    """
    views = [simulator.view(*unit) for unit in units]
    forward_windows = [view.forward_window() for view in views]
    later = [view.backward_window() for view in views]
    spans = [*forward_windows, *(span for span in later if span[0] >= 0)]
    # Half moments between which all units up to each one have dropped. Those of
    # backward are negated, so that both lists are sorted.
    forward_stops = list(accumulate((stop for _, stop in forward_windows), max))
    ends = [
        backward_start if backward_start >= 0 else stop
        for (backward_start, _), (_, stop) in zip(later, forward_windows, strict=True)
    ]
    backward_starts = list(accumulate((-end for end in ends), max))
    gaps = [0] * (len(units) + 1)
    for first, last in windows:
        edges = Counter({first: 0, last + 1: 0})
        for start, stop in spans:
            if start <= last and stop >= first:
                edges[max(start, first)] += 1
                edges[min(stop, last) + 1] -= 1
        running = 0
        for start, stop in pairwise(sorted(edges)):
            running += edges[start]
            if not running:
                number = min(
                    bisect_left(forward_stops, start),
                    bisect_left(backward_starts, -start),
                )
                most = max(simulator.unplanned_bytes[start:stop], default=0)
                gaps[number] = max(gaps[number], most)
    return gaps
