"""Proves how close plans are to the best there could be, and that no practice is ahead.

For every graph file in traces/ and 20 budgets, even from 80 % down to 20 % of the
activation bytes being left, the plan stands beside the lower bound on any schedule of
the same ops and beside every practice of ``ckplan compare``. The gap is (1 + overhead)
/ (1 + bound) - 1. A budget below the floor has no plan and is counted apart. "At every
call" compares, under the peak of rerunning every layer, what the plan costs, and what
any schedule costs at least, with what that costs.

    python scripts/gaps.py
    python scripts/gaps.py --only gpt2

Exit code 1 if the median gap exceeds 1 %, the worst 3 %, or a practice is ahead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import _measuring as measuring

from ckplan.graph.file import load
from ckplan.solving.bound import gap
from ckplan.solving.common_strategies import all_baselines
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.solving.solution import Baseline
from ckplan.units import format_bytes, format_percent, format_seconds

BUDGETS = 20
FREED = (0.2, 0.8)  # of the activation bytes
MOST_MEDIAN, MOST_WORST = 0.01, 0.03
HEADERS = (
    "trace",
    "floor",
    "plans",
    "median gap",
    "worst gap",
    "at freed",
    "at every call",
    "bound there",
    "every call",
    "practices ahead",
    "CPU",
)


@dataclass(frozen=True)
class Plan:
    """The plan under one budget."""

    freed: float
    overhead: float
    bound: float
    ahead: tuple[str, ...]  # practices that fit and cost less

    @property
    def gap(self) -> float:
        """How much cheaper any schedule could make the step."""
        return gap(self.overhead, self.bound)


@dataclass(frozen=True)
class Row:
    """All plans of one trace."""

    name: str
    floor_bytes: int
    plans: Sequence[Plan]
    every: Baseline | None  # rerunning every layer
    at_every: float | None  # overhead of the plan under the same peak
    bound_at_every: float | None  # of any schedule
    seconds: float

    def cells(self) -> list[str]:
        """A row of the table."""
        gaps = [plan.gap for plan in self.plans]
        worst = max(self.plans, key=lambda plan: plan.gap, default=None)
        ahead = sorted({name for plan in self.plans for name in plan.ahead})
        return [
            self.name,
            format_bytes(self.floor_bytes),
            f"{len(self.plans)} of {BUDGETS}",
            format_percent(statistics.median(gaps)) if gaps else "",
            format_percent(worst.gap) if worst else "",
            format_percent(worst.freed) if worst else "",
            *map(
                measuring.format_overhead,
                (
                    self.at_every,
                    self.bound_at_every,
                    self.every.overhead if self.every else None,
                ),
            ),
            ", ".join(ahead) or "none",
            format_seconds(self.seconds),
        ]


def main() -> int:
    """Solve every trace, print the table, write it."""
    args = measuring.make_parser(__doc__, only=True).parse_args()
    traces = measuring.recorded()
    chosen = measuring.chosen(traces, args.only)
    rows = [solve_all(name, traces[name]) for name in chosen]
    gaps = [plan.gap for row in rows for plan in row.plans]
    median, worst = statistics.median(gaps), max(gaps)
    summary = (
        f"Over {len(gaps)} plans: median gap {format_percent(median)}, worst "
        f"{format_percent(worst)}."
    )
    report = measuring.Report(
        "gaps",
        "How close plans are to the best there could be",
        __doc__,
        [measuring.make_table(HEADERS, [row.cells() for row in rows]), summary],
        list(broken(rows, median)),
    )
    return measuring.finish(report, args)


def solve_all(name: str, path: Path) -> Row:
    """Solve one trace for all budgets."""
    measuring.say(name)
    began = time.process_time()
    planner = Planner(load(path))
    peak_bytes = planner.unplanned.peak_bytes
    activations = planner.unplanned.peak_by_kind["activation"]
    plans = []
    for place in range(BUDGETS):
        freed = FREED[0] + (FREED[1] - FREED[0]) * place / (BUDGETS - 1)
        budget = peak_bytes - round(freed * activations)
        found = planner.within(budget)
        if found is not None:
            overhead = found[0].overhead
            others = all_baselines(planner, MemoryLimit(budget))
            ahead = tuple(o.name for o in others if o.fits and o.overhead < overhead)
            plans.append(Plan(freed, overhead, planner.bound(budget), ahead))
    loose = all_baselines(planner, MemoryLimit(peak_bytes))
    every = next((o for o in loose if o.name == "every call"), None)
    found = planner.within(every.peak_bytes) if every else None
    seconds = time.process_time() - began
    return Row(
        name,
        planner.floor.peak_bytes,
        plans,
        every,
        found[0].overhead if found else None,
        planner.bound(every.peak_bytes) if every else None,
        seconds,
    )


def broken(rows: Sequence[Row], median: float) -> Iterator[str]:
    """Where the claim does not hold."""
    if median > MOST_MEDIAN:
        yield f"the median gap is {format_percent(median)}"
    for row in rows:
        for plan in row.plans:
            where = f"{row.name}, {format_percent(plan.freed)} freed"
            if plan.gap > MOST_WORST:
                yield f"{where}: the gap is {format_percent(plan.gap)}"
            if plan.ahead:
                yield f"{where}: {', '.join(plan.ahead)} cost less"


if __name__ == "__main__":
    measuring.run(main)
