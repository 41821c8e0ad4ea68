"""Levers of plans: what they may do besides recomputation, in every setting of a way.

They change no step, only its plans. So a way with them shares the recorded and drawn
steps of the way without.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckplan.graph.graph import Graph
from ckplan.simulating.moving import Link
from ckplan.simulating.simulate import Simulator, Timeline
from ckplan.solving.levers import search_with
from ckplan.solving.offloading import host_rate
from ckplan.solving.planner import Planner
from ckplan.solving.replays import ReplayedPlan
from ckplan.solving.search import Search
from ckplan.tuning.settings import CLOSE, Way

HOST = "host"
_FINEST = 64  # part of the way from the floor to the unplanned peak


def has_plan_levers(way: Way) -> bool:
    """Whether plans of a way may do more than recompute."""
    return way.tiles is not None or way.offload is not None


def without_plan_levers(way: Way) -> Way:
    """The same way, whose plans recompute and nothing else."""
    return replace(way, tiles=None, offload=None)


def simulator_of(way: Way, graph: Graph) -> Simulator:
    """Replays a step under the plans of a way.

    Raises:
        CkplanError: Values are to move to host memory, and the step runs there.
    """
    if way.offload is None:
        return Simulator(graph)
    return Simulator(graph, Link.of(graph, host_rate(graph, way.offload)))


@dataclass(frozen=True, slots=True)
class _Peak:
    peak_bytes: int


class LeverPlans:
    """The plans of one step in a way with such levers.

    Args:
        planner: Of the step, which keeps and recomputes.
        way: The way.

    Raises:
        CkplanError: No call can run in tiles, or nothing can move.
    """

    def __init__(self, planner: Planner, way: Way) -> None:
        link = None
        if way.offload is not None:
            link = Link.of(planner.graph, host_rate(planner.graph, way.offload))
        allow = {None: [], CLOSE: ["tiles", "close"]}.get(way.tiles, ["tiles"])
        self._search: Search = search_with(planner, allow=allow, link=link)
        self.unplanned: Timeline = planner.unplanned
        self._found: dict[int, ReplayedPlan | None] = {}

    @property
    def floor(self) -> _Peak:
        """The smallest peak of all plans."""
        return _Peak(self._search.floor_bytes)

    @property
    def smallest(self) -> ReplayedPlan:
        """The cheapest plan that reaches it, or one near it: copies may need bytes."""
        floor_bytes = self._search.floor_bytes
        above = max(self.unplanned.peak_bytes - floor_bytes, 0)
        for part in (0, *(1 << place for place in range(_FINEST.bit_length()))):
            found = self.within(floor_bytes + above * part // _FINEST)
            if found is not None:
                return found
        return self.unplanned, ()

    def within(self, budget_bytes: int) -> ReplayedPlan | None:
        """The cheapest plan within a budget; None if there is none."""
        if self.unplanned.peak_bytes <= budget_bytes:
            return self.unplanned, ()
        if budget_bytes not in self._found:
            self._found[budget_bytes] = self._search.within(budget_bytes)
        return self._found[budget_bytes]
