"""Proves what a GPU and its host hold while plans move tensors to the host and back.

Every workload is profiled for a card, in float32 and under autocast to bfloat16, and
planned for budgets a quarter, half and three quarters of the way from the floor to the
peak, with offload to host memory, as if ops took a thousand times as long and the link
no time, so that plans move what they can: bytes depend on neither. Then steps run in
processes of their own on a GPU that computes nothing (see ``allocated.py``). Allocated
and reserved bytes are those of torch's own allocator, under the streams of the copies;
the host's are those that CUDA was asked to pin, which ``_dummy_gpu.c`` counts, as it
counts the bytes copied out and back in a step.

With ``--spill FOLDER``, tensors go on from a small room of the host to a file there.

    python scripts/allocated_offload.py
    python scripts/allocated_offload.py --only gpt2 --gpu "RTX 4090"
    python scripts/allocated_offload.py --spill /tmp

Rows are kept beside the page as they come; a run that was cut goes on from there.
``--only`` measures some anew, ``--fresh`` all. This is no measurement on a GPU: nothing
is computed, so bits are not compared here, nor is a link timed.

Exit code 1 if allocated bytes are more than 1 % away, reserved bytes more than 3 % and
more than one segment of 20 MiB, host memory more than 5 %; if other bytes are copied
than planned; or if a plan moves nothing though it can lower the peak.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import _measuring as measuring
import allocated
from _dummy_gpu import build, environment
from _kept_rows import KeptRows

from ckplan import gpus
from ckplan.applying.moving.stores import HOST
from ckplan.errors import CkplanError
from ckplan.graph.graph import Graph
from ckplan.plan import file as plan_file
from ckplan.plan.plan import Plan
from ckplan.plan.region import Region
from ckplan.simulating.moving import Link
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.offloading import MovingPlanner, behind_host
from ckplan.solving.planner import Planner
from ckplan.solving.solution import Solution
from ckplan.solving.solve import to_plan
from ckplan.units import format_bytes

QUARTERS = (1, 2, 3)
MOST_HOST, MOST_COPIED = 0.05, 0.01  # a trace rounds tensors of a GPU up to 512 B
_FREE = 1e15  # bytes per second of a link that takes no time
_SLOW = 1000  # as many seconds of every op
HEADERS = (
    *("workload", "types", "budget", "moved", "copied out", "copied back"),
    *("allocated", "of the allocator", "error", "reserved", "of the allocator"),
    *("error", "host", "pinned", "error", "cause"),
)


@dataclass(frozen=True)
class Row:
    """One plan: what was predicted of its second step, and what was found."""

    model: str
    types: str
    quarters: int  # of the way from the floor to the peak
    budget_bytes: int
    predicted: Sequence[int]  # allocated, reserved, host, out, back, in bytes
    found: Sequence[int]  # the same; none if it did not run
    why: str = ""  # there is nothing, or nothing moves

    @property
    def name(self) -> str:
        return f"{self.model}, {self.types}, {self.quarters} of 4"

    def cells(self) -> list[str]:
        """A row of the table."""
        start = [self.model, self.types, format_bytes(self.budget_bytes)]
        if not self.found:
            why = allocated.NOT_HERE.get(self.model)
            why = why or allocated.CAUSES.get(self.model, self.why)
            return [*start, *[""] * (len(HEADERS) - 4), why]
        moved = [self.predicted[3], *self.found[3:]]
        pairs = list(zip(self.predicted, self.found, strict=True))[:3]
        numbers = [
            cell
            for ours, its in pairs
            for cell in (format_bytes(ours), format_bytes(its), error(ours, its))
        ]
        cause = allocated.CAUSES.get(self.model, "") if any(self.broken()) else self.why
        return [*start, *map(format_bytes, moved), *numbers, cause]

    def within(self) -> list[bool]:
        """Whether allocated, reserved and host bytes are, each in itself."""
        limits = allocated.MOST_ALLOCATED, allocated.MOST_RESERVED, MOST_HOST
        pairs = zip(self.predicted, self.found, limits, strict=False)
        return [abs(ours - its) <= most * its for ours, its, most in pairs]

    def broken(self) -> Iterator[str]:
        """Where the claim does not hold."""
        if not self.found:
            if self.model not in allocated.NOT_HERE:
                yield f"{self.name}: {self.why}"
            return
        names = "allocated", "reserved", "host memory"
        within = zip(names, self.within(), self.predicted, self.found, strict=False)
        for name, holds, ours, its in within:
            one_more = abs(ours - its) > allocated.SEGMENT_BYTES
            if not holds and (one_more or name != "reserved"):
                yield f"{self.name}: {name} is {error(ours, its)} away"
        of_plan, (out, back) = self.predicted[3], self.found[3:]
        if out != back or not 0 <= of_plan - out <= MOST_COPIED * of_plan:
            copied = f"{format_bytes(out)} are copied out and {format_bytes(back)} back"
            yield f"{self.name}: {copied}"
        if not self.predicted[3] and not self.why:
            yield f"{self.name}: nothing moves"


def error(predicted_bytes: int, found_bytes: int) -> str:
    """How far a prediction is away, as in a table."""
    if not found_bytes:
        return "+0.00 %" if not predicted_bytes else "n/a"
    return measuring.format_error(predicted_bytes, found_bytes)


def main() -> int:
    """Profile, plan and run everything; print the table, write it."""
    if sys.argv[1:2] == ["--step"]:
        take_steps(*sys.argv[2:])
    args = _arguments()
    allocated.check_dummy_gpu()
    name = "allocated_spill" if args.spill else "allocated_offload"
    kept = KeptRows(name, Row, args)
    with tempfile.TemporaryDirectory() as folder:
        library, gpu = build(Path(folder)), gpus.find(args.gpu)
        measure = partial(rows_of, gpu=gpu, library=library, spill=args.spill)
        rows = kept.fill(measuring.everything(), measure)
    if args.only:
        rows = [row for row in rows if row.model in args.only]
    table = measuring.make_table(HEADERS, [row.cells() for row in rows], texts=3)
    report = measuring.Report(
        name,
        "What a GPU that computes nothing and its host hold while tensors move",
        __doc__,
        [f"As the card {args.gpu}. No GPU was used.", _count(rows), table],
        [what for row in rows for what in row.broken()],
    )
    return measuring.finish(report, args)


def _count(rows: Sequence[Row]) -> str:
    run = [row for row in rows if row.found]
    within = [row.within() for row in run]
    allocated_ones, reserved, host = (
        sum(one[place] for one in within) for place in range(3)
    )
    same = sum(row.predicted[1] == row.found[1] for row in run)
    return (
        f"{len(run)} plans were run, {sum(row.found[3] > 0 for row in run)} of which "
        f"move tensors. Allocated bytes are within 1 % in {allocated_ones}, reserved "
        f"bytes within 3 % in {reserved} and the same in {same}, host memory within "
        f"5 % in {host}."
    )


def rows_of(
    name: str, gpu: gpus.Gpu, library: Path, spill: Path | None
) -> Iterator[Row]:
    """The plans of one workload in all types."""
    for types in allocated.TYPES:
        try:
            graph = allocated.profiled(name, types, gpu)
        except CkplanError as error:
            yield Row(name, types, 0, 0, (), (), error.what)
            continue
        to_host = Link.of(graph, _FREE)
        link = behind_host(graph, Link(_FREE)) if spill else to_host
        row = partial(Row, name, types)
        path = library.parent / "plan.yaml"
        run = partial(_found, name, types, environment(library, gpu), path, spill)
        yield from _rows_of_graph(graph, link, row, run)


def _rows_of_graph(
    graph: Graph,
    link: Link,
    row: Callable[..., Row],
    run: Callable[[Plan], tuple[Sequence[int], str]],
) -> Iterator[Row]:
    graph = _slow(graph)
    planner = Planner(graph)
    moving = MovingPlanner(planner, link)
    floor, top = moving.floor_bytes, planner.unplanned.peak_bytes
    known: dict[Sequence[Region], tuple[Sequence[int], str]] = {}
    for quarters in QUARTERS:
        budget_bytes = floor + (top - floor) * quarters // 4
        solution = moving.solve(MemoryLimit(budget_bytes))
        if solution.regions not in known:
            known[solution.regions] = run(to_plan(graph, solution))
        found, why = known[solution.regions]
        if floor == top:
            why = why or "its peak is the update's, which no plan of the step lowers"
        yield row(quarters, budget_bytes, predicted(solution), found, why)


def _slow(graph: Graph) -> Graph:
    """The step on a card on which it never pays to run an op again."""
    ops = (
        replace(
            op,
            seconds=_SLOW * op.seconds,
            launch_seconds=_SLOW * op.launch_seconds,
        )
        for op in graph.ops
    )
    return replace(graph, ops=tuple(ops))


def predicted(solution: Solution) -> list[int]:
    """What is said of a plan without a GPU."""
    moves = solution.timeline.moves
    bytes_ = allocated.predicted(solution.timeline)
    copied = [moves.moved_bytes, moves.moved_bytes]
    return [bytes_.allocated, bytes_.reserved, moves.host_bytes, *copied]


def _found(
    name: str,
    types: str,
    where: Mapping[str, str],
    path: Path,
    spill: Path | None,
    plan: Plan,
) -> tuple[Sequence[int], str]:
    """What two steps of a plan hold, or why there are none."""
    plan_file.save(plan, path, force=True)
    place = HOST if spill is None else str(spill)
    words = [name, types, str(path), place]
    done = allocated.run_alone(__file__, words, where)
    if done.returncode:
        return (), measuring.error_line(done.stderr)
    return json.loads(done.stdout), ""


def take_steps(name: str, types: str, plan: str, place: str) -> NoReturn:
    """Take steps on the GPU that is there; say what it and its host held."""
    gpu, before = ctypes.CDLL(None), [0, 0]  # loaded before all else

    def copied() -> list[int]:
        return [_asked(gpu, what) for what in ("bytes_out", "bytes_back")]

    def look(_: int) -> None:
        before[:] = copied()

    _, found = allocated.taken(name, types, plan, place, before_step=look)
    moved = [after - start for after, start in zip(copied(), before, strict=True)]
    pinned = _asked(gpu, "registered_bytes")
    allocated.leave_with([found.allocated, found.reserved, pinned, *moved])


def _asked(gpu: ctypes.CDLL, what: str) -> int:
    """What the dummy GPU counted."""
    function = getattr(gpu, f"dummy_gpu_{what}")
    function.restype = ctypes.c_size_t
    counted: int = function()
    return counted


def _arguments() -> argparse.Namespace:
    parser = measuring.make_parser(__doc__, only=True, gpu="A100 80GB")
    parser.add_argument(
        "--fresh", action="store_true", help="forget the rows of earlier runs"
    )
    parser.add_argument(
        "--spill", metavar="FOLDER", type=Path, help="tensors go to a file there"
    )
    parser.add_argument(
        "--minutes",
        metavar="N",
        type=float,
        default=1e6,
        help="begin no other workload after so many  [default: no limit]",
    )
    return parser.parse_args()


if __name__ == "__main__":
    measuring.run(main)
