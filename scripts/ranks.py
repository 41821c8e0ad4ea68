"""Proves what one of several ranks needs: predicted beside the allocator of each.

Two gloo processes train small models under DDP and under FSDP2, unplanned and with
plans for two budgets, which lie a third and two thirds of the way from the unplanned
peak of a rank down to its floor. The claim holds where the measured peak of every rank
is within the budget and the first rank's within 1 % of the prediction (a later rank has
fewer rows where they are uneven), and where the parameters of both ranks after six
steps have the same bits as without the plan. Measured is what the allocator holds
during a step; under FSDP2, what it holds between steps is counted by its storages, as
the profiler does not see all that gloo lets go of.

    python scripts/ranks.py
    python scripts/ranks.py --only gpt2

Exit code 1 if any row breaks the claim.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import _measuring as measuring

sys.path.insert(0, str(measuring.ROOT / "tests" / "helpers"))

from two_ranks import Trained, train_two

from ckplan.graph.sharding import shard
from ckplan.plan import file as plan_file
from ckplan.solving.planner import Planner
from ckplan.solving.solve import to_plan
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec
from ckplan.units import format_bytes

MOST_ERROR = 0.01
SCHEMES = ("ddp", "fsdp2")
MODELS = {  # options, and which modules are gathered as one
    "gpt2": ({"layers": 4, "width": 192, "batch": 4, "length": 128}, "transformer.h"),
    "bert": (
        {"layers": 4, "width": 192, "heads": 3, "batch": 4, "length": 128},
        "bert.encoder.layer",
    ),
    "llama": (
        {"layers": 4, "width": 192, "length": 128, "vocab": 4096},
        "model.layers",
    ),
}
HEADERS = (
    "workload",
    "scheme",
    "budget",
    "predicted peak",
    "rank 0",
    "error",
    "rank 1",
    "error",
    "within budget",
    "bits equal",
)


@dataclass(frozen=True)
class Row:
    """One plan, or none, on two ranks."""

    workload: str
    scheme: str
    budget_bytes: int | None
    predicted_bytes: int
    ranks: tuple[Trained, Trained]
    unplanned: tuple[Trained, Trained]

    @property
    def fits(self) -> bool:
        budget_bytes = self.budget_bytes
        peaks = [rank.peak_bytes for rank in self.ranks]
        return budget_bytes is None or max(peaks) <= budget_bytes

    @property
    def equal(self) -> bool:
        pairs = zip(self.ranks, self.unplanned, strict=True)
        return all(one.digest == other.digest for one, other in pairs)

    def cells(self) -> list[str]:
        budget_bytes = self.budget_bytes
        return [
            self.workload,
            self.scheme,
            "unplanned" if budget_bytes is None else format_bytes(budget_bytes),
            format_bytes(self.predicted_bytes),
            *(
                cell
                for rank in self.ranks
                for cell in (
                    format_bytes(rank.peak_bytes),
                    measuring.format_error(self.predicted_bytes, rank.peak_bytes),
                )
            ),
            "yes" if self.fits else "**no**",
            "yes" if self.equal else "**no**",
        ]

    def broken(self) -> Iterator[str]:
        where = f"{self.workload}, {self.scheme}, {self.cells()[2]}"
        if not self.fits:
            yield f"{where}: a rank exceeds the budget"
        if not self.equal:
            yield f"{where}: other parameters than without the plan"
        error = measuring.relative_error(self.predicted_bytes, self.ranks[0].peak_bytes)
        if abs(error) > MOST_ERROR:
            yield f"{where}: the prediction is off by {100 * error:+.2f} %"


def main() -> int:
    """Measure all rows, and report."""
    parser = measuring.make_parser(__doc__)
    parser.add_argument("--only", choices=MODELS, help="measure this workload alone")
    args = parser.parse_args()
    rows = [
        row
        for name in ([args.only] if args.only else MODELS)
        for scheme in SCHEMES
        for row in measure(name, scheme)
    ]
    report = measuring.Report(
        name="ranks",
        title="What one of several ranks needs",
        doc=__doc__,
        parts=[measuring.make_table(HEADERS, [row.cells() for row in rows], texts=3)],
        broken=[line for row in rows for line in row.broken()],
    )
    return measuring.finish(report, args)


def measure(name: str, scheme: str) -> list[Row]:
    """Unplanned, then under two budgets."""
    options, units = MODELS[name]
    spec = WorkloadSpec(measuring.location_of(name), options)
    measuring.say(f"{name}, {scheme}")
    planner = Planner(shard(profile_workload(spec), scheme, 2))
    peak_bytes, floor_bytes = planner.unplanned.peak_bytes, planner.floor.peak_bytes
    budgets = [peak_bytes - share * (peak_bytes - floor_bytes) // 3 for share in (1, 2)]
    with tempfile.TemporaryDirectory(prefix="ckplan-ranks-") as folder:
        files, predicted = [], []
        for budget_bytes in budgets:
            solution = planner.solve(budget_bytes)
            predicted.append(solution.timeline.peak_bytes)
            files.append(Path(folder) / f"{budget_bytes}.yaml")
            plan_file.save(to_plan(planner.graph, solution), files[-1], force=False)
        first, second = train_two(Path(folder), _source(spec, units), scheme, files)
    trained = list(zip(first, second, strict=True))  # unplanned comes last
    order = zip(
        (None, *budgets),
        (peak_bytes, *predicted),
        (trained[-1], *trained),
        strict=False,
    )
    return [Row(name, scheme, *one, trained[-1]) for one in order]


def _source(spec: WorkloadSpec, units: str) -> str:
    return (
        "from ckplan.training.loading import WorkloadSpec\n"
        f"make = WorkloadSpec({spec.target!r}, {spec.options!r}).build\n"
        f"units = lambda model: model.get_submodule({units!r})"
    )


if __name__ == "__main__":
    measuring.run(main)
