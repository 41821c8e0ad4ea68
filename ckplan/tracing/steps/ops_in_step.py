"""Seconds of ops inside a real step, by the name of the op.

Ops alone find caches as a measurement leaves them; in a step, what the op before wrote
is still there, or all was evicted. So each op of a few steps is timed as it runs. Of
steps with a plan that reruns all layers, what backward takes more by ops of the same
names tells how long ops take that run again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckplan.graph.graph import Graph
from ckplan.tracing.costs.spread import undisturbed
from ckplan.training.step import TrainingStep

_STEPS = 5


@dataclass(frozen=True, slots=True)
class OpSeconds:
    """What ops take in a step, all of one name together."""

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    num_forward: Mapping[str, int]

    def per_call(self, name: str) -> float:
        """Seconds of an op of this name in forward; 0 if there is none."""
        calls = self.num_forward.get(name, 0)
        return self.forward[name] / calls if calls else 0.0


def time_ops(step: TrainingStep, clock: Callable[[], float]) -> OpSeconds:
    """Take a few steps, and time their ops.

    Args:
        step: Takes the same ops every time; else the steps that differ do not count.
        clock: Seconds.
    """
    runs: list[_Timed] = []
    for _ in range(_STEPS):
        timed = _Timed(clock)
        with timed:
            replace(step, on_phase=timed.enter).run()
        runs.append(timed)
    alike = [one for one in runs if one.names == runs[0].names]
    forward, backward = defaultdict[str, float](float), defaultdict[str, float](float)
    calls = Counter[str]()
    taken = zip(*(one.seconds for one in alike), strict=True)
    for (phase, name), seconds in zip(runs[0].names, taken, strict=True):
        if phase == "forward":
            forward[name] += undisturbed(seconds)
            calls[name] += 1
        elif phase == "backward":
            backward[name] += undisturbed(seconds)
    return OpSeconds(forward, backward, calls)


def factors_of(graph: Graph, seconds: OpSeconds) -> dict[str, float]:
    """Seconds of ops in forward as factors of those in the graph, by name.

    Names that the step and the graph count otherwise have the factor of all others.
    """
    alone, calls = defaultdict[str, float](float), Counter[str]()
    for op in graph.ops[: graph.num_forward]:
        alone[op.name] += graph.num_batches * op.seconds
        calls[op.name] += graph.num_batches
    known = {
        name: seconds.forward[name] / alone[name]
        for name, count in calls.items()
        if seconds.num_forward.get(name) == count and alone[name] > 0
    }
    before = sum(alone[name] for name in known)
    after = sum(seconds.forward[name] for name in known)
    return {name: known.get(name, after / before if before else 1.0) for name in calls}


def again_factor(
    unplanned: OpSeconds, planned: OpSeconds, reruns: Sequence[str]
) -> float | None:
    """Seconds of ops that rerun in backward, as a factor of those in forward.

    Args:
        unplanned: Of the step as it is.
        planned: Of the step with a plan.
        reruns: The names of the ops that the plan reruns.

    Returns:
        The factor, or None if these ops take no time.
    """
    once = sum(unplanned.per_call(name) for name in reruns)
    more = sum(
        planned.backward.get(name, 0.0) - unplanned.backward.get(name, 0.0)
        for name in {*reruns}
    )
    return more / once if once > 0 and more > 0 else None


@dataclass
class _Timed(TorchDispatchMode):
    """Times each op; what runs before a phase begins is of none."""

    clock: Callable[[], float]
    names: list[tuple[str, str]] = field(default_factory=list)  # phase and op
    seconds: list[float] = field(default_factory=list)
    phase: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def enter(self, phase: str) -> None:
        """From now on, ops are of this phase."""
        self.phase = phase

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run it and look at the clock."""
        del types
        begin = self.clock()
        found = func(*args, **(kwargs or {}))
        self.seconds.append(self.clock() - begin)
        self.names.append((self.phase, func.overloadpacket.__name__))
        return found
