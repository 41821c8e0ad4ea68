"""Record the second step of a workload: the steady state, with optimizer state.

The step runs under fake tensors where possible. They have shapes and no bytes, so a
model larger than the machine's memory can be traced. Otherwise the step runs on real
tensors, and a note of the trace says so. A forward on plain tensors proves the path of
fake ones; where it takes another one, the step is traced on plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial

import torch

from ckplan.available import available_bytes
from ckplan.errors import CkplanError, WorkloadError
from ckplan.tracing.cuda import cpu_as_cuda, fake_cuda_with_gpu, fake_cuda_without_gpu
from ckplan.tracing.failures import (
    failure_of_model,
    is_want_of_values,
    why_not_fake,
)
from ckplan.tracing.faking.fake_mode import KnownValues, fake_tensors
from ckplan.tracing.faking.hollow import hollow_tensors
from ckplan.tracing.first_step import FirstStep
from ckplan.tracing.path_check import NOTE_KNOWN, FunctionLog, PathCheck, check_path
from ckplan.tracing.smaller_batches import DoesNotFitError
from ckplan.tracing.target import TraceTarget
from ckplan.tracing.watched_step import (
    BuildWorkload,
    TracedStep,
    watch_step,
)
from ckplan.training.failures import (
    first_line,
    is_out_of_memory,
    wants_gpu,
)
from ckplan.training.free_memory import limited_memory
from ckplan.training.step import Training

NOTE_FAKE = "traced under fake tensors"
_DRAWN = (
    "a number that the model draws decides what it runs, such as whether a layer is "
    "left out"
)
NOTE_DRAWN = f"{_DRAWN}: here it was 0.5"
NOTE_ONE_DRAW = (
    f"{_DRAWN}: these are the ops of one draw, another step may run more and take more "
    "bytes, also under a plan"
)
NOTE_HOLLOW = "traced on tensors without content"

_MOST_OF_MEMORY = 0.9  # fraction of available bytes that a step on real tensors may use


def trace(
    build: BuildWorkload,
    training: Training,
    target: TraceTarget,
    *,
    check: bool = True,
    first: FirstStep | None = None,
) -> TracedStep:
    """Trace under fake tensors, or on real tensors where the model needs values.

    Args:
        build: Makes the workload; takes the scope of fake tensors, or None for real
            tensors.
        training: Options of the step.
        target: The device that the step is planned for.
        check: Whether a forward on plain tensors proves the path of fake ones; False
            if another batch of the same model has proved it.
        first: As of ``watch_step``.

    Raises:
        DoesNotFitError: The step needs real tensors, and memory is too small for them.
        WorkloadError: The model cannot be trained on its batch.
    """
    if not target.is_here:
        traced, log = _trace_elsewhere(build, training, target, first)
        here = torch.device("cpu")
        note = NOTE_KNOWN
        if check:
            note = check_path(traced.recording, log, build, training, here).note
        traced.notes.append(note)
        return traced
    known: KnownValues | None = None
    try:
        with fake_tensors() as scope, _kernels_of(target) as words:
            known = scope[1]
            traced = watch_step(build, training, target, scope, first=first)
    except Exception as error:
        if _is_final(error):
            raise
        why = f"traced on real tensors: {why_not_fake(error.__cause__ or error)}"
        traced = trace_on_real_tensors(build, training, target, why)
        traced.notes.extend(_drawn(known, NOTE_ONE_DRAW))
        return traced
    traced.notes.append(NOTE_FAKE)
    traced.notes.extend(_drawn(known))
    traced.notes.extend(f"as CUDA does it: {what}" for what in words)
    if not check:
        traced.notes.append(NOTE_KNOWN)
        return traced
    checked = check_path(traced.recording, None, build, training, target.placed)
    if checked.differs:
        return _trace_where_checked(build, training, target, checked)
    traced.notes.append(checked.note)
    return traced


def _trace_where_checked(
    build: BuildWorkload, training: Training, target: TraceTarget, checked: PathCheck
) -> TracedStep:
    """Trace on the plain tensors that took another path than fake ones."""
    if checked.is_hollow:
        with suppress(Exception), hollow_tensors():
            traced = watch_step(build, training, target, None, has_values=False)
            traced.notes.append(f"{NOTE_HOLLOW}: {checked.note}")
            return traced
    return trace_on_real_tensors(build, training, target, checked.note)


def _drawn(known: KnownValues | None, note: str = NOTE_DRAWN) -> Iterable[str]:
    return [note] if known is not None and known.asked_drawn else []


def _kernels_of(target: TraceTarget) -> AbstractContextManager[Iterable[str]]:
    """A scope in which fake tensors act like a local device's kernels."""
    return fake_cuda_with_gpu() if target.device.type == "cuda" else nullcontext(())


def _trace_elsewhere(
    build: BuildWorkload,
    training: Training,
    target: TraceTarget,
    first: FirstStep | None,
) -> tuple[TracedStep, FunctionLog]:
    """Trace a step for CUDA without a GPU; there is no fallback to real tensors.

    Returns:
        The step, and the functions of torch that its forward called.

    Raises:
        WorkloadError: The step cannot be traced on fake tensors.
    """
    if not torch.backends.cuda.is_built():
        return _trace_translated(build, training, target, first=first)
    try:
        with (
            fake_tensors() as scope,
            FunctionLog() as log,
            fake_cuda_without_gpu(target.capability, target.gpu) as words,
        ):
            traced = watch_step(
                *(build, training, target, scope, target.device), log=log, first=first
            )
    except Exception as error:
        if _is_final(error):
            raise
        why = _why_not(error)
        traced, log = _trace_translated(build, training, target, why, first=first)
        traced.notes.append(f"not traced on fake CUDA tensors: {why}")
        return traced, log
    traced.notes.append(f"traced under fake CUDA tensors for {_card(target)}")
    traced.notes.extend(_drawn(scope[1]))
    traced.notes.extend(f"as CUDA does it: {what}" for what in words)
    return traced, log


def _trace_translated(
    build: BuildWorkload,
    training: Training,
    target: TraceTarget,
    before: str = "",
    *,
    first: FirstStep | None = None,
) -> tuple[TracedStep, FunctionLog]:
    """Trace a step for CUDA on fake CPU tensors; see ``_trace_elsewhere``.

    Args:
        build: Makes the workload.
        training: Options of the step.
        target: The device that the step is planned for.
        before: Why fake CUDA tensors failed; empty if they were not tried.
        first: As of ``watch_step``.

    Raises:
        WorkloadError: The step cannot be traced on fake CPU tensors either.
    """
    try:
        with (
            fake_tensors() as scope,
            FunctionLog() as log,
            cpu_as_cuda(target.capability, target.gpu) as words,
        ):
            traced = watch_step(build, training, target, scope, log=log, first=first)
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
    traced.notes.extend(_drawn(scope[1]))
    traced.notes.extend(f"as CUDA does it: {what}" for what in words)
    return traced, log


def _watch_on_fake_cpu(build: BuildWorkload, training: Training) -> None:
    with fake_tensors() as scope:
        target = TraceTarget(torch.device("cpu"), None, is_here=True)
        watch_step(build, training, target, scope)


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
            traced = watch_step(build, training, target, None)
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
