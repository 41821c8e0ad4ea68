"""Which hazards of a graph a way to recompute does not take care of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckplan.errors import PlanError
from ckplan.names import is_around
from ckplan.region import RERUN, Region

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckplan.graph import Graph
    from ckplan.records import Hazard

_OF_MODULES = ("buffer", "state", "statistics")
_RIGHT_ANYWAY = ("shapes", "statistics", "unseen")  # as far as outputs and gradients go


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


def refuse_in_plain_torch(graph: Graph, region: Region) -> None:
    """Check that a region's gradients are right where torch alone runs it again.

    ``torch.utils.checkpoint`` puts back torch's own random numbers and no more.

    Raises:
        PlanError: They may not be; the hazard is named.
    """
    for hazard in graph.hazards_in(region.call, region.last):
        if hazard.kind not in _RIGHT_ANYWAY:
            raise PlanError(
                f"cannot run {graph.calls[region.call]} again by torch alone: "
                f"{graph.calls[hazard.call]} {hazard.reason}",
                needed="layers that do the same whenever they run",
                hint="ckplan.apply(model, plan), which sees to that",
            )


def update_twice(graph: Graph, regions: Iterable[Region]) -> bool:
    """Whether torch alone would update running statistics of regions twice."""
    return any(
        hazard.kind == "statistics"
        for region in regions
        for hazard in graph.hazards_in(region.call, region.last)
    )


def _is_guarded(graph: Graph, region: Region, hazard: Hazard) -> bool:
    """Whether a region takes care of a hazard in it.

    A module that runs again is put back with those inside of it. One that it calls
    and that somebody else owns is not. Nobody puts back what a run of calls changed, as
    practices that run segments again ignore: their statistics come out wrong, and where
    outputs follow a buffer, their gradients.
    """
    if region.by not in hazard.guarded_by:
        return False
    if region.by != RERUN or hazard.kind not in _OF_MODULES:
        return True
    if region.last is not None:
        return hazard.kind != "buffer"
    return is_around(graph.calls[region.call].fqn, graph.calls[hazard.call].fqn)
