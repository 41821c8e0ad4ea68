"""Proves what kernels on a card take while they run, one op at a time.

Every workload trains for a step on a GPU that computes nothing (see ``allocated.py``),
in float32 and under autocast to bfloat16. Of each op, forward and backward, all blocks
are written down that it has from torch's own allocator when they are most: what it
returns, and what its kernel works in. Beside them stands what is said of that op from
its shapes. Alike are ops with the same blocks, each of the same size.

    python scripts/workspaces.py
    python scripts/workspaces.py --only gpt2 --gpu T4

What cuDNN works in is not there, nor are values, which gradients of embeddings and
mixtures of experts go by.

Exit code 1 if an op takes over 1 % more than is said, and over 64 KiB.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import _measuring as measuring
import allocated
from _blocks import AskedFor, total
from _dummy_gpu import build, environment

from ckplan import gpus
from ckplan.training.step import make_step
from ckplan.units import format_bytes

MOST_UNDER, SMALL_BYTES = 0.01, 64 << 10
HEADERS = (
    "op",
    "where",
    "runs",
    "with a workspace",
    "alike",
    "least alike: blocks said",
    "of the allocator",
    "apart",
)


@dataclass
class Row:
    """All runs of an op."""

    op: str
    runs: int = 0
    working: int = 0
    alike: int = 0
    said: int = 0  # bytes, of the run that is least alike
    found: int = 0
    where: str = ""

    def add(self, other: Row) -> None:
        """Take runs of another workload."""
        self.runs += other.runs
        self.working += other.working
        self.alike += other.alike
        if abs(other.said - other.found) >= abs(self.said - self.found):
            self.said, self.found, self.where = other.said, other.found, other.where

    def cells(self) -> list[str]:
        """A row of the table."""
        counts = [f"{n:,}" for n in (self.runs, self.working, self.alike)]
        if self.alike == self.runs:
            return [self.op, "", *counts, "", "", ""]
        apart = format_bytes(abs(self.said - self.found))
        sign = "-" if self.said < self.found else "+"
        sizes = [format_bytes(self.said), format_bytes(self.found), sign + apart]
        return [self.op, self.where, *counts, *sizes]

    def broken(self) -> Iterator[str]:
        """Where the claim does not hold."""
        under = self.found - self.said
        if under > SMALL_BYTES and under > MOST_UNDER * self.found:
            yield f"{self.op} ({self.where}): takes {format_bytes(under)} more"


def main() -> int:
    """Run everything; print the table, write it."""
    if sys.argv[1:2] == ["--step"]:
        take_step(*sys.argv[2:])
    args = measuring.make_parser(__doc__, only=True, gpu="A100 80GB").parse_args()
    allocated.check_dummy_gpu()
    rows: dict[str, Row] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        where = environment(build(Path(folder)), gpus.find(args.gpu))
        for name in measuring.chosen(measuring.everything(), args.only):
            for types in allocated.TYPES:
                measuring.say(f"{name}, {types}")
                found = ops_of(name, types, where)
                if isinstance(found, str):
                    failed.append(f"{name}, {types}: {found}")
                    continue
                for row in found:
                    rows.setdefault(row.op, Row(row.op)).add(row)
    report = measuring.Report(
        "workspaces",
        "What kernels take, one op at a time",
        __doc__,
        [f"As the card {args.gpu}. No GPU was used.", *tables(rows.values(), failed)],
        [what for row in rows.values() for what in row.broken()],
    )
    return measuring.finish(report, args)


def tables(rows: Iterable[Row], failed: Iterable[str]) -> Iterator[str]:
    """All ops that have a workspace, or others blocks than is said."""
    there = [*rows]
    runs, alike = sum(row.runs for row in there), sum(row.alike for row in there)
    yield f"Of {runs:,} runs of {len(there)} ops, {alike:,} are alike."
    told = [row for row in there if row.working or row.alike < row.runs]
    told.sort(key=lambda row: (row.alike == row.runs, -row.working, row.op))
    yield measuring.make_table(HEADERS, [row.cells() for row in told], texts=2)
    if failed := [*failed]:
        yield "Not run: " + "; ".join(failed) + "."


def ops_of(name: str, types: str, where: Mapping[str, str]) -> list[Row] | str:
    """Of a workload, in a process of its own; or why there is nothing."""
    done = allocated.run_alone(__file__, [name, types], where)
    if done.returncode:
        why = measuring.error_line(done.stderr)
        return allocated.NOT_HERE.get(name) or allocated.CAUSES.get(name, why)
    return [Row(*row) for row in json.loads(done.stdout)]


def take_step(name: str, types: str) -> NoReturn:
    """Take one step on the GPU that is there, and say what its ops asked for."""
    workload, follow = allocated.on_dummy_gpu(name)
    step = make_step(workload, allocated.TYPES[types])
    with AskedFor() as asked_for:
        allocated.one_step(step, follow)
    rows = []
    for op, runs in asked_for.found.items():
        worst = max(runs, key=lambda one: abs(one.apart_bytes))
        rows.append(
            [
                op,
                len(runs),
                sum(one.works for one in runs),
                sum(one.said == one.found for one in runs),
                total(worst.said),
                total(worst.found),
                f"{name}, {types}",
            ]
        )
    allocated.leave_with(rows)


if __name__ == "__main__":
    measuring.run(main)
