"""Plans with the head and its loss in tiles, if they are allowed.

A head in tiles is another graph (``simulating/tiling.py``), which is solved like any
other; the cheapest plan over a few numbers of tiles, and over the whole head, is taken.
The bound holds for schedules of the whole head, and of these tiles.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.plan.region import TILES, Region
from ckplan.plan.tiles import CLOSE_BITS, SAME_BITS, Tiles
from ckplan.simulating.heads import HeadOps, find_head
from ckplan.simulating.moving import Link
from ckplan.simulating.simulate import Simulator
from ckplan.simulating.tiling import tested, tile_graph
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.offloading import MovingPlanner, by_cost
from ckplan.solving.planner import Planner
from ckplan.solving.replays import ReplayedPlan
from ckplan.solving.reserved_limit import solve_within_limit
from ckplan.solving.search import solve_each
from ckplan.solving.solution import Solution

COUNTS = (8, 32)  # tiles of tokens, and of the vocabulary


def find_tileable_head(
    graph: Graph, *, close: bool = False
) -> tuple[int, tuple[Tiles, ...]]:
    """The last call that can run in tiles, and the tiles to choose from.

    Bits are those that ``profile`` tested; where it did not, those of the rule that 16
    bits without a cast are close, and others are the same.

    Args:
        graph: The step.
        close: Whether results may be rounded in another place.

    Raises:
        PlanError: There is none; the error says why the last linear layer cannot.
    """
    why: PlanError | None = None
    for call in reversed(range(len(graph.calls))):
        if graph.calls[call].module == "Linear":
            try:
                found = find_head(graph, call)
            except PlanError as error:
                why = why or error
                continue
            every = [_tiles(graph, call, n, found) for n in COUNTS]
            fit = tuple(one for one in every if close or one.bits == SAME_BITS)
            if fit:
                return call, fit
            why = why or _other_bits(graph, call, every[0], found)
    raise why or PlanError(
        f"cannot tile a head of {graph.model}: it has no linear layer",
        needed="a linear layer whose logits F.cross_entropy reads",
        hint="leave out --allow tiles",
    )


def _tiles(graph: Graph, call: int, count: int, found: HeadOps) -> Tiles:
    """So many tiles each way, with their bits."""
    test = tested(graph, call, Tiles(count, count))
    difference = test.difference if test is not None else 0.0
    is_close = found.is_close or difference > 0
    bits = CLOSE_BITS if is_close else SAME_BITS
    return Tiles(count, count, bits, difference)


def _other_bits(graph: Graph, call: int, tiles: Tiles, found: HeadOps) -> PlanError:
    if not found.is_close:
        return PlanError(
            f"cannot tile {graph.calls[call]}: profile found other bits, by up to "
            f"{tiles.difference:.1e} of the largest value",
            needed="the same bits on this device, with this number of threads",
            hint="profile and train with OMP_NUM_THREADS=1, or --allow close",
        )
    return PlanError(
        f"cannot tile {graph.calls[call]}: its logits have 16 bits and are not "
        "cast to float32, so that tiles give other bits",
        needed="a cast to float32 before F.cross_entropy",
        hint="logits.float(), or --allow tiles --allow close",
    )


class TilingPlanner:
    """The plans of one graph with the head whole or in tiles."""

    def __init__(
        self, planner: Planner, link: Link | None = None, *, close: bool = False
    ) -> None:
        """Prepare the searches.

        Args:
            planner: Of the graph with the head whole.
            link: The way of copies, if values may move.
            close: Whether tiles may round results in another place.

        Raises:
            PlanError: No head can run in tiles.
        """
        graph = planner.graph
        call, counts = find_tileable_head(graph, close=close)
        heads = [Region(call, TILES, tiles=one) for one in counts]
        tiled = [Planner(tile_graph(graph, call, one)) for one in counts]
        searches = [_search(one, link) for one in (planner, *tiled)]
        self._tries = list(zip((None, *heads), searches, strict=True))
        self._planner, self._link = planner, link
        self._simulator = Simulator(graph, link)

    @property
    def floor_bytes(self) -> int:
        """The smallest peak of any plan found."""
        return min(_floor_bytes(search) for _, search in self._tries)

    def within(self, budget_bytes: int) -> ReplayedPlan | None:
        """The cheapest plan that fits, as its timeline and its regions."""
        found: list[ReplayedPlan] = []
        for head, search in self._tries:
            plan = search.within(budget_bytes)
            if plan is not None:
                regions = plan[1] if head is None else _with_head(plan[1], head)
                found.append((self._simulator.run(regions), regions))
        return min(
            (one for one in found if one[0].peak_bytes <= budget_bytes),
            key=lambda one: (one[0].overhead, one[0].peak_bytes),
            default=None,
        )

    def solve(self, limit: MemoryLimit) -> Solution:
        """Find the cheapest plan within a limit.

        Raises:
            InfeasibleError: No plan found fits; the smallest peak found is named.
        """

        def solved(tried: tuple[Region | None, Planner | MovingPlanner]) -> Solution:
            head, search = tried
            solution = _solve(search, limit)
            if head is None:
                return solution
            return _on_graph(self._simulator, head, solution)

        found = solve_each(self._tries, solved, lambda tried: _floor_bytes(tried[1]))
        best = min(found, key=partial(by_cost, limit))
        bounds = [one.bound_overhead for one in found]
        bounds += [self._planner.bound(limit.bytes)] if self._link is None else []
        return replace(
            best,
            bound_overhead=max(0.0, min(bounds)),
            baselines=self._planner.standard_baselines.baselines(limit),
        )


def _search(planner: Planner, link: Link | None) -> Planner | MovingPlanner:
    return planner if link is None else MovingPlanner(planner, link)


def _floor_bytes(search: Planner | MovingPlanner) -> int:
    """The smallest peak that a search found."""
    if isinstance(search, MovingPlanner):
        return search.floor_bytes
    return search.floor.peak_bytes


def _solve(search: Planner | MovingPlanner, limit: MemoryLimit) -> Solution:
    """The cheapest plan within a limit."""
    if isinstance(search, MovingPlanner):
        return search.solve(limit)
    return solve_within_limit(search, limit)


def _with_head(regions: tuple[Region, ...], head: Region) -> tuple[Region, ...]:
    return tuple(sorted((*regions, head), key=lambda one: one.call))


def _on_graph(simulator: Simulator, head: Region, tiled: Solution) -> Solution:
    """A solution of the graph with tiles, as one of the graph itself."""
    regions = _with_head(tiled.regions, head)
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
