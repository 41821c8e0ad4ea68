"""Verify a plan: unplanned and planned steps side by side, each in its own process."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ckplan.applying.regions import mover_for
from ckplan.errors import CkplanError, WorkloadError
from ckplan.plan.file import as_plan
from ckplan.plan.plan import PLAN_SUFFIXES, Plan
from ckplan.plan.region import RERUN, Region
from ckplan.plan.resolve import describe
from ckplan.simulating.curve import PLANNED, UNPLANNED
from ckplan.simulating.simulate import Simulator
from ckplan.solving.baselines import can_recompute, find_repeated_layers
from ckplan.solving.menu import Menus
from ckplan.tracing.target import find_target
from ckplan.training.loading import WorkloadSpec
from ckplan.training.remembered import ScriptSpec, untold, workload_or_script
from ckplan.training.step import Training, amp_name
from ckplan.verifying.closeness import (
    Reference,
    bits_notes,
    close_tiles,
    file_for_results,
    is_within,
    stated_difference,
)
from ckplan.verifying.compare_steps import (
    StepPair,
    comparison_notes,
    differing_results,
    first_steps_at_smaller_batch,
)
from ckplan.verifying.energy import Energy, energy_counters, measure_energy
from ckplan.verifying.outcome import AbstractOutcome, in_one_process, outcome_fields
from ckplan.verifying.phases import PhaseSeconds
from ckplan.verifying.predict import curves_by_step, predict
from ckplan.verifying.step_process import ScriptProcess, StepProcess
from ckplan.verifying.timing import Quartiles, Timing, compare_times, machine_load
from ckplan.verifying.worker import FirstSteps, Result

if TYPE_CHECKING:
    from ckplan.graph.graph import Graph
    from ckplan.tracing.costs.calibrate import Progress

_MOST_NAMES = 10


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of both steps by phase, side by side; None where not known."""

    predicted_unplanned: PhaseSeconds | None = None
    predicted: PhaseSeconds | None = None
    measured_unplanned: PhaseSeconds | None = None  # medians over rounds
    measured: PhaseSeconds | None = None
    added_seconds: Quartiles | None = None  # measured, in forward and backward


@dataclass(frozen=True, kw_only=True)
class Verification(AbstractOutcome):
    """Results of planned steps compared with those of unplanned steps.

    Measurements of the unplanned step are None if it does not fit in memory. Times are
    None if no timing was requested. If the machine is too busy to measure the overhead,
    it is None, and ``timing_problem`` says why. Predictions are None if the plan has
    none. If the unplanned step does not fit, the planned step is compared with a step
    that recomputes every layer, and with the unplanned step at a smaller batch.
    """

    gradients_equal: bool | None  # bitwise, in both steps
    buffers_equal: bool | None
    loss_equal: bool | None
    random_state_equal: bool | None  # after both steps
    different: tuple[str, ...]  # the first results that differ
    measured_peak_bytes: int
    unplanned_measured_peak_bytes: int | None
    predicted_overhead: float | None
    step_seconds: float | None
    unplanned_step_seconds: float | None
    overhead: float | None
    overhead_quartiles: tuple[float, float] | None = None  # of the rounds
    timing_problem: str | None = None  # why time could not be measured
    phases: Breakdown = Breakdown()
    # Peaks of a GPU's caching allocator: bytes in allocated blocks, bytes reserved.
    predicted_allocated_bytes: int | None = None
    measured_allocated_bytes: int | None = None
    predicted_reserved_bytes: int | None = None
    measured_reserved_bytes: int | None = None
    spilled_bytes: int = 0  # of the file that offloaded tensors move to
    host_bytes: int = 0  # of pinned host memory that they move to
    close_tiles: tuple[str, ...] = ()  # calls of which the plan states `bits: close`
    stated_difference: float | None = None  # the most that the plan allows there
    # The largest in loss and gradients of the first step, relative to the largest value
    # of its tensor; None if the plan states no close bits.
    largest_difference: float | None = None
    energy: Energy | None = None  # measured, if that was asked for

    @property
    def is_close(self) -> bool:
        """Whether loss and gradients differ by at most what the plan states."""
        differ = False in (self.gradients_equal, self.loss_equal)
        found = self.largest_difference
        return (
            differ
            and found is not None
            and is_within({"": found}, self.stated_difference)
        )

    @property
    def passed(self) -> bool:
        """Whether nothing differs, and the measured peak is within the budget.

        Loss and gradients may differ by what a plan with close bits states.
        """
        results = (self.gradients_equal, self.loss_equal)
        exact = (self.buffers_equal, self.random_state_equal)
        equal = exact if self.is_close else (*results, *exact)
        return self.fits and False not in equal


def verify(
    spec: WorkloadSpec | ScriptSpec | str | Path | None = None,
    plan: Plan | str | Path | None = None,
    *,
    optimizer: str | None = None,
    amp: str | torch.dtype | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    scaler: bool = False,
    device: str | None = None,
    cap_bytes: int | None = None,
    spill: str | Path | None = None,
    seed: int = 0,
    steps: int = 5,
    energy: bool = False,
    trace: Graph | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Take the same steps without a plan and with it, and compare.

    Args:
        spec: Where the workload comes from, or ``"model.py:factory"`` alone; each
            process builds its own. By default, and where a plan's
            file is alone, that of the plan, with all its options that are not given. If
            that is a script, each process runs it up to the recorded step, and through
            the steps that are timed.
        plan: What to verify, or the path of its file; None compares the workload with
            itself.
        optimizer: ``adamw``, ``adam``, ``sgd``, ``momentum``, ``adafactor``, ``none``
            or ``own``; by default the workload's own optimizer, else AdamW.
        amp: ``bf16``, ``fp16`` or its dtype: forward and loss run under autocast.
        accumulate: Backwards before the optimizer takes a step.
        clip: Largest norm of all gradients together: ``clip_grad_norm_``.
        scaler: Whether the loss goes through a gradient scaler.
        device: Device of the steps; by default the plan's device.
        cap_bytes: Most bytes that a GPU's allocator may reserve, to emulate a smaller
            GPU.
        spill: Folder of the file that tensors move to, for plans with ``offload``, or
            ``"host"``.
        seed: Seed of all random numbers.
        steps: Number of timed steps per process, interleaved; 0 disables timing.
        energy: Whether to measure joules, in windows of at least 5 seconds.
        trace: Trace of this workload. It predicts live bytes over the step, and names
            the layers to recompute if the unplanned step does not fit.
        progress: Callback that reports progress.

    Returns:
        The comparison. A difference or a peak over the budget does not raise.

    Raises:
        CkplanError: The device is not available, does not support a cap, or has no
            counters of energy.
        OutOfMemoryError: The planned step does not fit in memory.
        CkplanError: The workload or the plan cannot be used, or a step fails.
    """
    alone = plan is None and Path(str(spec)).suffix in PLAN_SUFFIXES
    spec, plan = (None, as_plan(spec)) if alone else (spec, as_plan(plan))
    plan, apart = in_one_process(plan)
    training = Training(optimizer, amp_name(amp), accumulate, clip, scaler)
    workload, training, seed = workload_or_script(spec, training, seed, plan)
    is_script = isinstance(workload, ScriptSpec)
    tell = progress or (lambda what, done, total: None)
    if training.predicted_only:
        raise WorkloadError(
            f"cannot train with '{training.optimizer}': its memory is only predicted",
            needed="an optimizer that can train, such as the workload's own",
            hint="--fake, which checks memory only",
        )
    device_name = step_device(device, plan)
    if plan is not None:
        mover_for(plan, spill, device_name.partition(":")[0])  # raises early
    _check_cap(cap_bytes, device_name)
    if energy and is_script:
        raise untold("measure energy")
    counters = energy_counters(device_name) if energy else None

    def start(
        chosen: Plan | None, halvings: int = 0, *, one_thread: bool = False
    ) -> StepProcess:
        folder = Path(spill) if spill is not None and chosen is plan else None
        reference = None if results is None else Reference(results, chosen is plan)
        options = (cap_bytes, halvings, folder, reference)
        job = workload, chosen, training, seed, device_name, *options
        process = ScriptProcess if is_script else StepProcess
        return process(*job, one_thread=one_thread)

    def start_substitute() -> StepProcess | None:
        everything = recompute_every_layer(trace) if trace is not None else None
        return None if everything is None else start(everything)

    load = machine_load()
    with file_for_results(plan) as results:
        with ExitStack() as running:
            sides = [partial(start, None), partial(start, plan)]
            pair = StepPair(sides, start_substitute, running, plan)
            reference, planned = pair.first_steps(tell)
            timing = compare_times(*pair.timed_steps(steps, tell), load)
            samples = training.accumulate * planned.rows
            joules = None
            if counters is not None:
                joules = measure_energy(counters, pair, samples, tell)
        fewer = None
        if not (pair.fits or is_script):
            fewer = first_steps_at_smaller_batch(start, plan, tell)
    unplanned = reference if pair.fits else None
    predicted = predict(trace, plan, training, planned.fingerprint)
    compared = comparison_notes(reference, planned, fewer)
    different = differing_results((reference, planned), fewer)
    far = (fewer[1] if fewer else planned).differences
    bits = bits_notes(plan, None if different is None else bool(different), far)
    found = _judge(
        plan,
        (unplanned, planned),
        different,
        timing,
        (*apart, *pair.notes, *planned.notes, *compared, *bits, *predicted.notes),
    )
    far_most = max(far.values(), default=None)
    found = replace(found, largest_difference=far_most, energy=joules)
    both = ((UNPLANNED, unplanned), (PLANNED, planned))
    measured = {which: one.curve for which, one in both if one and one.curve}
    reserved = predicted.reserved
    if plan is not None and plan.predicted is None and PLANNED in predicted.curves:
        peak_bytes = predicted.curves[PLANNED].peak_bytes  # of a plan by hand
        found = replace(found, predicted_peak_bytes=peak_bytes)
    return replace(
        found,
        curves=curves_by_step(predicted=predicted.curves, measured=measured),
        phases=Breakdown(
            predicted.unplanned,
            predicted.planned,
            timing.unplanned,
            timing.planned,
            timing.added_seconds,
        ),
        predicted_allocated_bytes=reserved and reserved.allocated_bytes,
        predicted_reserved_bytes=reserved and reserved.bytes,
    )


def _check_cap(cap_bytes: int | None, device: str) -> None:
    if cap_bytes is not None and not device.startswith("cuda"):
        raise CkplanError(
            f"cannot cap the memory of {device}",
            needed="a GPU, whose allocator can be limited",
            hint="--device cuda, or no cap: the peak is measured against the budget",
        )


def recompute_every_layer(trace: Graph) -> Plan | None:
    """Return a plan that recomputes every possible layer; None if there is none."""
    simulator = Simulator(trace)
    layers = find_repeated_layers(trace, Menus(simulator))
    regions = [Region(layer, RERUN) for layer in layers]
    possible = [region for region in regions if can_recompute(simulator, region)]
    described = describe(trace, possible)
    return Plan(trace.model, regions=described) if described else None


def step_device(device: str | None, plan: Plan | None) -> str:
    """Return the device of the steps: the requested one, or the plan's.

    Raises:
        CkplanError: This machine has no such device.
    """
    name = device or (plan.fingerprint.get("device") if plan else None) or "cpu"
    if not find_target(name, None).is_here:
        raise CkplanError(
            f"cannot take steps on {name}: this machine has no GPU",
            needed="the GPU that the plan is for",
            hint="ckplan verify --fake, which needs none",
        )
    return name


def _judge(
    plan: Plan | None,
    steps: tuple[FirstSteps | None, FirstSteps],
    different: tuple[Result, ...] | None,
    timing: Timing,
    notes: tuple[str, ...],
) -> Verification:
    """Combine predictions and measurements of unplanned and planned steps."""
    unplanned, planned = steps
    predicted = plan.predicted if plan else None
    gpu, overhead = planned.gpu_allocator_stats, timing.overhead
    return Verification(
        **outcome_fields(
            plan, planned.peak_bytes, planned.regions, planned.fingerprint
        ),
        gradients_equal=_equal("gradient", different),
        buffers_equal=_equal("buffer", different),
        loss_equal=_equal("loss", different),
        random_state_equal=_equal("random state", different),
        different=tuple(map(str, (different or ())[:_MOST_NAMES])),
        measured_peak_bytes=planned.peak_bytes,
        unplanned_measured_peak_bytes=unplanned.peak_bytes if unplanned else None,
        predicted_overhead=predicted.overhead if predicted else None,
        step_seconds=timing.planned_seconds,
        unplanned_step_seconds=timing.unplanned_seconds,
        overhead=overhead.median if overhead else None,
        overhead_quartiles=(overhead.low, overhead.high) if overhead else None,
        timing_problem=timing.problem,
        notes=notes,
        measured_allocated_bytes=gpu.allocated_peak_bytes if gpu else None,
        measured_reserved_bytes=gpu.reserved_peak_bytes if gpu else None,
        spilled_bytes=planned.spilled_bytes,
        host_bytes=planned.host_bytes,
        close_tiles=tuple(calls for calls, _ in close_tiles(plan)),
        stated_difference=stated_difference(plan),
    )


def _equal(kind: str, different: tuple[Result, ...] | None) -> bool | None:
    if different is None:
        return None
    return all(result.kind != kind for result in different)
