"""Proves that plans for a card run there: PyTorch's own allocator, on a card that full.

Every workload, in fp32 and in bf16, gets a card that is too small for it by half of
what planning can save. Two plans are made: one whose tensors fit, as `solve --budget`
makes it, and one whose allocator has room, too, as `solve --gpu` does. Both are run on
a GPU that computes nothing, with so much memory and with torch's own allocator (see
``allocated.py``), with segments as they are and with those that expand. Kept where the
second plan always runs, and the first does if and only if that was said.

    python scripts/room.py
    python scripts/room.py --only gpt2

Exit code 1 if any of it does not hold.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import _measuring as measuring
import allocated
from _dummy_gpu import environment

from ckplan import gpus
from ckplan.errors import CkplanError
from ckplan.plan import file as plan_file
from ckplan.simulating.allocations import reserved_bytes
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.solving.reserved_limit import solve_within_limit
from ckplan.solving.solution import Solution
from ckplan.solving.solve import to_plan
from ckplan.units import format_bytes, format_percent

SEGMENTS = {"as they are": False, "expandable": True}
HEADERS = (
    "workload",
    "types",
    "segments",
    "card",
    "tensors fit: peak",
    "overhead",
    "said",
    "runs",
    "allocator has room: peak",
    "overhead",
    "runs",
)
_FULL = "OutOfMemoryError"


@dataclass(frozen=True)
class Row:
    """Two plans for one card."""

    workload: str
    types: str
    segments: str
    card_bytes: int
    by_tensors: Solution
    said: bool
    tensors_run: bool
    for_card: Solution
    runs: bool

    def cells(self) -> list[str]:
        """A row of the table."""
        first, second = self.by_tensors.timeline, self.for_card.timeline
        return [
            self.workload,
            self.types,
            self.segments,
            format_bytes(self.card_bytes),
            format_bytes(first.peak_bytes),
            format_percent(first.overhead, sign=True),
            *("yes" if one else "no" for one in (self.said, self.tensors_run)),
            format_bytes(second.peak_bytes),
            format_percent(second.overhead, sign=True),
            "yes" if self.runs else "no",
        ]

    def broken(self) -> Iterator[str]:
        """Where the claim does not hold."""
        name = f"{self.workload}, {self.types}, {self.segments}"
        if self.said != self.tensors_run:
            yield f"{name}: it was said that there is {'' if self.said else 'no '}room"
        if not self.runs:
            yield f"{name}: the plan for the card does not run"


def main() -> int:
    """Profile, plan and run everything; print the table, write it."""
    args = measuring.make_parser(__doc__, only=True, gpu="A100 80GB").parse_args()
    names = (
        name
        for name in measuring.chosen(measuring.everything(), args.only)
        if name in args.only or name not in allocated.NOT_HERE
    )
    rows = allocated.rows_on_dummy_gpu(names, args.gpu, rows_of)
    full = sum(not row.tensors_run for row in rows)
    report = measuring.Report(
        "room",
        "Plans on a card that is full, by torch's own allocator",
        __doc__,
        [
            f"As the card {args.gpu}, with less memory. No GPU was used. Where the "
            f"tensors fit, {full} of {len(rows)} plans find no room; of those for the "
            f"card, {sum(not row.runs for row in rows)}.",
            measuring.make_table(HEADERS, [row.cells() for row in rows], texts=3),
        ],
        [what for row in rows for what in row.broken()],
    )
    return measuring.finish(report, args)


def rows_of(name: str, types: str, gpu: gpus.Gpu, library: Path) -> Iterator[Row]:
    """One workload, with both kinds of segments."""
    measuring.say(f"{name}, {types}")
    try:
        graph = allocated.profiled(name, types, gpu)
    except CkplanError as error:
        measuring.say(f"{name}, {types}: {error.what}")
        return
    planner = Planner(graph)
    steps = planner.unplanned, planner.solve(planner.floor.peak_bytes).timeline
    card_bytes = sum(map(reserved_bytes, steps)) // 2
    for segments, expandable in SEGMENTS.items():
        by_tensors = planner.solve(card_bytes)
        limit = MemoryLimit(card_bytes, of_reserved=True, expandable=expandable)
        for_card = solve_within_limit(planner, limit)
        said = limit.allows(by_tensors.timeline)
        where = {
            **environment(library, gpu),
            "DUMMY_GPU_BYTES": str(card_bytes),
            "PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}",
        }
        runs = [
            _runs(name, types, solution, where) for solution in (by_tensors, for_card)
        ]
        yield Row(
            name,
            types,
            segments,
            card_bytes,
            by_tensors,
            said,
            runs[0],
            for_card,
            runs[1],
        )


def _runs(name: str, types: str, solution: Solution, where: dict[str, str]) -> bool:
    """Whether the steps of a plan come to their end.

    Raises:
        RuntimeError: Something else ends them.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        plan = to_plan(solution.timeline.graph, solution)
        plan_file.save(plan, path, force=True)
        done = allocated.run_alone(allocated.__file__, [name, types, str(path)], where)
    if done.returncode and _FULL not in done.stderr:
        raise RuntimeError(f"{name}, {types}: {done.stderr.strip()[-500:]}")
    return not done.returncode


if __name__ == "__main__":
    measuring.run(main)
