"""Plans with calls in tiles, if allowed: the head and its loss, MLPs, attentions.

A step with calls in tiles is another graph (``simulating/tiled_regions.py``), which is
solved like any other. The cheapest plan over a few sets of tiles is taken, of which one
is none. A set that alone costs more than a plan that was found is not searched. MLPs in
tiles mostly cost more than their hidden values rebuilt, so they are tried only where
the smallest peak of plans without them is in one of them, or where they were measured
to be faster than whole ones. The bound
holds for schedules of all steps that are tried.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial

from ckplan.errors import CkplanError, PlanError
from ckplan.graph.graph import Graph
from ckplan.graph.records import OUTSIDE_CALLS
from ckplan.plan.region import TILES, Region
from ckplan.simulating.moving import Link
from ckplan.simulating.simulate import Simulator
from ckplan.simulating.tiled_regions import tile_regions
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.offloading import MovingPlanner, by_cost
from ckplan.solving.planner import Planner
from ckplan.solving.replays import ReplayedPlan
from ckplan.solving.reserved_limit import solve_within_limit
from ckplan.solving.search import solve_each
from ckplan.solving.solution import Solution, WithoutTiles
from ckplan.solving.tiled_heads import find_tileable_head
from ckplan.solving.tiled_rows import find_tileable_rows

_ROUNDING = 1e-9  # of overheads
_FASTER = 1e-3  # of the step: what a set of tiles has to save, if it only saves time


def heads_in_tiles(
    graph: Graph, *, close: bool = False, needed: bool = True
) -> list[tuple[Region, ...]]:
    """The head and its loss in a few numbers of tiles, as sets of one region.

    Raises:
        PlanError: One is needed and there is none.
    """
    try:
        call, counts = find_tileable_head(graph, close=close)
    except PlanError as why_no_head:
        if needed:
            raise _nothing_to_tile(graph, why_no_head) from None
        return []
    return [(Region(call, TILES, tiles=one),) for one in counts]


def _nothing_to_tile(graph: Graph, head: PlanError) -> PlanError:
    """Say why neither the head nor any other call can run in tiles."""
    every = (one for some in find_tileable_rows(graph, close=True)[-1:] for one in some)
    differences = [one.tiles.difference for one in every if one.tiles is not None]
    if not differences:
        return PlanError(
            f"{head.what}; and no MLP, norm or attention can run in tiles of rows",
            needed=f"{head.needed}; or one that works on each row apart",
            hint="leave out --allow tiles",
        )
    return PlanError(
        f"{head.what}; and tiles of rows give other bits in {len(differences)} MLPs, "
        f"norms or attentions, by up to {max(differences):.1e} of the largest value",
        needed=f"{head.needed}; or permission to round in another place",
        hint="--allow tiles,close",
    )


class TilingPlanner:
    """The plans of one graph with calls whole or in tiles."""

    def __init__(
        self, planner: Planner, link: Link | None = None, *, close: bool = False
    ) -> None:
        """Prepare the searches.

        Args:
            planner: Of the graph with all calls whole.
            link: The way of copies, if values may move.
            close: Whether tiles may round results in another place.

        Raises:
            CkplanError: The step is compiled.
            PlanError: No call can run in tiles.
        """
        graph = planner.graph
        if "compiled" in graph.fingerprint:
            raise CkplanError(
                f"cannot plan tiles in the compiled step of '{graph.model}'",
                needed="an uncompiled step: compiled code keeps or recomputes",
                hint="leave out --allow tiles, or a trace made without --compile",
            )
        self._planner, self._link = planner, link
        self._rows = find_tileable_rows(graph, close=close)
        self._heads = heads_in_tiles(graph, close=close, needed=not self._rows)
        self._simulator = Simulator(graph, link)

    @cached_property
    def _tries(self) -> list[_Try]:
        """Sets of tiles, those that cost least first; one is empty."""
        planner, link = self._planner, self._link
        tries = [_Try(planner, one, link) for one in ((), *self._heads)]
        for base in dict.fromkeys((tries[0], tries[-1])):
            sets = (_together(calls, base.tiled) for calls in self._rows)
            tries += [_Try(planner, tiled, link, base) for tiled in sets]
        return sorted(tries, key=lambda one: one.least_overhead)

    @property
    def floor_bytes(self) -> int:
        """The smallest peak of any plan found."""
        needed = (one for one in self._tries if one.is_needed)
        return min(one.floor_bytes for one in needed)

    def within(self, budget_bytes: int) -> ReplayedPlan | None:
        """The cheapest plan that fits, as its timeline and its regions."""
        best: ReplayedPlan | None = None
        for one in self._tries:
            if best is not None and one.least_overhead > best[0].overhead:
                break
            plan = one.search.within(budget_bytes) if one.is_needed else None
            if plan is None:
                continue
            regions = _together(plan[1], one.tiled)
            timeline = self._simulator.run(regions)
            cost = timeline.overhead, timeline.peak_bytes
            if timeline.peak_bytes <= budget_bytes and (
                best is None or cost < (best[0].overhead, best[0].peak_bytes)
            ):
                best = timeline, regions
        return best

    def solve(self, limit: MemoryLimit) -> Solution:
        """Find the cheapest plan within a limit.

        Raises:
            InfeasibleError: No plan found fits; the smallest peak found is named.
        """
        least: list[float] = []  # overheads of plans that fit

        def solved(one: _Try) -> Solution | None:
            if one.tiled and least and one.least_overhead > min(least):
                return None
            if not one.is_needed:
                return None
            solution = one.solve(limit)
            if one.tiled:
                solution = _on_graph(self._simulator, one.tiled, solution)
            if limit.allows(solution.timeline):
                least.append(solution.timeline.overhead)
            return solution

        found = solve_each(self._tries, solved, lambda one: one.floor_bytes)
        best = min(found, key=partial(by_cost, limit))
        bounds = [one.bound_overhead for one in found]
        bounds += [self._planner.bound(limit.bytes)] if self._link is None else []
        return replace(
            best,
            bound_overhead=min(bounds),
            baselines=self._planner.standard_baselines.baselines(limit),
            without_tiles=self._without(found, limit),
        )

    def _without(self, found: list[Solution], limit: MemoryLimit) -> WithoutTiles:
        """What plans without tiles reach, of all that were found."""
        costs = [
            one.timeline.overhead
            for one in found
            if limit.allows(one.timeline) and not any(r.tiles for r in one.regions)
        ]
        (whole,) = (one for one in self._tries if not one.tiled)
        return WithoutTiles(whole.floor_bytes, min(costs, default=None))


class _Try:
    """The search of one set of tiles."""

    def __init__(
        self,
        planner: Planner,
        tiled: tuple[Region, ...],
        link: Link | None,
        base: _Try | None = None,
    ) -> None:
        self.tiled = tiled
        self._planner, self._link, self._base = planner, link, base

    @cached_property
    def _graph(self) -> Graph:
        return tile_regions(self._planner.graph, self.tiled)

    @cached_property
    def least_overhead(self) -> float:
        """What every plan with these tiles costs at least."""
        seconds = self._planner.graph.step_seconds
        more = self._graph.step_seconds - seconds
        return more / (seconds or 1.0) - _ROUNDING if self.tiled else 0.0

    @cached_property
    def search(self) -> Planner | MovingPlanner:
        """Of the step with these tiles."""
        planner = Planner(self._graph) if self.tiled else self._planner
        return planner if self._link is None else MovingPlanner(planner, self._link)

    @cached_property
    def is_needed(self) -> bool:
        """Whether it is worth a search: the smallest peak without it is in its calls.

        So is one that makes the step faster. Asked last, since the answer costs another
        search.
        """
        if self._base is None:
            return True
        if self.least_overhead < self._base.least_overhead - _FASTER:
            return True
        more = {*self.tiled} - {*self._base.tiled}
        return not self._base.around_peak.isdisjoint(one.call for one in more)

    @cached_property
    def around_peak(self) -> frozenset[int]:
        """Calls around the peak of the smallest plan that only recomputes."""
        search = self.search
        planner = search.planner if isinstance(search, MovingPlanner) else search
        found = planner.within(planner.floor.peak_bytes)
        if found is None:
            return frozenset()
        graph, moment = planner.graph, found[0].peak_moment // 2
        call = graph.ops[moment].call if moment < len(graph.ops) else OUTSIDE_CALLS
        around: set[int] = set()
        while call != OUTSIDE_CALLS:
            around.add(call)
            call = graph.calls[call].parent
        return frozenset(around)

    @property
    def floor_bytes(self) -> int:
        """The smallest peak that the search found."""
        if isinstance(self.search, MovingPlanner):
            return self.search.floor_bytes
        return self.search.floor.peak_bytes

    def solve(self, limit: MemoryLimit) -> Solution:
        """The cheapest plan within a limit, of the step with these tiles."""
        if isinstance(self.search, MovingPlanner):
            return self.search.solve(limit)
        return solve_within_limit(self.search, limit)


def _together(
    regions: tuple[Region, ...], others: tuple[Region, ...]
) -> tuple[Region, ...]:
    return tuple(sorted((*regions, *others), key=lambda one: one.call))


def _on_graph(
    simulator: Simulator, tiles: tuple[Region, ...], tiled: Solution
) -> Solution:
    """A solution of the graph with tiles, as one of the graph itself."""
    regions = _together(tiled.regions, tiles)
    timeline = simulator.run(regions)
    longer = tiled.unplanned.graph.step_seconds / (timeline.unplanned_seconds or 1.0)
    bound = (1 + tiled.bound_overhead) * longer - 1
    return replace(
        tiled,
        regions=regions,
        timeline=timeline,
        unplanned=simulator.run(),
        bound_overhead=bound,
    )
