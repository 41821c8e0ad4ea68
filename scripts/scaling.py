"""Proves that profiling grows no faster than the model, up to Llama-3 70B.

A narrow GPT-2 is profiled at 8 to 128 layers, every distinct op measured anew, each
time in a new process; the graph file is loaded again, five times, in CPU seconds. Then
Llama-3 70B (80 layers, bf16, batch 1 x 4096) is profiled as an H100 would run
it, and solved for one of 64 ranks that share it (FSDP2), 60 % of the activations to be
freed. CPU seconds, wall seconds and the most resident memory are those the system
counted for the process; a picture is drawn beside the table.

    python scripts/scaling.py
    python scripts/scaling.py --layers 2,4 --set vocab=100 --small

Exit code 1 if a limit is exceeded, or if a layer costs more in deep models than in
shallow ones.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import _measuring as measuring
from speed import Usage, use

from ckplan.graph import file as trace_file
from ckplan.graph.sharding import shard
from ckplan.solving.planner import Planner
from ckplan.units import GIB, MIB, format_bytes, format_seconds

LAYERS = (8, 16, 32, 64, 128)
NARROW = ("width=64", "heads=2", "batch=2", "length=64", "vocab=1000")
LLAMA_3_70B = (
    "layers=80",
    "width=8192",
    "heads=64",
    "groups=8",
    "inner=28672",
    "vocab=128256",
    "batch=1",
    "length=4096",
    "dtype=bfloat16",
)
SMALL_LLAMA = ("layers=2", "dtype=bfloat16")
MOST_SECONDS, MOST_BYTES = 60.0, 2 * GIB  # of profiling Llama-3 70B
MOST_SOLVE_SECONDS, RANKS, FREED = 2.0, 64, 0.6
MOST_LOAD_SECONDS, LOADED_OPS = 0.5, 20_000
MOST_GROWTH = 1.5  # of what one more layer costs, deep against shallow
HEADERS = ("layers", "ops", "CPU", "wall", "memory", "file", "load")


@dataclass(frozen=True)
class Point:
    """One depth."""

    layers: int
    num_ops: int
    used: Usage
    file_bytes: int
    load_seconds: float

    def cells(self) -> list[str]:
        """A row of the table."""
        return [
            str(self.layers),
            str(self.num_ops),
            format_seconds(self.used.cpu_seconds),
            format_seconds(self.used.wall_seconds),
            format_bytes(self.used.peak_bytes),
            format_bytes(self.file_bytes),
            format_seconds(self.load_seconds),
        ]


def main() -> int:
    """Measure every depth and the large model; print, draw and write."""
    args = _arguments()
    llama = SMALL_LLAMA if args.small else LLAMA_3_70B
    with tempfile.TemporaryDirectory(prefix="ckplan-scaling-") as folder:
        trace = Path(folder) / "trace.json.gz"
        points = [_depth(layers, args.settings, trace) for layers in args.layers]
        measuring.say("Llama-3 70B")
        large = _profile("llama", llama, ["--gpu", "H100"], trace)
        solve_seconds = _solve(trace)
    parts = [
        measuring.make_table(HEADERS, [point.cells() for point in points], texts=0),
        measuring.make_table(
            ("Llama-3 70B", "", "limit"),
            [
                ["ops", str(large.num_ops), ""],
                ["CPU", format_seconds(large.used.cpu_seconds), ""],
                [
                    "wall",
                    format_seconds(large.used.wall_seconds),
                    f"< {format_seconds(MOST_SECONDS)}",
                ],
                [
                    "memory",
                    format_bytes(large.used.peak_bytes),
                    f"< {format_bytes(MOST_BYTES)}",
                ],
                ["file", format_bytes(large.file_bytes), ""],
                [
                    f"solve, {RANKS} ranks",
                    format_seconds(solve_seconds),
                    f"< {format_seconds(MOST_SOLVE_SECONDS)}",
                ],
            ],
        ),
    ]
    whole = not (args.settings or args.small or args.layers != LAYERS)
    picture = args.plot or (
        measuring.results_path("scaling", ".png") if whole else None
    )
    if picture is not None:
        draw(points, picture)
        parts.append(f"![Time and file size against the number of ops]({picture.name})")
    report = measuring.Report(
        name="scaling",
        title="Profiling deep and large models",
        doc=__doc__,
        parts=parts,
        broken=[*_broken(points), *_too_much(large, solve_seconds)],
    )
    return measuring.finish(report, args, whole=whole)


def _depth(layers: int, settings: Sequence[str], trace: Path) -> Point:
    measuring.say(f"GPT-2 with {layers} layers")
    return _profile("gpt2", [*NARROW, *settings], ["--fresh"], trace, layers)


def _profile(
    workload: str,
    settings: Sequence[str],
    options: Sequence[str],
    trace: Path,
    layers: int = 0,
) -> Point:
    """Profile a workload in a process of its own and load what it wrote."""
    depth = [f"layers={layers}"] if layers else []
    words = measuring.with_settings([*settings, *depth])
    path = ("-o", str(trace), "--force")
    used = use(("profile", measuring.workload_path(workload), *words, *options, *path))
    times = []
    for _ in range(5):
        start = time.process_time()
        graph = trace_file.load(trace)
        times.append(time.process_time() - start)
    size, seconds = trace.stat().st_size, statistics.median(times)
    return Point(layers, len(graph.ops), used, size, seconds)


def _broken(points: Sequence[Point]) -> Iterator[str]:
    """Where a layer costs more than before, or loading takes too long."""
    first, middle, last = points[0], points[len(points) // 2], points[-1]

    def growth(cost: Sequence[float]) -> float:
        below = (cost[1] - cost[0]) / max(middle.layers - first.layers, 1)
        above = (cost[2] - cost[1]) / max(last.layers - middle.layers, 1)
        return above / below if below > 0 else 1.0

    chosen = (first, middle, last)
    for what, cost in (
        ("CPU seconds", [point.used.cpu_seconds for point in chosen]),
        ("bytes of the file", [float(point.file_bytes) for point in chosen]),
    ):
        if len(points) > 2 and growth(cost) > MOST_GROWTH:
            yield f"{what} of a layer grow by {growth(cost):.2f} with depth"
    if last.num_ops >= LOADED_OPS and last.load_seconds >= MOST_LOAD_SECONDS:
        seconds = format_seconds(last.load_seconds)
        yield f"a graph of {last.num_ops} ops loads in {seconds}"


def _solve(trace: Path) -> float:
    """CPU seconds of one budget, of one of many ranks."""
    graph = shard(trace_file.load(trace), "fsdp2", RANKS)
    start = time.process_time()
    planner = Planner(graph)
    unplanned = planner.unplanned
    freed_bytes = round(FREED * unplanned.peak_by_kind["activation"])
    planner.solve(unplanned.peak_bytes - freed_bytes)
    return time.process_time() - start


def _too_much(large: Point, solve_seconds: float) -> Iterator[str]:
    if large.used.wall_seconds >= MOST_SECONDS:
        yield f"Llama-3 70B took {format_seconds(large.used.wall_seconds)}"
    if large.used.peak_bytes >= MOST_BYTES:
        yield f"Llama-3 70B took {format_bytes(large.used.peak_bytes)}"
    if solve_seconds >= MOST_SOLVE_SECONDS:
        yield f"Llama-3 70B is solved in {format_seconds(solve_seconds)}"


def draw(points: Sequence[Point], path: Path) -> None:
    """Time and file size against the number of ops, both from zero."""
    from matplotlib.figure import Figure

    ops = [point.num_ops for point in points]
    figure = Figure(figsize=(8, 4), layout="constrained")
    time_axes, size_axes = figure.subplots(1, 2)
    time_axes.plot(ops, [point.used.cpu_seconds for point in points], marker="o")
    time_axes.set_ylabel("CPU seconds of ckplan profile")
    size_axes.plot(ops, [point.file_bytes / MIB for point in points], marker="o")
    size_axes.set_ylabel("graph file, gzipped (MiB)")
    for axes in (time_axes, size_axes):
        axes.set_xlabel("ops of the step")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    for point in points:
        place = (point.num_ops, point.used.cpu_seconds)
        time_axes.annotate(
            f"{point.layers} layers",
            place,
            fontsize="x-small",
            ha="right",
            xytext=(-6, 3),
            textcoords="offset points",
        )
    figure.suptitle("Profiling GPT-2 of 8 to 128 layers")
    figure.savefig(path, dpi=120)
    measuring.say(f"wrote {path}")


def _layers(text: str) -> tuple[int, ...]:
    return tuple(sorted(map(int, text.split(","))))


def _arguments() -> argparse.Namespace:
    parser = measuring.make_parser(__doc__, settings=True)
    parser.add_argument(
        "--layers",
        type=_layers,
        default=LAYERS,
        metavar="N,N",
        help="depths of GPT-2  [default: 8,16,32,64,128]",
    )
    parser.add_argument(
        "--small", action="store_true", help="a small Llama in place of the 70B"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the picture")
    return parser.parse_args()


if __name__ == "__main__":
    measuring.run(main)
