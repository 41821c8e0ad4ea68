"""Proves that two ways of telling what CUDA would hold agree, and a third with a GPU.

Every workload is profiled for CUDA, in float32 and under autocast to bfloat16, and
solved for an overhead of 10 %. Predicted, by replaying the graph, stands beside the dry
run, which follows every storage of the planned model while it runs on tensors without
bytes. Where there is a GPU, what its allocator measured stands there, too; without one
these columns are empty, and nothing here is a measurement.

    python scripts/cuda.py
    python scripts/cuda.py --only gpt2 --gpu "RTX 4090"

Exit code 1 if predicted and dry run are more than 2 % apart, predicted is the lower by
more than 0.1 %, or measured is more than 1 % away.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import _measuring as measuring
import torch

from ckplan.units import format_bytes

WORKLOADS = ("mlp", "gpt2", "bert", "llama", "vit", "resnet50", "unet")
TYPES = {"fp32": (), "bf16": ("--amp", "bf16")}
OVERHEAD = "10%"
MOST_APART, MOST_UNDER, MOST_MEASURED = 0.02, 0.001, 0.01
_ATTENTION = "as CUDA does it: attention: "
HEADERS = (
    "workload",
    "types",
    "attention",
    "predicted",
    "dry run",
    "error",
    "measured",
    "planned",
    "dry run",
    "error",
    "measured",
)


@dataclass(frozen=True)
class Peak:
    """One step, told in two ways or three."""

    predicted_bytes: int
    dry_run_bytes: int
    measured_bytes: int | None

    def cells(self) -> list[str]:
        """Its part of a row."""
        measured = self.measured_bytes
        return [
            format_bytes(self.predicted_bytes),
            format_bytes(self.dry_run_bytes),
            measuring.format_error(self.predicted_bytes, self.dry_run_bytes),
            "" if measured is None else format_bytes(measured),
        ]

    def broken(self) -> Iterator[str]:
        """Where the claim does not hold."""
        error = measuring.relative_error(self.predicted_bytes, self.dry_run_bytes)
        if not -MOST_UNDER <= error <= MOST_APART:
            yield f"predicted is {error:+.2%} from the dry run"
        if self.measured_bytes is not None:
            error = measuring.relative_error(self.predicted_bytes, self.measured_bytes)
            if abs(error) > MOST_MEASURED:
                yield f"predicted is {error:+.2%} from measured"


@dataclass(frozen=True)
class Row:
    """One workload in one choice of types."""

    workload: str
    types: str
    attention: str
    unplanned: Peak
    planned: Peak

    def cells(self) -> list[str]:
        """A row of the table."""
        first = [self.workload, self.types, self.attention]
        return [*first, *self.unplanned.cells(), *self.planned.cells()]


def main() -> int:
    """Profile, solve, run dry; print the table, write it."""
    options = {"settings": True, "only": True, "gpu": "A100 40GB"}
    args = measuring.make_parser(__doc__, **options).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row_of(name, types, args.settings, args.gpu, Path(folder))
            for name in measuring.chosen(WORKLOADS, args.only)
            for types in TYPES
        ]
    report = measuring.Report(
        "cuda",
        "What CUDA would hold",
        __doc__,
        [
            f"For the card {args.gpu}, plans of at most {OVERHEAD} overhead:",
            measuring.make_table(HEADERS, [row.cells() for row in rows], texts=3),
        ],
        list(broken(rows)),
    )
    return measuring.finish(report, args)


def row_of(
    name: str, types: str, settings: Sequence[str], gpu: str, folder: Path
) -> Row:
    """Profile and solve one workload, and run both steps dry."""
    measuring.say(f"{name}, {types}")
    trace, plan = str(folder / "trace.json.gz"), str(folder / "plan.yaml")
    of = [
        measuring.workload_path(name),
        *measuring.with_settings(settings),
        *TYPES[types],
    ]
    to = ["--gpu", gpu, "-o", trace, "--force"]
    step = measuring.run_ckplan("profile", *of, "--device", "cuda", *to)
    goal = ["--max-overhead", OVERHEAD]
    solved = measuring.run_ckplan("solve", trace, *goal, "-o", plan, "--force")
    verify = ["verify", measuring.workload_path(name), plan, *of[1:]]
    dry = measuring.run_ckplan(*verify, "--fake", "--trace", trace)
    here = torch.cuda.is_available()
    real = measuring.run_ckplan(*verify, "--steps", "0") if here else {}
    kernels = (n for n in step["notes"] if n.startswith(_ATTENTION))
    return Row(
        name,
        types,
        ", ".join(k.removeprefix(_ATTENTION).partition(" ")[0] for k in kernels),
        Peak(
            solved["unplanned_peak_bytes"],
            dry["unplanned_dry_run_peak_bytes"],
            real.get("unplanned_measured_peak_bytes"),
        ),
        Peak(
            solved["peak_bytes"],
            dry["dry_run_peak_bytes"],
            real.get("measured_peak_bytes"),
        ),
    )


def broken(rows: Sequence[Row]) -> Iterator[str]:
    """Where the claim does not hold."""
    for row in rows:
        for step, peak in (("unplanned", row.unplanned), ("planned", row.planned)):
            for what in peak.broken():
                yield f"{row.workload}, {row.types}, {step}: {what}"


if __name__ == "__main__":
    measuring.run(main)
