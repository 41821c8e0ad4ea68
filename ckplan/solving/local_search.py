"""Local search: plans are improved by changing one unit at a time.

The recurrence of ``chain.py`` adds up the bytes that units free, as if each were alone,
and its menus are those of single units. Pareto local search repairs what that misses:
every plan that no known plan dominates has as neighbours the plans that do something
else with one unit. Each neighbour is simulated exactly. The non-dominated ones are kept
and have neighbours in turn. L. Paquete, M. Chiarandini, T. Stuetzle, "Pareto local
optimum sets in the biobjective traveling salesman problem: an experimental study",
2004. The search ends when all neighbours are known, or after a number of simulations
that depends on the number of ops only, so its result is the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple, TypeAlias

from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.plan.region import Region
from ckplan.simulating.simulate import Simulator, Timeline
from ckplan.solving.menu import Menus
from ckplan.solving.replays import ReplayedPlan
from ckplan.solving.unit_bytes import Unit

Plan: TypeAlias = tuple[Region, ...]

_FEWEST, _SIMULATED_OPS = 4, 12_000  # least simulations; most, times ops of the step
_MOST_DOMINATED = 16  # plans with neighbours, after all that are not dominated


class _Point(NamedTuple):
    """What the search needs to know of a plan whose neighbours are not simulated."""

    peak_bytes: int
    seconds: float
    moment: int  # of the peak

    @classmethod
    def of(cls, timeline: Timeline) -> _Point:
        return cls(
            timeline.peak_bytes, timeline.recompute_seconds, timeline.peak_moment
        )


class LocalSearch:
    """The non-dominated plans found so far, smallest peak first."""

    def __init__(
        self,
        simulator: Simulator,
        menus: Menus,
        units: Iterable[Unit],
    ) -> None:
        """Know no plan yet.

        Args:
            simulator: The simulator of the graph.
            menus: The menus of the graph.
            units: Calls and runs of calls that can be regions.
        """
        self._simulator = simulator
        self._units = [(unit, _span(simulator.graph, unit)) for unit in units]
        self._menus = menus
        self._seen: set[Plan] = set()
        # simulations left
        self.num_left = max(_FEWEST, _SIMULATED_OPS // max(len(simulator.graph.ops), 1))
        self._unexplored: dict[Plan, _Point] = {}
        self.plans: list[ReplayedPlan] = []

    def offer(self, plan: Iterable[Region]) -> None:
        """Simulate a plan, unless it is known, and keep it if none dominates it."""
        plan = tuple(sorted(plan, key=lambda region: region.call))
        if plan in self._seen:
            return
        self._seen.add(plan)
        self.num_left -= 1
        with suppress(PlanError):
            timeline = self._simulator.run(plan)
            self._unexplored[plan] = _Point.of(timeline)
            self._add(timeline, plan)

    def _add(self, timeline: Timeline, plan: Plan) -> None:
        peak, seconds = timeline.peak_bytes, timeline.recompute_seconds
        if self._least_peak(seconds) <= peak:
            return
        self.plans = [
            (one, kept)
            for one, kept in self.plans
            if one.peak_bytes < peak or one.recompute_seconds < seconds
        ]
        self.plans.append((timeline, plan))
        self.plans.sort(key=lambda found: found[0].peak_bytes)

    def _least_peak(self, seconds: float) -> float:
        """The least peak of the plans that take at most so many seconds."""
        return next(
            (
                one.peak_bytes
                for one, _ in self.plans
                if one.recompute_seconds <= seconds
            ),
            math.inf,
        )

    def run(self) -> list[ReplayedPlan]:
        """Simulate neighbours of the plans, smallest peak first, while any is left.

        When none is left, the dominated plans that are nearest to the others follow.
        """
        patience = _MOST_DOMINATED
        while self._unexplored and self.num_left > 0:
            todo = [plan for _, plan in self.plans if plan in self._unexplored]
            if not todo:
                if not patience:
                    break
                patience -= 1
                todo = [min(self._unexplored, key=self._excess)]
            point = self._unexplored.pop(todo[0])
            for neighbour in self._neighbours(todo[0], point.moment):
                if self.num_left <= 0:
                    break
                self.offer(neighbour)
        return self.plans

    def _excess(self, plan: Plan) -> float:
        """How much larger a plan is than one that takes no longer."""
        point = self._unexplored[plan]
        return point.peak_bytes / max(self._least_peak(point.seconds), 1)

    def _neighbours(self, plan: Plan, peak_moment: int) -> Iterator[Plan]:
        """The plans that do something else with one unit, then with one value."""
        graph = self._simulator.graph
        spans = [_span(graph, (one.call, one.last)) for one in plan]
        for unit, (first, last) in self._by_distance(peak_moment):
            others = tuple(
                region
                for region, (start, stop) in zip(plan, spans, strict=True)
                if stop < first or last < start
            )
            yield others
            for region in self._menus.choices(unit):
                yield (*others, region)
        for region in plan:
            for nearby in self._menus.nearby(region):
                yield tuple(nearby if one is region else one for one in plan)

    def _by_distance(self, moment: int) -> list[tuple[Unit, tuple[int, int]]]:
        """The units, first those whose backward is at a moment, then those before."""

        def distance(found: tuple[Unit, tuple[int, int]]) -> int:
            first, last = self._simulator.view(*found[0]).backward_window()
            return 0 if first <= moment <= last else 1 if moment < first else 2

        return sorted(self._units, key=distance)


def _span(graph: Graph, unit: Unit) -> tuple[int, int]:
    """The first and the last of a unit's calls and all calls inside them."""
    call, last = unit
    end = call if last is None else last
    while graph.children[end]:
        end = graph.children[end][-1]
    return call, end
