"""The floors of the recorded steps with tiles, with moves, and with both.

For every graph file in traces/, the smallest peak of any plan found: by recomputation
alone, with the head and its loss in 8 or 32 tiles, with values that move, and with
both. Moves count as free, so that no disk is part of it. Each plan is replayed. Bytes
alone, no measurement.

    python scripts/lever_floors.py
    python scripts/lever_floors.py --only gpt2

Exit code 1 if a lever raises a floor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import _measuring as measuring

from ckplan.errors import PlanError
from ckplan.graph.file import load
from ckplan.graph.graph import Graph
from ckplan.plan.tiles import Tiles
from ckplan.simulating.moving import Link
from ckplan.simulating.simulate import Simulator
from ckplan.simulating.tiling import tile_graph
from ckplan.solving.offloading import as_moving, with_moves
from ckplan.solving.planner import Planner
from ckplan.solving.tiled_heads import COUNTS, find_tileable_head
from ckplan.units import format_bytes

HEADERS = ("trace", "unplanned peak", "floor", "with tiles", "with moves", "with both")


@dataclass(frozen=True)
class Row:
    """The floors of one trace; None without a head that runs in tiles."""

    name: str
    unplanned_bytes: int
    floor_bytes: int
    tiles_bytes: int | None
    moves_bytes: int
    both_bytes: int | None

    def cells(self) -> list[str]:
        """A row of the table."""
        levers = (self.tiles_bytes, self.moves_bytes, self.both_bytes)
        return [
            self.name,
            format_bytes(self.unplanned_bytes),
            format_bytes(self.floor_bytes),
            *("no such head" if n is None else format_bytes(n) for n in levers),
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
    floor_bytes, moves_bytes = planner.floor.peak_bytes, floor_with_moves(graph)
    try:
        head, _ = find_tileable_head(graph)
    except PlanError:
        tiled: list[Graph] = []
    else:
        tiled = [tile_graph(graph, head, Tiles(n, n)) for n in COUNTS]
    of_tiles = [Planner(one).floor.peak_bytes for one in tiled]
    of_both = [floor_with_moves(one) for one in tiled]
    return Row(
        name,
        planner.unplanned.peak_bytes,
        floor_bytes,
        min([floor_bytes, *of_tiles]) if tiled else None,
        min(floor_bytes, moves_bytes),
        min([floor_bytes, moves_bytes, *of_tiles, *of_both]) if tiled else None,
    )


def floor_with_moves(graph: Graph) -> int:
    """The smallest peak of plans that move, as they are replayed."""
    planner = Planner(with_moves(graph, Link(math.inf)))
    solution = planner.solve(planner.floor.peak_bytes)
    simulator = Simulator(graph)
    regions = [as_moving(simulator, region) for region in solution.regions]
    return simulator.run(regions).peak_bytes


def broken(rows: list[Row]) -> Iterator[str]:
    """Where the claim does not hold."""
    for row in rows:
        levers = (row.tiles_bytes, row.moves_bytes, row.both_bytes)
        if any(n is not None and n > row.floor_bytes for n in levers):
            yield f"{row.name}: a lever raises the floor"


if __name__ == "__main__":
    measuring.run(main)
