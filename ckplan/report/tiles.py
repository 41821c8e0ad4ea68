"""What a plan runs in tiles, with which bits, and why: words and JSON of ``solve``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckplan import units
from ckplan.graph.records import TiledBits
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.tiles import RowTiles
from ckplan.plan.tiles_in_file import tiles_content
from ckplan.simulating.tiling import tested
from ckplan.solving.solution import Solution


def tiles_rows(solution: Solution, plan: Plan) -> list[tuple[str, str]]:
    """What runs in tiles and what its bits are; then what would be without tiles."""
    rows = [_words(one, test) for one, test in _tiled(solution, plan)]
    if rows and solution.without_tiles is not None:
        rows.append(_why(solution))
    return [("" if place else "tiles", words) for place, words in enumerate(rows)]


def tiles_json(solution: Solution, plan: Plan) -> list[dict[str, Any]]:
    """The same as JSON; ``threads`` are those of the test of the bits, if there was."""
    return [
        {
            "call": one.title,
            **tiles_content(one.tiles),
            "threads": test and test.threads,
        }
        for one, test in _tiled(solution, plan)
        if one.tiles is not None
    ]


def _tiled(
    solution: Solution, plan: Plan
) -> Iterator[tuple[PlannedRegion, TiledBits | None]]:
    """Regions by tiles, each with the test of its bits."""
    graph = solution.timeline.graph
    tests = {
        one.tiles: tested(graph, one.call, one.tiles)
        for one in solution.regions
        if one.tiles is not None
    }
    for region in plan.regions:
        if region.tiles is not None:
            yield region, tests.get(region.tiles)


def _words(region: PlannedRegion, test: TiledBits | None) -> str:
    tiles = region.tiles
    of_rows = isinstance(tiles, RowTiles)
    never = (
        "hidden values or scores are" if of_rows else "logits and their gradients are"
    )
    bits = f"{region.title} in tiles, {tiles}: {never} never whole; "
    if test is None:
        return bits + "these bits were not tested, `ckplan verify` compares them"
    number = f"{test.threads} thread" + "s" * (test.threads != 1)
    return (
        f"{bits}tested with {number}; with another number, `ckplan verify` tells "
        "whether bits are the same"
    )


def _why(solution: Solution) -> str:
    """Why there are tiles: what plans without them reach."""
    without = solution.without_tiles
    assert without is not None
    if without.overhead is None:
        floor = units.format_bytes(without.floor_bytes)
        return f"without tiles, no plan fits: the smallest peak found is {floor}"
    cost = units.format_percent(without.overhead, sign=True)
    return f"without tiles, the cheapest plan costs {cost}"
