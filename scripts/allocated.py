"""Proves what PyTorch's CUDA allocator would say, beside what it says on a dummy GPU.

Every workload is profiled for a card, in float32 and under autocast to bfloat16, and
planned for the middle between its peak and the floor. Then steps run in processes of
their own, unplanned, planned and with every layer run again (``by: rerun``), on a GPU
that computes nothing
(``scripts/_dummy_gpu.py``): dispatch to CUDA's kernels, autograd's streams and the
caching allocator are torch's own. Predicted stands beside what the allocator says:
"peak" is what tensors and kernels asked for (``requested_bytes``), "allocated" the
blocks that it handed out (``torch.cuda.max_memory_allocated``), "reserved" the segments
that it took from the card (``torch.cuda.max_memory_reserved``).

    python scripts/allocated.py
    python scripts/allocated.py --only gpt2 --gpu "RTX 4090"

This is no measurement on a GPU: workspaces and reserves of cuDNN are nothing here, and
values are not computed, but for small integers, which are followed on the CPU in
forward so that a model asks what it would be told.

Exit code 1 if a peak is more than 0.3 % away or more than 0.1 % too low, allocated more
than 1 %, reserved more than 3 % and more than one segment of 20 MiB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import _measuring as measuring
import torch
from _dummy_gpu import build, environment, why_not
from torch import nn

from ckplan import gpus
from ckplan.applying.regions import apply
from ckplan.errors import CkplanError
from ckplan.graph.graph import Graph
from ckplan.plan import file as plan_file
from ckplan.plan.plan import Plan, plan_fingerprint
from ckplan.plan.region import Region
from ckplan.plan.resolve import describe
from ckplan.simulating.allocations import replayed
from ckplan.simulating.simulate import Timeline
from ckplan.solving.planner import Planner
from ckplan.tracing.faking.fake_mode import KnownValues
from ckplan.tracing.profile import profile_workload
from ckplan.training.allocator import gpu_allocator_stats
from ckplan.training.loading import WorkloadSpec
from ckplan.training.step import Training, TrainingStep, make_step
from ckplan.training.workload import Workload, on_device, tensors_of
from ckplan.units import format_bytes

_Row = TypeVar("_Row")
TYPES = {"fp32": Training(), "bf16": Training(amp="bf16")}
CUDA = torch.device("cuda", 0)
MOST_APART, MOST_UNDER, MOST_ALLOCATED, MOST_RESERVED = 0.003, 0.001, 0.01, 0.03
PATIENCE_SECONDS = 600
SEGMENT_BYTES = 20 << 20  # the allocator takes no less from a card for most blocks
_SMALL = "many small tensors: predicted in blocks, asked for in bytes"
_SHARED = "shared weights, which autocast casts anew for each layer that runs again"
CAUSES = {
    "albert": _SHARED,
    "policy": _SHARED,
    "efficientnet": _SMALL,
    "inception": _SMALL,
    "graphs": "raises under autocast, on a CPU, too: scatter of two types",
}
NOT_HERE = dict.fromkeys(
    ("lstm", "gru", "policy"),
    "cuDNN alone knows how recurrent weights lie, and there is none",
)
HEADERS = (
    "workload",
    "types",
    "step",
    "peak",
    "of the allocator",
    "error",
    "allocated",
    "of the allocator",
    "error",
    "reserved",
    "of the allocator",
    "error",
    "cause",
)


class Bytes(NamedTuple):
    """Of one step."""

    peak: int
    allocated: int
    reserved: int


@dataclass(frozen=True)
class Row:
    """One step of a workload, unplanned, planned or with every layer run again."""

    workload: str
    types: str
    step: str
    predicted: Bytes
    found: Bytes | str  # or why there is nothing

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.types}, {self.step}"

    def cells(self) -> list[str]:
        """A row of the table."""
        start = [self.workload, self.types, self.step]
        if isinstance(self.found, str):
            why = NOT_HERE.get(self.workload) or CAUSES.get(self.workload, self.found)
            return [*start, format_bytes(self.predicted.peak), *[""] * 8, why]
        pairs = zip(self.predicted, self.found, strict=True)
        numbers = [
            cell
            for ours, its in pairs
            for cell in (
                format_bytes(ours),
                format_bytes(its),
                measuring.format_error(ours, its),
            )
        ]
        cause = CAUSES.get(self.workload, "") if any(self.broken()) else ""
        return [*start, *numbers, cause]

    def broken(self) -> Iterator[str]:
        """Where the claim does not hold."""
        if isinstance(self.found, str):
            if self.workload not in NOT_HERE:
                yield f"{self.name}: {self.found}"
            return
        pairs = zip(self.predicted, self.found, strict=True)
        peak, allocated, reserved = (measuring.relative_error(*pair) for pair in pairs)
        if not -MOST_UNDER <= peak <= MOST_APART:
            yield f"{self.name}: the peak is {peak:+.2%} away"
        if abs(allocated) > MOST_ALLOCATED:
            yield f"{self.name}: allocated is {allocated:+.2%} away"
        one_more = abs(self.predicted.reserved - self.found.reserved) > SEGMENT_BYTES
        if abs(reserved) > MOST_RESERVED and one_more:
            yield f"{self.name}: reserved is {reserved:+.2%} away"


def main() -> int:
    """Profile, plan and run everything; print the table, write it."""
    if sys.argv[1:2] == ["--step"]:
        take_steps(*sys.argv[2:])
    args = measuring.make_parser(__doc__, only=True, gpu="A100 80GB").parse_args()
    names = measuring.chosen(measuring.everything(), args.only)
    rows = rows_on_dummy_gpu(names, args.gpu, rows_of)
    report = measuring.Report(
        "allocated",
        "What the CUDA allocator says on a GPU that computes nothing",
        __doc__,
        [
            f"As the card {args.gpu}. No GPU was used.",
            measuring.make_table(HEADERS, [row.cells() for row in rows], texts=3),
        ],
        [what for row in rows for what in row.broken()],
    )
    return measuring.finish(report, args)


def rows_on_dummy_gpu(
    names: Iterable[str],
    card: str,
    rows_of: Callable[[str, str, gpus.Gpu, Path], Iterable[_Row]],
) -> list[_Row]:
    """Rows of every workload in every type, with a dummy GPU that is like a card.

    Args:
        names: Of workloads.
        card: Its name.
        rows_of: Given a workload, a type, the card, and the library of the dummy GPU.

    Raises:
        CkplanError: There can be no such GPU here, or there is no such card.
    """
    check_dummy_gpu()
    gpu = gpus.find(card)
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        return [
            row
            for name in names
            for types in TYPES
            for row in rows_of(name, types, gpu, library)
        ]


def rows_of(name: str, types: str, gpu: gpus.Gpu, library: Path) -> Iterator[Row]:
    """The steps of one workload."""
    measuring.say(f"{name}, {types}")
    try:
        graph = profiled(name, types, gpu)
    except CkplanError as error:
        yield Row(name, types, "unplanned", Bytes(0, 0, 0), error.what)
        return
    planner = Planner(graph)
    middle = (planner.unplanned.peak_bytes + planner.floor.peak_bytes) // 2
    steps: list[tuple[str, Timeline, Sequence[Region]]] = [
        ("unplanned", planner.unplanned, ())
    ]
    solution = planner.solve(middle)
    steps.append(("planned", solution.timeline, solution.regions))
    steps += (("run again", *found) for found in planner.standard_baselines.every_call)
    path = library.parent / "plan.yaml"
    for step, timeline, regions in steps:
        plan = Plan(
            fingerprint=plan_fingerprint(graph.fingerprint),
            regions=describe(graph, regions),
        )
        plan_file.save(plan, path, force=True)
        where = environment(library, gpu)
        done = run_alone(__file__, [name, types, str(path)], where)
        why = measuring.error_line(done.stderr)
        found = why if done.returncode else Bytes(*json.loads(done.stdout))
        yield Row(name, types, step, predicted(timeline), found)


def profiled(name: str, types: str, gpu: gpus.Gpu) -> Graph:
    """The step of a workload, as on a card."""
    torch.manual_seed(0)
    return profile_workload(
        WorkloadSpec(measuring.location_of(name)),
        training=TYPES[types],
        device="cuda",
        gpu=gpu.name,
    )


def run_alone(
    program: str,
    words: Sequence[str],
    where: Mapping[str, str],
    patience_seconds: float = PATIENCE_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """A program with ``--step``, in a process and an environment of its own."""
    return subprocess.run(
        [sys.executable, program, "--step", *words],
        env=where,
        capture_output=True,
        text=True,
        timeout=patience_seconds,
        check=False,
    )


def check_dummy_gpu() -> None:
    """Refuse where there can be none.

    Raises:
        CkplanError: Something is missing.
    """
    if missing := why_not():
        raise CkplanError(
            "cannot have a GPU that computes nothing here",
            needed=missing.removeprefix("needs "),
            hint="pip install torch==2.13.0, gcc, and no GPU",
        )


def predicted(timeline: Timeline) -> Bytes:
    """What is said without a GPU."""
    return Bytes(timeline.peak_bytes, *replayed(timeline))


def on_dummy_gpu(name: str) -> tuple[Workload, KnownValues]:
    """A workload on the GPU that is there, and what its small integers are worth."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    workload = WorkloadSpec(measuring.location_of(name)).build()
    known = [*workload.model.buffers(), *tensors_of(workload.batch)]
    values = [tensor.clone() for tensor in known]
    workload = on_device(workload, CUDA)
    known = [*workload.model.buffers(), *tensors_of(workload.batch)]
    follow = FollowedValues()
    follow.learn_all(known, values)
    return workload, follow


def take_steps(name: str, types: str, plan: str) -> NoReturn:
    """Take steps on the GPU that is there, and say what its allocator did."""
    leave_with(list(taken(name, types, plan)[1]))


def taken(
    name: str,
    types: str,
    plan: str,
    spill: str | None = None,
    *,
    before_step: Callable[[int], None] = lambda _: None,
) -> tuple[nn.Module, Bytes]:
    """Take two steps of a planned workload; its model, and the second step's bytes."""
    workload, follow = on_dummy_gpu(name)
    apply(workload.model, plan, spill=spill)
    step = make_step(workload, TYPES[types])
    for number in range(2):
        torch.cuda.reset_peak_memory_stats(CUDA)
        before_step(number)
        one_step(step, follow)
        step.zero_grad()
    found = gpu_allocator_stats(CUDA)
    return workload.model, Bytes(
        found.requested_peak_bytes,
        found.allocated_peak_bytes,
        found.reserved_peak_bytes,
    )


def leave_with(found: list[Any]) -> NoReturn:
    """Print JSON, and end at once: such a GPU is no good at shutting down."""
    print(json.dumps(found), flush=True)
    os._exit(0)


def one_step(step: TrainingStep, follow: KnownValues) -> None:
    """Forward with what small integers are worth; backward and update as they are."""
    with follow:
        output, loss, _ = step.forward()
    step.backward(loss)
    loss = loss.detach()
    del output
    step.update()


class FollowedValues(KnownValues):
    """Of tensors on a GPU that computes nothing."""

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not tensor.is_cuda:
            return tensor
        real = self._real.get(tensor)
        known = real is not None and real.untyped_storage() not in self._stale
        return real if known else None

    def _is_unknown_float(self, x: object) -> bool:
        floats = isinstance(x, torch.Tensor) and x.is_floating_point()
        return floats and self._value(x) is None


if __name__ == "__main__":
    measuring.run(main)
