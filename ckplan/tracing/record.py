"""Record a step of anybody's own training loop.

    with ckplan.record(model, optimizer) as recorder:
        for batch in loader:
            ...  # forwards, losses, backwards
            optimizer.step()
    plan = ckplan.solve(recorder.graph, budget="12GiB")

A step ends when the optimizer has stepped. The second whole step is recorded, the
steady state, in which the optimizer has its state. Before and after it, nothing but the
optimizer's steps is watched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from ckplan.errors import WorkloadError
from ckplan.graph.extrapolate import extrapolate
from ckplan.graph.graph import Graph
from ckplan.tracing.costs.calibrate import Progress
from ckplan.tracing.costs.cost_cache import cost_cache
from ckplan.tracing.cut_batches import BatchCutter, check_alike, cutter_of
from ckplan.tracing.held_outputs import held_outputs
from ckplan.tracing.loop_errors import check_loop, too_few_steps
from ckplan.tracing.ops_twice import with_chance_hazards
from ckplan.tracing.profile import as_graph, left_as_it_is
from ckplan.tracing.recording.trimming import Trimmed
from ckplan.tracing.target import find_target
from ckplan.tracing.watched_loop import LoopWatch, elements
from ckplan.tracing.watched_step import TracedStep, several_forwards
from ckplan.training.fingerprint import loop_fingerprint
from ckplan.training.step import DEFAULT_TRAINING
from ckplan.training.workload import check_not_lazy
from ckplan.units import format_bytes

NOTE_RECORDED = "recorded from a running loop, on real tensors: its step number"
_MENTIONED_BYTES = 1 << 20
# Which steps after the first one are recorded of batches that are cut: a loader can be
# one batch ahead, and what a step leaves behind must be of the same cut. Both numbers
# are odd, as some loops do something else in every second step.
_CUT_STEPS = (False, True, False, False, False, True)


def steps_ahead(num_steps: int, cutter: BatchCutter | None) -> list[bool]:
    """Of the steps after the first one, which ones are recorded."""
    return [True] * num_steps if cutter is None else [*_CUT_STEPS]


class LoopRecorder:
    """Records the second step of a loop; see ``record``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        num_steps: int = 1,
        fresh: bool = False,
        progress: Progress | None = None,
        cutter: BatchCutter | None = None,
        on_done: Callable[[], object] | None = None,
    ) -> None:
        """Check the arguments; see ``record``.

        With a ``cutter``, a step at each of its two cuts is recorded.
        """
        several = isinstance(optimizer, Sequence)
        optimizers = [*optimizer] if several else [optimizer]
        check_loop(model, optimizers)
        if num_steps < 1:
            raise WorkloadError(
                f"cannot record {num_steps} steps",
                needed="one or more, of which that with the largest batch is kept",
                hint="ckplan.record(model, optimizer, num_steps=10)",
            )
        # Of the steps ahead, which ones are recorded.
        self._ahead = steps_ahead(num_steps, cutter)
        self._done = False
        self.wanted = 1 + len(self._ahead)  # steps until it is done
        self._cutter = cutter
        self._scope = ExitStack()  # of a cutter that nobody has opened
        self.steps = 0  # that ended since the recorder began
        self._model = model
        self._optimizers = [*map(_unwrapped, optimizers)]
        self._fresh, self._progress, self._on_done = fresh, progress, on_done
        self._hook: _EndOfStep | None = None
        self._watch: LoopWatch | None = None
        self._kept: list[_Kept] = []  # one step; with a cutter, one of each cut

    def __enter__(self) -> LoopRecorder:
        """Begin to watch the optimizer."""
        check_not_lazy(self._model, "record")
        if self._cutter is not None:
            self._cutter.begin()
            if not self._cutter.is_open:
                self._scope.enter_context(self._cutter.cutting())
        self._hook = _EndOfStep(self._optimizers[-1], self._stepped)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Stop watching; a step that did not end is dropped.

        Raises:
            WorkloadError: The loop has failed on a batch that was cut.
        """
        del kind, trace
        self._scope.close()
        if self._hook is not None:
            self._hook.remove()
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        if self._cutter is not None and not self.done:
            self._cutter.explain(error)

    def start(self) -> LoopRecorder:
        """Begin with the step that begins now: the optimizers have just stepped."""
        self.__enter__()
        self._stepped()
        return self

    @property
    def batch(self) -> dict[str, str]:
        """Shapes of what the model was given in the recorded step, by name."""
        return self._kept[0].batch if self._kept else {}

    @property
    def beside_bytes(self) -> int:
        """Bytes of tensors that are alive all along, and that the step does not use."""
        return self._kept[-1].step.beside_bytes if self._kept else 0

    @property
    def number(self) -> int:
        """Of the recorded step, from 1; of cut batches, 2."""
        return self._kept[0].number if self._kept and self._cutter is None else 2

    @property
    def done(self) -> bool:
        """Whether all wanted steps are recorded: the loop may end."""
        return self._done

    @cached_property
    def graph(self) -> Graph:
        """The recorded step, its ops measured when this is read first.

        Raises:
            WorkloadError: The loop has not taken enough steps so far, or the recorded
                one ran no backward of the model; or batches could not be cut.
            GraphError: The step is not linear in the rows of the batch that was cut.
        """
        model = self._model
        if not self._kept or (self._cutter and not self.done):
            raise too_few_steps(self.steps, type(model).__name__, self.wanted)
        for kept in self._kept:
            if not (kept.step.recording.num_forward and kept.step.recording.calls):
                raise WorkloadError(
                    f"cannot plan for {type(model).__name__}: the recorded step ran no "
                    "backward through a call of it",
                    needed="the model that the loop trains, and its optimizer",
                    hint="ckplan.record(model, optimizer) with the module that is "
                    "called",
                )
        if self._cutter is None:
            return held_outputs(self._as_graph(self._kept[0]))
        rows = self._cutter.rows()
        many, few = self._kept
        check_alike(few.batch, many.batch, rows)
        graph = extrapolate(self._as_graph(few), self._as_graph(many), rows)
        where = "a DataLoader" if self._cutter.from_loader else "a call of a model"
        said = (
            f"extrapolated linearly from batches of {rows[0]} and {rows[1]} rows to "
            f"{rows[2]}: first rows of the first batch, cut where it leaves {where}"
        )
        return held_outputs(replace(graph, notes=(*graph.notes, said)))

    def _as_graph(self, kept: _Kept) -> Graph:
        model, found = self._model, kept.step.recording
        target = find_target(_device_of(model), None)
        fingerprint = loop_fingerprint(model, target.device, kept.batch)
        fingerprint |= several_forwards(found)
        traced = TracedStep(found, type(model).__name__, fingerprint, _notes(kept))
        with left_as_it_is(target):
            cache = cost_cache(target.placed, fresh=self._fresh)
            made = as_graph(traced, DEFAULT_TRAINING, target, cache, self._progress)
            return with_chance_hazards(made, found, target.placed)

    def _stepped(self) -> None:
        """A step has ended."""
        self.steps += 1
        if self._watch is not None:
            self._watch.end()
            self._keep(self._watch)
            self._watch = None
        if not self._ahead:
            self._done = True
            self._scope.close()
            if self._hook is not None:
                self._hook.remove()
            if self._on_done is not None:
                self._on_done()
        elif self._ahead.pop(0):
            placed = torch.device(_device_of(self._model))
            self._watch = LoopWatch(self._model, self._optimizers, placed)

    def _keep(self, watch: LoopWatch) -> None:
        """Keep each step of a cutter; else the one with the largest batch."""
        if self._cutter is not None:
            self._cutter.halve()
        elif self._kept:
            if elements(watch.batch) <= elements(self._kept[0].batch):
                return
            self._kept.clear()
        self._kept.append(_Kept(watch, self.steps))


class _EndOfStep:
    """Hook of an optimizer that calls a function when it has stepped."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, told: Callable[[], object]
    ) -> None:
        self._told: Callable[[], object] | None = told
        self._runs = False
        self._handle = optimizer.register_step_post_hook(self)

    def __call__(self, *given: object) -> None:
        del given
        if self._told is not None:
            self._runs = True
            try:
                self._told()
            finally:
                self._runs = False

    def remove(self) -> None:
        """Call the function no more.

        A hook that runs stays, without an effect: the optimizer goes through its hooks.
        """
        self._told = None
        if not self._runs:
            self._handle.remove()


class _Kept(NamedTuple):
    """A recorded step."""

    watch: LoopWatch
    number: int

    @property
    def batch(self) -> dict[str, str]:
        return self.watch.batch

    @property
    def step(self) -> Trimmed:
        return self.watch.result


def _notes(kept: _Kept) -> list[str]:
    notes = [f"{NOTE_RECORDED} {kept.number}"]
    beside_bytes = kept.step.beside_bytes
    if beside_bytes >= _MENTIONED_BYTES:
        notes.append(
            f"{format_bytes(beside_bytes)} in tensors that the step does not use "
            "are not counted: leave them free with --reserve"
        )
    return [*notes, *kept.watch.notes()]


def record(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    num_steps: int = 1,
    reduce: int | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
) -> LoopRecorder:
    """Record a step of a training loop that runs in a ``with`` block.

    A step ends when the optimizer has stepped. Between two ends the loop may do
    anything: run several forwards, losses, backwards and other models, accumulate and
    clip gradients, make data. The second whole step is recorded; its results are those
    of the loop without a recorder, bit for bit. Of accumulated batches that run the
    same ops, the largest one is the step, as for ``profile(accumulate=...)`` the last.

    Args:
        model: The module that is to be planned, without a plan; other models of the
            loop are recorded as they are.
        optimizer: The optimizer whose step ends a step of the loop; or several, in the
            order in which they step, of which the last one does.
        num_steps: Steps to record, one after the other, if batches differ: the one with
            the largest batch is kept.
        reduce: Record a loop that does not fit: until two steps are recorded, batches
            are cut to one row of so many, then to half of that, and the step of whole
            batches is extrapolated from both. A ``DataLoader`` hands out the first
            rows of its first batch, again and again; without one, inputs of models are
            cut where a model is called. What the loop trains meanwhile is to be thrown
            away.
        fresh: Measure ops again that the cost cache already knows.
        progress: Called with the progress of the measurement.

    Returns:
        The recorder: a context manager. ``done`` says whether a step is recorded, and
        ``graph`` is that step.

    Raises:
        WorkloadError: These are no model and optimizer, the optimizer trains nothing of
            the model, or the model has a plan. Later: the loop fails on a batch that
            was cut.
    """
    how: dict[str, Any] = {"num_steps": num_steps, "fresh": fresh, "progress": progress}
    return LoopRecorder(model, optimizer, cutter=cutter_of(reduce, num_steps), **how)


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside a wrapper, such as that of Accelerate."""
    inner = getattr(optimizer, "optimizer", None)
    return _unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def _device_of(model: nn.Module) -> str:
    return next((str(p.device) for p in model.parameters()), "cpu")
