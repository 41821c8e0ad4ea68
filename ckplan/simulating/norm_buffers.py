"""Most bytes of the passes over the tiles of a written-out norm, moment by moment.

A tile runs the ops of the norm in the order of the trace, so what is alive in it is
known: see ``applying/tiling/norm_passes.py``, and change both together.
"""

from __future__ import annotations

from collections.abc import Callable

from ckplan.graph.graph import Graph
from ckplan.plan.tiles import RowTiles
from ckplan.simulating.norm_ops import NormOps
from ckplan.simulating.tiling import kept_by_kernels


def norm_bytes(graph: Graph, found: NormOps, tiles: RowTiles) -> tuple[int, int, int]:
    """Most bytes of the passes, without what they return.

    Returns:
        Of forward, of the pass over rows and of that over columns.
    """
    rows = max(one.stop - one.start for one in tiles.of_rows(found.rows))
    columns = max(one.stop - one.start for one in tiles.of_columns(found.width))

    def in_rows(storage: int, bytes_: int) -> int:
        whole = storage in found.of_columns
        return bytes_ if whole else -(-bytes_ * rows // found.rows)

    def in_columns(storage: int, bytes_: int) -> int:
        whole = storage in found.by_row
        return bytes_ if whole else -(-bytes_ * columns // found.width)

    known = sum(graph.storages[s].bytes for s in found.statistics)
    return (
        _most(graph, found, found.forward, in_rows),
        known + _most(graph, found, found.in_rows, in_rows, found.statistics),
        known + _most(graph, found, found.in_columns, in_columns),
    )


def _most(
    graph: Graph,
    found: NormOps,
    steps: tuple[int, ...],
    size: Callable[[int, int], int],
    noted: frozenset[int] = frozenset(),
) -> int:
    """Most bytes of the largest tile, which notes some storages until forward ends."""
    until = {s: _until(graph, steps, s) for n in steps for s in graph.ops[n].creates}
    end = len(found.forward) - 1
    until |= {s: max(end, until[s]) for s in noted}
    begin = {s: at for at, n in enumerate(steps) for s in graph.ops[n].creates}
    bytes_ = {s: size(s, graph.storages[s].bytes) for s in until}
    numbers = kept_by_kernels(graph, steps)
    kept = sum(graph.storages[one].bytes for one in numbers)
    most = 0
    for at, number in enumerate(steps):
        alive = (bytes_[s] for s in until if begin[s] <= at <= until[s])
        made = graph.ops[number].outputs[0]
        scratch = size(made, graph.ops[number].workspace.bytes)
        if number < graph.num_forward:  # a tile writes elsewhere
            written = graph.ops[number].writes
            scratch += sum(size(s, graph.storages[s].bytes) for s in written)
        most = max(most, sum(alive) + scratch)
    return most + kept


def _until(graph: Graph, steps: tuple[int, ...], storage: int) -> int:
    """The last step of a tile at which a storage is alive."""
    reads = [
        at
        for at, n in enumerate(steps)
        if storage in (*graph.ops[n].reads, *graph.ops[n].outputs)
    ]
    one, last = graph.storages[storage], reads[-1]
    if one.maker >= graph.num_forward:
        is_returned = not any(storage in graph.ops[n].reads for n in steps)
        moment = one.last
        if is_returned:
            return len(steps) - 1
    elif steps[last] < graph.num_forward:
        return last
    else:
        saved = graph.saved_of.get(storage, ())
        moment = max((graph.saved[n].last_held for n in saved), default=-1)
    return max([last, *(at for at, n in enumerate(steps) if n <= moment)])
