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

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeAlias

from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.plan.region import Region
from ckplan.simulating.simulate import Simulator, Timeline
from ckplan.solving.replays import ReplayedPlan
from ckplan.solving.unit_bytes import Unit

Plan: TypeAlias = tuple[Region, ...]

_FEWEST, _SIMULATED_OPS = 8, 20_000  # least simulations; most, times ops of the step


class LocalSearch:
    """The non-dominated plans found so far, smallest peak first."""

    def __init__(
        self,
        simulator: Simulator,
        units: Iterable[Unit],
        choices: Callable[[Unit], Iterable[Region]],
    ) -> None:
        """Know no plan yet.

        Args:
            simulator: The simulator of the graph.
            units: Calls and runs of calls that can be regions.
            choices: The regions on a unit.
        """
        self._simulator = simulator
        self._units = [(unit, _span(simulator.graph, unit)) for unit in units]
        self._choices = choices
        self._seen: set[Plan] = set()
        # simulations left
        self.num_left = max(_FEWEST, _SIMULATED_OPS // max(len(simulator.graph.ops), 1))
        self.plans: list[ReplayedPlan] = []

    def offer(self, plan: Iterable[Region]) -> None:
        """Simulate a plan, unless it is known, and keep it if none dominates it."""
        plan = tuple(sorted(plan, key=lambda region: region.call))
        if plan in self._seen:
            return
        self._seen.add(plan)
        self.num_left -= 1
        with suppress(PlanError):
            self._add(self._simulator.run(plan), plan)

    def _add(self, timeline: Timeline, plan: Plan) -> None:
        peak, seconds = timeline.peak_bytes, timeline.recompute_seconds
        if any(
            one.peak_bytes <= peak and one.recompute_seconds <= seconds
            for one, _ in self.plans
        ):
            return
        self.plans = [
            (one, kept)
            for one, kept in self.plans
            if one.peak_bytes < peak or one.recompute_seconds < seconds
        ]
        self.plans.append((timeline, plan))
        self.plans.sort(key=lambda found: found[0].peak_bytes)

    def run(self) -> list[ReplayedPlan]:
        """Simulate neighbours of the plans, smallest peak first, while any is left."""
        done: set[Plan] = set()
        while todo := [found for found in self.plans if found[1] not in done]:
            timeline, plan = todo[0]
            done.add(plan)
            for neighbour in self._neighbours(plan, timeline.peak_moment):
                if self.num_left <= 0:
                    return self.plans
                self.offer(neighbour)
        return self.plans

    def _neighbours(self, plan: Plan, peak_moment: int) -> Iterator[Plan]:
        """The plans that keep one unit, or make it another region."""
        graph = self._simulator.graph
        spans = [_span(graph, (one.call, one.last)) for one in plan]
        for unit, (first, last) in self._by_distance(peak_moment):
            others = tuple(
                region
                for region, (start, stop) in zip(plan, spans, strict=True)
                if stop < first or last < start
            )
            yield others
            for region in self._choices(unit):
                yield (*others, region)

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
