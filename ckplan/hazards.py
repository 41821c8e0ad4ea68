"""Which hazards of a graph a way to recompute does not take care of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckplan.errors import PlanError

if TYPE_CHECKING:
    from ckplan.graph import Graph
    from ckplan.simulate import Region


def refuse_hazards(graph: Graph, region: Region) -> None:
    """Check that a region's way to recompute takes care of every hazard in it.

    Raises:
        PlanError: It does not; the hazard is named.
    """
    for hazard in graph.hazards_in(region.call, region.last):
        if region.by not in hazard.guarded_by:
            ways = " or ".join(f"by: {way}" for way in hazard.guarded_by)
            raise PlanError(
                f"cannot recompute {graph.calls[region.call]} by {region.by}: "
                f"{graph.calls[hazard.call]} {hazard.reason}",
                needed=ways or "a region without that call",
                hint=ways or "leave this call out of the plan, or name smaller ones",
            )
    for inner in region.inner:
        refuse_hazards(graph, inner)
