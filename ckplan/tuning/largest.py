"""The largest batch that fits in memory, unplanned or with some plan.

Peaks are nearly linear in the rows, so the largest batch whose tensors fit is found in
a few replays. What a card's allocator reserves beyond them is replayed only near it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress

from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.plan.region import Region
from ckplan.simulating.allocations import reserved_bytes
from ckplan.simulating.simulate import Simulator, Timeline
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.replays import ReplayedPlan
from ckplan.solving.reserved_limit import Plans, plan_within

MOST_ROWS = 2**24
_SECANTS = 8  # most steps on a line before halving
_NO_LINE = 2  # times the limit, where a line was to cross it: sizes are on no line


def largest_batch(
    graph_at: Callable[[int], Graph],
    memory_limit: MemoryLimit,
    plans_at: Callable[[int], Plans] | None = None,
    *,
    start: int = 1,
    unplanned: int | None = None,
    likely: int = 0,
    most: int = MOST_ROWS,
    simulator: Callable[[Graph], Simulator] = Simulator,
) -> tuple[int, tuple[Region, ...]]:
    """The largest number of rows whose step fits, and the plan under which it does.

    It is 0 if not even one row does. Whatever fits at some batch is taken to fit at all
    smaller ones.

    Args:
        graph_at: The step at a number of rows.
        memory_limit: Of a budget, or of a card's allocator.
        plans_at: The plans at a number of rows; without it, none is tried.
        start: Where the search without a plan begins.
        unplanned: Its result, if it is known.
        likely: A number that is likely to fit with a plan; tried first.
        most: Largest number to try.
        simulator: Replays a step.
    """
    replays = _Replays(graph_at, memory_limit, most, simulator)
    regions = tuple[Region, ...]()
    largest = replays.largest_under((), start) if unplanned is None else unplanned
    # The smallest plan of one batch is nearly that of others: replays find the largest
    # batch for it, and a search one row further finds whether another plan is smaller.
    tried = likely if largest < likely <= most else largest + 1
    while plans_at is not None and tried <= most:
        found = _smallest_within(plans_at(tried), memory_limit)
        if found is not None:
            regions = found[1]
            largest = replays.largest_under(regions, tried, least=tried)
        elif tried == largest + 1:
            break
        tried = largest + 1
    return largest, regions


def largest_under(
    graph_at: Callable[[int], Graph],
    limit: MemoryLimit,
    regions: tuple[Region, ...],
    near: int,
) -> int:
    """The largest number of rows that fits under one plan; 0 if not even one does."""
    return _Replays(graph_at, limit, MOST_ROWS).largest_under(regions, near)


def same_forward(one: Graph, other: Graph) -> bool:
    """Whether two steps run the same ops in forward, so that plans of one fit both."""
    first, second = (g.ops[: g.num_forward] for g in (one, other))
    return len(first) == len(second) and all(
        a.name == b.name and a.call == b.call
        for a, b in zip(first, second, strict=True)
    )


class _Replays:
    """The step at any number of rows, under any plan, within a limit."""

    def __init__(
        self,
        graph_at: Callable[[int], Graph],
        limit: MemoryLimit,
        most: int,
        simulator: Callable[[Graph], Simulator] = Simulator,
    ) -> None:
        self._graph_at, self._limit, self._most = graph_at, limit, most
        self._simulator = simulator
        self._simulators: dict[int, Simulator] = {}
        self._timelines: dict[tuple[int, tuple[Region, ...]], Timeline | None] = {}
        self._alike: dict[tuple[int, int], bool] = {}  # of two batches

    def largest_under(
        self, regions: tuple[Region, ...], near: int, *, least: int = 0
    ) -> int:
        """The largest number of rows that fits under a plan; ``least`` does."""

        def peak_of(rows: int) -> int:
            timeline = self._at(rows, regions, near)
            return 2 * self._limit.bytes if timeline is None else timeline.peak_bytes

        def fits(rows: int) -> bool:
            timeline = self._at(rows, regions, near)
            return timeline is not None and self._limit.allows(timeline)

        def likely(rows: int) -> int:
            """Where the allocator needs to free no segment to stay within the limit."""
            timeline = self._at(rows, regions, near)
            assert timeline is not None, "internal error: tensors fit in no timeline"
            needed = reserved_bytes(timeline, expandable=limit.expandable)
            within = limit.bytes * timeline.peak_bytes // needed
            place = _last_within(peak_of, within, numbers, rows)
            return numbers[max(place, 0)]

        numbers, limit = range(1, self._most + 1), self._limit
        return largest_number(
            peak_of, fits, limit.bytes, numbers, near, least=least, likely=likely
        )

    def _at(
        self, rows: int, regions: tuple[Region, ...], found_at: int
    ) -> Timeline | None:
        """The step under a plan of some batch; None if its ops are others there."""
        if rows not in self._simulators:
            self._simulators[rows] = self._simulator(self._graph_at(rows))
        if regions and not self._runs_alike(rows, found_at):
            return None
        if (rows, regions) not in self._timelines:
            timeline = None
            with suppress(PlanError):  # other calls
                timeline = self._simulators[rows].run(regions)
            self._timelines[rows, regions] = timeline
        return self._timelines[rows, regions]

    def _runs_alike(self, rows: int, found_at: int) -> bool:
        """Whether a batch runs the ops of another, compared once."""
        if (rows, found_at) not in self._alike:
            other = self._graph_at(found_at)
            self._alike[rows, found_at] = same_forward(
                self._simulators[rows].graph, other
            )
        return self._alike[rows, found_at]


def _smallest_within(planner: Plans, limit: MemoryLimit) -> ReplayedPlan | None:
    """A plan within a limit, the smallest one if that has room; None if none has."""
    smallest = planner.smallest
    if limit.allows(smallest[0]):
        return smallest
    return plan_within(planner, limit)


def largest_number(
    size_of: Callable[[int], int],
    fits: Callable[[int], bool],
    limit_bytes: int,
    numbers: Sequence[int],
    near: int,
    *,
    least: int = 0,
    likely: Callable[[int], int] = lambda number: number - 1,
) -> int:
    """The largest number of rows that fits; 0 if none does.

    Args:
        size_of: Bytes of a number of rows, at least: cheap to know, nearly linear.
        fits: Whether a number of rows fits; then all smaller ones are taken to fit.
        limit_bytes: What has a larger size does not fit.
        numbers: The numbers to try, ascending.
        near: Where the search begins.
        least: A number that is known to fit.
        likely: A number that is likely to fit where one, whose size is within the
            limit, does not.

    >>> largest_number(
    ...     lambda n: 5 * n, lambda n: n <= 11, 66, range(1, 100), near=40
    ... )
    11
    """
    top = _last_within(size_of, limit_bytes, numbers, near)
    low, high, step = bisect_right(numbers, least) - 1, top, 1  # fits, does not fit
    if top <= low or fits(numbers[top]):
        low = max(low, top)
        return numbers[low] if low >= 0 else 0
    guess = min(bisect_right(numbers, likely(numbers[top])), high) - 1
    if guess > low and fits(numbers[guess]):
        low = guess
    while high - low > 1:
        place = (low + high) // 2 if low >= 0 else max(high - step, 0)
        if fits(numbers[place]):
            low = place
        else:
            high, step = place, 2 * step
    return numbers[low] if low >= 0 else 0


def _last_within(
    size_of: Callable[[int], int], limit_bytes: int, numbers: Sequence[int], near: int
) -> int:
    """The place of the last number whose size is within a limit; -1 if there is none.

    Steps follow the line through the last two sizes; later ones halve what is left.
    """
    sizes: dict[int, int] = {}  # rows -> bytes
    low, high = -1, len(numbers)
    place = max(bisect_right(numbers, near) - 1, 0)
    while high - low > 1:
        rows = numbers[place]
        sizes[rows] = size_of(rows)
        if sizes[rows] <= limit_bytes:
            low = place
        else:
            high = place
        crossing = _crossing(sizes, limit_bytes) if len(sizes) < _SECANTS else None
        if crossing is not None:
            place = bisect_right(numbers, crossing) - 1
            if place >= high and sizes[numbers[high]] > _NO_LINE * limit_bytes:
                place = math.isqrt(max(low, 1) * high)
        elif high == len(numbers):
            place = 2 * place + 1
        else:
            place = (low + high) // 2
        place = min(max(place, low + 1), high - 1)
    return low


def _crossing(sizes: dict[int, int], limit_bytes: int) -> float | None:
    """Where the line through the two sizes nearest to a limit crosses it."""
    near = sorted(sizes, key=lambda rows: abs(sizes[rows] - limit_bytes))[:2]
    if len(near) < 2 or (near[0] < near[1]) != (sizes[near[0]] < sizes[near[1]]):
        return None
    slope = (sizes[near[1]] - sizes[near[0]]) / (near[1] - near[0])
    return near[0] + (limit_bytes - sizes[near[0]]) / slope if slope else None
