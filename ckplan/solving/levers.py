"""Plans with levers beside recomputation: tiles, values that move, grouped updates.

Each lever is a search of its own with a floor and a bound. This module picks the
search, draws its trade-off, and simulates what frameworks do with the same levers:

===================  ==================================================================
``offload all``      every value of every layer that can move moves, the rest is rebuilt
``save_on_cpu``      the same, each copy waited for (``torch.autograd.graph``)
``chunked loss``     the head and its loss in 8 tiles, and nothing else
``tiled MLPs``       every MLP, attention and norm in 8 tiles, and nothing else
``fused loss``       ``torch.nn.functional.linear_cross_entropy`` by chunks
===================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ckplan.errors import CkplanError, InfeasibleError, PlanError, did_you_mean
from ckplan.graph.graph import Graph
from ckplan.graph.records import OUTSIDE_CALLS
from ckplan.plan.region import TILES, Region
from ckplan.simulating.fused_loss import fused_graph
from ckplan.simulating.moving import Link
from ckplan.simulating.simulate import Simulator
from ckplan.solving.baselines import can_recompute, find_repeated_layers
from ckplan.solving.grouped_updates import GroupingPlanner
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.offloading import MovingPlanner, movable, only_wanted
from ckplan.solving.planner import Planner
from ckplan.solving.reserved_limit import solve_within_limit
from ckplan.solving.search import Search
from ckplan.solving.solution import Baseline, FrontierPoint, Solution
from ckplan.solving.tiled_heads import find_tileable_head
from ckplan.solving.tiled_plans import TilingPlanner
from ckplan.solving.tiled_rows import find_tileable_rows

GROUPS = "groups"
"""The lever of updates in groups of parameters."""
LEVERS = ("tiles", "close", GROUPS)
"""What a plan may do besides recomputation, if it is allowed."""


def split_levers(allow: str | Iterable[str] | None) -> list[str]:
    """Names of levers, each once: several are a list, or joined by commas.

    >>> split_levers(["tiles, close", "tiles", "groups"])
    ['tiles', 'close', 'groups']
    """
    listed = [allow] if isinstance(allow, str) else allow or ()
    names = (name.strip() for text in listed for name in text.split(","))
    return [*dict.fromkeys(filter(None, names))]


def allowed_levers(allow: str | Iterable[str]) -> list[str]:
    """The levers of a plan that are allowed, each once.

    Raises:
        CkplanError: One is unknown, or bits may be close and nothing would change them.
    """
    names = split_levers(allow)
    for name in names:
        if name not in LEVERS:
            raise no_such_lever(name, LEVERS)
    if "close" in names and "tiles" not in names:
        raise CkplanError(
            "cannot allow close bits alone",
            needed="tiles, whose gradients may be rounded in another place",
            hint="--allow tiles,close",
        )
    return names


def no_such_lever(name: str, known: Sequence[str]) -> CkplanError:
    """The error for a lever that is none of those known."""
    return CkplanError(
        f"cannot allow {name!r}: there is no such lever",
        needed="one or more of these, joined by commas: " + ", ".join(known),
        hint=f"--allow {did_you_mean(name, known) or known[0]}",
    )


def search_with(
    planner: Planner, *, allow: Collection[str], link: Link | None
) -> Search:
    """The search of the levers that are allowed.

    Args:
        planner: Of the graph, which keeps and recomputes.
        allow: As in ``solve_plan``.
        link: The way of copies, if values may move.

    Raises:
        PlanError: No call can run in tiles, or no update in groups.
    """
    if GROUPS in allow:
        others = [one for one in allow if one != GROUPS]
        return GroupingPlanner(planner, partial(search_with, allow=others, link=link))
    if allow:
        return TilingPlanner(planner, link, close="close" in allow)
    return Recomputing(planner) if link is None else MovingPlanner(planner, link)


class Recomputing:
    """The search that only recomputes."""

    def __init__(self, planner: Planner) -> None:
        self._planner, self.within = planner, planner.within

    @property
    def floor_bytes(self) -> int:
        """The smallest peak of any plan found."""
        return self._planner.least.peak_bytes

    def solve(self, limit: MemoryLimit) -> Solution:
        """Find the cheapest plan within a limit.

        Raises:
            InfeasibleError: No plan found fits; the floor is named.
        """
        return solve_within_limit(self._planner, limit)


def frontier_of(
    planner: Planner, search: Search, count: int
) -> tuple[FrontierPoint, ...]:
    """Non-dominated plans, smallest peak first, the unplanned step last.

    Args:
        planner: Of the graph.
        search: Its search.
        count: Number of budgets, evenly spaced from the floor to the unplanned peak.
    """
    low, high = search.floor_bytes, planner.unplanned.peak_bytes
    found: list[FrontierPoint] = []
    for place in range(count):
        limit = MemoryLimit(low + (high - low) * place // max(count - 1, 1))
        try:
            one = search.solve(limit)
        except InfeasibleError:  # the link of its smallest plan costs bytes
            continue
        line, bound = one.timeline, one.bound_overhead
        of_plan = line.peak_bytes, line.overhead, bound, one.regions
        found.append(FrontierPoint(*of_plan, timeline=line))
    kept: list[FrontierPoint] = []
    for point in sorted(found, key=lambda p: (p.peak_bytes, p.overhead)):
        if not kept or point.overhead < kept[-1].overhead:
            kept.append(point)
    if kept and kept[-1].regions:  # calls in tiles can be faster than whole ones
        kept.append(FrontierPoint(high, 0.0, min(0.0, kept[-1].bound_overhead), ()))
    return tuple(kept)


def lever_baselines(
    planner: Planner,
    limit: MemoryLimit,
    *,
    allow: Collection[str],
    link: Link | None,
) -> Iterator[Baseline]:
    """What frameworks do with the levers that are allowed, as simulated."""
    graph = planner.graph
    if link is not None:
        simulator = Simulator(graph, link)
        layers = find_repeated_layers(graph, planner.menus)
        layers = layers or graph.children[OUTSIDE_CALLS][:1]
        every = (_moving_all(simulator, layer) for layer in layers)
        regions = [one for one in every if can_recompute(simulator, one)]
        line = simulator.run(regions)
        moving = Baseline.of("offload all", line, limit)
        yield moving
        copies = 2 * graph.num_batches * line.moves.moved_bytes / link.bytes_per_second
        seconds = line.recompute_seconds - line.stall_seconds + copies
        overhead = seconds / (line.unplanned_seconds or 1.0)
        yield replace(moving, name="save_on_cpu", overhead=overhead)
    if "tiles" in allow:
        yield from _tiling(planner, limit, close="close" in allow)


def _tiling(planner: Planner, limit: MemoryLimit, *, close: bool) -> Iterator[Baseline]:
    """Tiles and nothing else: of the head, and of all other calls."""
    with suppress(PlanError):  # no head can
        call, counts = find_tileable_head(planner.graph, close=close)
        head = Region(call, TILES, tiles=counts[0])
        yield Baseline.of("chunked loss", planner.simulator.run([head]), limit)
        # It has no soft cap, and no label smoothing.
        yield _fused(planner.graph, call, limit)
    for regions in find_tileable_rows(planner.graph, close=close)[-1:]:
        yield Baseline.of("tiled MLPs", planner.simulator.run(regions), limit)


def _fused(graph: Graph, call: int, limit: MemoryLimit) -> Baseline:
    fused = fused_graph(graph, call)
    found = Baseline.of("fused loss", Simulator(fused).run(), limit)
    seconds = max(0.0, fused.step_seconds - graph.step_seconds)  # without rounding
    return replace(found, overhead=round(seconds / (graph.step_seconds or 1.0), 9))


def _moving_all(simulator: Simulator, layer: int) -> Region:
    call = simulator.graph.calls[layer]
    places = movable(simulator.graph, range(call.start, call.stop))
    return only_wanted(simulator, Region(layer, offload=frozenset(places)))
