"""What the CUDA allocator says of compiled steps, on a GPU that computes nothing.

Every workload is compiled on a GPU that computes nothing (``scripts/_dummy_gpu.py``),
in float32 and under autocast to bfloat16: without a plan, with the smallest one, and
within a budget half of the way between these. The code that Inductor generates for that
card is replayed; then it is compiled and takes steps, whose kernels do nothing and
whose buffers torch's own caching allocator hands out. "Replayed" is what
``ckplan.backend`` says, in blocks of 512 bytes; "asked for" is the peak of
``requested_bytes`` in the third step, in bytes; "allocated" is
``torch.cuda.max_memory_allocated``: what is left of a block of more than 1 MiB is not
split off. The last two are what a step takes beyond what was there before, and what is
replayed of that: parameters, buffers and batch that it uses, and what cuBLAS keeps. The
first steps also time kernels on buffers of their own. Constants that Inductor folds
have no values there, so a graph may differ from itself when it is compiled again: such
a row says that the plan is for another graph.

    python scripts/compiled_allocated.py
    python scripts/compiled_allocated.py --only gpt2 --gpu "RTX 4090"

This is no measurement on a GPU: workspaces of cuDNN are nothing here, and values and
seconds cannot be had.

Exit code 1 if less is replayed than is asked for, or 0.1 % more, or a budget exceeded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import _measuring as measuring
import torch
from _compiled_rows import spec_of
from _dummy_gpu import environment
from allocated import CUDA, TYPES, leave_with, rows_on_dummy_gpu, run_alone
from compiled_budgets import TEN

import ckplan
from ckplan import gpus
from ckplan.compiling.lowering import in_order
from ckplan.compiling.step import compiled_loss, parts_of, under_autocast
from ckplan.errors import InfeasibleError
from ckplan.training.allocator import gpu_allocator_stats, requested_within
from ckplan.training.workload import Workload, on_device

MODELS = ("gpt2", "llama", "bert", "vit")
SHARES = 2  # budgets, from the smallest replayed peak on, towards the unplanned one
UNPLANNED = "unplanned"
PATIENCE_SECONDS = 3600
STEPS = 3
MOST_APART = 0.001  # blocks are multiples of 512 bytes
HEADERS = (
    *("workload", "types", "step", "budget", "replayed"),
    *("asked for", "apart", "allocated"),
)


@dataclass(frozen=True)
class Row:
    """One way to take a step."""

    workload: str
    types: str
    step: str
    budget_bytes: int | None
    replayed_bytes: int
    requested_bytes: int
    allocated_bytes: int
    why: str = ""  # there is nothing

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.types}, {self.step}"

    def cells(self) -> list[str]:
        """A row of the table."""
        budget = "" if self.budget_bytes is None else f"{self.budget_bytes:,}"
        start = [self.workload, self.types, self.step, budget]
        if self.why:
            return [*start, "", "", "", self.why]
        apart = measuring.format_error(self.replayed_bytes, self.requested_bytes)
        sizes = (self.replayed_bytes, self.requested_bytes, self.allocated_bytes)
        ours, its, allocated = (f"{one:,}" for one in sizes)
        return [*start, ours, its, apart, allocated]

    def broken(self) -> Iterator[str]:
        """Where the claim does not hold."""
        if self.why:
            yield f"{self.name}: {self.why}"
            return
        beyond = measuring.relative_error(self.replayed_bytes, self.requested_bytes)
        if not 0 <= beyond <= MOST_APART:
            yield f"{self.name}: {beyond:+.2%} apart"
        if self.budget_bytes is not None and self.budget_bytes < self.replayed_bytes:
            yield f"{self.name}: beyond its budget"


def main() -> int:
    """Take all steps; print the table, write it."""
    if sys.argv[1:2] == ["--step"]:
        take_steps(*sys.argv[2:])
    args = measuring.make_parser(__doc__, only=True, gpu="RTX 4090").parse_args()
    names = measuring.chosen(MODELS, args.only)
    rows = rows_on_dummy_gpu(names, args.gpu, rows_of)
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
    where = environment(library, gpu)
    done = run_alone(__file__, [name, types], where, PATIENCE_SECONDS)
    if done.returncode:
        why = measuring.error_line(done.stderr)
        yield Row(name, types, UNPLANNED, None, 0, 0, 0, why)
        return
    for found in json.loads(done.stdout):
        yield Row(name, types, *found)


def take_steps(name: str, types: str) -> NoReturn:
    """Compile a workload on the GPU that is there, and say what its allocator did."""
    torch.manual_seed(0)
    workload = on_device(spec_of(name, TEN[name]).build(), CUDA)
    workload = under_autocast(workload, TYPES[types].amp, "cuda")
    (planner,) = parts_of(workload).planners.values()
    unplanned = planner.unplanned
    full = unplanned.peak_bytes
    sizes = asked_and_allocated(workload, in_order, unplanned.held_bytes)
    found: list[tuple[object, ...]] = [(UNPLANNED, None, full, *sizes)]
    with suppress(InfeasibleError):
        planner.solve(1)
    low = planner.replayed(planner.smallest.saved).peak_bytes
    for share in range(SHARES):
        budget_bytes = low + (full - low) * share // SHARES
        torch._dynamo.reset()
        planned = ckplan.backend(planner.solve(budget_bytes).plan)
        sizes = asked_and_allocated(workload, planned, unplanned.held_bytes)
        step = f"{share}/{SHARES}"
        found.append((step, budget_bytes, planned.peak_bytes, *sizes))
    leave_with(found)


def asked_and_allocated(
    workload: Workload, backend: object, held_bytes: int
) -> tuple[int, int]:
    """Most bytes that steps ask the allocator for, and that it hands out in blocks."""
    loss = compiled_loss(workload, backend)
    for _ in range(STEPS):
        workload.model.zero_grad()
        before = torch.cuda.memory_allocated(CUDA)
        with requested_within(CUDA) as requested:
            loss().backward()
    allocated_bytes = gpu_allocator_stats(CUDA).allocated_peak_bytes - int(before)
    return held_bytes + requested.peak_bytes, held_bytes + allocated_bytes


if __name__ == "__main__":
    measuring.run(main)
