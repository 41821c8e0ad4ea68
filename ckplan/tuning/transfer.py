"""Plans of a step at one batch, taken from those of another batch.

Tensors and seconds grow with the rows, so the plans of one batch are good ones at
others, too. Each is replayed at its new batch: its bytes and its overhead are exact,
but a search there may find one that costs a little less.
"""

from __future__ import annotations

from functools import cached_property

from ckplan.plan.region import Region
from ckplan.simulating.simulate import Simulator, Timeline
from ckplan.solving.replays import ReplayedPlan
from ckplan.solving.reserved_limit import Plans
from ckplan.tuning.largest import same_forward

_MOST_TRIES = 6  # of budgets at the other batch, for one budget here


def transferred(plans: Plans, simulator: Simulator) -> TransferredPlans | None:
    """The plans of another step for this one; None if it runs other ops in forward."""
    if not same_forward(plans.unplanned.graph, simulator.graph):
        return None
    return TransferredPlans(plans, simulator)


class TransferredPlans:
    """Plans of a step that a search at another batch found.

    Args:
        plans: The plans at the other batch.
        simulator: Of the step; it runs the same ops.
    """

    def __init__(self, plans: Plans, simulator: Simulator) -> None:
        self._there, self._simulator = plans, simulator
        self._replays: dict[tuple[Region, ...], ReplayedPlan] = {}
        self._found: dict[int, ReplayedPlan | None] = {}  # by budget
        self.unplanned = self._simulator.run()

    @cached_property
    def floor(self) -> Timeline:
        """The step under the smallest plan of the other batch."""
        return self.smallest[0]

    @cached_property
    def smallest(self) -> ReplayedPlan:
        """That plan."""
        return self._replayed(self._there.smallest[1])

    def within(self, budget_bytes: int) -> ReplayedPlan | None:
        """The cheapest plan found whose peak fits; None if none does."""
        if self.unplanned.peak_bytes <= budget_bytes:
            return self.unplanned, ()
        if budget_bytes not in self._found:
            self._found[budget_bytes] = self._search(budget_bytes)
        return self._found[budget_bytes]

    def _search(self, budget_bytes: int) -> ReplayedPlan | None:
        least, most = self._there.floor.peak_bytes, self._there.unplanned.peak_bytes
        spread = self.unplanned.peak_bytes - self.floor.peak_bytes
        if spread <= 0 or self.floor.peak_bytes > budget_bytes:
            return None
        ratio = (most - least) / spread
        low, high, best = least, most, self.smallest
        there = least + int(ratio * (budget_bytes - self.floor.peak_bytes))
        for _ in range(_MOST_TRIES):
            there = min(max(there, low), high)
            found = self._first_within(there)
            excess = found[0].peak_bytes - budget_bytes
            if excess <= 0:
                best = min(best, found, key=lambda one: one[0].recompute_seconds)
                low = there + 1
            else:
                high = there - 1
            if low > high:
                break
            # Steps follow the excess, or what is left of the budget; halves in the end.
            there -= int(ratio * excess)
            if not low < there < high:
                there = (low + high) // 2
        return best

    def _first_within(self, budget_bytes: int) -> ReplayedPlan:
        """The cheapest plan within a budget at the other batch, replayed here."""
        found = self._there.within(budget_bytes)
        assert found is not None, "internal error: the budget is not below the floor"
        return self._replayed(found[1])

    def _replayed(self, regions: tuple[Region, ...]) -> ReplayedPlan:
        if regions not in self._replays:
            self._replays[regions] = self._simulator.run(regions), regions
        return self._replays[regions]
