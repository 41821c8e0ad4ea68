"""Refuse regions with a hazard that their way to recompute does not handle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckplan.errors import PlanError
from ckplan.graph.attentions import has_attention
from ckplan.graph.fqn import is_around
from ckplan.plan.region import RERUN, Region
from ckplan.plan.tiles import RowTiles, Tiles

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckplan.graph.graph import Graph
    from ckplan.graph.records import Hazard

_MODULE_STATE = ("buffer", "state", "statistics")
# Outputs and gradients are right despite these:
_SAFE_IN_TORCH = ("again", "shapes", "statistics", "unseen")


def refuse_hazards(graph: Graph, region: Region) -> None:
    """Check that a region's way to recompute handles every hazard in it.

    Raises:
        PlanError: A hazard is not handled, or the model itself reruns a call. The error
            names the hazard.
    """
    for hazard in _hazards_around(graph, region):
        raise PlanError(
            _message(graph, region, hazard),
            needed="calls that the model itself does not rerun in backward",
            hint="profile the model without its own checkpoint, or leave this call out",
        )
    # Tiles of a head rerun a linear layer and nothing else, those of an attention what
    # is between queries and values. The code of both runs once.
    runs_once = isinstance(region.tiles, Tiles) or (
        isinstance(region.tiles, RowTiles) and has_attention(graph, region.call)
    )
    found = () if runs_once else graph.hazards_in(region.call, region.last)
    for hazard in found:
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
    """Hazards of calls around a region that the model itself reruns in backward.

    Backward does not find the tensors that the region saves there.
    """
    last = region.call if region.last is None else region.last
    for hazard in graph.self_recomputed:
        if any(graph.is_within(call, hazard.call) for call in (region.call, last)):
            yield hazard


def refuse_torch_rerun(graph: Graph, region: Region) -> None:
    """Check that ``torch.utils.checkpoint`` reruns a region with right gradients.

    It restores the state of torch's default generators only.

    Raises:
        PlanError: Gradients can be wrong. The error names the hazard.
    """
    for hazard in graph.hazards_in(region.call, region.last):
        if hazard.kind not in _SAFE_IN_TORCH:
            raise PlanError(
                f"cannot run {graph.calls[region.call]} again by torch alone: "
                f"{graph.calls[hazard.call]} {hazard.reason}",
                needed="layers that give the same result when they rerun",
                hint="ckplan.apply(model, plan), which handles this",
            )


def updates_statistics_twice(graph: Graph, regions: Iterable[Region]) -> bool:
    """Whether a rerun by torch alone updates running statistics a second time."""
    return any(
        hazard.kind == "statistics"
        for region in regions
        for hazard in graph.hazards_in(region.call, region.last)
    )


def _is_guarded(graph: Graph, region: Region, hazard: Hazard) -> bool:
    """Whether a region handles a hazard in it.

    A rerun restores the state of its module and of the modules inside it. It does not
    restore a module that it calls but that another module owns. A rerun of a run of
    calls restores no state: statistics are updated twice, and gradients can be wrong
    if outputs depend on a buffer, so only the buffer hazard is refused there.
    """
    if region.by not in hazard.guarded_by:
        return False
    if region.by != RERUN or hazard.kind not in _MODULE_STATE:
        return True
    if region.last is not None:
        return hazard.kind != "buffer"
    return is_around(graph.calls[region.call].fqn, graph.calls[hazard.call].fqn)
