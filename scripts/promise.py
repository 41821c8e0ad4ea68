"""Proves the promise: what is planned fits, as predicted, and computes the same.

For every workload of configs/workloads and two budgets, the commands ``ckplan
profile``, ``solve`` and ``verify`` run in processes of their own, as a user runs them.
The budgets lie a third and two thirds of the way from the unplanned peak down to the
floor that ``solve`` reports. The promise is kept where the measured peak is within the
budget, both predicted peaks are within 2 % of the measured ones, and loss, gradients,
buffers and random state have the same bits as without the plan, in two steps.

    python scripts/promise.py
    python scripts/promise.py --only mlp --set layers=3

Exit code 1 if any row breaks the promise.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import _measuring as measuring

from ckplan.errors import CkplanError
from ckplan.units import format_bytes

HEADERS = (
    "workload",
    "budget",
    "predicted peak",
    "measured peak",
    "error",
    "fits",
    "bits equal",
    "unplanned predicted",
    "unplanned measured",
    "error",
    "predicted overhead",
    "bound",
)
RESULTS = ("loss", "gradients", "buffers", "random_state")


@dataclass(frozen=True)
class Row:
    """One workload under one budget: what ``solve`` and ``verify`` say."""

    workload: str
    solved: dict[str, Any]
    verified: dict[str, Any]

    @property
    def planned(self) -> tuple[int, int]:
        """Predicted and measured peak of the planned step."""
        return self.solved["peak_bytes"], self.verified["measured_peak_bytes"]

    @property
    def unplanned(self) -> tuple[int, int | None]:
        """Predicted and measured peak of the unplanned step, if that one fits."""
        measured_bytes = self.verified["unplanned_measured_peak_bytes"]
        return self.solved["unplanned_peak_bytes"], measured_bytes

    @property
    def different(self) -> list[str]:
        """Results that were not seen to be equal."""
        return [name for name in RESULTS if not self.verified[f"{name}_equal"]]

    def cells(self, *, timed: bool) -> list[str]:
        """The row of the table, with the measured overhead if that was asked for."""
        predicted_bytes, measured_bytes = self.unplanned
        unplanned = measured_bytes and (
            format_bytes(measured_bytes),
            measuring.format_error(predicted_bytes, measured_bytes),
        )
        overhead = self.verified["overhead"]  # None if there is no memory to time both
        return [
            self.workload,
            format_bytes(self.solved["budget_bytes"]),
            *map(format_bytes, self.planned),
            measuring.format_error(*self.planned),
            "yes" if self.verified["fits"] else "**no**",
            "**not " + ", ".join(self.different) + "**" if self.different else "yes",
            format_bytes(predicted_bytes),
            *(unplanned or ("n/a", "n/a")),
            measuring.format_overhead(self.solved["overhead"]),
            measuring.format_overhead(self.solved["bound_overhead"]),
            *([measuring.format_overhead(overhead)] if timed else []),
        ]

    def broken(self) -> Iterator[str]:
        """What of the promise does not hold."""
        budget = format_bytes(self.solved["budget_bytes"])
        where = f"{self.workload} at {budget}"
        if not self.verified["fits"]:
            over_bytes = self.planned[1] - self.solved["budget_bytes"]
            yield f"{where}: the measured peak is {over_bytes} B over the budget"
        if self.different:
            names = [*self.different, *self.verified["different"]]
            yield f"{where}: not seen to be equal: {', '.join(names)}"
        peaks = (("planned", self.planned), ("unplanned", self.unplanned))
        for name, (predicted, measured) in peaks:
            off = measuring.relative_error(predicted, measured) if measured else 0
            if abs(off) > measuring.MOST_ERROR:
                error = measuring.format_error(predicted, measured)
                yield f"{where}: the predicted {name} peak is off by {error}"


@dataclass(frozen=True)
class Findings:
    """All rows, and where there is none because a command failed."""

    rows: list[Row] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def broken(self) -> list[str]:
        """Where the promise does not hold."""
        return [*(line for row in self.rows for line in row.broken()), *self.failed]


def main() -> int:
    """Measure all rows, and report."""
    args = _arguments()
    found = Findings()
    for workload in measuring.workloads(args.only):
        try:
            measure(workload, args, found)
        except CkplanError as error:
            found.failed.append(f"{workload}: {error.what}")
    return measuring.finish(_report(found, args.steps), args)


def measure(workload: str, args: argparse.Namespace, found: Findings) -> None:
    """Profile a workload once, then solve and verify it for every budget."""
    settings = measuring.with_settings(args.settings)
    with tempfile.TemporaryDirectory(prefix="ckplan-promise-") as folder:
        trace, plan = f"{folder}/trace.json.gz", f"{folder}/plan.yaml"
        measuring.say(f"{workload}: profile")
        measuring.run_ckplan(
            "profile",
            measuring.workload_path(workload),
            *settings,
            "--fresh",
            "-o",
            trace,
        )
        verify = ("verify", measuring.workload_path(workload), plan, *settings)
        for budget_bytes in _budgets(trace, plan, args.shares):
            budget = format_bytes(budget_bytes)
            measuring.say(f"{workload}: solve and verify at {budget}")
            try:
                solved = _solve(trace, plan, str(budget_bytes))
                verified = measuring.run_ckplan(
                    *verify, "--seed", str(measuring.SEED), "--steps", str(args.steps)
                )
            except CkplanError as error:
                found.failed.append(f"{workload} at {budget}: {error.what}")
            else:
                found.rows.append(Row(workload, solved, verified))


def _budgets(trace: str, plan: str, shares: Sequence[Fraction]) -> list[int]:
    """Budgets some way down from the unplanned peak to the floor."""
    loose = _solve(trace, plan, "100%")
    peak_bytes, floor_bytes = loose["unplanned_peak_bytes"], loose["floor_bytes"]
    return [peak_bytes - int(share * (peak_bytes - floor_bytes)) for share in shares]


def _solve(trace: str, plan: str, budget: str) -> dict[str, Any]:
    return measuring.run_ckplan(
        "solve", trace, "--budget", budget, "-o", plan, "--force"
    )


def _report(found: Findings, steps: int) -> measuring.Report:
    headers = (*HEADERS, "measured overhead") if steps else HEADERS
    rows = [row.cells(timed=steps > 0) for row in found.rows]
    return measuring.Report(
        name="promise",
        title="The promise: it fits, as predicted, and computes the same",
        doc=__doc__,
        parts=[measuring.make_table(headers, rows)],
        broken=found.broken(),
    )


def _arguments() -> argparse.Namespace:
    parser = measuring.make_parser(__doc__, settings=True, only=True)
    parser.add_argument(
        "--shares",
        metavar="SHARE",
        type=_share,
        nargs="+",
        default=[Fraction(1, 3), Fraction(2, 3)],
        help="budgets, as parts of the way from the unplanned peak to the floor  "
        "[default: 1/3 2/3]",
    )
    parser.add_argument(
        "--steps",
        metavar="N",
        type=int,
        default=0,
        help="time so many steps of each  [default: 0]",
    )
    return parser.parse_args()


def _share(text: str) -> Fraction:
    share = Fraction(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return share


if __name__ == "__main__":
    measuring.run(main)
