"""A dry run: the model with its plan takes steps on fake tensors.

It needs no GPU and allocates no data, so it works for models larger than the machine.
It checks ``simulate`` independently: the real forward, backward and optimizer run with
all regions, and every storage is tracked from allocation to free.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ckplan.applying.hooks.plan_warnings import IDLE
from ckplan.applying.moving.mover import Mover
from ckplan.applying.regions import apply_with, remove
from ckplan.errors import CkplanError, VerifyError
from ckplan.gpus import DEFAULT, find
from ckplan.plan.file import as_plan
from ckplan.simulating.curve import PLANNED, UNPLANNED, Curve
from ckplan.tracing.costs.calibrate import calibrate
from ckplan.tracing.costs.cost_cache import Cost, cost_cache
from ckplan.tracing.costs.roofline import roofline
from ckplan.tracing.cuda import cpu_as_cuda
from ckplan.tracing.cuda.cublas import kept_bytes
from ckplan.tracing.cuda.memory import with_workspaces
from ckplan.tracing.faking.fake_mode import fake_tensors
from ckplan.tracing.recording.recording import RawOp
from ckplan.tracing.target import TraceTarget, find_target
from ckplan.training.failures import first_line
from ckplan.training.fingerprint import fingerprint
from ckplan.training.loading import WorkloadSpec
from ckplan.training.optimizers import step_counts
from ckplan.training.randomness import seed_everything
from ckplan.training.remembered import complete
from ckplan.training.step import DEFAULT_TRAINING, Training, amp_name, make_step
from ckplan.training.workload import Workload
from ckplan.units import in_blocks
from ckplan.verifying.outcome import AbstractOutcome, in_one_process, outcome_fields
from ckplan.verifying.predict import curves_by_step, predict
from ckplan.verifying.storage_tracker import StorageLog, StorageTracker
from ckplan.verifying.worker import status_of
from ckplan.verifying.worker_state import persistent_tensors

if TYPE_CHECKING:
    from ckplan.applying.hooks.choices import RegionStatus
    from ckplan.graph.graph import Graph
    from ckplan.plan.plan import Plan
    from ckplan.tracing.costs.calibrate import Progress

NOTE_CUDA = (
    "bytes are those of CUDA, in blocks of 512: workspaces of kernels and of cuBLAS "
    "are counted, those of cuDNN and cuFFT are not"
)
NOTE_WORKSPACE = (
    "fake tensors do not show workspaces of kernels: these were measured on this "
    "machine, one distinct op at a time"
)


@dataclass(frozen=True, kw_only=True)
class DryRun(AbstractOutcome):
    """Memory of steps on fake tensors, without the plan and with it."""

    dry_run_peak_bytes: int
    unplanned_predicted_peak_bytes: int | None
    unplanned_dry_run_peak_bytes: int

    @property
    def passed(self) -> bool:
        """Whether the peak is within the budget."""
        return self.fits


@dataclass(frozen=True, slots=True)
class _Steps:
    """Records of the first two steps."""

    log: StorageLog
    regions: tuple[RegionStatus, ...]  # status of the plan's regions
    fingerprint: Mapping[str, Any]


def dry_run(
    spec: WorkloadSpec | str | Path | None = None,
    plan: Plan | str | Path | None = None,
    *,
    optimizer: str | None = None,
    amp: str | torch.dtype | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    scaler: bool = False,
    device: str | None = None,
    seed: int = 0,
    trace: Graph | None = None,
    progress: Progress | None = None,
) -> DryRun:
    """Take two steps without the plan and two with it, on fake tensors.

    Args:
        spec: Where the workload comes from, or ``"model.py:factory"`` alone; by
            default the plan's, as all options that are not given.
        plan: What to verify, or the path of its file; None compares the workload with
            itself.
        optimizer: Name of the optimizer, as for ``verify``.
        amp: ``bf16``, ``fp16`` or its dtype: forward and loss run under autocast.
        accumulate: Backwards before the optimizer takes a step.
        clip: Largest norm of all gradients together: ``clip_grad_norm_``.
        scaler: Whether the loss goes through a gradient scaler.
        device: ``cpu`` or ``cuda``; no GPU is needed. By default the plan's device.
        seed: Seed of all random numbers.
        trace: Trace of this workload, which predicts live bytes over the step.
        progress: Callback that reports progress.

    Returns:
        The result. A peak over the budget does not raise.

    Raises:
        CkplanError: The workload or the plan cannot be used, or a step fails on fake
            tensors.
    """
    plan, apart = in_one_process(as_plan(plan))
    given = Training(optimizer, amp_name(amp), accumulate, clip, scaler)
    spec, training, seed = complete(spec, given, seed, plan)
    found = dry_run_workload(
        spec.load(),
        plan,
        training,
        device=device,
        seed=seed,
        trace=trace,
        progress=progress,
    )
    return replace(found, notes=(*apart, *found.notes))


def dry_run_workload(
    make: Callable[[], Workload],
    plan: Plan | None,
    training: Training = DEFAULT_TRAINING,
    *,
    device: str | None = None,
    seed: int = 0,
    trace: Graph | None = None,
    progress: Progress | None = None,
) -> DryRun:
    """Dry-run a workload from its factory ``make``, which is called twice."""
    tell = progress or (lambda what, done, total: None)
    place = _place(device, plan, trace)
    tell("dry run without the plan", 0, 2)
    unplanned = _steps(make, None, training, seed, place)
    tell("dry run with the plan", 1, 2)
    planned = _steps(make, plan, training, seed, place)
    ops = [*unplanned.log.ops, *planned.log.ops]
    costs, notes = _costs(ops, place, progress)
    if missing := sum(not cost.measured for cost in costs):
        notes.append(
            f"workspaces of {missing} ops could not be measured and count as 0"
        )
    first = len(unplanned.log.ops)
    curves = {
        UNPLANNED: unplanned.log.curve(costs[:first]),
        PLANNED: planned.log.curve(costs[first:]),
    }
    predicted = predict(trace, plan, training, planned.fingerprint)
    found = _judge(plan, curves, planned, (*notes, *predicted.notes))
    both = curves_by_step(predicted=predicted.curves, dry_run=curves)
    return replace(found, curves=both)


def _place(device: str | None, plan: Plan | None, trace: Graph | None) -> TraceTarget:
    """Target that the steps emulate: the CPU, or the GPU of the trace."""
    name = device or (plan.fingerprint.get("device") if plan else None) or "cpu"
    known = trace.options if trace else plan.workload if plan else {}
    return find_target(name, known.get("gpu"))


def _costs(
    ops: Sequence[RawOp], place: TraceTarget, progress: Progress | None
) -> tuple[list[Cost], list[str]]:
    """Costs of ops, with workspaces of kernels, and notes on their source."""
    if place.device.type == "cuda":
        gpu = place.gpu or find(DEFAULT)
        known = [replace(c, measured=True) for c in roofline(ops, gpu)]
        return with_workspaces(ops, known, gpu), [NOTE_CUDA]
    costs = calibrate(ops, place.device, progress, cost_cache(place.device))
    return costs, [NOTE_WORKSPACE]


def _check_without_tiles(plan: Plan | None) -> None:
    if plan is not None and any(region.tiles for region in plan.regions):
        raise VerifyError(
            "cannot dry-run the plan: it runs calls in tiles, which fake tensors "
            "cannot",
            needed="a plan without by: tiles",
            hint="leave out --fake, which takes real steps",
        )


def _judge(
    plan: Plan | None,
    curves: Mapping[str, Curve],
    planned: _Steps,
    notes: tuple[str, ...],
) -> DryRun:
    predicted = plan.predicted if plan else None
    peak_bytes = curves[PLANNED].peak_bytes
    return DryRun(
        **outcome_fields(plan, peak_bytes, planned.regions, planned.fingerprint),
        dry_run_peak_bytes=peak_bytes,
        unplanned_predicted_peak_bytes=(
            predicted.unplanned_peak_bytes if predicted else None
        ),
        unplanned_dry_run_peak_bytes=curves[UNPLANNED].peak_bytes,
        notes=notes,
    )


def _steps(
    make: Callable[[], Workload],
    plan: Plan | None,
    training: Training,
    seed: int,
    place: TraceTarget,
) -> _Steps:
    """Take two steps; the second one is logged by phase.

    Raises:
        CkplanError: A step fails.
    """
    seed_everything(seed)
    on_cuda = place.device.type == "cuda"
    meter = StorageTracker(on_cuda=on_cuda)
    try:
        with ExitStack() as stack:
            stack.enter_context(fake_tensors())
            if on_cuda:
                stack.enter_context(cpu_as_cuda(place.capability, place.gpu))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", f".*{IDLE}")  # it is reported
            stack.enter_context(meter.watching(random_states=not on_cuda))
            return _two_steps(make, plan, training, meter, place)
    except CkplanError:
        raise
    except Exception as error:
        raise VerifyError(
            f"the dry run failed: {type(error).__name__}: {first_line(error)}",
            needed="a workload that trains on tensors without values",
            hint="ckplan verify without --fake, on a machine that it fits",
        ) from error


def _two_steps(
    make: Callable[[], Workload],
    plan: Plan | None,
    training: Training,
    meter: StorageTracker,
    place: TraceTarget,
) -> _Steps:
    workload = make()
    _check_without_tiles(plan)
    remove(workload.model)
    if plan is not None:
        apply_with(workload.model, plan, Mover(None))  # moves no bytes
    step = make_step(workload, training, place.device.type)
    workload_fingerprint = fingerprint(workload, place.device)
    step.run()
    step.zero_grad()
    meter.register(persistent_tensors(step))
    if place.device.type == "cuda":
        kept = [
            torch.empty(size, dtype=torch.uint8)
            for size in 2 * kept_bytes(place.capability, ["addmm"])
        ]
        meter.register(kept)
        if step.optimizer is not None:
            meter.count_as_zero_bytes(step_counts(step.optimizer))
    step = replace(step, on_phase=meter.begin, before_backward=meter.watch_nodes)
    step.run()
    if place.device.type == "cuda":
        for phase in ("forward", "backward"):
            for size in kept_bytes(place.capability, meter.log.names(phase)):
                kept.pop([one.nbytes for one in kept].index(size))
        meter.count_as_zero_bytes(kept)
        meter.log.bytes = [in_blocks(size) for size in meter.log.bytes]
    regions, *_ = status_of(plan, workload.model)
    return _Steps(meter.log, regions, workload_fingerprint)
