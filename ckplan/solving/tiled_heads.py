"""Heads that can run in tiles with their losses, and the tiles to choose from."""

from __future__ import annotations

from collections.abc import Sequence

from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.plan.region import TILES, Region
from ckplan.plan.tiles import CLOSE_BITS, SAME_BITS, Tiles
from ckplan.simulating.heads import HeadOps, find_head
from ckplan.simulating.simulate import Simulator, Timeline
from ckplan.simulating.tiling import tested

COUNTS = (8, 32)  # tiles of tokens, and of the vocabulary


def find_tileable_head(
    graph: Graph, *, close: bool = False
) -> tuple[int, tuple[Tiles, ...]]:
    """The last call that can run in tiles, and the tiles to choose from.

    Bits are those that ``profile`` tested; where it did not, those of the rule that 16
    bits without a cast are close, and others are the same.

    Args:
        graph: The step.
        close: Whether results may be rounded in another place.

    Raises:
        PlanError: There is none; the error says why the last linear layer cannot.
    """
    why: PlanError | None = None
    for call in reversed(range(len(graph.calls))):
        if graph.calls[call].module == "Linear":
            try:
                found = find_head(graph, call)
            except PlanError as error:
                why = why or error
                continue
            every = [_tiles(graph, call, n, found) for n in COUNTS]
            fit = tuple(one for one in every if close or one.bits == SAME_BITS)
            if fit:
                return call, fit
            why = why or _other_bits(graph, call, every[0], found)
    raise why or PlanError(
        f"cannot tile a head of {graph.model}: it has no linear layer",
        needed="a linear layer whose logits F.cross_entropy reads",
        hint="leave out --allow tiles",
    )


def head_in_tiles(graph: Graph) -> Region | None:
    """The region of the head and its loss with the same bits; None if it has none."""
    if "compiled" in graph.fingerprint:
        return None
    try:
        call, (tiles, *_) = find_tileable_head(graph)
    except PlanError:
        return None
    return Region(call, TILES, tiles=tiles)


def run_beside(
    simulator: Simulator, regions: Sequence[Region], head: Region
) -> Timeline | None:
    """The step under a plan, but for what is around a head in tiles; None if it can't.

    Args:
        simulator: Of the step.
        regions: The plan.
        head: The region in tiles.
    """
    around = simulator.graph.is_within
    others = [one for one in regions if not around(head.call, one.call)]
    try:
        return simulator.run((*others, head))
    except PlanError:
        return None


def _tiles(graph: Graph, call: int, count: int, found: HeadOps) -> Tiles:
    """So many tiles each way, with their bits."""
    test = tested(graph, call, Tiles(count, count))
    difference = test.difference if test is not None else 0.0
    is_close = found.is_close or difference > 0
    bits = CLOSE_BITS if is_close else SAME_BITS
    return Tiles(count, count, bits, difference)


def _other_bits(graph: Graph, call: int, tiles: Tiles, found: HeadOps) -> PlanError:
    if not found.is_close:
        return PlanError(
            f"cannot tile {graph.calls[call]}: profile found other bits, by up to "
            f"{tiles.difference:.1e} of the largest value",
            needed="the same bits on this device, with this number of threads",
            hint="profile and train with MKL_CBWR=AUTO,STRICT (Intel CPUs), or with "
            "OMP_NUM_THREADS=1; or --allow close",
        )
    return PlanError(
        f"cannot tile {graph.calls[call]}: its logits have 16 bits and are not "
        "cast to float32, so that tiles give other bits",
        needed="a cast to float32 before F.cross_entropy",
        hint="logits.float(), or --allow tiles,close",
    )
