"""A step whose row-wise calls run in tiles, as another graph.

Ops, storages and calls keep their numbers, as in ``tiling.py``. Hidden values and their
gradients have no bytes. Three ops stand for the passes: the last op of forward, and the
first two of backward, for the gradient of the input and for those of weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckplan.graph.graph import Graph
from ckplan.graph.records import Hazard, Op, Storage
from ckplan.plan.tiles import RowTiles
from ckplan.simulating.row_buffers import columns_bytes, forward_bytes, rows_bytes
from ckplan.simulating.row_wise import (
    RowOps,
    find_row_wise,
    input_gradient,
    refuse_rows,
)
from ckplan.simulating.tiling import costed, kept_by_kernels

_NOTING_SECONDS = 0.005
"""CPU time in which the engine looks at the ops of a call, measured on one core."""


def tile_rows_of(graph: Graph, call: int, tiles: RowTiles) -> Graph:
    """The step with a row-wise call in tiles.

    Args:
        graph: The step.
        call: The call.
        tiles: Numbers of tiles.

    Raises:
        PlanError: The rows of the call are not apart, or an op is not understood.
    """
    found = find_row_wise(graph, call)
    begin = found.backward
    for_rows = begin[0] if found.hidden_gradients else None
    for_columns = None
    if found.weight_gradients:
        for_columns = begin[0] if for_rows is None else begin[1]
    end = max(one for one in (for_rows, for_columns) if one is not None)
    ops, storages = list(graph.ops), list(graph.storages)
    for number in (*found.interior, *kept_by_kernels(graph, found.forward)):
        storages[number] = replace(storages[number], bytes=0, tensor=None)
    gradient = input_gradient(graph, found)
    if gradient is not None and for_rows is not None:
        _move(ops, storages, gradient, for_rows)
    if for_columns is not None:
        for number in found.weight_gradients:
            for storage in graph.creates[number]:
                _move(ops, storages, storage, for_columns)
    for storage in (found.hidden, found.given):
        last = max(storages[storage].last, end)
        storages[storage] = replace(storages[storage], last=last)
    _check_makers(graph, call, found, begin[0])
    values = {name: getattr(graph, name) for name in graph.__dataclass_fields__}
    hazard = Hazard(call, "unseen", "runs in tiles", ())
    values.update(
        ops=tuple(_in_passes(graph, found, tiles, ops, (for_rows, for_columns))),
        storages=tuple(storages),
        saved=tuple(
            replace(one, unpacked_at=begin[0], last_used=end, last_held=end)
            if one.storage == found.hidden and one.unpacked_at in begin
            else one
            for one in graph.saved
        ),
        hazards=tuple(sorted((*graph.hazards, hazard), key=lambda one: one.call)),
        encodings=tuple(one for one in graph.encodings if one.op not in found.forward),
    )
    return Graph(**values)


def _move(ops: list[Op], storages: list[Storage], storage: int, maker: int) -> None:
    """Let another op make a storage."""
    before = storages[storage].maker
    kept = tuple(one for one in ops[before].outputs if one != storage)
    ops[before] = replace(ops[before], outputs=kept)
    ops[maker] = replace(ops[maker], outputs=(*ops[maker].outputs, storage))
    storages[storage] = replace(storages[storage], maker=maker)


def _check_makers(graph: Graph, call: int, found: RowOps, begin: int) -> None:
    """Check that what backward needs is there when it begins."""
    if graph.storages[found.given].maker >= begin:
        raise refuse_rows(graph, call, "its backward begins before its gradient")


def _in_passes(
    graph: Graph,
    found: RowOps,
    tiles: RowTiles,
    ops: list[Op],
    passes: tuple[int | None, int | None],
) -> Iterator[Op]:
    """Ops with the seconds, FLOPs and workspaces of tiles."""
    for_rows, for_columns = passes
    again = (*found.forward[:-1], found.inner_gradient, *found.elementwise)
    rows = len(tiles.of_rows(found.rows))
    runs: dict[int, tuple[tuple[int, ...], int]] = {
        found.product: (found.forward, rows)
    }
    spaces = {found.product: forward_bytes(graph, found, tiles)}
    if for_rows is not None:
        runs[for_rows] = ((*again, *found.hidden_gradients), rows)
        spaces[for_rows] = rows_bytes(graph, found, tiles)
    if for_columns is not None:
        columns = len(tiles.of_columns(found.width))
        runs[for_columns] = ((*again, *found.weight_gradients), columns)
        spaces[for_columns] = columns_bytes(graph, found, tiles)
    gone = {*found.forward, *found.backward}
    for number, op in enumerate(costed(graph, ops, runs, spaces, gone)):
        if number != found.product:
            yield op
        elif graph.is_launched:
            yield replace(op, launch_seconds=op.launch_seconds + _NOTING_SECONDS)
        else:
            yield replace(op, seconds=op.seconds + _NOTING_SECONDS)
