"""MLPs, attentions, norms that can run in tiles, and sets of them to choose from.

Equal calls run in tiles together. The smallest peak is in one of them: often in the
first layers, as gradients of parameters pile up in backward while activations go, or in
the last ones, before their activations go. So each quarter of the layers is a set of
its own, which costs a quarter of the time and leaves the others to be rebuilt whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.plan.hazards import refuse_hazards
from ckplan.plan.region import TILES, Region
from ckplan.plan.tiles import CLOSE_BITS, SAME_BITS, RowTiles
from ckplan.simulating.norm_ops import NormOps
from ckplan.simulating.row_ops import RowOps
from ckplan.simulating.row_wise import find_row_wise
from ckplan.simulating.tiling import runs_whole, tested

ROW_COUNT = 8  # tiles of rows, and of columns
_PARTS = 4  # of the layers


def find_tileable_rows(
    graph: Graph, *, close: bool = False
) -> tuple[tuple[Region, ...], ...]:
    """Sets of calls that can run in tiles of rows, with their tiles; fewest first.

    Bits are those that ``profile`` tested; where it did not, the same.

    Args:
        graph: The step.
        close: Whether results may be rounded in another place.

    Returns:
        Of the calls with the largest hidden values, each quarter and all; all that can,
        if there are others. Nothing if no call can run in tiles.
    """
    groups: dict[Hashable, list[Region]] = {}
    sizes: dict[Hashable, int] = {}
    for call, found in row_wise_calls(graph).items():
        if runs_whole(graph, call):
            continue
        region = Region(call, TILES, tiles=_tiles(graph, call))
        if close or region.tiles.bits == SAME_BITS:  # type: ignore[union-attr]
            kind = family_of(graph, call, found)
            groups.setdefault(kind, []).append(region)
            size = found.tensor_bytes * len(found.interior)
            sizes[kind] = max(size, sizes.get(kind, 0))
    if not groups:
        return ()
    largest = groups[max(sizes, key=lambda kind: sizes[kind])]
    every = sorted((one for of in groups.values() for one in of), key=lambda o: o.call)
    size = -(-len(largest) // _PARTS)
    parts = (largest[n : n + size] for n in range(0, len(largest), size))
    return tuple(dict.fromkeys(map(tuple, (*parts, largest, every))))


def row_wise_calls(graph: Graph) -> dict[int, RowOps]:
    """Calls that can run in tiles of rows: outermost ones, and all of their module.

    Of a norm and an MLP in one call, the MLP alone is taken if it is a call, too, so
    that other regions may hold the norm.
    """
    found: dict[int, RowOps] = {}
    for call in range(len(graph.calls)):
        around = next((n for n in _last_key(found) if graph.is_within(call, n)), None)
        if around is not None and graph.calls[call].start == graph.calls[around].start:
            continue
        try:
            refuse_hazards(graph, Region(call, TILES, tiles=RowTiles()))
            ops = find_row_wise(graph, call)
        except PlanError:
            continue
        if around is not None:
            if isinstance(ops, NormOps):
                continue
            del found[around]
        found[call] = ops
    number_of: dict[str, int] = {}
    for one in graph.calls:
        number_of[one.fqn] = number_of.get(one.fqn, 0) + 1
    names = [graph.calls[call].fqn for call in found]
    return {
        call: ops
        for call, ops in found.items()
        if names.count(graph.calls[call].fqn) == number_of[graph.calls[call].fqn]
    }


def _last_key(found: dict[int, RowOps]) -> Iterator[int]:
    """The latest call: calls inside follow it at once."""
    yield from list(found)[-1:]


def _tiles(graph: Graph, call: int) -> RowTiles:
    test = tested(graph, call, RowTiles(ROW_COUNT, ROW_COUNT))
    difference = test.difference if test is not None else 0.0
    bits = CLOSE_BITS if difference else SAME_BITS
    return RowTiles(ROW_COUNT, ROW_COUNT, bits, difference)


def kind_of(graph: Graph, call: int, found: RowOps) -> tuple[Hashable, ...]:
    """Equal for MLPs of the same class and shapes that run the same ops."""
    names = tuple(graph.ops[number].name for number in found.forward)
    shapes = tuple(graph.storages[s].tensor for s in _read(graph, found))
    return graph.calls[call].module, names, shapes


def family_of(graph: Graph, call: int, found: RowOps) -> Hashable:
    """Equal for MLPs that differ in rows only, such as the experts of a mixture."""
    module, names, _ = kind_of(graph, call, found)
    weights = (s for s in _read(graph, found) if s in found.weights)
    return module, names, tuple(graph.storages[s].tensor for s in weights)


def _read(graph: Graph, found: RowOps) -> Iterator[int]:
    return (s for number in found.forward for s in graph.ops[number].reads)
