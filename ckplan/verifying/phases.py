"""Seconds of a step by phase: predicted from a graph, or measured in a step.

Recomputation runs inside backward, the engine inside forward and backward. Timers
around single ops would cost more than the engine itself. So a measured step has neither
as a figure of its own: both are what its forward and backward take longer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch

from ckplan.graph.graph import Graph
from ckplan.graph.queues import span
from ckplan.simulating.curve import PHASES
from ckplan.simulating.simulate import Timeline

_FORWARD, _BACKWARD, _OPTIMIZER = PHASES


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Seconds of one step by phase; the optimizer's phase begins with ``zero_grad``."""

    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    recomputation_seconds: float | None = None  # None if measured: within backward
    engine_seconds: float | None = None  # None if measured: in forward and backward

    @property
    def total_seconds(self) -> float:
        """Seconds of all phases."""
        return self.model_seconds + self.optimizer_seconds

    @property
    def model_seconds(self) -> float:
        """Seconds of forward and backward, with recomputation and engine."""
        added = (self.recomputation_seconds or 0.0) + (self.engine_seconds or 0.0)
        return self.forward_seconds + self.backward_seconds + added


class TimedStep(NamedTuple):
    """Seconds of one measured step."""

    seconds: float  # from an idle device to an idle device
    phases: PhaseSeconds | None  # None in a script, which does more than train
    cpu_seconds: float = 0.0  # of the process, all threads together


def predicted_seconds(timeline: Timeline, unplanned: Graph) -> PhaseSeconds:
    """Seconds of a simulated step.

    Forward and backward are those of the unplanned step. Recomputation, with what tiles
    and moves add, and engine are the parts of ``timeline.recompute_seconds`` that no
    other queue hides.

    Args:
        timeline: The step with a plan, or without.
        unplanned: The step without.
    """
    added = timeline.recompute_seconds
    engine = min(added, timeline.engine_overhead * timeline.unplanned_seconds)
    forward, backward, optimizer = _unplanned_phases(unplanned)
    return PhaseSeconds(forward, backward, optimizer, added - engine, engine)


def _unplanned_phases(graph: Graph) -> tuple[float, float, float]:
    """Seconds of forward, backward and optimizer: until the device is done with each.

    Of several batches that a GPU's queues overlap, phases have the proportions of one.
    """
    start, stop, batches = graph.num_forward, graph.backward_stop, graph.num_batches
    if not graph.is_launched:
        seconds = graph.critical_seconds
        halves = sum(seconds[:start]), sum(seconds[start:stop])
        return batches * halves[0], batches * halves[1], sum(seconds[stop:])
    device, launch = graph.device_and_launch
    one = graph.batch_span
    all_batches = one.times(batches).seconds
    share = span(launch[:start], device[:start]).seconds / (one.seconds or 1.0)
    forward = share * all_batches
    return forward, all_batches - forward, graph.step_seconds - all_batches


def median_phases(steps: Iterable[TimedStep]) -> PhaseSeconds | None:
    """The median of every phase over steps; None if there are none."""
    phases = [step.phases for step in steps if step.phases is not None]
    if not phases:
        return None
    return PhaseSeconds(
        median(one.forward_seconds for one in phases),
        median(one.backward_seconds for one in phases),
        median(one.optimizer_seconds for one in phases),
    )


class PhaseClock:
    """Measures the phases of one step without waiting between them.

    On a GPU, events in the stream mark the phases: a phase lasts until the device has
    done its work.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin in the optimizer's phase: a step begins with ``zero_grad``."""
        self._device = device
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self.enter(_OPTIMIZER)

    def enter(self, phase: str) -> None:
        """End the phase and begin another one of ``PHASES``."""
        self._marks.append((phase, self._now()))

    def stop(self) -> PhaseSeconds:
        """End the last phase; waits for the device.

        Returns:
            The sums of each phase, which may have had several turns.
        """
        self.enter("")
        taken = Counter[str]()
        for (phase, since), (_, until) in pairwise(self._marks):
            taken[phase] += _seconds_between(since, until)  # type: ignore[assignment]
        return PhaseSeconds(taken[_FORWARD], taken[_BACKWARD], taken[_OPTIMIZER])

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        with torch.cuda.device(self._device):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return event


def _seconds_between(
    since: float | torch.cuda.Event, until: float | torch.cuda.Event
) -> float:
    if isinstance(since, float) and isinstance(until, float):
        return until - since
    assert not isinstance(since, float) and not isinstance(until, float)
    until.synchronize()
    return since.elapsed_time(until) / 1e3
