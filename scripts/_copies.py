"""Copies of a workload that take steps in turns, all in one process.

Of two processes that take the same step, one was up to 5 % slower, as pages lie; of
copies in one process, less than 1 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ckplan.plan.plan import Plan
from ckplan.tracing.costs.spread import Quartiles, quartiles, undisturbed
from ckplan.training.loading import WorkloadSpec
from ckplan.training.step import Training
from ckplan.verifying.phases import TimedStep
from ckplan.verifying.step_process import StepProcess, take_turns
from ckplan.verifying.worker import FIRST_STEPS, TIMED_STEP, Job, Worker
from ckplan.verifying.worker import main as answer

LEAST_TURNS, MOST_TURNS = 2, 40
ROUND_SECONDS = 12.0
Trained = tuple[WorkloadSpec, Plan | None, Training]


def measured_in_turns(
    ways: Sequence[Trained], rounds: int
) -> tuple[list[int], list[Sequence[float]]]:
    """The peak of each way, in a process of its own, and its CPU seconds by round."""
    peaks = list[int]()
    for spec, plan, training in ways:
        with StepProcess(spec, plan, training, one_thread=True) as process:
            peaks.append(process.first_steps().peak_bytes)
    first, *others = ways
    with Copies(*first, one_thread=True) as copies:
        copies.first_steps()
        copies.add(others)
        copies.round(ROUND_SECONDS, of_cpu=True)  # caches and pages as they stay
        taken = [copies.round(ROUND_SECONDS, of_cpu=True) for _ in range(rounds)]
    return peaks, [*zip(*taken, strict=True)]


def changes(taken: Sequence[float], without: Sequence[float]) -> Quartiles:
    """By how much seconds exceed others of the same rounds, as parts of those."""
    found = quartiles(
        [one / other - 1 for one, other in zip(taken, without, strict=True)]
    )
    assert found is not None, "internal error: no round was measured"
    return found


class Copies(StepProcess):
    """A workload as given, and copies that train otherwise, all in one process."""

    main = "import _copies; _copies.take_requests()"

    def add(self, others: Sequence[Trained]) -> None:
        """Build copies, and let them take their first steps."""
        self._ask(
            [
                replace(self._job, spec=spec, plan=plan, training=training)
                for spec, plan, training in others
            ]
        )

    def round(self, seconds: float, *, of_cpu: bool) -> list[float]:
        """Seconds of a step of each, the mean of the faster half of some turns.

        Args:
            seconds: What all steps take together, about.
            of_cpu: Whether they are of the processor, or of the wall.
        """
        taken: list[list[TimedStep]] = self._ask(seconds)
        return [
            undisturbed([one.cpu_seconds if of_cpu else one.seconds for one in of])
            for of in taken
        ]


class _Copies(Worker):
    """What their process does."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._others = list[Worker]()

    def handle(self, request: Any) -> Any:
        """Add copies, or take a round of steps of so many seconds."""
        if isinstance(request, list):
            self._others = [Worker(job) for job in request]
            for one in self._others:
                one.handle(FIRST_STEPS)
            return None
        if not isinstance(request, float):
            return super().handle(request)
        steps = [partial(one.handle, TIMED_STEP) for one in (self, *self._others)]
        turn_seconds = sum(step().seconds for step in steps)
        turns = min(max(round(request / turn_seconds), LEAST_TURNS), MOST_TURNS)
        return take_turns(steps, turns)


def take_requests() -> None:
    """What a child process runs."""
    answer(_Copies)
