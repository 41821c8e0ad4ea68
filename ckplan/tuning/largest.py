"""The largest batch that fits in memory, unplanned or with some plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.plan.region import Region
from ckplan.simulating.simulate import Simulator
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.solving.replays import ReplayedPlan
from ckplan.solving.reserved_limit import plan_within

MOST_ROWS = 2**24


def largest_batch(
    graph_at: Callable[[int], Graph],
    memory_limit: MemoryLimit,
    planned: bool,
    *,
    start: int = 1,
    most: int = MOST_ROWS,
) -> int:
    """The largest number of rows whose step fits; 0 if not even one row does.

    Whatever fits at some batch is taken to fit at all smaller ones.

    Args:
        graph_at: The step at a number of rows.
        memory_limit: Of a budget, or of a card's allocator.
        planned: Whether plans are tried.
        start: Where the search begins.
        most: Largest number to try.
    """
    simulators: dict[int, Simulator] = {}

    def replayed(rows: int, regions: tuple[Region, ...]) -> bool:
        if rows not in simulators:
            simulators[rows] = Simulator(graph_at(rows))
        try:
            return memory_limit.allows(simulators[rows].run(regions))
        except PlanError:  # the step runs other ops there
            return False

    largest = largest_that(lambda rows: replayed(rows, ()), start, most)
    # The smallest plan of one batch is nearly that of others: replays find the largest
    # batch for it, and a search one row further finds whether another plan is smaller.
    tried = largest + 1
    while planned and tried <= most:
        found = _smallest_within(graph_at(tried), memory_limit)
        if found is None:
            break
        fits = partial(replayed, regions=found[1])
        largest = max(largest_that(fits, tried, most), tried)
        tried = largest + 1
    return largest


def _smallest_within(graph: Graph, limit: MemoryLimit) -> ReplayedPlan | None:
    """A plan within a limit, the smallest one if that has room; None if none has."""
    planner = Planner(graph)
    smallest = planner.within(planner.floor.peak_bytes)
    if smallest is not None and limit.allows(smallest[0]):
        return smallest
    return plan_within(planner, limit)


def largest_that(fits: Callable[[int], bool], start: int, most: int) -> int:
    """The largest of 1 to ``most`` that fits; 0 if none does.

    >>> largest_that(lambda n: n <= 13, start=4, most=100)
    13
    """
    low, high = 0, most + 1  # fits, does not fit
    guess = min(max(start, 1), most)
    while high - low > 1:
        if fits(guess):
            low = guess
            grown = 2 * low
            guess = grown if high > most else (low + high) // 2
        else:
            high = guess
            guess = (low + high) // 2 if low else max(high // 2, 1)
        guess = min(max(guess, low + 1), max(high - 1, low + 1))
        if high == 1:
            break
    return low
