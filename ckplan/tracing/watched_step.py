"""Run two steps of a workload and record the second: the steady state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ckplan.errors import CkplanError, WorkloadError
from ckplan.graph.records import BEFORE_STEP
from ckplan.tracing.alive import LeftBehind
from ckplan.tracing.faking.fake_mode import KnownValues
from ckplan.tracing.first_step import FirstStep
from ckplan.tracing.path_check import FunctionLog
from ckplan.tracing.recording.function_counts import FunctionCounts
from ckplan.tracing.recording.recorder import StepRecorder
from ckplan.tracing.recording.recording import Recording
from ckplan.tracing.recording.storages import Storages
from ckplan.tracing.target import TraceTarget
from ckplan.training.failures import (
    check_finite,
    describe_failure,
    location_hint,
    untraceable_feature,
)
from ckplan.training.fingerprint import fingerprint
from ckplan.training.optimizers import step_counts
from ckplan.training.step import Training, TrainingStep, make_step
from ckplan.training.workload import (
    Workload,
    check_not_lazy,
    mode_notes,
    on_device,
    tensors_of,
)
from ckplan.units import format_bytes

NOTE_PREDICTED = "optimizer: predicted only, as one byte for each of two states"
NOTE_ADAMW = "assumed optimizer: adamw (--optimizer)"
NOTE_MADE = (
    "the first forward makes modules: call the model on a batch before a plan is "
    "applied, in the workload's factory, too"
)

FakeScope: TypeAlias = tuple[FakeTensorMode, KnownValues]
BuildWorkload: TypeAlias = Callable[[FakeScope | None], Workload]


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A recorded step and the model that it belongs to."""

    recording: Recording
    model: str
    fingerprint: dict[str, Any]
    notes: list[str]
    own_optimizer: bool = False  # of the workload
    is_update: bool = False  # of the optimizer alone


def watch_step(
    build: BuildWorkload,
    training: Training,
    target: TraceTarget,
    scope: FakeScope | None,
    device: torch.device | None = None,
    *,
    log: FunctionLog | None = None,
    has_values: bool = True,
    first: FirstStep | None = None,
) -> TracedStep:
    """Record the second step: the steady state, with optimizer state.

    Args:
        build: Makes the workload.
        training: Options of the step.
        target: The device that the step is planned for.
        scope: The scope of fake tensors; None for plain ones.
        device: Where tensors are, if not where the target says.
        log: Keeps the functions that forward calls.
        has_values: Whether the loss of a step on plain tensors is computed.
        first: The first step of the same model at another batch, or with another
            optimizer; what is not known of it is learnt. If it says so, and is known,
            the update alone is recorded.
    """
    placed = device or target.placed
    workload = on_device(build(scope), placed)
    check_not_lazy(workload.model, "profile")
    there = {name for name, _ in workload.model.named_modules()}
    step = make_step(workload, training, target.device.type)
    before = fingerprint(workload, target.device)  # as `apply` and `verify` see it
    with _told("the first step"):
        first = first if scope is not None and first is not None else FirstStep()
        stands_in = first.stands_in(step)
        left = None
        if stands_in:
            first.set_gradients(step)
            first.update(step)
        else:
            left = LeftBehind(fake=scope is not None)
            loss = first.run(step)
            if scope is None and has_values:
                check_finite(loss, "the first step")
            del loss
    with _told("the second step"):
        step.zero_grad()
        update_alone = stands_in and first.alone
        for _ in range(1 if update_alone else training.accumulate - 1):
            first.set_gradients(step) if stands_in else step.accumulate()
        on_cuda = target.device.type == "cuda"
        fake = scope is not None
        recorder = StepRecorder(workload.model, placed, fake=fake, on_cuda=on_cuda)
        optimizers = [] if step.optimizer is None else [step.optimizer]
        storages = recorder.storages
        know_before(storages, workload.model, optimizers, workload.data)
        if left is not None and (held := left.tensors(storages.knows)):
            storages.numbers(held, "temporary", BEFORE_STEP)
            first.forget()
            del held
        if on_cuda and step.optimizer is not None:
            storages.count_as_zero_bytes(step_counts(step.optimizer))
        record = _record_update if update_alone else partial(_record, log=log)
        notes = [*_assumed(workload, training), *record(recorder, step)]
    before |= several_forwards(recorder.recording)
    made = [name for name, _ in workload.model.named_modules() if name not in there]
    if made:
        notes.append(f"{NOTE_MADE}: {made[0]}" + ", ..." * (len(made) > 1))
    return TracedStep(
        recorder.recording,
        type(workload.model).__name__,
        before,
        notes,
        step.optimizer is not None and step.optimizer is workload.optimizer,
        update_alone,
    )


@contextmanager
def _told(title: str) -> Iterator[None]:
    """Add the step and phase to an exception that the workload raises."""
    try:
        yield
    except CkplanError:
        raise
    except Exception as error:
        what, used = f"{title} {describe_failure(error)}", untraceable_feature(error)
        needed = "a model that takes two steps on its batch, one after the other"
        if used:
            what = f"cannot trace the step: it uses {used}"
            needed = "a step of strided tensors and torch.autograd"
        raise WorkloadError(what, needed=needed, hint=location_hint(error)) from error


def several_forwards(recording: Recording) -> dict[str, Any]:
    """How often the step runs the model, over all of which calls are numbered.

    It is part of the fingerprint if it is more than once.
    """
    roots = [call for call in recording.calls if not call.fqn]
    return {"forwards": len(roots)} if len(roots) > 1 else {}


def _assumed(workload: Workload, training: Training) -> Iterator[str]:
    """What nobody said about a workload, or what it is not likely to mean."""
    yield from mode_notes(workload.model)
    yield from workload.assumptions
    if workload.source and training.optimizer is None:
        yield NOTE_ADAMW


def _record(
    recorder: StepRecorder, step: TrainingStep, log: FunctionLog | None
) -> list[str]:
    with recorder.watching():
        with log.following(recorder) if log else FunctionCounts(recorder):
            output, loss, rule = step.forward()
        recorder.begin_backward(loss)
        step.backward(loss)
        value = loss.detach()  # a training loop keeps the loss to log it
        del output, loss
        recorder.begin_update()
        parameters = step.workload.model.parameters()
        grads = [p.grad for p in parameters if p.grad is not None]
        recorder.storages.set_kind(grads, "gradient")
        del grads
        step.update()
        del value
    return [rule, *_without_gradients(step.workload.model), *_said_of(step)]


def _without_gradients(model: nn.Module) -> Iterator[str]:
    """What a step that trains more of the model would take besides."""
    left = [
        (name, p)
        for name, p in model.named_parameters()
        if p.requires_grad and p.grad is None
    ]
    if left:
        (first, _), num_bytes = left[0], sum(p.nbytes for _, p in left)
        yield (
            f"no gradient for {first}{', ...' * (len(left) > 1)}: a step that trains "
            f"them, too, takes {format_bytes(num_bytes)} more for gradients, and the "
            "optimizer's state"
        )


def _record_update(recorder: StepRecorder, step: TrainingStep) -> list[str]:
    with recorder.watching():
        recorder.begin_backward_of(())
        recorder.begin_update()
        step.update()
    return _said_of(step)


def _said_of(step: TrainingStep) -> list[str]:
    return [NOTE_PREDICTED] if step.training.predicted_only else []


def know_before(
    storages: Storages,
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    data: object = None,
) -> None:
    """Register what exists before the step: of the model, optimizers, the batch."""
    storages.register_existing(model.parameters(), "parameter")
    storages.register_existing(model.buffers(), "buffer")
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    storages.register_existing(grads, "gradient")
    for optimizer in optimizers:
        storages.register_existing(
            tensors_of(list(optimizer.state.values())), "optimizer"
        )
    storages.register_existing(tensors_of(data), "input")
    # Tensors in plain attributes, which possibly no op reads. A tensor that the first
    # step left there, as weight-norm hooks do, lives until it is replaced.
    held = tensors_of([vars(module) for module in model.modules()])
    plain = [x for x in held if x.layout == torch.strided and not x.is_nested]
    storages.numbers(plain, "buffer", BEFORE_STEP)
