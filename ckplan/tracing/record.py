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
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ckplan.applying import status
from ckplan.errors import ApplyError, WorkloadError
from ckplan.graph.graph import Graph
from ckplan.tracing.costs.calibrate import Progress
from ckplan.tracing.costs.cost_cache import cost_cache
from ckplan.tracing.held_outputs import held_outputs
from ckplan.tracing.profile import as_graph, left_as_it_is
from ckplan.tracing.recording.trimming import Trimmed
from ckplan.tracing.target import find_target
from ckplan.tracing.watched_loop import LoopWatch, elements
from ckplan.tracing.watched_step import TracedStep
from ckplan.training.fingerprint import parameter_shapes, torch_version
from ckplan.training.step import DEFAULT_TRAINING
from ckplan.training.workload import check_not_lazy
from ckplan.units import format_bytes

NOTE_RECORDED = "recorded from a running loop, on real tensors: its step number"
NOTE_NOT_TWICE = "forward was not run twice to compare: that can change a running loop"
NOTE_OVER = (
    "a backward of the next step needs tensors of this one, which are counted up to "
    "the end of the last backward: of several optimizers, the one that steps last in "
    "the loop should end the step"
)
_MENTIONED_BYTES = 1 << 20


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
        on_done: Callable[[], object] | None = None,
    ) -> None:
        """Check the arguments; see ``record``."""
        several = isinstance(optimizer, Sequence)
        optimizers = [*optimizer] if several else [optimizer]
        _check_arguments(model, optimizers)
        if num_steps < 1:
            raise WorkloadError(
                f"cannot record {num_steps} steps",
                needed="one or more, of which that with the largest batch is kept",
                hint="ckplan.record(model, optimizer, num_steps=10)",
            )
        self._left = num_steps  # steps to record
        self.steps = 0  # that ended since the recorder began
        self._model = model
        self._optimizers = [*map(_unwrapped, optimizers)]
        self._fresh, self._progress, self._on_done = fresh, progress, on_done
        self._hook: RemovableHandle | None = None
        self._watch: LoopWatch | None = None
        self._found: Trimmed | None = None
        self._batch: dict[str, str] = {}
        self._holds_over = False
        self._number = 0  # of the step that is kept

    def __enter__(self) -> LoopRecorder:
        """Begin to watch the optimizer."""
        check_not_lazy(self._model, "record")
        self._hook = self._optimizers[-1].register_step_post_hook(self._stepped)
        return self

    def __exit__(self, *error: object) -> None:
        """Stop watching; a step that did not end is dropped."""
        if self._hook is not None:
            self._hook.remove()
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def start(self) -> LoopRecorder:
        """Begin with the step that begins now: the optimizers have just stepped."""
        self.__enter__()
        self._stepped()
        return self

    @property
    def batch(self) -> dict[str, str]:
        """Shapes of what the model was given in the recorded step, by name."""
        return self._batch

    @property
    def done(self) -> bool:
        """Whether all wanted steps are recorded: the loop may end."""
        return self._left == 0

    @cached_property
    def graph(self) -> Graph:
        """The recorded step, its ops measured when this is read first.

        Raises:
            WorkloadError: The loop has not taken two steps so far, or the recorded one
                ran no backward of the model.
        """
        if self._found is None:
            raise _too_few_steps(self.steps, type(self._model).__name__)
        found, model = self._found.recording, self._model
        if not (found.num_forward and found.calls):
            raise WorkloadError(
                f"cannot plan for {type(model).__name__}: the recorded step ran no "
                "backward through a call of it",
                needed="the model that the loop trains, and its optimizer",
                hint="ckplan.record(model, optimizer) with the module that is called",
            )
        target = find_target(_device_of(model), None)
        calls = [call for call in found.calls if not call.fqn]
        several = {"forwards": len(calls)} if len(calls) > 1 else {}
        fingerprint: dict[str, Any] = {
            "torch": torch_version(),
            "device": target.device.type,
            "batch": self._batch,
            "parameters": parameter_shapes(model),
            **several,
        }
        traced = TracedStep(found, type(model).__name__, fingerprint, self._notes())
        with left_as_it_is(target):
            cache = cost_cache(target.placed, fresh=self._fresh)
            graph = as_graph(traced, DEFAULT_TRAINING, target, cache, self._progress)
        return held_outputs(graph)

    def _notes(self) -> list[str]:
        assert self._found is not None, "internal error: no step is recorded"
        notes = [f"{NOTE_RECORDED} {self._number}", NOTE_NOT_TWICE]
        beside_bytes = self._found.beside_bytes
        if beside_bytes >= _MENTIONED_BYTES:
            notes.append(
                f"{format_bytes(beside_bytes)} in tensors that the step does not use "
                "are not counted: leave them free with --reserve"
            )
        if self._holds_over:
            notes.append(NOTE_OVER)
        return notes

    def _stepped(self, *given: object) -> None:
        """Hook of the optimizer: a step has ended."""
        del given
        self.steps += 1
        if self._watch is not None:
            self._watch.end()
            self._keep_largest(self._watch)
            self._watch = None
            self._left -= 1
        if self._left:
            placed = torch.device(_device_of(self._model))
            self._watch = LoopWatch(self._model, self._optimizers, placed)
            return
        if self._hook is not None:
            self._hook.remove()
        if self._on_done is not None:
            self._on_done()

    def _keep_largest(self, watch: LoopWatch) -> None:
        """Keep a step if its batch is larger than that of the one before."""
        if self._found is None or elements(watch.batch) > elements(self._batch):
            self._found, self._batch = watch.result(), watch.batch
            self._holds_over, self._number = watch.holds_over, self.steps


def record(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    num_steps: int = 1,
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
        fresh: Measure ops again that the cost cache already knows.
        progress: Called with the progress of the measurement.

    Returns:
        The recorder: a context manager. ``done`` says whether a step is recorded, and
        ``graph`` is that step.

    Raises:
        WorkloadError: These are no model and optimizer, the optimizer trains nothing of
            the model, or the model has a plan.
    """
    how: dict[str, Any] = {"num_steps": num_steps, "fresh": fresh}
    return LoopRecorder(model, optimizer, progress=progress, **how)


def _check_arguments(model: object, optimizers: Sequence[object]) -> None:
    if not isinstance(model, nn.Module):
        raise WorkloadError(
            f"cannot record a {type(model).__name__}",
            needed="one model of the loop, a torch.nn.Module, and its optimizer",
            hint="ckplan.record(model, optimizer)",
        )
    others = [one for one in optimizers if not isinstance(one, torch.optim.Optimizer)]
    if others or not optimizers:
        kind = type(others[0]).__name__ if others else "nothing"
        raise WorkloadError(
            f"cannot record the steps of {kind}, which is no optimizer",
            needed="the torch.optim.Optimizer whose step() ends a step of the loop",
            hint="ckplan.record(model, optimizer)",
        )
    stepped = [p for one in optimizers for p in _parameters_of(one)]
    mine = {id(p) for p in model.parameters()}
    if not any(id(p) in mine for p in stepped):
        raise WorkloadError(
            f"cannot record {type(model).__name__} with this optimizer: it steps no "
            "parameter of the model",
            needed="a model, and an optimizer of its parameters",
            hint="for several models, a recorder of each with its own optimizer",
        )
    try:
        status(model)
    except ApplyError:
        return
    raise WorkloadError(
        f"cannot record {type(model).__name__}: it has a plan already",
        needed="the model without a plan",
        hint="ckplan.remove(model)",
    )


def _parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside a wrapper, such as that of Accelerate."""
    inner = getattr(optimizer, "optimizer", None)
    return _unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def _device_of(model: nn.Module) -> str:
    return next((str(p.device) for p in model.parameters()), "cpu")


def _too_few_steps(steps: int, model: str) -> WorkloadError:
    return WorkloadError(
        f"no step of {model} is recorded: its optimizer stepped {steps} "
        f"time{'s' * (steps != 1)} while the recorder was open",
        needed="two steps: the first one makes the optimizer's state, the second one "
        "is recorded",
        hint="run more of the loop in `with ckplan.record(model, optimizer):`",
    )
