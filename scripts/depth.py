"""Memory and time against depth: one block, stacked ever higher.

Off every predicted peak is taken what no plan changes: parameters, gradients, optimizer
state and inputs. ``every block`` reruns every block and ``sqrt(n)`` reruns segments of
about sqrt(n) blocks. ``smallest`` is the floor of ckplan's plans, and ``as dear`` the
least memory that costs no more than rerunning every block.

    python scripts/depth.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from _measuring import (
    ROOT,
    Report,
    add_output,
    finish,
    make_parser,
    make_table,
    results_path,
    run,
    say,
    workload_path,
)

from ckplan.graph import Graph
from ckplan.simulate import Timeline
from ckplan.solving.planner import Planner
from ckplan.solving.practices import practices
from ckplan.tracing.profile import profile_workload
from ckplan.training.workload import WorkloadSpec, parse_options
from ckplan.units import format_bytes, format_percent, format_seconds

DEPTHS = (8, 16, 32, 64, 128, 256)
SMALL = ("width=32", "batch=16384")  # next to no weights: activations are the peak
EVERY, SEGMENTS = "every call", "sqrt(n) segments"
HEADERS = (
    "blocks",
    "ops",
    "unplanned",
    "every block",
    "costs",
    "sqrt(n)",
    "costs",
    "smallest",
    "costs",
    "as dear",
    "solving, CPU",
)


@dataclass(frozen=True)
class Row:
    """One depth; bytes without what no plan changes, overheads as fractions."""

    blocks: int
    ops: int
    unplanned_bytes: int
    every: tuple[int, float]
    segments: tuple[int, float]
    smallest: tuple[int, float]
    as_dear_bytes: int
    solve_seconds: float

    def cells(self) -> list[str]:
        """As a line of the table."""
        pairs = (self.every, self.segments, self.smallest)
        return [
            str(self.blocks),
            str(self.ops),
            format_bytes(self.unplanned_bytes),
            *(
                cell
                for num_bytes, overhead in pairs
                for cell in (
                    format_bytes(num_bytes),
                    format_percent(overhead, sign=True),
                )
            ),
            format_bytes(self.as_dear_bytes),
            format_seconds(self.solve_seconds),
        ]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    add_output(parser)
    args = parser.parse_args()
    rows = list(measured(args.depths, [*SMALL, *args.settings]))
    report = Report(
        "depth",
        "Memory and time against depth",
        (__doc__ or "").partition("\n    python")[0],
        [make_table(HEADERS, [row.cells() for row in rows], texts=0)],
        list(broken(rows)),
    )
    whole = tuple(args.depths) == DEPTHS and not args.settings
    if whole:
        draw(rows, results_path("depth", ".png"))
    return finish(report, args.output, whole=whole)


def measured(depths: Sequence[int], settings: Sequence[str]) -> Iterator[Row]:
    for blocks in depths:
        say(f"{blocks} blocks")
        options = parse_options([*settings, f"layers={blocks}"])
        target = str(ROOT / workload_path("mlp"))
        graph = profile_workload(WorkloadSpec(target, options))
        yield row_of(blocks, graph)


def row_of(blocks: int, graph: Graph) -> Row:
    began = time.process_time()
    planner = Planner(graph)
    floor = planner.solve(planner.floor.peak_bytes)
    seconds = time.process_time() - began
    simulator, menus, peak = planner.simulator, planner.menus, floor.budget_bytes
    found = (*floor.baselines, *practices(simulator, menus, peak))
    known = {one.name: one for one in found}
    every, segments = known[EVERY], known[SEGMENTS]
    as_dear = planner.least_memory(every.overhead).timeline
    fixed = fixed_bytes(planner.unplanned)
    return Row(
        blocks,
        len(graph.ops),
        planner.unplanned.peak_bytes - fixed,
        (every.peak_bytes - fixed, every.overhead),
        (segments.peak_bytes - fixed, segments.overhead),
        (floor.timeline.peak_bytes - fixed, floor.timeline.overhead),
        as_dear.peak_bytes - fixed,
        seconds,
    )


def fixed_bytes(timeline: Timeline) -> int:
    """Bytes at the start of the step, which stay to its end."""
    return timeline.live_bytes[0]


def broken(rows: Sequence[Row]) -> Iterator[str]:
    """Where memory grows as fast as depth, or a practice is ahead."""
    for row in rows:
        for practice in (row.every, row.segments):
            if row.smallest[0] > practice[0] or row.as_dear_bytes > row.every[0]:
                yield f"{row.blocks} blocks: a practice holds less"
    for less, more in pairwise(rows):
        if more.smallest[0] / less.smallest[0] >= 0.8 * more.blocks / less.blocks:
            yield f"{less.blocks} to {more.blocks} blocks: memory grows as depth does"


def draw(rows: Sequence[Row], path: Path) -> None:
    """The two curves that everyone remembers: memory and time against depth."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    blocks = [row.blocks for row in rows]
    curves = {
        "unplanned": [(row.unplanned_bytes, 0.0) for row in rows],
        "every block rerun": [row.every for row in rows],
        "sqrt(n) segments": [row.segments for row in rows],
        "ckplan, smallest": [row.smallest for row in rows],
        "ckplan, as dear as every block": [
            (row.as_dear_bytes, row.every[1]) for row in rows
        ],
    }
    for name, points in curves.items():
        left.loglog(blocks, [size / 2**20 for size, _ in points], "o-", label=name)
        right.semilogx(blocks, [100 * cost for _, cost in points], "o-", label=name)
    left.set(xlabel="blocks", ylabel="MiB beyond parameters and optimizer")
    right.set(xlabel="blocks", ylabel="overhead, % of an unplanned step")
    left.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    say(f"wrote {path}")


if __name__ == "__main__":
    run(main)
