"""What every search for plans of one graph offers, whatever its levers."""

from __future__ import annotations

from typing import Protocol

from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.replays import ReplayedPlan
from ckplan.solving.solution import Solution


class Search(Protocol):
    """Finds plans of one graph."""

    @property
    def floor_bytes(self) -> int:
        """The smallest peak of any plan found."""

    def within(self, budget_bytes: int) -> ReplayedPlan | None:
        """The cheapest plan within a budget; None if none is found."""

    def solve(self, limit: MemoryLimit) -> Solution:
        """Find the cheapest plan within a limit."""
