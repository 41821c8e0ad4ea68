"""Predicted peaks beside measured ones, bitwise results, over workloads of all kinds.

Every workload of configs/workloads, the zoo's included, is profiled, and planned for
three budgets: a quarter, a half and three quarters of the way from the unplanned peak
down to the floor. The unplanned step and the planned ones then run, each in a process
of its own, where the CPU allocator is read. A row is on the line where the predicted
peak is at most 0.3 % away from the measured one and at most 0.1 % below it, the
measured peak is within the budget, and loss, gradients, buffers and random state of two
steps have the same bits as without a plan. Steps that differ are taken again, as in
``ckplan verify``, and if they never agree, on one thread, to tell chance from a
difference.

    python scripts/accuracy.py
    python scripts/accuracy.py --only lstm --only gru

Rows are kept beside the table, in a file of JSON lines, as soon as they are known; a
run that was cut goes on from there. ``--only`` measures some anew, ``--fresh`` all.
Exit code 1 if a row is over the line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import _measuring as measuring

from ckplan.errors import CkplanError
from ckplan.plan.plan import Plan
from ckplan.training.loading import WorkloadSpec
from ckplan.training.step import Training
from ckplan.units import format_bytes

UNDER_AUTOCAST = ("mistral", "convnext", "vit")
MOST_ERROR, MOST_UNDER = 0.003, 0.001
SHARES = (1 / 4, 1 / 2, 3 / 4)
MOST_REPEATS = 2
HEADERS = (
    "workload",
    "budget",
    "predicted peak",
    "measured peak",
    "error",
    "fits",
    "bits equal",
    "cause",
)
CAUSES: dict[str, str] = {}  # of rows over the line, by workload


@dataclass(frozen=True)
class Row:
    """One step of a workload: unplanned, or planned for a budget."""

    workload: str
    budget_bytes: int | None
    predicted_bytes: int
    measured_bytes: int
    different: list[str]  # results that differ from the unplanned step's
    failed: str = ""

    @property
    def error(self) -> float:
        """Of the predicted peak, as a fraction of the measured one."""
        return measuring.relative_error(self.predicted_bytes, self.measured_bytes)

    @property
    def fits(self) -> bool:
        """Whether the measured peak is within the budget."""
        return self.budget_bytes is None or self.measured_bytes <= self.budget_bytes

    @property
    def is_on_the_line(self) -> bool:
        """Whether all is as it must be."""
        if self.failed or self.different or not self.fits:
            return False
        return -MOST_UNDER <= self.error <= MOST_ERROR

    def cells(self) -> list[str]:
        """The row of the table."""
        budget = (
            "none" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        )
        cause = "" if self.is_on_the_line else CAUSES.get(self.workload, "unknown")
        if self.failed:
            return [self.workload, budget, *["n/a"] * 5, self.failed]
        return [
            self.workload,
            budget,
            format_bytes(self.predicted_bytes),
            format_bytes(self.measured_bytes),
            measuring.format_error(self.predicted_bytes, self.measured_bytes),
            "yes" if self.fits else "**no**",
            "**not " + ", ".join(self.different) + "**" if self.different else "yes",
            cause,
        ]


def main() -> int:
    """Measure what is not measured yet, and report."""
    args = _arguments()
    rows_path = _rows_path(args.output)
    rows = {} if args.fresh else _read(rows_path)
    names = _names(args.only)
    for name in names:
        if name in rows and name not in args.only:
            continue
        measuring.say(f"{name} ({names.index(name) + 1} of {len(names)})")
        rows[name] = list(_measure(name))
        _write(rows_path, rows)
    done = [row for name in _names([]) for row in rows.get(name, ())]
    whole = all(name in rows for name in _names([]))
    return measuring.finish(_report(done), args, whole=whole)


def _measure(name: str) -> Iterator[Row]:
    """All steps of one workload."""
    spec, training = _spec(name), _training(name)
    try:
        peak_bytes, plans = _alone(_plans, spec, training)
        unplanned = _alone(_first_steps, spec, None, training)
    except CkplanError as error:
        yield Row(name, None, 0, 0, [], error.what)
        return
    yield Row(name, None, peak_bytes, unplanned.peak_bytes, [])
    seen = [unplanned]
    for plan in plans:
        try:
            planned, different = _compared(spec, plan, training, seen)
        except CkplanError as error:
            yield Row(name, plan.budget_bytes, 0, 0, [], error.what)
            continue
        predicted_bytes = plan.predicted.peak_bytes
        yield Row(
            name, plan.budget_bytes, predicted_bytes, planned.peak_bytes, different
        )


def _compared(
    spec: WorkloadSpec, plan: Plan, training: Training, seen: list[Any]
) -> tuple[Any, list[str]]:
    """A planned step, and which of its results no unplanned step had."""
    from ckplan.verifying.compare_steps import num_results

    planned = _alone(_first_steps, spec, plan, training)
    for _ in range(MOST_REPEATS):
        if not _different(planned, seen):
            break
        seen.append(_alone(_first_steps, spec, None, training))
        planned = _alone(_first_steps, spec, plan, training)
    different = _different(planned, seen)
    if different and num_results(seen) > 1:
        steps = [_alone(_first_steps, spec, p, training, True) for p in (None, plan)]
        different = _different(steps[1], steps[:1])
    return planned, different


def _different(planned: Any, seen: Sequence[Any]) -> list[str]:
    """Kinds of results that differ from the unplanned step that is most alike."""
    from ckplan.verifying.compare_steps import differing_results

    def kinds(unplanned: Any) -> list[str]:
        different = differing_results((unplanned, planned)) or ()
        return sorted({result.kind for result in different})

    return min(map(kinds, seen), key=len)


# -- in processes of their own -----------------------------------------------------


def _alone(work: Callable[..., Any], *args: Any) -> Any:
    """Do something in a new process, forked from one that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["accuracy", "ckplan.verifying.worker", "diffusers"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        found = pool.submit(work, *args).result()
    if isinstance(found, CkplanError):
        raise found
    return found


def _plans(
    spec: WorkloadSpec, training: Training
) -> tuple[int, list[Plan]] | CkplanError:
    """The predicted unplanned peak, and plans for budgets between it and the floor."""
    from ckplan.solving.planner import Planner
    from ckplan.solving.solve import to_plan
    from ckplan.tracing.profile import profile_workload

    warnings.simplefilter("ignore")
    try:
        graph = profile_workload(spec, training=training)
        planner = Planner(graph)
        peak_bytes, floor_bytes = planner.unplanned.peak_bytes, planner.floor.peak_bytes
        span_bytes = peak_bytes - floor_bytes
        budgets = [peak_bytes - int(share * span_bytes) for share in SHARES]
        return peak_bytes, [to_plan(graph, planner.solve(b)) for b in budgets]
    except CkplanError as error:
        return error


def _first_steps(
    spec: WorkloadSpec, plan: Plan | None, training: Training, one_thread: bool = False
) -> Any:
    import torch

    from ckplan.verifying.worker import FIRST_STEPS, Job, Worker

    warnings.simplefilter("ignore")
    if one_thread:
        torch.set_num_threads(1)
    return Worker(Job(spec, plan, training, measuring.SEED)).answer(FIRST_STEPS)


# -- workloads and files -----------------------------------------------------------


def _names(only: Sequence[str]) -> list[str]:
    """All workloads, or some, in order: first the zoo's."""
    there = [
        *measuring.zoo(),
        *(f"{name}-bf16" for name in UNDER_AUTOCAST),
        *measuring.workloads(),
    ]
    return measuring.chosen(there, only)


def _spec(name: str) -> WorkloadSpec:
    return WorkloadSpec(measuring.location_of(name.removesuffix("-bf16")))


def _training(name: str) -> Training:
    return Training(amp="bf16" if name.endswith("-bf16") else None)


def _rows_path(output: Path | None) -> Path:
    return (output or measuring.results_path("accuracy")).with_suffix(".jsonl")


def _read(path: Path) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = Row(**json.loads(line))
        rows.setdefault(row.workload, []).append(row)
    return rows


def _write(path: Path, rows: dict[str, list[Row]]) -> None:
    lines = [json.dumps(asdict(row)) for found in rows.values() for row in found]
    path.write_text("\n".join(lines) + "\n")


def _report(rows: Sequence[Row]) -> measuring.Report:
    measured = [row for row in rows if not row.failed]
    errors = sorted(abs(row.error) for row in measured)
    names = {row.workload for row in rows}
    over = [row for row in rows if not row.is_on_the_line]
    summary = (
        f"{len(rows)} steps of {len(names)} workloads: {len(rows) - len(over)} on the "
        f"line. Absolute error: median {statistics.median(errors):.3%}, worst "
        f"{errors[-1]:.3%}; most under the measured peak: "
        f"{max(0.0, *(-row.error for row in measured)):.3%}."
    )
    return measuring.Report(
        name="accuracy",
        title="Predicted beside measured, over workloads of all kinds",
        doc=__doc__,
        parts=[summary, measuring.make_table(HEADERS, [row.cells() for row in rows])],
        broken=[", ".join(row.cells()) for row in over],
    )


def _arguments() -> argparse.Namespace:
    parser = measuring.make_parser(__doc__, only=True)
    parser.add_argument(
        "--fresh", action="store_true", help="forget the rows of earlier runs"
    )
    return parser.parse_args()


if __name__ == "__main__":
    measuring.run(main)
