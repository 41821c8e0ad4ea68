"""Seconds in a step for steps that differ from it in their batch or their optimizer.

Steps are measured at two batches. Forward and backward of all others are on the line
through both: a step has seconds that no row adds to, of Python and of launches. As long
as one batch is known, its seconds are some factor of those of its ops measured alone,
which another batch takes, too. So seconds of all batches are comparable, and few steps
are taken. Another optimizer shares forward and backward: only the factor of its own
phase is measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import mul
from typing import NamedTuple

from ckplan.graph.graph import Graph
from ckplan.graph.updates import with_update_of
from ckplan.tracing.first_step import FirstStep
from ckplan.tracing.steps.in_step import (
    NOTE_IN_STEP,
    StepCosts,
    StepSeconds,
    with_step_costs,
)
from ckplan.tracing.target import TraceTarget
from ckplan.tracing.watched_step import TracedStep
from ckplan.training.step import Training


@dataclass
class OtherSteps:
    """What steps of one model and precision, measured once, say of all others."""

    rows: int | None = None  # of a micro-batch of the next step, if they are known
    measured: Graph | None = None  # the first step, as measured
    begun: bool = False  # a step was tried, measured or not
    at_rows: dict[int, _Batch | None] = field(default_factory=dict)  # two at most
    factors: tuple[float, float] = (1.0, 1.0)  # of forward and backward
    first: FirstStep = field(default_factory=FirstStep)
    of_ops: dict[str, float] = field(default_factory=dict)  # of forward
    of_optimizers: dict[str | None, float] = field(default_factory=dict)
    like: Graph | None = None  # the next step with another optimizer
    _updates: dict[Training, Graph] = field(default_factory=dict)  # of other optimizers

    def recorded(
        self,
        training: Training,
        target: TraceTarget,
        trace: Callable[..., TracedStep],
        measured: Callable[[TracedStep], Graph],
        *,
        check: bool,
    ) -> Graph:
        """The next step; for a card, of another optimizer the update alone is recorded.

        An update reads parameters and gradients, which no row adds to: one that was
        recorded at another batch is not recorded again.

        Args:
            training: Options of the step.
            target: The device that it is planned for.
            trace: Records it, given what is known of its ``first`` step.
            measured: Makes a graph of what was recorded.
            check: Whether the recording is compared with a forward.
        """
        alone = self.like is not None and not target.is_here
        if alone and not check and training in self._updates:
            found = self._with_update(self._updates[training])
            if found is not None:
                return found
        first = replace(self.first, alone=True) if alone else self.first
        traced = trace(first=first)
        graph = measured(traced)
        if not traced.is_update:
            return graph
        self._updates[training] = graph
        return self._with_update(graph) or measured(trace(first=self.first))

    def learn_update(self, training: Training, graph: Graph) -> None:
        """Take the update of a step with another optimizer, recorded elsewhere."""
        if self.like is not None:
            self._updates[training] = graph

    def _with_update(self, update: Graph) -> Graph | None:
        assert self.like is not None, "internal error: no step to take the update into"
        return with_update_of(self.like, update)

    def taken_into(
        self,
        graph: Graph,
        optimizer: str | None,
        measure: Callable[[], Graph],
        measure_phases: Callable[[], StepSeconds | None],
    ) -> Graph:
        """A step with seconds as in a step.

        Args:
            graph: The step, whose ops were measured alone.
            optimizer: The name of its optimizer.
            measure: Takes steps of it: ``graph`` with their seconds, or with a note
                why they were not measured.
            measure_phases: Takes steps of it without plans; None if it cannot.
        """
        if not self.begun:
            self.begun, found = True, measure()
            if NOTE_IN_STEP not in found.notes:
                return found
            *factors, own = _factors(graph, found)
            self.measured, self.factors = found, (factors[0], factors[1])
            self.of_ops = _factors_of_ops(graph, found)
            self.of_optimizers[optimizer] = own
            self._learn(StepSeconds(*_phases(found)))
            return found
        if self.measured is None:
            return graph
        if len(self.at_rows) == 1 and self.rows not in self.at_rows:
            self._learn(measure_phases(), graph.num_batches)
        if optimizer not in self.of_optimizers:
            found = measure()
            if NOTE_IN_STEP in found.notes:
                self.of_optimizers[optimizer] = _factors(graph, found)[-1]
            else:
                self.of_optimizers[optimizer] = next(iter(self.of_optimizers.values()))
        return self._scaled(graph, self.of_optimizers[optimizer])

    def _scaled(self, graph: Graph, of_optimizer: float) -> Graph:
        assert self.measured is not None
        *alone, update = _phases(graph)
        batch = self._on_line() or _Batch(*map(mul, self.factors, alone))
        seconds = StepSeconds(
            graph.num_batches * batch.forward,
            graph.num_batches * batch.backward,
            of_optimizer * update,
        )
        costs = StepCosts(seconds, self.measured.engine, self.of_ops)
        return with_step_costs(graph, costs)

    def _learn(self, phases: StepSeconds | None, num_batches: int = 1) -> None:
        """Remember what a batch of the next step's rows takes, if it was measured."""
        if self.rows is None:
            return
        self.at_rows[self.rows] = None
        if phases is not None:
            both = phases.forward / num_batches, phases.backward / num_batches
            self.at_rows[self.rows] = _Batch(*both)

    def _on_line(self) -> _Batch | None:
        """The next batch, measured or on the line through two that are, if known."""
        found = self.at_rows.get(self.rows) if self.rows is not None else None
        if found is not None or self.rows is None or len(self.at_rows) < 2:
            return found
        (few, small), (many, large) = sorted(self.at_rows.items())
        if small is None or large is None:
            return None
        place, share = (self.rows - few) / (many - few), min(self.rows / few, 1.0)
        pairs = zip(small, large, strict=True)
        # A row takes no less in a smaller batch.
        return _Batch(*(max(a + place * (b - a), share * a) for a, b in pairs))


class _Batch(NamedTuple):
    """Seconds of one micro-batch in a step."""

    forward: float
    backward: float


def _factors(alone: Graph, in_step: Graph) -> tuple[float, float, float]:
    """Seconds of the three phases in a step, relative to their ops alone."""
    pairs = zip(_phases(in_step), _phases(alone), strict=True)
    one, two, three = (there / here if here else 1.0 for there, here in pairs)
    return one, two, three


def _factors_of_ops(alone: Graph, in_step: Graph) -> dict[str, float]:
    """Seconds of the ops of forward in a step, relative to those alone, by name."""
    here, there = defaultdict[str, float](float), defaultdict[str, float](float)
    for one, other in zip(alone.ops, in_step.ops[: alone.num_forward], strict=False):
        here[one.name] += one.seconds
        there[one.name] += other.seconds
    return {name: there[name] / more for name, more in here.items() if more > 0}


def _phases(graph: Graph) -> tuple[float, float, float]:
    """Seconds of the ops of one forward, one backward, and of the optimizer."""
    start, stop = graph.num_forward, graph.backward_stop
    ops = graph.ops[:start], graph.ops[start:stop], graph.ops[stop:]
    one, two, three = (sum(op.seconds for op in span) for span in ops)
    return one, two, three
