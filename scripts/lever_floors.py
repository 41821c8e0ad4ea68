"""The floors of the recorded steps with tiles, with moves, and with both.

For every graph file in traces/, the smallest peak of any plan found: by recomputation
alone, with the head and its loss in 8 or 32 tiles, with MLPs in 8 tiles of rows, too,
with values that move, and with all of that. Moves count as free, so that no disk is
part of it. Each plan is replayed. Bytes alone, no measurement.

    python scripts/lever_floors.py
    python scripts/lever_floors.py --only gpt2

Exit code 1 if a lever raises a floor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import _measuring as measuring

from ckplan.graph.file import load
from ckplan.graph.graph import Graph
from ckplan.plan.region import Region
from ckplan.simulating.moving import Link
from ckplan.simulating.simulate import Simulator
from ckplan.simulating.tiled_regions import tile_regions
from ckplan.solving.offloading import as_moving, with_moves
from ckplan.solving.planner import Planner
from ckplan.solving.tiled_plans import heads_in_tiles
from ckplan.solving.tiled_rows import find_tileable_rows
from ckplan.units import format_bytes

HEADERS = (
    *("trace", "unplanned peak", "floor", "head in tiles", "and MLPs"),
    *("with moves", "with both"),
)


@dataclass(frozen=True)
class Row:
    """The floors of one trace; None where no call runs in such tiles."""

    name: str
    unplanned_bytes: int
    floor_bytes: int
    head_bytes: int | None
    tiles_bytes: int | None
    moves_bytes: int
    both_bytes: int

    @property
    def levers(self) -> tuple[int | None, ...]:
        """The floors with levers."""
        return self.head_bytes, self.tiles_bytes, self.moves_bytes, self.both_bytes

    def cells(self) -> list[str]:
        """A row of the table."""
        return [
            self.name,
            format_bytes(self.unplanned_bytes),
            format_bytes(self.floor_bytes),
            *("none" if n is None else format_bytes(n) for n in self.levers),
        ]


def main() -> int:
    """Find all floors, print the table, write it."""
    args = measuring.make_parser(__doc__, only=True).parse_args()
    traces = measuring.recorded()
    rows = [row_of(name, traces[name]) for name in measuring.chosen(traces, args.only)]
    report = measuring.Report(
        "lever_floors",
        "Floors with tiles and moves",
        __doc__,
        [measuring.make_table(HEADERS, [row.cells() for row in rows])],
        list(broken(rows)),
    )
    return measuring.finish(report, args)


def row_of(name: str, path: Path) -> Row:
    """The floors of a trace."""
    measuring.say(name)
    graph = load(path)
    planner = Planner(graph)
    least, moves = planner.floor.peak_bytes, floor_with_moves(graph)
    heads = heads_in_tiles(graph, needed=False)
    rows = find_tileable_rows(graph)
    of_heads = floors(graph, heads)
    of_rows = floors(graph, [(*row, *head) for row in rows for head in ((), *heads)])
    tiled = [*of_heads, *of_rows]
    return Row(
        name,
        planner.unplanned.peak_bytes,
        least,
        min([least, *(one.bytes for one in of_heads)]) if heads else None,
        min([least, *(one.bytes for one in tiled)]) if rows else None,
        min(least, moves),
        min(
            [
                least,
                moves,
                *(one.bytes for one in tiled),
                *(o.moved_bytes for o in tiled),
            ]
        ),
    )


class Floor(NamedTuple):
    """The floor of a step with calls in tiles, and with moves, too."""

    bytes: int
    moved_bytes: int


def floors(graph: Graph, sets: Iterable[tuple[Region, ...]]) -> list[Floor]:
    """The floors with each set of calls in tiles."""
    tiled = [tile_regions(graph, regions) for regions in sets]
    return [
        Floor(Planner(one).floor.peak_bytes, floor_with_moves(one)) for one in tiled
    ]


def floor_with_moves(graph: Graph) -> int:
    """The smallest peak of plans that move, as they are replayed."""
    planner = Planner(with_moves(graph, Link(math.inf), encoded=True))
    solution = planner.solve(planner.floor.peak_bytes)
    simulator = Simulator(graph)
    regions = [
        as_moving(simulator, planner.graph, region) for region in solution.regions
    ]
    return simulator.run(regions).peak_bytes


def broken(rows: list[Row]) -> Iterator[str]:
    """Where the claim does not hold."""
    for row in rows:
        if any(n is not None and n > row.floor_bytes for n in row.levers):
            yield f"{row.name}: a lever raises the floor"


if __name__ == "__main__":
    measuring.run(main)
