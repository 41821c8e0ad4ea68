"""What every search for plans of one graph offers, whatever its levers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol, TypeVar

from ckplan.errors import InfeasibleError
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.replays import ReplayedPlan
from ckplan.solving.solution import Solution

_Tried = TypeVar("_Tried")
_Found = TypeVar("_Found")


class Search(Protocol):
    """Finds plans of one graph."""

    @property
    def floor_bytes(self) -> int:
        """The smallest peak of any plan found."""

    def within(self, budget_bytes: int) -> ReplayedPlan | None:
        """The cheapest plan within a budget; None if none is found."""

    def solve(self, limit: MemoryLimit) -> Solution:
        """Find the cheapest plan within a limit."""


def solve_with_room(search: Search, limit: MemoryLimit) -> Solution:
    """The cheapest plan within a limit, where PyTorch's allocator has room for it.

    If no plan leaves room for the gaps of a card's segments, but one fits with
    expandable segments, that one; the limit of the solution says so.

    Raises:
        InfeasibleError: Not even the tensors fit.
    """
    found = search.solve(limit)
    if limit.expandable or limit.allows(found.timeline):
        return found
    wider = replace(limit, expandable=True)
    other = search.solve(wider)
    return other if wider.allows(other.timeline) else found


def solve_each(
    tried: Iterable[_Tried],
    solve: Callable[[_Tried], _Found | None],
    floor_bytes: Callable[[_Tried], int],
) -> list[_Found]:
    """What searches find, in order, without those that find nothing.

    Args:
        tried: The searches.
        solve: Asks one of them; None if what it finds is of no use.
        floor_bytes: The smallest peak of one of them.

    Raises:
        InfeasibleError: None finds a plan; that of the smallest peak.
    """
    found: list[_Found] = []
    refused: dict[int, InfeasibleError] = {}
    for one in tried:
        try:
            solution = solve(one)
        except InfeasibleError as error:
            refused[floor_bytes(one)] = error
            continue
        if solution is not None:
            found.append(solution)
    if not found:
        raise refused[min(refused)]
    return found
