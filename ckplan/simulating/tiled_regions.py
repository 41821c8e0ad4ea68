"""A step under all the tiles of a plan, as another graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckplan.graph.graph import Graph
from ckplan.plan.region import Region
from ckplan.plan.tiles import RowTiles, Tiles
from ckplan.simulating.row_tiling import tile_rows_of
from ckplan.simulating.tiling import refuse_regions_of_loss, tile_graph


def tile_regions(graph: Graph, regions: Iterable[Region]) -> Graph:
    """The step with the calls of regions by tiles in their tiles.

    Raises:
        PlanError: A call cannot run in tiles.
    """
    heads: list[tuple[int, Tiles]] = []
    calls: dict[int, RowTiles] = {}
    for one in regions:
        if isinstance(one.tiles, RowTiles):
            calls[one.call] = one.tiles
        elif one.tiles is not None:
            heads.append((one.call, one.tiles))
    graph = tile_rows_of(graph, calls) if calls else graph
    for call, tiles in heads:
        graph = tile_graph(graph, call, tiles)
    return graph


def refuse_regions_of_losses(graph: Graph, regions: Sequence[Region]) -> None:
    """Check that no other region holds ops of a tiled head or of its loss.

    Raises:
        PlanError: One does.
    """
    for one in regions:
        if isinstance(one.tiles, Tiles):
            others = [other for other in regions if other is not one]
            refuse_regions_of_loss(graph, one.call, others)
