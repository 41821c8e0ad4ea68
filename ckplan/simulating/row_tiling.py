"""A step whose row-wise calls run in tiles, as another graph.

Ops, storages and calls keep their numbers, as in ``tiling.py``. Hidden values and their
gradients have no bytes. Three ops stand for the passes: the last op of forward, and the
first two of backward, for the gradient of the input and for those of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from ckplan.graph.graph import Graph
from ckplan.graph.records import Hazard, Op, Saved, Storage, Workspace
from ckplan.plan.tiles import RowTiles
from ckplan.simulating.attention_ops import held_by_scores
from ckplan.simulating.norm_buffers import norm_bytes
from ckplan.simulating.norm_ops import NormOps
from ckplan.simulating.row_buffers import columns_bytes, forward_bytes, rows_bytes
from ckplan.simulating.row_ops import (
    Drawn,
    RowOps,
    gradients_of_parameters,
    row_gradients,
)
from ckplan.simulating.row_parts import refuse_rows
from ckplan.simulating.row_wise import find_row_wise
from ckplan.simulating.tiling import (
    costed,
    kept_by_kernels,
    refuse_other_bits,
    share_of,
)

_NOTING_SECONDS, _NOTING_A_NORM = 0.003, 0.002
"""CPU time in which the engine looks at the ops of a call: medians in steps of GPT-2,
Llama and a PoolFormer were 3.0, 3.3 and 1.9 ms, those of norms 1.5 to 3 ms, on one core
of an AMD EPYC.
"""


def tile_rows_of(graph: Graph, calls: Mapping[int, RowTiles]) -> Graph:
    """The step with row-wise calls in tiles.

    Args:
        graph: The step.
        calls: Call -> its numbers of tiles.

    Raises:
        PlanError: The rows of a call are not apart, an op is not understood, or tiles
            have other bits than they promise.
    """
    values = {name: getattr(graph, name) for name in graph.__dataclass_fields__}
    ops, storages, saved = list(graph.ops), list(graph.storages), list(graph.saved)
    gone: set[int] = set()
    for call, tiles in calls.items():
        found = find_row_wise(graph, call)
        refuse_other_bits(graph, call, tiles)
        _check_makers(graph, call, found)
        share = share_of(graph, call, tiles)
        _replace_call(graph, found, tiles, ops, storages, saved, share)
        gone.update(found.forward)
    more = [
        Hazard(inside, "unseen", "runs in tiles", ())
        for call in calls
        for inside in range(call, len(graph.calls))
        if graph.is_within(inside, call)
    ]
    values.update(
        ops=tuple(ops),
        storages=tuple(storages),
        saved=tuple(saved),
        hazards=tuple(sorted((*graph.hazards, *more), key=lambda one: one.call)),
        encodings=tuple(one for one in graph.encodings if one.op not in gone),
    )
    return Graph(**values)


def _replace_call(
    graph: Graph,
    found: RowOps,
    tiles: RowTiles,
    ops: list[Op],
    storages: list[Storage],
    saved: list[Saved],
    share: float,
) -> None:
    """Let the passes over the tiles of one call stand for its ops."""
    begin = found.backward
    for_rows = begin[0] if found.hidden_gradients else None
    for_columns = None
    if found.weight_gradients:
        # Of a norm, other ops may add to the gradient of its bias after the first op.
        at_once = for_rows is None or isinstance(found, NormOps)
        for_columns = begin[0] if at_once else begin[1]
    end = max(one for one in (for_rows, for_columns) if one is not None)
    for number in (*found.interior, *kept_by_kernels(graph, found.forward)):
        storages[number] = replace(storages[number], bytes=0, tensor=None)
    if found.drawn is not None:
        mask = found.drawn.storage
        storages[mask] = replace(storages[mask], bytes=found.drawn.bytes)
    for gradient in row_gradients(graph, found):
        assert for_rows is not None
        _move(ops, storages, gradient, for_rows)
    if for_columns is not None:
        for storage in gradients_of_parameters(graph, found):
            _move(ops, storages, storage, for_columns)
    _keep_operands(graph, found, end, storages, saved)
    _set_passes(graph, found, tiles, ops, (for_rows, for_columns), share)


def _keep_operands(
    graph: Graph,
    found: RowOps,
    end: int,
    storages: list[Storage],
    saved: list[Saved],
) -> None:
    """Keep what the passes read until the last one has run."""
    if found.heads is not None:
        held, until = held_by_scores(graph, found)
        for storage in held:
            last = max(storages[storage].last, until)
            storages[storage] = replace(storages[storage], last=last)
    casts = found.copies | found.weights & graph.casts.keys()
    read = set(found.operands or {found.hidden, *casts})
    if found.drawn is not None:
        read.add(found.drawn.storage)
    for storage in (*read, found.given):
        last = max(storages[storage].last, end)
        storages[storage] = replace(storages[storage], last=last)
    begin = found.backward
    for index in chain.from_iterable(graph.saved_of.get(one, ()) for one in read):
        if saved[index].unpacked_at in begin:
            ends = {"unpacked_at": begin[0], "last_used": end, "last_held": end}
            saved[index] = replace(saved[index], **ends, uses=())


def _move(ops: list[Op], storages: list[Storage], storage: int, maker: int) -> None:
    """Let another op make a storage."""
    before = storages[storage].maker
    kept = tuple(one for one in ops[before].outputs if one != storage)
    ops[before] = replace(ops[before], outputs=kept)
    ops[maker] = replace(ops[maker], outputs=(*ops[maker].outputs, storage))
    storages[storage] = replace(storages[storage], maker=maker)


def _check_makers(graph: Graph, call: int, found: RowOps) -> None:
    """Check that what backward needs is there when it begins."""
    if graph.storages[found.given].maker >= found.backward[0]:
        raise refuse_rows(graph, call, "its backward begins before its gradient")


def _set_passes(
    graph: Graph,
    found: RowOps,
    tiles: RowTiles,
    ops: list[Op],
    passes: tuple[int | None, int | None],
    share: float,
) -> None:
    """Give ops the seconds, FLOPs and workspaces of tiles."""
    for_rows, for_columns = passes
    rows = len(found.cut_rows(tiles))
    runs: dict[int, tuple[tuple[int, ...], int]] = {
        found.product: (found.forward, rows)
    }
    in_forward, in_rows, in_columns = _bytes_of_passes(graph, found, tiles)
    spaces = {found.product: in_forward}
    if for_rows is not None:
        runs[for_rows] = (found.in_rows, rows)
        spaces[for_rows] = in_rows
    if for_columns is not None:
        columns = len(tiles.of_columns(found.width))
        before, count = runs.get(for_columns, ((), 0))
        runs[for_columns] = ((*before, *found.in_columns), max(count, columns))
        spaces[for_columns] = max(spaces.get(for_columns, 0), in_columns)
    numbers = sorted({*found.forward, *found.backward, *found.unused})
    mine = [ops[number] for number in numbers]
    costs = {number: graph.ops[number] for number in numbers}
    costs |= {number: _half(graph.ops[number]) for number in found.halved}
    if found.drawn is not None:
        costs[found.drawn.op] = _unpacked(graph, found.drawn)
    total = share * sum(graph.ops[n].seconds for n in numbers if n != _draws(found))
    pairs = zip(numbers, mine, strict=True)
    spent = costed(costs, pairs, runs, spaces, {*numbers}, total)
    for number, op in zip(numbers, spent, strict=True):
        ops[number] = op
    if found.drawn is not None:
        ops[found.drawn.op] = _packed(graph, found, tiles)
    noting = _NOTING_A_NORM if isinstance(found, NormOps) else _NOTING_SECONDS
    last = ops[found.product]
    if graph.is_launched:
        more = last.launch_seconds + noting
        ops[found.product] = replace(last, launch_seconds=more)
    else:
        ops[found.product] = replace(last, seconds=last.seconds + noting)


def _bytes_of_passes(
    graph: Graph, found: RowOps, tiles: RowTiles
) -> tuple[int, int, int]:
    """Most bytes in forward, in the pass over rows, and in that over columns."""
    if isinstance(found, NormOps):
        return norm_bytes(graph, found, tiles)
    return (
        forward_bytes(graph, found, tiles),
        rows_bytes(graph, found, tiles) if found.hidden_gradients else 0,
        columns_bytes(graph, found, tiles) if found.weight_gradients else 0,
    )


def _draws(found: RowOps) -> int:
    """The op that draws for dropout, which has its own seconds."""
    return -1 if found.drawn is None else found.drawn.op


def _packed(graph: Graph, found: RowOps, tiles: RowTiles) -> Op:
    """The op that draws the mask of dropout, with what packs it to bits."""
    assert found.drawn is not None
    op = graph.ops[found.drawn.op]
    most = max(one.stop - one.start for one in found.cut_rows(tiles))
    space = found.drawn.drawing_bytes(most)
    small = graph.encoding_of.get((found.drawn.op, 0))
    seconds = op.seconds + (small.encode_seconds if small else 0.0)
    return replace(op, workspace=Workspace((), (space,)), seconds=seconds)


def _unpacked(graph: Graph, drawn: Drawn) -> Op:
    """What makes the mask of dropout again, in place of drawing it."""
    small = graph.encoding_of.get((drawn.op, 0))
    seconds = small.decode_seconds if small else 0.0
    return replace(graph.ops[drawn.op], flops=0, seconds=seconds)


def _half(op: Op) -> Op:
    """The costs of one of two products."""
    return replace(
        op,
        seconds=op.seconds / 2,
        flops=op.flops // 2,
        moved_bytes=op.moved_bytes // 2,
    )
