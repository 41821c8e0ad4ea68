"""Which hazards of a graph a way to recompute does not take care of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckplan.errors import PlanError

if TYPE_CHECKING:
    from ckplan.graph import Graph
    from ckplan.records import Hazard
    from ckplan.region import Region

_RERUN = "rerun"  # as in ``simulate``, which asks here
_OF_MODULES = ("buffer", "state", "statistics")


def refuse_hazards(graph: Graph, region: Region) -> None:
    """Check that a region's way to recompute takes care of every hazard in it.

    Raises:
        PlanError: It does not; the hazard is named.
    """
    for hazard in graph.hazards_in(region.call, region.last):
        if not _is_guarded(graph, region, hazard):
            ways = " or ".join(f"by: {way}" for way in hazard.guarded_by)
            raise PlanError(
                f"cannot recompute {graph.calls[region.call]} by {region.by}: "
                f"{graph.calls[hazard.call]} {hazard.reason}",
                needed=ways or "a region without that call",
                hint=ways or "leave this call out of the plan, or name smaller ones",
            )
    for inner in region.inner:
        refuse_hazards(graph, inner)


def _is_guarded(graph: Graph, region: Region, hazard: Hazard) -> bool:
    """Whether a region takes care of a hazard in it.

    A module that runs again is put back with those inside of it. One that it calls
    and that somebody else owns is not.
    """
    if region.by not in hazard.guarded_by:
        return False
    if region.by != _RERUN or hazard.kind not in _OF_MODULES or region.last is not None:
        return True
    owner, module = graph.calls[region.call].fqn, graph.calls[hazard.call].fqn
    return not owner or f"{module}.".startswith(f"{owner}.")
