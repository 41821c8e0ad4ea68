"""The child process of ``on_card``: a step's phases, and the device's part of it.

A step takes as long as the device has to do, or as the processor takes to launch it.
For the device alone, each phase is launched while the device sleeps, so that CUDA
events around it measure kernels without the gaps between launches. Where the device
woke up before all was launched (the phase waits for a value, or the queue of launches
was full), the gaps that followed are part of the measured seconds, which are then the
most that the device can have been busy.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch

from ckplan.errors import CkplanError
from ckplan.plan.plan import Plan
from ckplan.training.loading import WorkloadSpec
from ckplan.training.step import Training, TrainingStep
from ckplan.verifying.step_process import StepProcess
from ckplan.verifying.worker import Worker, main

T, R = TypeVar("T"), TypeVar("R")
PHASES, DEVICE = "phases", "device"
_CALIBRATION_CYCLES = 20_000_000
_LONGER, _AT_LEAST_SECONDS = 1.5, 0.002  # that the device sleeps, of the launches
_DETERMINISTIC = "ON_CARD_DETERMINISTIC"


class DeviceTime(NamedTuple):
    """How long the device was busy in one step."""

    seconds: float
    is_exact: bool  # False: it was this long at most


class CardProcess(StepProcess):
    """A ``StepProcess`` that also answers how long phases and kernels take."""

    main = "from _card_worker import serve; serve({!r})"

    def __init__(
        self, spec: WorkloadSpec, plan: Plan | None, training: Training, **job: Any
    ) -> None:
        super().__init__(spec, plan, training, **job)
        self.main = self.main.format(spec.target)  # imported while it waits for a job

    def carry(self, plan: Plan | None) -> None:
        """Take the plan of its steps, which may be made after it was started."""
        self._job = replace(self._job, plan=plan)

    def phases(self) -> tuple[float, float, float]:
        """Seconds of the processor in forward, backward and the optimizer's step."""
        found: tuple[float, float, float] = self._ask(PHASES)
        return found

    def device_time(self) -> DeviceTime | None:
        """How long a GPU is busy in one step; None on the CPU."""
        found: DeviceTime | None = self._ask(DEVICE)
        return found


class DeterministicProcess(CardProcess):
    """The same, with kernels whose results do not depend on chance."""

    main = (
        f"import os; os.environ[{_DETERMINISTIC!r}] = '1'; "
        "os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'; " + CardProcess.main
    )


def at_once(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """What work returns for each item, in order; each in a thread of its own.

    An alarm in the meantime waits for no thread: the processes end first.
    """
    pool = ThreadPoolExecutor(len(items))
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def serve(target: str) -> None:
    """Import a workload, then answer requests until the parent closes the pipe."""
    warnings.simplefilter("ignore")
    with suppress(CkplanError):  # it is raised again where it can be told
        WorkloadSpec(target).load()
    if os.environ.get(_DETERMINISTIC):
        torch.use_deterministic_algorithms(True, warn_only=True)
    main(CardWorker)


class CardWorker(Worker):
    """A worker that knows two more requests."""

    def handle(self, request: str) -> Any:
        """The reply to a request."""
        if request == PHASES:
            return phase_seconds(self.step)
        if request == DEVICE:
            cuda = self.device.type == "cuda"
            return device_time(self.step, Queue(self.device)) if cuda else None
        return super().handle(request)

    @property
    def device(self) -> torch.device:
        """Where the step runs."""
        return next(self.step.workload.model.parameters()).device


def phase_seconds(step: TrainingStep) -> tuple[float, float, float]:
    """Seconds of the processor in forward, backward and the optimizer's step."""
    times: list[float] = []
    device = next(step.workload.model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    replace(step, on_phase=lambda name: times.append(time.perf_counter())).run()
    times.append(time.perf_counter())
    forward, backward, update = (b - a for a, b in pairwise(times))
    return forward, backward, update


class Queue:
    """A GPU's queue of kernels: it can sleep, and is asked when it came to a place."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        begin, end = self.mark(), self._sleep_and_mark(_CALIBRATION_CYCLES)
        self.wait()
        self._cycles = _CALIBRATION_CYCLES / max(self.seconds(begin, end), 1e-6)

    def sleep(self, seconds: float) -> None:
        """Keep the device from starting what is launched next."""
        torch.cuda._sleep(round(seconds * self._cycles))

    def mark(self) -> torch.cuda.Event:
        """A place in the queue."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Until the queue is empty."""
        torch.cuda.synchronize(self._device)

    def is_over(self, place: torch.cuda.Event) -> bool:
        """Whether the device came to a place."""
        return place.query()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Between two places that the device came to."""
        return begin.elapsed_time(end) / 1e3

    def _sleep_and_mark(self, cycles: int) -> torch.cuda.Event:
        torch.cuda._sleep(cycles)
        return self.mark()


def device_time(step: TrainingStep, queue: Queue) -> DeviceTime:
    """Seconds of a step's kernels, without the gaps between their launches."""
    launches = [_launch_seconds(run, queue) for run in _phases(step)]
    seconds, is_exact = 0.0, True
    for run, launch in zip(_phases(step), launches, strict=True):
        queue.wait()
        queue.sleep(_LONGER * launch + _AT_LEAST_SECONDS)
        begin = queue.mark()
        run()
        end = queue.mark()
        is_exact = is_exact and not queue.is_over(begin)
        queue.wait()
        seconds += queue.seconds(begin, end)
    return DeviceTime(seconds, is_exact)


def _launch_seconds(run: Callable[[], None], queue: Queue) -> float:
    queue.wait()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _phases(step: TrainingStep) -> Iterator[Callable[[], None]]:
    """Forward, backward and the optimizer's step, one after the other."""
    held: list[Any] = []
    yield lambda: (step.zero_grad(), held.extend(step.forward()[:2]))[0]
    yield lambda: (step.backward(held[1]), held.clear())[0]
    yield step.update
