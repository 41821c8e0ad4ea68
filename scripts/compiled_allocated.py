"""What the CUDA allocator says of compiled steps, on a GPU that computes nothing.

Every workload is compiled on a GPU that computes nothing (``scripts/_dummy_gpu.py``),
in float32 and under autocast to bfloat16: without a plan, with the smallest one, and
within budgets a third and two thirds of the way between these. The code that Inductor
generates for that card is replayed; then it is compiled and takes steps, whose kernels
do nothing and whose buffers torch's own caching allocator hands out. "Replayed" is what
``ckplan.backend`` says; "allocated" is ``torch.cuda.max_memory_allocated`` of the third
step, without the parameters, buffers and batch that the step does not use, which
generated code is not given. The first steps also tune kernels, which takes memory of
its own.

    python scripts/compiled_allocated.py
    python scripts/compiled_allocated.py --only gpt2 --gpu "RTX 4090"

This is no measurement on a GPU: workspaces of cuDNN are nothing here, and values and
seconds cannot be had.

Exit code 1 if bytes are not equal, or beyond the budget.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import _measuring as measuring
import torch
from _compiled_rows import spec_of
from _dummy_gpu import build, environment
from allocated import CUDA, check_dummy_gpu, leave_with, run_alone
from compiled_budgets import TEN

import ckplan
from ckplan import gpus
from ckplan.compiling.lowering import in_order
from ckplan.compiling.step import compiled_loss, parts_of, under_autocast
from ckplan.errors import InfeasibleError
from ckplan.training.allocator import gpu_allocator_stats
from ckplan.training.workload import Workload, on_device

TYPES = {"fp32": None, "bf16": "bf16"}
SHARES = 3  # budgets, from the smallest replayed peak on, towards the unplanned one
UNPLANNED = "unplanned"
STEPS = 3
HEADERS = ("workload", "types", "step", "budget", "replayed", "allocated", "apart")


@dataclass(frozen=True)
class Row:
    """One way to take a step."""

    workload: str
    types: str
    step: str
    budget_bytes: int | None
    replayed_bytes: int
    allocated_bytes: int
    why: str = ""  # there is nothing

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.types}, {self.step}"

    @property
    def apart_bytes(self) -> int:
        return self.replayed_bytes - self.allocated_bytes

    def cells(self) -> list[str]:
        """A row of the table."""
        budget = "" if self.budget_bytes is None else f"{self.budget_bytes:,}"
        start = [self.workload, self.types, self.step, budget]
        if self.why:
            return [*start, "", "", self.why]
        sizes = self.replayed_bytes, self.allocated_bytes, self.apart_bytes
        return [*start, *(f"{one:,}" for one in sizes)]

    def broken(self) -> Iterator[str]:
        """Where the claim does not hold."""
        if self.why:
            yield f"{self.name}: {self.why}"
        elif self.apart_bytes:
            yield f"{self.name}: {self.apart_bytes:+,} B apart"
        elif self.budget_bytes is not None and self.budget_bytes < self.replayed_bytes:
            yield f"{self.name}: beyond its budget"


def main() -> int:
    """Take all steps; print the table, write it."""
    if sys.argv[1:2] == ["--step"]:
        take_steps(*sys.argv[2:])
    args = measuring.make_parser(__doc__, only=True, gpu="RTX 4090").parse_args()
    check_dummy_gpu()
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        rows = [
            row
            for name in measuring.chosen([*TEN], args.only)
            for types in TYPES
            for row in rows_of(name, types, gpus.find(args.gpu), library)
        ]
    report = measuring.Report(
        "compiled_allocated",
        "Plans inside torch.compile, and the CUDA allocator",
        __doc__,
        [
            f"As the card {args.gpu}. No GPU was used.",
            measuring.make_table(HEADERS, [row.cells() for row in rows], texts=3),
        ],
        [what for row in rows for what in row.broken()],
    )
    return measuring.finish(report, args)


def rows_of(name: str, types: str, gpu: gpus.Gpu, library: Path) -> Iterator[Row]:
    """The steps of one workload."""
    measuring.say(f"{name}, {types}")
    done = run_alone(__file__, [name, types], environment(library, gpu))
    if done.returncode:
        why = measuring.error_line(done.stderr)
        yield Row(name, types, UNPLANNED, None, 0, 0, why)
        return
    for found in json.loads(done.stdout):
        yield Row(name, types, *found)


def take_steps(name: str, types: str) -> NoReturn:
    """Compile a workload on the GPU that is there, and say what its allocator did."""
    torch.manual_seed(0)
    workload = on_device(spec_of(name, TEN[name]).build(), CUDA)
    workload = under_autocast(workload, TYPES[types], "cuda")
    (planner,) = parts_of(workload).planners.values()
    full, held_bytes = planner.unplanned.peak_bytes, planner.unplanned.held_bytes
    allocated_bytes = held_bytes + allocated_by(workload, in_order)
    found: list[tuple[object, ...]] = [(UNPLANNED, None, full, allocated_bytes)]
    with suppress(InfeasibleError):
        planner.solve(1)
    low = planner.replayed(planner.smallest.saved).peak_bytes
    for share in range(SHARES):
        budget_bytes = low + (full - low) * share // SHARES
        plan = planner.solve(budget_bytes).plan
        torch._dynamo.reset()
        backend = ckplan.backend(plan)
        taken_bytes = allocated_by(workload, backend)
        replayed = backend.chosen[-1].replayed
        allocated_bytes = replayed.held_bytes + taken_bytes
        step = f"{share}/{SHARES}"
        found.append((step, budget_bytes, replayed.peak_bytes, allocated_bytes))
    leave_with(found)


def allocated_by(workload: Workload, backend: object) -> int:
    """Most bytes that a step takes of the allocator, beyond what was there before."""
    loss = compiled_loss(workload, backend)
    for _ in range(STEPS):
        workload.model.zero_grad()
        before = torch.cuda.memory_allocated(CUDA)
        torch.cuda.reset_peak_memory_stats(CUDA)
        loss().backward()
    most_bytes = gpu_allocator_stats(CUDA).allocated_peak_bytes
    return most_bytes - int(before)


if __name__ == "__main__":
    measuring.run(main)
