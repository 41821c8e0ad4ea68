"""Plans for a card: memory that PyTorch's allocator reserves fits, gaps included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

from ckplan import units
from ckplan.simulating.allocations import has_room, is_on_card
from ckplan.simulating.caching_allocator import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES
from ckplan.simulating.simulate import Timeline
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.solving.replays import ReplayedPlan
from ckplan.solving.solution import Solution

SETTING = "PYTORCH_ALLOC_CONF=expandable_segments:True"
_SPARE_SHARE = 100
_FIRST_SHARE = 64  # divisor of the limit: first size left for gaps
_FINEST_SHARE = 128  # divisor of the limit: final precision of that size


class _WithPeak(Protocol):
    @property
    def peak_bytes(self) -> int: ...


class Plans(Protocol):
    """The plans of one step, as a ``Planner`` finds them."""

    unplanned: Timeline

    @property
    def floor(self) -> _WithPeak:
        """The smallest peak of all plans."""

    @property
    def smallest(self) -> ReplayedPlan:
        """A plan that reaches it, at whatever cost."""

    def within(self, budget_bytes: int) -> ReplayedPlan | None:
        """The cheapest plan within a budget; None if there is none."""


def solve_within_limit(planner: Planner, limit: MemoryLimit) -> Solution:
    """Find the cheapest plan within a limit.

    On a card, segments of PyTorch's allocator have gaps that no tensor fits into, so
    the budget of tensors is smaller than the limit. The size left for gaps is found by
    simulating the allocator: it starts small, doubles until the plan fits, and is then
    bisected. A spare segment is left free if a plan can leave it; the plan fits without
    one, too, which does not follow, as a full card frees other segments. A step that
    fits as it is gets no plan. If no plan fits with gaps, the limit applies to tensors
    alone.

    Raises:
        InfeasibleError: Not even the tensors fit.
    """
    return planner.solve(budget_within(planner, limit), limit)


def budget_within(planner: Plans, limit: MemoryLimit) -> int:
    """The budget of tensors whose plan fits within a limit; the limit if none does.

    Args:
        planner: The plans; their timelines are asked whether they fit.
        limit: The limit, with gaps or without.
    """
    found = planner.within(limit.bytes) if limit.of_reserved else None
    if found is not None and not found[1] and limit.allows(found[0]):
        return limit.bytes  # no plan is cheaper than none
    for within in (with_spare_segment(limit), limit) if limit.of_reserved else ():

        def fits(budget_bytes: int, within: MemoryLimit = within) -> bool:
            found = planner.within(budget_bytes)
            if found is None or not within.allows(found[0]):
                return False
            return within is limit or limit.allows(found[0])

        budget_bytes = _largest_fitting(fits, planner.floor.peak_bytes, limit.bytes)
        if budget_bytes is not None:
            return budget_bytes
    return limit.bytes


def plan_within(planner: Plans, limit: MemoryLimit) -> ReplayedPlan | None:
    """The step as it is or under the cheapest plan that fits; None if none does."""
    if limit.allows(planner.unplanned):
        return planner.unplanned, ()
    found = planner.within(budget_within(planner, limit))
    return found if found is not None and limit.allows(found[0]) else None


def room_warning(solution: Solution, reserve_bytes: int, *, asked: bool) -> str:
    """What a plan needs for PyTorch's allocator to have room for it; "" if nothing.

    Args:
        solution: The plan.
        reserve_bytes: What its budget leaves of the memory: for gaps, unless it is
            that of a card.
        asked: Whether expandable segments were asked for.
    """
    timeline, limit = solution.timeline, solution.limit
    if not is_on_card(timeline.graph):
        return ""
    room_bytes = limit.bytes + (0 if limit.of_reserved else reserve_bytes)
    if has_room(timeline, room_bytes, expandable=limit.expandable):
        if asked or not limit.expandable:
            return ""
        return f"no plan leaves room for gaps: this one needs {SETTING}"
    fails = "PyTorch's allocator runs out of memory in "
    fails += units.format_bytes(room_bytes)
    if has_room(timeline, room_bytes, expandable=True):
        return f"{fails}: set {SETTING}"
    if limit.of_reserved:
        return f"{fails}, and no plan leaves room for its gaps: a smaller batch does"
    return f"{fails}: a larger --reserve leaves room for fragmentation"


def with_spare_segment(limit: MemoryLimit) -> MemoryLimit:
    """The limit less one spare segment, for allocations in a different order.

    The spare is a large segment, at most a hundredth of the limit, and at least a
    small segment.
    """
    spare_bytes = min(LARGE_SEGMENT_BYTES, limit.bytes // _SPARE_SHARE)
    return replace(limit, bytes=limit.bytes - max(spare_bytes, SMALL_SEGMENT_BYTES))


def _largest_fitting(fits: Callable[[int], bool], least: int, most: int) -> int | None:
    """A nearly largest number of a range that fits; None if none is found.

    A smaller budget need not fit better: another plan leaves other gaps, above all one
    that moves values. If no number on the way down fits, those between them are tried.
    """
    if fits(most):
        return most
    sizes = [most, *_sizes_below(most, least)]
    place = next((n for n, size in enumerate(sizes) if n and fits(size)), None)
    if place is None:
        return next(filter(fits, ((a + b) // 2 for a, b in pairwise(sizes))), None)
    fails, size = sizes[place - 1], sizes[place]
    while fails - size > most // _FINEST_SHARE:
        middle = (size + fails) // 2
        if fits(middle):
            size = middle
        else:
            fails = middle
    return size


def _sizes_below(most: int, least: int) -> Iterator[int]:
    """Sizes below the largest, the steps between them doubling, to the smallest."""
    share = _FIRST_SHARE
    while share and (size := most - most // share) > least:
        yield size
        share //= 2
    yield least
