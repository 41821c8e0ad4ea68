"""What to do in place of a plan, or for a cheaper one: rows beside the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ckplan.graph.caches import held_caches, without_caches
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.solving.remedies import (
    SAME,
    TILED,
    Remedy,
    by_cost,
    cache_remedy,
    remedies,
    tiles_remedy,
)
from ckplan.solving.replays import ReplayedPlan
from ckplan.solving.reserved_limit import plan_within
from ckplan.solving.solution import Solution
from ckplan.solving.tiled_heads import head_in_tiles, run_beside

_SHARES_FREED = (1.0, 0.75, 0.5, 0.25)  # of what tiles free at the unplanned peak


def alternatives(planner: Planner, solution: Solution) -> tuple[Remedy, ...]:
    """What makes the step fit without a plan, or the plan cheaper, in order of cost.

    Args:
        planner: The plans of the step.
        solution: The plan; without regions, nothing is needed in its place.
    """
    if not solution.regions:
        return ()
    limit, unplanned = solution.limit, solution.unplanned
    reserved = limit.reserved_bytes(unplanned) or unplanned.peak_bytes
    room = limit.bytes - (reserved - unplanned.peak_bytes)
    found = [one for one in remedies(planner.graph, (), room) if one.fits]
    found = [one for one in found if one.how != TILED]  # priced with a plan below
    found += _without_caches(planner, limit, solution.timeline.overhead)
    if not any(region.tiles for region in solution.regions):
        found += _with_tiles(planner, limit, solution.timeline.overhead)
    found += expandable(
        planner, limit, solution.timeline.overhead, lambda plan: plan[0].overhead
    )
    return tuple(sorted(found, key=by_cost))


def expandable(
    planner: Planner,
    limit: MemoryLimit,
    overhead: float | None,
    overhead_of: Callable[[ReplayedPlan], float],
) -> Iterator[Remedy]:
    """Expandable segments, if they make the step fit or its plan cheaper.

    Args:
        planner: The plans of the step.
        limit: The limit, of reserved memory.
        overhead: Of the plan without them; None if no plan fits.
        overhead_of: The overhead of a plan at the seconds that count.
    """
    if not limit.of_reserved or limit.expandable:
        return
    wider = replace(limit, expandable=True)
    found = plan_within(planner, wider)
    if found is None:
        return
    then = overhead_of(found)
    if overhead is None or then < overhead:
        yield Remedy(
            "no gaps between segments of PyTorch's allocator",
            "--expandable-segments: expandable_segments:True in PYTORCH_ALLOC_CONF",
            wider.reserved_bytes(found[0]) or found[0].peak_bytes,
            SAME,
            overhead=then,
            fits=True,
        )


def _with_tiles(
    planner: Planner, limit: MemoryLimit, overhead: float
) -> Iterator[Remedy]:
    """The head in tiles, beside a plan for what it frees more, if that is cheaper.

    The plan is one for a larger budget; a search with tiles can find a cheaper one.
    """
    head = head_in_tiles(planner.graph)
    alone = None if head is None else run_beside(planner.simulator, (), head)
    if head is None or alone is None:
        return
    freed = planner.unplanned.peak_bytes - alone.peak_bytes
    for share in _SHARES_FREED:
        found = planner.within(limit.bytes + int(share * freed))
        if found is None or found[0].overhead >= overhead:
            continue
        timeline = run_beside(planner.simulator, found[1], head)
        if timeline is None or timeline.overhead >= overhead:
            return
        if limit.allows(timeline):
            needed = limit.reserved_bytes(timeline) or timeline.peak_bytes
            yield replace(tiles_remedy(needed, timeline.overhead), fits=True)
            return


def _without_caches(
    planner: Planner, limit: MemoryLimit, overhead: float
) -> Iterator[Remedy]:
    """``use_cache=False``, with the plan that it then needs, if that is cheaper."""
    caches = held_caches(planner.graph)
    if not caches:
        return
    found = plan_within(Planner(without_caches(planner.graph)), limit)
    if found is not None and found[1] and found[0].overhead < overhead:
        yield replace(
            cache_remedy(planner.graph, caches, found[0].peak_bytes),
            overhead=found[0].overhead,
            fits=True,
        )
