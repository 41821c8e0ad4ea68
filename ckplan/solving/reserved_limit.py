"""Plans for a card: PyTorch's allocator must find room there, with all its gaps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckplan.simulating.caching_allocator import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.solving.solution import Solution

_SPARE_SHARE = 100
_FIRST_SHARE = 64  # of the limit: the first part that is left to gaps
_FINEST_SHARE = 128  # how well that part is known in the end


def solve_within_limit(planner: Planner, limit: MemoryLimit) -> Solution:
    """Find the cheapest plan that keeps to a limit.

    On a card, segments of PyTorch's allocator have gaps that no tensor fits into, so
    the tensors get less. How much less is found by replaying the allocator: at first a
    small part, then twice as much until it has room, then between the two. Little is
    spared, unless no plan leaves so much. Where no plan has room, tensors decide.

    Raises:
        InfeasibleError: Not even the tensors fit.
    """
    if not limit.of_reserved:
        return planner.solve(limit.bytes, limit)
    for within in (with_spare_segment(limit), limit):

        def fits(budget_bytes: int, within: MemoryLimit = within) -> bool:
            found = planner.within(budget_bytes)
            return found is not None and within.allows(found[0])

        budget_bytes = _largest_fitting(fits, planner.floor.peak_bytes, limit.bytes)
        if budget_bytes is not None:
            return planner.solve(budget_bytes, limit)
    return planner.solve(limit.bytes, limit)


def with_spare_segment(limit: MemoryLimit) -> MemoryLimit:
    """What a replay may take: one segment is for what a step does in another order.

    It is a large one, of small cards a hundredth, of the smallest a small segment.
    """
    spare_bytes = min(LARGE_SEGMENT_BYTES, limit.bytes // _SPARE_SHARE)
    return replace(limit, bytes=limit.bytes - max(spare_bytes, SMALL_SEGMENT_BYTES))


def _largest_fitting(fits: Callable[[int], bool], least: int, most: int) -> int | None:
    """A large number from a range that fits."""
    if fits(most):
        return most
    fails, share = most, _FIRST_SHARE
    while not fits(at := max(most - most // share, least)):
        if at == least:
            return None
        fails, share = at, max(share // 2, 1)
    while fails - at > most // _FINEST_SHARE:
        middle = (at + fails) // 2
        if fits(middle):
            at = middle
        else:
            fails = middle
    return at
