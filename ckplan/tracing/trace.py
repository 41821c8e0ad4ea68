"""Record the second step of a workload: the steady state, with optimizer state.

The step runs under fake tensors where possible. They have shapes and no bytes, so a
model larger than the machine's memory can be traced. Otherwise the step runs on real
tensors, and a note of the trace says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ckplan.errors import CkplanError, WorkloadError
from ckplan.graph.records import BEFORE_STEP
from ckplan.tracing.cuda import cpu_as_cuda, fake_cuda_with_gpu, fake_cuda_without_gpu
from ckplan.tracing.failures import failure_of_model, is_want_of_values
from ckplan.tracing.faking.fake_mode import KnownValues, fake_tensors, why_not_fake
from ckplan.tracing.recording.recorder import StepRecorder
from ckplan.tracing.recording.recording import Recording
from ckplan.tracing.recording.storages import Storages
from ckplan.tracing.smaller_batches import DoesNotFitError
from ckplan.tracing.target import TraceTarget
from ckplan.training.failures import (
    check_finite,
    describe_failure,
    first_line,
    is_out_of_memory,
    location_hint,
    untraceable_feature,
    wants_gpu,
)
from ckplan.training.fingerprint import fingerprint
from ckplan.training.free_memory import available_bytes, limited_memory
from ckplan.training.optimizers import step_counts
from ckplan.training.step import Training, TrainingStep, make_step
from ckplan.training.workload import Workload, check_not_lazy, on_device, tensors_of

NOTE_FAKE = "traced under fake tensors"
NOTE_PREDICTED = "optimizer: predicted only, as one byte for each of two states"
NOTE_MADE = (
    "the first forward makes modules: call the model on a batch before a plan is "
    "applied, in the workload's factory, too"
)

_MOST_OF_MEMORY = 0.9  # fraction of available bytes that a step on real tensors may use

FakeScope: TypeAlias = tuple[FakeTensorMode, KnownValues]
BuildWorkload: TypeAlias = Callable[[FakeScope | None], Workload]


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A recorded step and the model that it belongs to."""

    recording: Recording
    model: str
    fingerprint: dict[str, Any]
    notes: list[str]


def trace(build: BuildWorkload, training: Training, target: TraceTarget) -> TracedStep:
    """Trace under fake tensors, or on real tensors where the model needs values.

    Args:
        build: Makes the workload; takes the scope of fake tensors, or None for real
            tensors.
        training: Options of the step.
        target: The device that the step is planned for.

    Raises:
        DoesNotFitError: The step needs real tensors, and memory is too small for them.
        WorkloadError: The model cannot be trained on its batch.
    """
    if not target.is_here:
        return _trace_elsewhere(build, training, target)
    try:
        with fake_tensors() as scope, _kernels_of(target) as words:
            traced = _watch_step(build, training, target, scope)
    except Exception as error:
        if _is_final(error):
            raise
        why = f"traced on real tensors: {why_not_fake(error.__cause__ or error)}"
        return trace_on_real_tensors(build, training, target, why)
    traced.notes.append(NOTE_FAKE)
    traced.notes.extend(f"as CUDA does it: {what}" for what in words)
    return traced


def _kernels_of(target: TraceTarget) -> AbstractContextManager[Iterable[str]]:
    """A scope in which fake tensors act like a local device's kernels."""
    return fake_cuda_with_gpu() if target.device.type == "cuda" else nullcontext(())


def _trace_elsewhere(
    build: BuildWorkload, training: Training, target: TraceTarget
) -> TracedStep:
    """Trace a step for CUDA without a GPU; there is no fallback to real tensors.

    Raises:
        WorkloadError: The step cannot be traced on fake tensors.
    """
    if not torch.backends.cuda.is_built():
        return _trace_translated(build, training, target)
    try:
        with (
            fake_tensors() as scope,
            fake_cuda_without_gpu(target.capability, target.gpu) as words,
        ):
            traced = _watch_step(build, training, target, scope, target.device)
    except Exception as error:
        if _is_final(error):
            raise
        why = _why_not(error)
        traced = _trace_translated(build, training, target, why)
        traced.notes.append(f"not traced on fake CUDA tensors: {why}")
        return traced
    traced.notes.append(f"traced under fake CUDA tensors for {_card(target)}")
    traced.notes.extend(f"as CUDA does it: {what}" for what in words)
    return traced


def _trace_translated(
    build: BuildWorkload, training: Training, target: TraceTarget, before: str = ""
) -> TracedStep:
    """Trace a step for CUDA on fake CPU tensors.

    Args:
        build: Makes the workload.
        training: Options of the step.
        target: The device that the step is planned for.
        before: Why fake CUDA tensors failed; empty if they were not tried.

    Raises:
        WorkloadError: The step cannot be traced on fake CPU tensors either.
    """
    try:
        with (
            fake_tensors() as scope,
            cpu_as_cuda(target.capability, target.gpu) as words,
        ):
            traced = _watch_step(build, training, target, scope)
    except Exception as error:
        if _is_final(error):
            raise
        plain = failure_of_model(error, partial(_watch_on_fake_cpu, build, training))
        if plain is not None:
            raise plain from plain.__cause__
        why = _why_not(error)
        if before not in ("", why):
            why = f"on fake CUDA tensors, {before}; translated from CPU, {why}"
        raise WorkloadError(
            f"cannot predict memory on CUDA without a GPU: {why}",
            needed=_what_can_be_told(error),
            hint=_instead(error),
        ) from error
    traced.notes.append(f"{NOTE_FAKE}, translated to CUDA on {_card(target)}")
    traced.notes.extend(f"as CUDA does it: {what}" for what in words)
    return traced


def _watch_on_fake_cpu(build: BuildWorkload, training: Training) -> None:
    with fake_tensors() as scope:
        target = TraceTarget(torch.device("cpu"), None, is_here=True)
        _watch_step(build, training, target, scope)


def _why_not(error: Exception) -> str:
    """Why a step for CUDA cannot be traced without a GPU."""
    cause = error.__cause__ or error
    if wants_gpu(cause):
        said, *_ = first_line(cause).split(". ")
        return f"the workload asks the GPU itself ({said})"
    return why_not_fake(cause)


def _what_can_be_told(error: Exception) -> str:
    if wants_gpu(error.__cause__ or error):
        return "a step that asks a card for its name, memory, streams and seeds at most"
    return "a step that runs on fake tensors, which have no values"


def _instead(error: Exception) -> str:
    """The hint to show when both ways of tracing for CUDA fail."""
    ways = ["--device cpu", "run this where the GPU is"]
    needs_values = is_want_of_values(error.__cause__ or error)
    if needs_values:
        ways[0] += ", where such a step runs on real tensors"
    elif not torch.backends.cuda.is_built():
        ways.insert(0, "a build of torch with CUDA, which needs no GPU here")
    if isinstance(error, WorkloadError):
        ways.insert(0, error.hint)
    return ", or ".join(ways)


def _card(target: TraceTarget) -> str:
    assert target.gpu is not None, "internal error: no card to trace for"
    major, minor = target.capability
    return f"{target.gpu.name} (compute capability {major}.{minor})"


def _is_final(error: Exception) -> bool:
    """Whether the step would fail in the same way on real tensors."""
    return isinstance(error, CkplanError) and error.__cause__ is None


def trace_on_real_tensors(
    build: BuildWorkload, training: Training, target: TraceTarget, why: str
) -> TracedStep:
    """Trace on real tensors.

    Args:
        build: Makes the workload.
        training: Options of the step.
        target: The device that the step is planned for.
        why: The reason that fake tensors do not work, as a note for the graph.

    Raises:
        DoesNotFitError: The machine has too little memory.
        WorkloadError: The model cannot be trained on its batch.
    """
    try:
        with limited_memory(int(_MOST_OF_MEMORY * available_bytes())):
            traced = _watch_step(build, training, target, None)
    except Exception as error:
        if is_out_of_memory(error):
            raise DoesNotFitError(
                f"the step does not fit in memory ({first_line(error)})",
                needed=why,
                hint="close other programs, or make the batch smaller",
            ) from error
        raise
    traced.notes.append(why)
    return traced


def _watch_step(
    build: BuildWorkload,
    training: Training,
    target: TraceTarget,
    scope: FakeScope | None,
    device: torch.device | None = None,
) -> TracedStep:
    """Record the second step: the steady state, with optimizer state."""
    placed = device or target.placed
    workload = on_device(build(scope), placed)
    check_not_lazy(workload.model, "profile")
    there = {name for name, _ in workload.model.named_modules()}
    step = make_step(workload, training, target.device.type)
    before = fingerprint(workload, target.device)  # as `apply` and `verify` see it
    with _told("the first step"):
        loss = step.run()
        if scope is None:
            check_finite(loss, "the first step")
    with _told("the second step"):
        step.zero_grad()
        for _ in range(training.accumulate - 1):
            step.accumulate()
        on_cuda = target.device.type == "cuda"
        fake = scope is not None
        recorder = StepRecorder(workload.model, placed, fake=fake, on_cuda=on_cuda)
        _know_before(recorder.storages, step)
        if on_cuda and step.optimizer is not None:
            recorder.storages.count_as_zero_bytes(step_counts(step.optimizer))
        notes = _record(recorder, step)
    made = [name for name, _ in workload.model.named_modules() if name not in there]
    if made:
        notes.append(f"{NOTE_MADE}: {made[0]}" + ", ..." * (len(made) > 1))
    return TracedStep(
        recorder.recording,
        type(workload.model).__name__,
        before,
        notes,
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


def _record(recorder: StepRecorder, step: TrainingStep) -> list[str]:
    with recorder.watching():
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
    return [rule, *([NOTE_PREDICTED] if step.training.predicted_only else [])]


def _know_before(storages: Storages, step: TrainingStep) -> None:
    model, optimizer = step.workload.model, step.optimizer
    storages.register_existing(model.parameters(), "parameter")
    storages.register_existing(model.buffers(), "buffer")
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    storages.register_existing(grads, "gradient")
    if optimizer is not None:
        storages.register_existing(
            tensors_of(list(optimizer.state.values())), "optimizer"
        )
    storages.register_existing(tensors_of(step.workload.data), "input")
    # Tensors in plain attributes, which possibly no op reads. A tensor that the first
    # step left there, as weight-norm hooks do, lives until it is replaced.
    held = tensors_of([vars(module) for module in model.modules()])
    plain = [x for x in held if x.layout == torch.strided and not x.is_nested]
    storages.numbers(plain, "buffer", BEFORE_STEP)
