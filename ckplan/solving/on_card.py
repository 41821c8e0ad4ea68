"""Plans for a card: PyTorch's allocator must find room there, with all its gaps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckplan.allocations import has_room, is_on_card
from ckplan.caching_allocator import LARGE_SEGMENT_BYTES
from ckplan.solving.planner import Planner
from ckplan.solving.solution import Solution

_SPARE_SHARE = 100
_FIRST_SHARE = 64  # of the budget: the first part that is left to gaps
_FINEST_SHARE = 128  # how well that part is known in the end


def solve_on_card(planner: Planner, budget_bytes: int, *, expandable: bool) -> Solution:
    """Find the cheapest plan with which PyTorch's allocator keeps to a budget.

    Segments have gaps that no tensor fits into, so the tensors get less. How much less
    is found by replaying the allocator: at first a small part, then twice as much until
    it has room, then between the two. A step of no card is planned by its tensors, and
    so is one where no plan leaves room.

    Args:
        planner: Of the step.
        budget_bytes: What the allocator can reserve.
        expandable: With ``PYTORCH_ALLOC_CONF=expandable_segments:True``.

    Raises:
        InfeasibleError: Not even the tensors fit.
    """
    room_bytes = planned_room(budget_bytes)

    def fits(at: int) -> bool:
        found = planner.within(at)
        return found is not None and has_room(
            found[0], room_bytes, expandable=expandable
        )

    solution = planner.solve(budget_bytes)
    if not is_on_card(planner.graph) or fits(budget_bytes):
        return solution
    tensor_bytes = _largest(fits, planner.floor.peak_bytes, budget_bytes)
    if tensor_bytes is None:
        return solution
    gap_bytes = budget_bytes - tensor_bytes
    return replace(planner.solve(tensor_bytes), gap_bytes=gap_bytes)


def planned_room(budget_bytes: int) -> int:
    """What the replay may take: one segment is for what a step does in another order.

    Of small cards, a hundredth.
    """
    return budget_bytes - min(LARGE_SEGMENT_BYTES, budget_bytes // _SPARE_SHARE)


def _largest(fits: Callable[[int], bool], least: int, most: int) -> int | None:
    """A large number from a range that fits, although ``most`` does not."""
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
