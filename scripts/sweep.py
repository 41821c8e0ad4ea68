"""Proves that plans fit: 20 budgets between floor and unplanned peak, measured.

Every workload is small, so that all of this takes minutes: what is shown are bytes,
which do not depend on who else uses the machine. For each budget the plan is put on the
workload, which then takes two training steps; the allocator's peak of the second one is
what is measured. Kept where every measured peak is within its budget, a larger budget
never gives a smaller measured peak nor a larger predicted overhead, every predicted
peak is at most 0.3 % above the measured one and 0.1 % below it, and loss, gradients,
buffers and random state have the same bits as without the plan.

With ``--floor`` there are two budgets: the floor, below which there is no plan, and 2 %
more. There the peak lies in a recomputation. All workloads take part, the zoo's
included, and some of those under autocast to bfloat16.

With ``--offload FOLDER``, plans may move tensors to a file there. They are made for a
disk that takes no time, so that they move; bytes and bits do not depend on its speed.

    python scripts/sweep.py
    python scripts/sweep.py --only gpt2 --budgets 4
    python scripts/sweep.py --zoo --budgets 3
    python scripts/sweep.py --floor
    python scripts/sweep.py --zoo --budgets 3 --offload /tmp

Exit code 1 if any of it does not hold.
"""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import _measuring as measuring

from ckplan.errors import CkplanError
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.simulating.moving import Link
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.offloading import MovingPlanner
from ckplan.solving.planner import Planner
from ckplan.solving.solve import to_plan
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec, parse_options
from ckplan.training.step import Training
from ckplan.units import format_bytes, format_percent
from ckplan.verifying.compare_steps import differing_results
from ckplan.verifying.worker import FIRST_STEPS, FirstSteps, Job, Worker

_TEXT = {"layers": 4, "width": 128, "heads": 4, "length": 128, "vocab": 1000}
_ABOVE_FLOOR = (0.0, 0.02)
_MOST_ABOVE, _MOST_UNDER = 0.003, 0.001  # of predictions, as fractions of measured
_FREE = 1e15  # bytes per second of a disk that takes no time
_MOST_TRIES = 3  # kernels of torch on CPU are not always deterministic


@dataclass(frozen=True)
class Case:
    """A small workload, and how it is trained."""

    file: str
    options: Mapping[str, Any]
    training: Training = field(default_factory=Training)
    factory: str = "build"


CASES = {
    "mlp": Case("mlp", {"layers": 6, "width": 128, "batch": 512}),
    "gpt2": Case("gpt2", {**_TEXT, "batch": 8}),
    "gpt2, bf16": Case("gpt2", {**_TEXT, "batch": 8}, Training(amp="bf16")),
    "gpt2, 3 batches": Case("gpt2", {**_TEXT, "batch": 8}, Training(accumulate=3)),
    "bert": Case("bert", {**_TEXT, "batch": 8}),
    "llama": Case("llama", {**_TEXT, "groups": 2, "batch": 8}),
    "vit": Case(
        "vit", {"layers": 4, "width": 128, "heads": 4, "batch": 16, "size": 112}
    ),
    "resnet50, SGD": Case(
        "resnet50", {"batch": 8, "size": 96, "classes": 10}, Training("sgd")
    ),
    "unet, SGD": Case(
        "unet", {"layers": 1, "width": 32, "batch": 4, "size": 64}, Training("sgd")
    ),
}


UNDER_AUTOCAST = ("lora", "mistral", "convnext")


def zoo() -> dict[str, Case]:
    """The models of many families in configs/workloads/zoo.py."""
    path = measuring.ROOT / measuring.workload_path("zoo")
    everything = runpy.run_path(str(path))
    made = (everything["Made"], everything["MadeWithLoss"])
    return {
        name: Case("zoo", {}, factory=name)
        for name, value in everything.items()
        if getattr(value, "__annotations__", {}).get("return") in made
    }


def everything() -> dict[str, Case]:
    """All of these, the zoo's under names of their own, and some under autocast."""
    models = {f"zoo {name}": case for name, case in zoo().items()}
    bf16 = Training(amp="bf16")
    autocast = {
        f"zoo {name}, bf16": replace(models[f"zoo {name}"], training=bf16)
        for name in UNDER_AUTOCAST
    }
    return {**CASES, **models, **autocast}


@dataclass(frozen=True)
class Row:
    """One budget: what was planned, and what was measured."""

    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    different: int  # results that are not the same bits
    overhead: float
    moved_bytes: int = 0

    @property
    def error(self) -> float:
        """Of the predicted peak, as a fraction of the measured one."""
        return measuring.relative_error(self.predicted_bytes, self.measured_bytes)


@dataclass(frozen=True)
class Sweep:
    """All budgets of one workload, the smallest first."""

    name: str
    floor_bytes: int
    measured_bytes: int  # unplanned
    rows: tuple[Row, ...]

    def cells(self) -> list[str]:
        """The row of the summary."""
        rows = self.rows
        return [
            self.name,
            format_bytes(self.floor_bytes),
            format_bytes(self.measured_bytes),
            f"{len({row.measured_bytes for row in rows})}",
            f"{sum(row.measured_bytes <= row.budget_bytes for row in rows)} of "
            f"{len(rows)}",
            _worst(rows),
            "**no**" if any(self.disorder()) else "yes",
            f"{sum(not row.different for row in rows)} of {len(rows)}",
        ]

    def disorder(self) -> Iterator[str]:
        """Where more memory gives a smaller peak, or costs more time."""
        for less, more in pairwise(self.rows):
            where = f"{self.name} at {format_bytes(more.budget_bytes)}"
            if more.measured_bytes < less.measured_bytes:
                yield f"{where}: the measured peak is smaller than with less memory"
            if more.overhead > less.overhead:
                yield f"{where}: the predicted overhead is larger than with less memory"

    def broken(self) -> Iterator[str]:
        """What does not hold."""
        for row in self.rows:
            where = f"{self.name} at {format_bytes(row.budget_bytes)}"
            over_bytes = row.measured_bytes - row.budget_bytes
            if over_bytes > 0:
                yield f"{where}: the measured peak is {over_bytes} B over the budget"
            if not -_MOST_UNDER <= row.error <= _MOST_ABOVE:
                off = measuring.format_error(row.predicted_bytes, row.measured_bytes)
                yield f"{where}: predicted is {off} from the measured peak"
            if row.different:
                yield f"{where}: {row.different} results differ from the unplanned ones"
        yield from self.disorder()


def main() -> int:
    """Measure all sweeps, and report."""
    args = _arguments()
    cases = everything() if args.floor else zoo() if args.zoo else CASES
    budgets = _at_floor if args.floor else partial(_between, args.budgets)
    sweeps, failed = [], []
    for name in measuring.chosen(cases, args.only):
        try:
            given = budgets, args.settings, args.offload
            sweeps.append(sweep(name, cases[name], *given))
        except CkplanError as error:
            failed.append(f"{name}: {error.what}")
            measuring.say(failed[-1])
    name = "sweep_floor" if args.floor else "sweep_zoo" if args.zoo else "sweep"
    name += "_offload" if args.offload else ""
    return measuring.finish(_report(name, sweeps, failed), args)


def _at_floor(floor_bytes: int, unplanned_bytes: int) -> list[int]:
    """Budgets at the floor and closely above it."""
    budgets = [int(floor_bytes * (1 + share)) for share in _ABOVE_FLOOR]
    return [min(budget, unplanned_bytes) for budget in budgets]


def _between(number: int, floor_bytes: int, unplanned_bytes: int) -> list[int]:
    """Budgets evenly between the two."""
    span = unplanned_bytes - floor_bytes
    return [floor_bytes + span * (i + 1) // (number + 1) for i in range(number)]


def sweep(
    name: str,
    case: Case,
    budgets: Callable[[int, int], list[int]],
    settings: list[str],
    folder: Path | None = None,
) -> Sweep:
    """Profile a workload once, then plan and measure it for every budget."""
    options = {**case.options, **parse_options(settings)}
    path = measuring.ROOT / measuring.workload_path(case.file)
    spec = WorkloadSpec(f"{path}:{case.factory}", options)
    measuring.say(f"{name}: profile")
    graph = profile_workload(spec, training=case.training)
    planner = Planner(graph)
    moving = MovingPlanner(planner, Link(_FREE)) if folder else None
    top = planner.unplanned.peak_bytes
    floor = moving.floor_bytes if moving else planner.floor.peak_bytes
    unplanned = _measure(spec, None, case.training)
    rows: list[Row] = []
    measured: dict[tuple[PlannedRegion, ...], tuple[int, int]] = {}
    for budget_bytes in budgets(floor, top):
        measuring.say(f"{name}: {format_bytes(budget_bytes)}")
        limit = MemoryLimit(budget_bytes)
        solution = moving.solve(limit) if moving else planner.solve(budget_bytes)
        plan = Plan(regions=to_plan(graph, solution).regions)
        if plan.regions not in measured:
            found = _compare(spec, plan, case.training, unplanned, folder)
            measured[plan.regions] = found
        line, seen = solution.timeline, measured[plan.regions]
        moved_bytes = line.moves.moved_bytes
        rows.append(
            Row(budget_bytes, line.peak_bytes, *seen, line.overhead, moved_bytes)
        )
    found = Sweep(name, floor, unplanned.peak_bytes, tuple(rows))
    measuring.say(f"{name}: " + ("; ".join(found.broken()) or "kept"))
    return found


def _compare(
    spec: WorkloadSpec,
    plan: Plan,
    training: Training,
    unplanned: FirstSteps,
    folder: Path | None,
) -> tuple[int, int]:
    """The measured peak, and how many results differ from the unplanned ones."""
    for _ in range(_MOST_TRIES):
        planned = _measure(spec, plan, training, folder)
        different = len(differing_results((unplanned, planned)) or ())
        if not different:
            break
    return planned.peak_bytes, different


def _measure(
    spec: WorkloadSpec,
    plan: Plan | None,
    training: Training,
    folder: Path | None = None,
) -> FirstSteps:
    job = Job(spec, plan, training, measuring.SEED, spill=folder)
    found = Worker(job).answer(FIRST_STEPS)
    if isinstance(found, CkplanError):
        raise found
    assert isinstance(found, FirstSteps)
    return found


def _worst(rows: tuple[Row, ...]) -> str:
    worst = max(rows, key=lambda row: abs(row.error))
    return measuring.format_error(worst.predicted_bytes, worst.measured_bytes)


def _report(name: str, sweeps: list[Sweep], failed: list[str]) -> measuring.Report:
    summary = measuring.make_table(
        (
            "workload",
            "floor",
            "unplanned peak",
            "different peaks",
            "within budget",
            "worst prediction",
            "monotone",
            "bits equal",
        ),
        [sweep.cells() for sweep in sweeps],
    )
    headers = (
        *("workload", "budget", "predicted peak", "measured peak"),
        *("overhead", "moved"),
    )
    rows = [
        [
            sweep.name,
            *(
                f"{n:,}"
                for n in (row.budget_bytes, row.predicted_bytes, row.measured_bytes)
            ),
            format_percent(row.overhead, sign=True),
            f"{row.moved_bytes:,}",
        ]
        for sweep in sweeps
        for row in sweep.rows
    ]
    details = measuring.make_table(headers, rows)
    every = [row for sweep in sweeps for row in sweep.rows]
    equal = sum(not row.different for row in every)
    moving = sum(row.moved_bytes > 0 for row in every)
    count = (
        f"{len(every)} plans, {moving} of which move tensors; bits equal in {equal}."
    )
    return measuring.Report(
        name=name,
        title="Every budget holds",
        doc=__doc__,
        parts=[summary, count, "In bytes; the overhead is predicted.", details],
        broken=[*(line for sweep in sweeps for line in sweep.broken()), *failed],
    )


def _arguments() -> argparse.Namespace:
    parser = measuring.make_parser(__doc__, settings=True, only=True)
    parser.add_argument(
        "--zoo",
        action="store_true",
        help="sweep configs/workloads/zoo.py",
    )
    parser.add_argument(
        "--floor",
        action="store_true",
        help="sweep all of these at the floor and 2 %% above it",
    )
    parser.add_argument(
        "--budgets", metavar="N", type=int, default=20, help="how many  [default: 20]"
    )
    parser.add_argument(
        "--offload", metavar="FOLDER", type=Path, help="plans may move tensors there"
    )
    return parser.parse_args()


if __name__ == "__main__":
    measuring.run(main)
