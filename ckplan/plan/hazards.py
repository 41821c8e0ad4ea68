"""Which hazards of a graph a way to recompute does not take care of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckplan.errors import PlanError
from ckplan.graph.fqn import is_around
from ckplan.plan.region import RERUN, Region

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckplan.graph.graph import Graph
    from ckplan.graph.records import Hazard

_MODULE_STATE = ("buffer", "state", "statistics")
# As far as outputs and gradients go:
_SAFE_IN_TORCH = ("again", "shapes", "statistics", "unseen")


def refuse_hazards(graph: Graph, region: Region) -> None:
    """Check that a region's way to recompute takes care of every hazard in it.

    Raises:
        PlanError: It does not, or the model itself runs its calls again; the hazard is
            named.
    """
    for hazard in _hazards_around(graph, region):
        raise PlanError(
            _message(graph, region, hazard),
            needed="calls that run once as long as there is no plan",
            hint="profile the model without its own checkpoint, or leave this call out",
        )
    for hazard in graph.hazards_in(region.call, region.last):
        if not _is_guarded(graph, region, hazard):
            ways = " or ".join(f"by: {way}" for way in hazard.guarded_by)
            raise PlanError(
                _message(graph, region, hazard),
                needed=ways or "a region without that call",
                hint=ways or "leave this call out of the plan, or name smaller ones",
            )
    for inner in region.inner:
        refuse_hazards(graph, inner)


def _message(graph: Graph, region: Region, hazard: Hazard) -> str:
    of = f"{graph.calls[region.call]} by {region.by}"
    return f"cannot recompute {of}: {graph.calls[hazard.call]} {hazard.reason}"


def _hazards_around(graph: Graph, region: Region) -> Iterator[Hazard]:
    """Calls that the model itself runs again, and that a region is on or inside of.

    What it saves there is not what backward finds.
    """
    last = region.call if region.last is None else region.last
    for hazard in graph.self_recomputed:
        if any(graph.is_within(call, hazard.call) for call in (region.call, last)):
            yield hazard


def refuse_torch_rerun(graph: Graph, region: Region) -> None:
    """Check that a region's gradients are right where torch alone runs it again.

    ``torch.utils.checkpoint`` puts back torch's own random numbers and no more.

    Raises:
        PlanError: They may not be; the hazard is named.
    """
    for hazard in graph.hazards_in(region.call, region.last):
        if hazard.kind not in _SAFE_IN_TORCH:
            raise PlanError(
                f"cannot run {graph.calls[region.call]} again by torch alone: "
                f"{graph.calls[hazard.call]} {hazard.reason}",
                needed="layers that do the same whenever they run",
                hint="ckplan.apply(model, plan), which sees to that",
            )


def updates_statistics_twice(graph: Graph, regions: Iterable[Region]) -> bool:
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
    if region.by != RERUN or hazard.kind not in _MODULE_STATE:
        return True
    if region.last is not None:
        return hazard.kind != "buffer"
    return is_around(graph.calls[region.call].fqn, graph.calls[hazard.call].fqn)
