"""Check that a trace on fake tensors took the path that training takes.

After the trace, the forward runs again on plain tensors of torch, from the start: on
real ones if that is cheap, else on hollow ones, whose large contents are not computed.
It is compared with the trace, call by call: ops, shapes and strides. A forward may
differ from the next, as one that fills caches does, so up to three are compared. For
CUDA without a GPU other kernels run on these tensors, so there the functions of torch
that the model calls are compared, which do not depend on kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch.overrides import resolve_name

from ckplan.graph.records import OUTSIDE_CALLS
from ckplan.tracing.faking.hollow import hollow_tensors
from ckplan.tracing.recording.function_counts import FunctionCounts
from ckplan.tracing.recording.recorder import StepRecorder
from ckplan.tracing.recording.recording import Recording, TensorMeta
from ckplan.training.failures import first_line
from ckplan.training.step import Training, TrainingStep, make_step
from ckplan.training.workload import Workload, on_device, tensors_of

MOST_FLOPS, MOST_BYTES = 10**10, 1 << 28
"""A forward with at most as many FLOPs and bytes runs on real tensors."""
NOTE_SAME = "path of the trace: as in a forward on"
NOTE_VARIES = "path of the trace: the forward takes another one from run to run"
NOTE_NOT = "path of the trace: not compared with a forward on real tensors, as"
NOTE_KNOWN = "path of the trace: as compared at another batch"
_REAL, _HOLLOW = "real tensors", "tensors of torch without content"


class Point(NamedTuple):
    """An op or function that a forward runs."""

    fqn: str
    number: int  # of the call of the module
    name: str
    shapes: tuple[tuple[int, ...], ...]  # of what it returns
    layouts: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = ()  # and strides

    def __str__(self) -> str:
        """Name, shapes and call, for a note."""
        shapes = ", ".join("x".join(map(str, one)) or "1" for one in self.shapes)
        return f"{self.name} -> {shapes or 'none'} in {self.fqn or 'the model'}"


class PathCheck(NamedTuple):
    """What a forward on plain tensors says of a trace."""

    note: str
    differs: bool = (
        False  # the trace took another path, and can be made on plain tensors
    )
    is_hollow: bool = False  # whether plain tensors had no content


class FunctionLog(FunctionCounts):
    """Functions of torch that make tensors in a forward, whatever the device."""

    def __init__(self) -> None:
        super().__init__(None)
        self._made: list[tuple[int, str, tuple[tuple[int, ...], ...]]] = []

    def _called(self, function: Any, returned: object, call: int) -> None:
        shapes = tuple(tuple(one.shape) for one in tensors_of(returned))
        if shapes:
            name = resolve_name(function) or getattr(function, "__name__", "")
            self._made.append((call, name, shapes))

    @contextmanager
    def following(self, recorder: StepRecorder) -> Iterator[None]:
        """A scope whose calls are kept; ``recorder`` tells where they are."""
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = None

    def points(self, recording: Recording) -> list[Point]:
        """The functions in order, with the calls of modules that they ran in."""
        return [
            Point(*_place(recording, call), name, shapes)
            for call, name, shapes in self._made
        ]


def check_path(
    recording: Recording,
    functions: FunctionLog | None,
    build: Callable[[None], Workload],
    training: Training,
    device: torch.device,
) -> PathCheck:
    """Compare the forward of a trace with one on plain tensors.

    Args:
        recording: The trace.
        functions: What its forward called, if it stands for kernels of another device.
        build: Makes the workload on real tensors.
        training: Options of the step.
        device: Where plain tensors are; large models are compared on the CPU only.
    """
    cheap = _is_cheap(recording) and functions is None
    if not cheap and device.type != "cpu":
        return PathCheck(f"{NOTE_NOT} it is too large")
    scope, what = (nullcontext, _REAL) if cheap else (hollow_tensors, _HOLLOW)
    theirs = _ops(recording) if functions is None else functions.points(recording)
    try:
        with scope():
            step = _make(build, training, device)
            forward = partial(_forward, step, device, functions is not None, not cheap)
            ours = forward()
            if theirs != ours:  # the trace is of a second forward
                ours = forward()
            if theirs != ours and ours != forward():
                return PathCheck(NOTE_VARIES)
    except Exception as error:
        why = f"that fails ({type(error).__name__}: {first_line(error)})"
        return PathCheck(f"{NOTE_NOT} {why}")
    difference = _first_difference(theirs, ours)
    if difference is None:
        kind = "ops" if functions is None else "functions of torch"
        return PathCheck(f"{NOTE_SAME} {what}: {len(ours)} {kind}")
    said = f"fake tensors take another path than {what}: first {difference}"
    return PathCheck(said, functions is None, not cheap)


def _make(
    build: Callable[[None], Workload], training: Training, device: torch.device
) -> TrainingStep:
    return make_step(on_device(build(None), device), training, device.type)


def _forward(
    step: TrainingStep, device: torch.device, functions: bool, hollow: bool
) -> list[Point]:
    """The ops, or the functions, of a forward; hollow tensors need no copies."""
    recorder = StepRecorder(step.workload.model, device, fake=hollow, on_cuda=False)
    log = FunctionLog() if functions else None
    with log or nullcontext(), recorder.watching():
        with log.following(recorder) if log else nullcontext():
            step.forward()
        recorder.recording.num_forward = len(recorder.recording.ops)
    return log.points(recorder.recording) if log else _ops(recorder.recording)


def _is_cheap(recording: Recording) -> bool:
    ops = recording.ops[: recording.num_forward]
    storages = [one for one in recording.storages if one.maker < recording.num_forward]
    num_bytes = sum(one.bytes for one in storages if one.kind != "optimizer")
    return sum(op.flops for op in ops) <= MOST_FLOPS and num_bytes <= MOST_BYTES


def _place(recording: Recording, call: int) -> tuple[str, int]:
    if call == OUTSIDE_CALLS:
        return "", 0
    return recording.calls[call].fqn, recording.calls[call].number


def _ops(recording: Recording) -> list[Point]:
    return [
        Point(
            *_place(recording, op.call),
            op.func.name(),
            tuple(one.shape for one in op.returned),
            tuple((one.dtype, _strides(one)) for one in op.returned),
        )
        for op in recording.ops[: recording.num_forward]
    ]


def _strides(meta: TensorMeta) -> tuple[int, ...]:
    """Strides of dimensions that have several elements; others mean nothing."""
    pairs = zip(meta.shape, meta.stride, strict=True)
    return tuple(stride for size, stride in pairs if size > 1)


def _first_difference(theirs: Sequence[Point], ours: Sequence[Point]) -> str | None:
    """The first point that differs, in words; None if all are the same."""
    for one, other in zip_longest(theirs, ours):
        if one == other:
            continue
        if one is None or other is None:
            return f"{one or 'the end of forward'}, not {other or 'the end of forward'}"
        if one[:4] == other[:4]:
            return f"{one}, of {_told(one)}, not {_told(other)}"
        return f"{one}, not {other}"
    return None


def _told(point: Point) -> str:
    said = (f"{dtype} with strides {strides}" for dtype, strides in point.layouts)
    return " and ".join(said).replace("torch.", "")
