"""The child process that trains a workload, with a plan or without.

Requests arrive on stdin and replies leave on stdout, both pickled. A ``Job`` requests
the first steps; each later request asks for one step. Output that the model prints goes
to stderr, and its stdin is empty. Errors are sent as replies.
"""

from __future__ import annotations

import gc
import os
import pickle
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import torch
from torch.profiler import record_function

from ckplan.applying.hooks.plan_warnings import IDLE
from ckplan.errors import CkplanError, VerifyError, WorkloadError
from ckplan.simulating.curve import PHASES, Curve
from ckplan.training.allocator import (
    AllocatorLog,
    GpuAllocatorStats,
    gpu_allocator_stats,
    log_allocations,
)
from ckplan.training.failures import (
    check_finite,
    describe_failure,
    first_line,
    is_out_of_memory,
    location_hint,
)
from ckplan.training.fingerprint import fingerprint
from ckplan.training.loading import WorkloadSpec
from ckplan.training.randomness import seed_everything
from ckplan.training.remembered import ScriptSpec
from ckplan.training.step import Training, TrainingStep, make_step
from ckplan.training.warm_up import warm_up_vector_kernels
from ckplan.training.workload import on_device, rows_of

if TYPE_CHECKING:
    from ckplan.applying.hooks.choices import RegionStatus
    from ckplan.plan.plan import Plan
from ckplan.verifying.closeness import Reference
from ckplan.verifying.phases import PhaseClock, TimedStep
from ckplan.verifying.worker_state import (
    bytes_held_on_gpu,
    cap_memory,
    digest,
    halved,
    live_bytes_of,
    persistent_storages,
    random_state_digest,
    wait_for,
)

FIRST_STEPS = "first steps"
TIMED_STEP = "timed step"
MARK, BEGIN, END = "ckplan_phase_", "begin", "end"


class OutOfMemoryError(VerifyError):
    """A step needs more memory than this machine has left."""


class ScriptEndedError(VerifyError):
    """The script has no step left."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker trains."""

    spec: WorkloadSpec | ScriptSpec
    plan: Plan | None
    training: Training
    seed: int
    device: str = "cpu"
    cap_bytes: int | None = None  # most bytes that the device's allocator may reserve
    halvings: int = 0  # number of times the batch is halved
    spill: Path | None = None  # folder that offloaded tensors move to, or host
    reference: Reference | None = None  # for plans that state close bits

    @property
    def title(self) -> str:
        """Name of its steps in error messages."""
        return "the unplanned step" if self.plan is None else "the planned step"


class Result(NamedTuple):
    """Name of a result of a step."""

    step: int  # from 1
    kind: str  # "loss", "gradient", "buffer" or "random state"
    name: str = ""

    def __str__(self) -> str:
        what = f"{self.kind} of {self.name}" if self.name else self.kind
        return f"{what}, step {self.step}"


@dataclass(frozen=True, slots=True)
class FirstSteps:
    """Results of the first two steps, and memory of the second one."""

    digests: dict[Result, str]
    peak_bytes: int  # of step 2: bytes held at its start plus those it requests
    regions: tuple[RegionStatus, ...]  # status of the plan's regions
    curve: Curve | None = field(default=None, compare=False)  # live bytes of step 2
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    rows: int = field(default=0, compare=False)  # of the batch
    gpu_allocator_stats: GpuAllocatorStats | None = field(
        default=None, compare=False
    )  # after step 2
    spilled_bytes: int = field(default=0, compare=False)  # of the file
    host_bytes: int = field(default=0, compare=False)  # of pinned memory
    differences: Mapping[str, float] = field(
        default_factory=dict, compare=False
    )  # of loss and gradients of step 1, where the plan states close bits
    notes: tuple[str, ...] = field(default=(), compare=False)


class Worker:
    """Builds a workload for its first steps, then takes one step per request."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._step: TrainingStep | None = None

    def answer(self, request: str) -> Any:
        """Handle a request; exceptions are returned as a ``CkplanError``."""
        try:
            return self.handle(request)
        except (Exception, SystemExit) as error:
            return explain_failure(error, self._job)

    def handle(self, request: str) -> Any:
        """The reply to a request; a subclass may know more of them."""
        return self._first_steps() if request == FIRST_STEPS else self._timed_step()

    @property
    def step(self) -> TrainingStep:
        """The step, once the first ones were taken."""
        assert self._step is not None, "internal error: timed before the first steps"
        return self._step

    def _first_steps(self) -> FirstSteps:
        warm_up_vector_kernels()
        seed_everything(self._job.seed)
        device = torch.device(self._job.device)
        cap_memory(self._job.cap_bytes, device)
        assert isinstance(self._job.spec, WorkloadSpec), "internal error: a script"
        workload = halved(self._job.spec.build(), self._job.halvings)
        workload = on_device(workload, device)
        model = workload.model
        replace_plan(self._job.plan, model, self._job.spill)
        step = self._step = make_step(workload, self._job.training)
        known_before = fingerprint(workload, device)

        first: dict[Result, str] = {}
        gc.collect()  # also where the collector is off: below, garbage would count
        with log_allocations(MARK, device) as whole:
            known = persistent_storages(step)
            value = step.run(
                after_backward=lambda: first.update(_gradient_digests(step, 1))
            )
            self._check(value, "step 1")
            digests = {
                Result(1, "loss"): digest(value),
                **first,
                **_buffer_digests(step, 1),
            }
            differences = self._meet(value, step)
            del value  # so that step 2 starts without the loss of step 1

            step.zero_grad()
            gc.collect()
            held_bytes, known_bytes = bytes_held_on_gpu(device), live_bytes_of(known)
            mark(BEGIN)
            value = replace(step, on_phase=mark).run()
            mark(END)
        before, log = whole.split(whole.spans[MARK + BEGIN][0])
        if held_bytes is None:
            held_bytes = known_bytes + before.held_bytes
        gpu = gpu_allocator_stats(device) if device.type == "cuda" else None
        peak_bytes = gpu.requested_peak_bytes if gpu else held_bytes + log.peak_bytes
        self._check(value, "step 2")
        digests[Result(2, "loss")] = digest(value)
        digests.update(
            _gradient_digests(step, 2)
        )  # gradients stay until the next zero_grad
        digests.update(_buffer_digests(step, 2))
        digests[Result(2, "random state")] = random_state_digest(device)
        regions, spilled_bytes, host_bytes = status_of(self._job.plan, model)
        return FirstSteps(
            digests,
            peak_bytes,
            regions,
            measured_curve(log, held_bytes),
            known_before,
            rows_of(workload),
            gpu,
            spilled_bytes,
            host_bytes,
            differences,
        )

    def _meet(self, loss: torch.Tensor, step: TrainingStep) -> dict[str, float]:
        if self._job.reference is None:
            return {}
        named = step.workload.model.named_parameters()
        return self._job.reference.meet({"loss": loss} | {n: p.grad for n, p in named})

    def _check(self, loss: torch.Tensor, title: str) -> None:
        if self._job.plan is None:  # with a plan, a non-finite loss is a difference
            check_finite(loss, title)

    def _timed_step(self) -> TimedStep:
        device, step = torch.device(self._job.device), self.step
        wait_for(device)
        start, cpu_start = time.perf_counter(), time.process_time()
        clock = PhaseClock(device)
        replace(step, on_phase=clock.enter).run()
        phases = clock.stop()
        wait_for(device)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time()
        return TimedStep(seconds, phases, cpu_seconds - cpu_start)


def main(make_worker: Callable[[Job], Worker] = Worker) -> None:
    """Answer requests until the parent closes the pipe."""
    requests, replies = take_standard_streams()
    warnings.filterwarnings("ignore", f".*{IDLE}")  # it is reported
    try:
        worker = make_worker(pickle.load(requests))
        request = FIRST_STEPS
        while True:
            pickle.dump(worker.answer(request), replies)
            replies.flush()
            request = pickle.load(requests)
    except (EOFError, BrokenPipeError):
        return


def mark(name: str) -> None:
    """Record a mark in the allocator's log: a phase that begins, or ``BEGIN``."""
    with record_function(MARK + name):
        pass


def measured_curve(log: AllocatorLog, held_bytes: int) -> Curve:
    """Live bytes of a step whose phases are marked."""
    marks = [log.spans[MARK + name][0] for name in (*PHASES, END)]
    levels = accumulate((size for _, size in log.events), initial=held_bytes)
    times = [when for when, _ in log.events]
    begin = min(*times, marks[0])
    points = zip(((t - begin) / 1e9 for t in (begin, *times)), levels, strict=True)
    return Curve(tuple(points), tuple((mark - begin) / 1e9 for mark in marks))


def _gradient_digests(step: TrainingStep, number: int) -> dict[Result, str]:
    named = step.workload.model.named_parameters()
    return {
        Result(number, "gradient", name): digest(value.grad) for name, value in named
    }


def _buffer_digests(step: TrainingStep, number: int) -> dict[Result, str]:
    named = step.workload.model.named_buffers()
    return {Result(number, "buffer", name): digest(value) for name, value in named}


def replace_plan(plan: Plan | None, model: torch.nn.Module, spill: Path | None) -> None:
    """Apply a plan to a model, after removing a plan that its factory applied."""
    from ckplan.applying import apply, remove

    remove(model)
    if plan is not None:
        apply(model, plan, spill=spill)


def status_of(
    plan: Plan | None, model: torch.nn.Module
) -> tuple[tuple[RegionStatus, ...], int, int]:
    """Status of a plan's regions; bytes of the file and of the host they move to."""
    if plan is None:
        return (), 0, 0
    from ckplan.applying import status

    found = status(model)
    return found.regions, found.spilled_bytes, found.host_bytes


def explain_failure(error: BaseException, job: Job) -> CkplanError:
    """Convert an exception of the workload or its plan to an error with a hint."""
    if is_out_of_memory(error):
        return out_of_memory(job, f"ran out of memory ({first_line(error)})")
    if isinstance(error, CkplanError):
        return error
    what = f"{job.title} {describe_failure(error)}"
    if job.plan is None:
        needed = "a workload whose training step runs"
        return WorkloadError(what, needed=needed, hint=location_hint(error))
    needed = "a planned step that runs to its end, as the unplanned step does"
    return VerifyError(what, needed=needed, hint=location_hint(error))


def out_of_memory(job: Job, found: str) -> OutOfMemoryError:
    """The error for a worker that ran out of memory."""
    return OutOfMemoryError(
        f"{job.title} {found}",
        needed="memory for the peak of the step and for its process",
        hint="close other programs, make the batch smaller, or plan for a lower budget",
    )


def take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Reserve stdin and stdout for requests and replies; the model gets neither."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies
