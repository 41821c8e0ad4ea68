"""Memory and time against depth: one block, stacked ever higher.

Off every predicted peak is taken what no plan changes: parameters, gradients, optimizer
state and inputs. ``every block`` reruns every block and ``sqrt(n)`` reruns segments of
about sqrt(n) blocks. ``smallest`` is the floor of ckplan's plans, and ``as dear`` the
least memory that costs no more than rerunning every block.

The second table is of chains of equal layers that keep their input, each of one op, in
activations: all that is alive at the peak over the bytes of one. "One forward more" is
the least for at most as many ops again as forward has, "smallest" the floor. Revolve
(A. Griewank, A. Walther, 2000) is the least there is for as many ops again.

    python scripts/depth.py
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import _measuring as measuring

sys.path.insert(0, str(measuring.ROOT / "tests" / "helpers"))

import revolve

from ckplan.graph.graph import Graph
from ckplan.simulating.simulate import Timeline
from ckplan.solving.common_strategies import all_baselines
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec, parse_options
from ckplan.units import format_bytes, format_percent, format_seconds

DEPTHS = (8, 16, 32, 64, 128, 256, 512)
LENGTHS = (10, 32, 100, 316, 1000, 3162, 10_000)
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

HEADERS_OF_CHAINS = (
    "layers",
    "unplanned",
    "one forward more",
    "Revolve",
    "smallest",
    "forwards more",
    "Revolve",
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


@dataclass(frozen=True)
class Chain:
    """One length; memory in activations."""

    layers: int
    unplanned: int
    one_more: int  # for one forward more at most
    smallest: int
    more: float  # forwards that the smallest takes
    solve_seconds: float

    def cells(self) -> list[str]:
        """As a line of the table."""
        return [
            str(self.layers),
            str(self.unplanned),
            str(self.one_more),
            str(least(self.layers, self.layers)),
            str(self.smallest),
            f"{self.more:.2f}",
            str(least(self.layers, round(self.more * self.layers))),
            format_seconds(self.solve_seconds),
        ]


def main() -> int:
    parser = measuring.make_parser(__doc__, settings=True)
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    args = parser.parse_args()
    rows = list(measured(args.depths, [*SMALL, *args.settings]))
    chains = [chain_of(length) for length in args.lengths]
    report = measuring.Report(
        "depth",
        "Memory and time against depth",
        __doc__,
        [
            measuring.make_table(HEADERS, [row.cells() for row in rows], texts=0),
            measuring.make_table(
                HEADERS_OF_CHAINS, [one.cells() for one in chains], texts=0
            ),
        ],
        [*broken(rows), *too_large(chains)],
    )
    asked = tuple(args.depths), tuple(args.lengths)
    whole = asked == (DEPTHS, LENGTHS) and not args.settings
    if whole:
        draw(rows, chains, measuring.results_path("depth", ".png"))
    return measuring.finish(report, args, whole=whole)


def measured(depths: Sequence[int], settings: Sequence[str]) -> Iterator[Row]:
    for blocks in depths:
        measuring.say(f"{blocks} blocks")
        options = parse_options([*settings, f"layers={blocks}"])
        target = measuring.location_of("mlp")
        graph = profile_workload(WorkloadSpec(target, options))
        yield row_of(blocks, graph)


def row_of(blocks: int, graph: Graph) -> Row:
    began = time.process_time()
    planner = Planner(graph)
    floor = planner.solve(planner.floor.peak_bytes)
    seconds = time.process_time() - began
    found = all_baselines(planner, MemoryLimit(planner.floor.peak_bytes))
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


def chain_of(layers: int) -> Chain:
    measuring.say(f"a chain of {layers} layers")
    graph = revolve.uniform(layers)
    began = time.process_time()
    planner = Planner(graph)
    floor = planner.floor.peak_bytes
    found = planner.within(floor)
    seconds = time.process_time() - began
    assert found is not None
    forward = sum(op.seconds for op in graph.ops[: graph.num_forward - 1])
    one_more = planner.least_memory((1 + 1e-9) * forward / graph.step_seconds)
    return Chain(
        layers,
        planner.unplanned.peak_bytes // revolve.UNIT,
        one_more.timeline.peak_bytes // revolve.UNIT,
        floor // revolve.UNIT,
        found[0].recompute_seconds / forward,
        seconds,
    )


def least(layers: int, extra_steps: int) -> int:
    """Activations that Revolve needs if so many layers may run again."""
    slots = next(
        s for s in range(1, layers) if revolve.extra_steps(layers, s) <= extra_steps
    )
    return revolve.LEAST // revolve.UNIT + slots - 1


def too_large(chains: Sequence[Chain]) -> Iterator[str]:
    """Where memory does not grow as the root, or as the logarithm, of depth."""
    for one in chains:
        if one.one_more > 2 * math.sqrt(one.layers) + 4:
            yield f"{one.layers} layers: {one.one_more} activations, one forward more"
        if one.smallest > 4 * math.log2(one.layers):
            yield f"{one.layers} layers: {one.smallest} activations at least"


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


def draw(rows: Sequence[Row], chains: Sequence[Chain], path: Path) -> None:
    """The two curves that everyone remembers: memory and time against depth."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(15, 4), layout="constrained"
    )
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
        middle.semilogx(blocks, [100 * cost for _, cost in points], "o-", label=name)
    left.set(xlabel="blocks", ylabel="MiB beyond parameters and optimizer")
    middle.set(xlabel="blocks", ylabel="overhead, % of an unplanned step")
    left.legend()
    layers = [one.layers for one in chains]
    lines = {
        "unplanned": [one.unplanned for one in chains],
        "ckplan, one forward more": [one.one_more for one in chains],
        "2 sqrt(n)": [2 * math.sqrt(n) for n in layers],
        "ckplan, smallest": [one.smallest for one in chains],
        "3 log2(n)": [3 * math.log2(n) for n in layers],
    }
    for name, values in lines.items():
        right.loglog(layers, values, "o-" if "(" not in name else ":", label=name)
    right.set(
        xlabel="layers of a uniform chain", ylabel="activations alive at the peak"
    )
    right.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    measuring.say(f"wrote {path}")


if __name__ == "__main__":
    measuring.run(main)
