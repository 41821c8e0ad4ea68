"""Plans with the optimizer's update in groups of parameters, if that is allowed.

Groups have temporaries as small as their parameters, and the same bits. A step with
them is another graph (``graph/grouped_updates.py``), which is solved like any other;
the plan's ``workload`` names that optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckplan import units
from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.graph.grouped_updates import group_size, with_grouped_update
from ckplan.simulating.simulate import Timeline
from ckplan.solving.common_strategies import all_baselines
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.solving.replays import ReplayedPlan
from ckplan.solving.search import Search, solve_each
from ckplan.solving.solution import Solution


class GroupingPlanner:
    """The plans of one graph with the update whole or in groups."""

    def __init__(
        self, planner: Planner, search_of: Callable[[Planner], Search]
    ) -> None:
        """Prepare the searches.

        Args:
            planner: Of the graph with the whole update.
            search_of: The search of the other levers.

        Raises:
            PlanError: The update cannot run in groups, or they would free nothing.
        """
        grouped = Planner(_grouped(planner.graph))
        self._planner = planner
        self._searches = [search_of(planner), search_of(grouped)]
        self._longer = grouped.graph.step_seconds - planner.graph.step_seconds

    @property
    def floor_bytes(self) -> int:
        """The smallest peak of any plan found."""
        return min(search.floor_bytes for search in self._searches)

    def within(self, budget_bytes: int) -> ReplayedPlan | None:
        """The cheapest plan that fits, as its timeline and its regions."""
        found = (search.within(budget_bytes) for search in self._searches)
        plans = [(self._of_whole(one[0]), one[1]) for one in found if one is not None]
        return min(plans, key=lambda one: _cost(one[0]), default=None)

    def solve(self, limit: MemoryLimit) -> Solution:
        """Find the cheapest plan within a limit.

        Raises:
            InfeasibleError: No plan found fits; the smallest peak found is named.
        """
        found = solve_each(
            self._searches, lambda one: one.solve(limit), lambda one: one.floor_bytes
        )
        best = min(
            found, key=lambda s: (not limit.allows(s.timeline), *_cost(s.timeline))
        )
        timeline = self._of_whole(best.timeline)
        return best if timeline is best.timeline else self._grouped(best, timeline)

    def _of_whole(self, timeline: Timeline) -> Timeline:
        """A step as one that was planned with the whole update, which is quicker."""
        if timeline.unplanned_seconds == self._planner.unplanned.unplanned_seconds:
            return timeline
        return replace(timeline, added_seconds=timeline.added_seconds + self._longer)

    def _grouped(self, found: Solution, timeline: Timeline) -> Solution:
        """A solution with the update in groups, beside the unplanned step itself."""
        planner = self._planner
        longer = 1 + self._longer / (planner.graph.step_seconds or 1.0)
        bound = (1 + found.bound_overhead) * longer - 1
        return replace(
            found,
            timeline=timeline,
            unplanned=planner.unplanned,
            bound_overhead=min(bound, planner.bound(found.budget_bytes)),
            baselines=all_baselines(planner, found.limit),
        )


def _grouped(graph: Graph) -> Graph:
    size = group_size(graph)
    if size is None:
        raise PlanError(
            f"cannot update {graph.model} in groups: that would free nothing",
            needed="an update that makes lists of temporaries, as foreach kernels do",
            hint="leave out --allow groups",
        )
    return with_grouped_update(graph, size, units.parse_bytes(size))


def _cost(timeline: Timeline) -> tuple[float, int]:
    """Seconds of the whole step, then bytes."""
    seconds = timeline.unplanned_seconds + timeline.recompute_seconds
    return seconds, timeline.peak_bytes
