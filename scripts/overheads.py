"""Predicted overheads beside measured ones, over models of all kinds and sizes.

Every model trains with plain SGD, so that activations are most of the peak. It is
profiled with its seconds in a step (``ckplan profile --in-step``) and planned for three
budgets: a quarter, a half and three quarters of the way from the unplanned peak down to
the floor. Four copies of the model, without a plan and with each of the three, then
take single steps in turns, every second turn in reverse, in one process that keeps its
memory: of two processes that take the same step, one was up to 5 % slower, as pages
lie; of copies in one process, less than 1 %. A round is as many turns as take about 16
seconds; the mean of the faster half of its steps counts, since whatever else the host
does makes steps longer. All is done with one thread and with torch's default. With one
thread, seconds are CPU seconds of the process, of which other programs take none. An
overhead is the median over rounds of a planned copy's seconds,
divided by those of the unplanned one in the same round, less one.

A row is on the line where the predicted overhead is within 2 points of the measured
one, or within 15 % of it. Rows whose own quartiles are wider than that are shown and
not counted. Three models are in no test.

    python scripts/overheads.py
    python scripts/overheads.py --only gpt2 --only mixer --rounds 12
    python scripts/overheads.py --minutes 30          # again: goes on from there

Rows are kept beside the table, in a file of JSON lines, as soon as they are known.
``--only`` measures some anew, ``--fresh`` all. Exit code 1 if fewer than 90 % of the
counted rows with default threads are on the line, or 95 % of those with one thread; if
a counted row is predicted more than 5 points under what was measured; or if more than a
third is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import _measuring as measuring
import torch
from _copies import Copies, changes
from _in_turns import own_cache
from _overhead_models import MODELS, spec_of

from ckplan import files
from ckplan.errors import CkplanError
from ckplan.solving.planner import Planner
from ckplan.solving.solve import to_plan
from ckplan.tracing.profile import profile_workload
from ckplan.tracing.steps.in_step import NOTE_IN_STEP
from ckplan.training.loading import WorkloadSpec
from ckplan.training.step import Training
from ckplan.units import format_bytes, format_seconds

SHARES = (0.25, 0.5, 0.75)
ROUND_SECONDS = 16.0
TRAINING = Training("sgd")
MOST_POINTS, MOST_RELATIVE, MOST_UNDER = 0.02, 0.15, 0.05
LEAST_ON_LINE = {1: 0.95, 0: 0.90}  # threads, 0: torch's default -> share of rows
MOST_UNCOUNTED = 1 / 3
HEADERS = (
    "model",
    "threads",
    "freed",
    "step",
    "predicted",
    "measured",
    "quartiles",
    "off",
    "line",
)


# -- rows ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One plan of a model."""

    model: str
    threads: int  # 0: torch's default
    freed_bytes: int
    step_seconds: float  # measured, unplanned
    predicted: float
    low: float  # quartiles of the measured overhead
    measured: float
    high: float
    note: str = ""  # why the seconds are not those of a step
    failed: str = ""

    @property
    def line(self) -> float:
        """How far the prediction may be off."""
        return max(MOST_POINTS, MOST_RELATIVE * abs(self.measured))

    @property
    def is_counted(self) -> bool:
        """Whether it was measured, by rounds that agree."""
        return not self.failed and self.high - self.low <= self.line

    @property
    def is_on_the_line(self) -> bool:
        """Whether the prediction holds."""
        return abs(self.predicted - self.measured) <= self.line

    def cells(self) -> list[str]:
        """The row of the table."""
        threads = str(self.threads or "default")
        if self.failed:
            return [self.model, threads, *[""] * 6, self.failed]
        percent = measuring.format_overhead
        verdict = "yes" if self.is_on_the_line else "**no**"
        if not self.is_counted:
            verdict = "not counted"
        return [
            self.model,
            threads,
            format_bytes(self.freed_bytes),
            format_seconds(self.step_seconds),
            percent(self.predicted) + ("" if not self.note else " (ops alone)"),
            percent(self.measured),
            f"{percent(self.low)} to {percent(self.high)}",
            percent(self.predicted - self.measured),
            verdict,
        ]


def main() -> int:
    """Measure what is not known yet, and report all."""
    args = _arguments()
    measuring.keep_memory()
    names = measuring.chosen(MODELS, args.only)
    path = _rows_path(args.output)
    rows = {} if args.fresh else _read(path)
    for name in args.only:
        rows = {key: found for key, found in rows.items() if key[0] != name}
    end = time.monotonic() + 60 * args.minutes
    left = [(name, t) for name in names for t in args.threads if (name, t) not in rows]
    for number, (name, threads) in enumerate(left):
        if time.monotonic() > end:
            measuring.say(f"time is over: {len(left) - number} are left")
            break
        measuring.say(f"{name}, threads: {threads or 'default'}")
        rows[name, threads] = _measure(name, threads, args.rounds)
        _write(path, rows)
        for row in rows[name, threads]:
            measuring.say("  ".join(row.cells()))
    order = {name: number for number, name in enumerate(MODELS)}
    found = sorted(rows.items(), key=lambda item: (order[item[0][0]], item[0][1]))
    report = _report([row for _, some in found for row in some])
    return measuring.finish(report, args, whole=set(MODELS) <= {n for n, _ in rows})


# -- measuring -----------------------------------------------------------------------


def _measure(name: str, threads: int, rounds: int) -> list[Row]:
    try:
        with _threads(threads), own_cache():
            return _rows(name, threads, spec_of(name), rounds)
    except CkplanError as error:
        return [Row(name, threads, 0, 0.0, 0.0, 0.0, 0.0, 0.0, failed=error.what)]


def _rows(name: str, threads: int, spec: WorkloadSpec, rounds: int) -> list[Row]:
    graph = profile_workload(spec, training=TRAINING, in_step=True)
    note = "" if NOTE_IN_STEP in graph.notes else graph.notes[-1]
    if note:
        measuring.say(note)
    planner = Planner(graph)
    whole, floor = planner.unplanned.peak_bytes, planner.floor.peak_bytes
    solved = [planner.solve(round(whole - s * (whole - floor))) for s in SHARES]
    with Copies(spec, None, TRAINING, measuring.SEED) as process:
        process.first_steps()
        process.add([(spec, to_plan(graph, one), TRAINING) for one in solved])
        of_cpu = threads == 1
        taken = [process.round(ROUND_SECONDS, of_cpu=of_cpu) for _ in range(rounds)]
    unplanned, *planned = zip(*taken, strict=True)
    return [
        Row(
            name,
            threads,
            whole - one.timeline.peak_bytes,
            statistics.median(unplanned),
            one.timeline.overhead,
            *changes(found, unplanned),
            note,
        )
        for one, found in zip(solved, planned, strict=True)
    ]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Use so many threads here and in processes started here; 0: torch's default."""
    before = torch.get_num_threads()
    count = count or os.cpu_count() or 1
    with patch.dict(os.environ, {"OMP_NUM_THREADS": str(count)}):
        torch.set_num_threads(count)
        yield
    torch.set_num_threads(before)


# -- reporting -----------------------------------------------------------------------


def _rows_path(output: Path | None) -> Path:
    return (output or measuring.results_path("overheads")).with_suffix(".jsonl")


def _read(path: Path) -> dict[tuple[str, int], list[Row]]:
    rows: dict[tuple[str, int], list[Row]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = Row(**json.loads(line))
        rows.setdefault((row.model, row.threads), []).append(row)
    return rows


def _write(path: Path, rows: dict[tuple[str, int], list[Row]]) -> None:
    lines = [json.dumps(asdict(row)) for found in rows.values() for row in found]
    files.write_text(path, "\n".join(lines) + "\n", force=True)


def _report(rows: Sequence[Row]) -> measuring.Report:
    return measuring.Report(
        name="overheads",
        title="Predicted overheads beside measured ones",
        doc=__doc__,
        parts=[
            *(_summary(rows, threads) for threads in LEAST_ON_LINE),
            measuring.make_table(HEADERS, [row.cells() for row in rows]),
        ],
        broken=list(_broken(rows)),
    )


def _counted(rows: Sequence[Row], threads: int) -> tuple[list[Row], list[Row]]:
    """All rows with so many threads, and those that count."""
    those = [row for row in rows if row.threads == threads]
    return those, [row for row in those if row.is_counted]


def _summary(rows: Sequence[Row], threads: int) -> str:
    those, counted = _counted(rows, threads)
    held = sum(row.is_on_the_line for row in counted)
    under = max((row.measured - row.predicted for row in counted), default=0.0)
    name = f"{threads} thread" if threads else "default threads"
    return (
        f"With {name}: {len(those)} plans, {len(counted)} counted, {held} on the line; "
        f"most under what was measured: {100 * max(under, 0.0):.1f} points."
    )


def _broken(rows: Sequence[Row]) -> Iterator[str]:
    for threads, least in LEAST_ON_LINE.items():
        those, counted = _counted(rows, threads)
        name = f"{threads} thread" if threads else "default threads"
        held = sum(row.is_on_the_line for row in counted)
        if held < least * len(counted):
            yield f"{name}: {held} of {len(counted)} rows are on the line"
        if len(those) - len(counted) > MOST_UNCOUNTED * len(those):
            yield f"{name}: {len(those) - len(counted)} of {len(those)} do not count"
        for row in counted:
            if row.measured - row.predicted > MOST_UNDER:
                yield f"too far under: {', '.join(row.cells())}"
    for row in rows:
        if row.failed:
            yield f"{row.model}: {row.failed}"


def _arguments() -> argparse.Namespace:
    parser = measuring.make_parser(__doc__, only=True)
    parser.add_argument(
        "--rounds", metavar="N", type=int, default=6, help="rounds of a model  [6]"
    )
    parser.add_argument(
        "--minutes",
        metavar="N",
        type=float,
        default=float("inf"),
        help="begin no model after so many; the next run goes on",
    )
    parser.add_argument(
        "--threads",
        metavar="N",
        type=int,
        action="append",
        choices=[*LEAST_ON_LINE],
        help="1, or 0 for torch's default  [both]",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="forget the rows of earlier runs"
    )
    args = parser.parse_args()
    args.threads = args.threads or [*LEAST_ON_LINE]
    if args.rounds < 2:
        parser.error(f"--rounds: at least 2, not {args.rounds}")
    return args


if __name__ == "__main__":
    measuring.run(main)
