"""Plans that may offload: moving is one more way to keep a value.

A value that can move is given a form of no bytes, whose seconds are a share of those
that its copies take: what cannot be hidden beside the ops. The step with these forms is
solved like any other, for some shares, and replayed with the waits that the link really
causes. The cheapest plan is taken; recomputation alone is among them, so a link that is
too slow moves nothing.

The bound counts moves as free: no schedule of these ops, with any moves, costs less.
"""

from __future__ import annotations

from dataclasses import replace

from ckplan.errors import InfeasibleError
from ckplan.graph.graph import Graph
from ckplan.graph.records import Encoding
from ckplan.plan.outputs import why_not_moved
from ckplan.plan.region import Region
from ckplan.simulating.simulate import Simulator
from ckplan.simulating.view import MOVED
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.solving.reserved_limit import solve_within_limit
from ckplan.solving.solution import Solution

_SHARES = (0.02, 0.3, 1.0)  # of the seconds of a copy that ops wait for


def solve_with_moves(
    planner: Planner, limit: MemoryLimit | None, bytes_per_second: float
) -> Solution:
    """The cheapest plan within a limit that recomputes, moves, or both.

    Args:
        planner: Of the graph, which keeps and recomputes.
        limit: The limit; None for the smallest peak.
        bytes_per_second: Rate of the copies.

    Raises:
        InfeasibleError: No plan found fits; the smallest peak found is named.
    """
    graph = planner.graph
    planners = {
        share: Planner(with_moves(graph, share / bytes_per_second)) for share in _SHARES
    }
    if limit is None:
        floors = [one.floor.peak_bytes for one in (planner, *planners.values())]
        limit = MemoryLimit(min(floors))
    found: list[Solution] = []
    refused: dict[int, InfeasibleError] = {}  # smallest peak -> the error
    replay = Simulator(graph, bytes_per_second)
    for one in (planner, *planners.values()):
        try:
            solution = solve_within_limit(one, limit)
        except InfeasibleError as error:
            refused[one.floor.peak_bytes] = error
            continue
        regions = tuple(_moving(replay, region) for region in solution.regions)
        timeline = replay.run(regions)
        if timeline.peak_bytes <= solution.budget_bytes:
            found.append(replace(solution, regions=regions, timeline=timeline))
    if not found:
        raise refused[min(refused)]
    best = min(found, key=lambda one: (one.timeline.overhead, one.timeline.peak_bytes))
    return replace(
        best,
        unplanned=planner.unplanned,
        bound_overhead=Planner(with_moves(graph, 0.0)).bound(limit.bytes),
        baselines=planner.standard_baselines.baselines(limit),
    )


def with_moves(graph: Graph, seconds_per_byte: float) -> Graph:
    """The step with a form of no bytes for every value that can move.

    Args:
        graph: The step.
        seconds_per_byte: What a move costs, out and back together.
    """
    last: dict[int, tuple[int, int]] = {}  # storage -> the op that makes what stays
    for op in range(graph.num_forward):
        for output, storage in enumerate(graph.ops[op].outputs):
            if not why_not_moved(graph, op, output):
                last[storage] = op, output
    moves = [
        Encoding(*place, MOVED, 0, 0, 0, 2 * seconds_per_byte * size, 0.0)
        for place, size in (
            (place, graph.storages[s].bytes) for s, place in last.items()
        )
        if place not in graph.encoding_of
    ]
    forms = sorted((*graph.encodings, *moves), key=lambda one: (one.op, one.output))
    return replace(graph, encodings=tuple(forms))


def _moving(simulator: Simulator, region: Region) -> Region:
    """A region of a step with forms for moves, as one of the step itself."""
    moved = {
        place for place in region.encode if place not in simulator.graph.encoding_of
    }
    if not moved:
        return region
    offload, encode = frozenset(moved), region.encode - moved
    found = replace(region, encode=encode, offload=offload)
    view = simulator.view(region.call, region.last)
    wanted, returned = view.program(found)[0].decodes, view.flow.returned
    kept = (p for p in offload if returned[p[0] - view.start][p[1]] in wanted)
    return replace(found, offload=frozenset(kept))
