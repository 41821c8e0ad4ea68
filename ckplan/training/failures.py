"""Descriptions of a workload's exceptions: message, phase and location."""

from __future__ import annotations

import cmath
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from ckplan.errors import CkplanError, WorkloadError
from ckplan.training import step

_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "bad_alloc",
    "_status_alloc_failed",  # of cuBLAS and cuDNN
    "nvml_success == r",  # CUDA's allocator queries other processes
)
_DETAILS = " Of the allocated memory"  # start of the details in torch's message
_NO_GPU = re.compile(
    "NVIDIA driver|CUDA driver|CUDA error|compiled with CUDA|requires CUDA support"
    "|dummy base class|without ATen_cuda|without CUDA support|support for cuda devices"
    "|Cannot access accelerator|support create a new|not installed.*CUDA build"
    "|is not known without it"
)
_NESTED = re.compile("NestedTensorImpl|NestedIntNode|nested_tensor")
_NESTED_TENSORS = "nested tensors, whose bytes cannot be recorded"
_FLEX = "FlexAttention, one compiled kernel (scaled_dot_product_attention is traced)"
_TRANSFORMS = "torch.func.grad or a similar transform, which forbids saved-tensor hooks"
_PHASES = {"forward": "forward", "backward": "backward", "update": "the optimizer"}
"""Methods of a ``TrainingStep`` -> their names in messages."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception or one of its causes is an out-of-memory error."""
    return any(map(_is_want_of_memory, _causes(error)))


def wants_gpu(error: BaseException) -> bool:
    """Whether an exception says that CUDA or a GPU is missing."""
    return bool(_NO_GPU.search(str(error)))


def untraceable_feature(error: BaseException) -> str | None:
    """The torch feature that tracing does not support, if it caused the failure."""
    if "torch.func" in str(error) and "saved tensor hooks" in str(error):
        return _TRANSFORMS
    frames = traceback.extract_tb(error.__traceback__)
    files = [Path(frame.filename).as_posix() for frame in frames]
    if any(file.endswith("/flex_attention.py") for file in files):
        return _FLEX
    inside = any("/torch/nested/" in file for file in files)
    return _NESTED_TENSORS if inside or _NESTED.search(str(error)) else None


def first_line(error: BaseException) -> str:
    """First line of an exception's message, or its type if it is empty."""
    what = error.what if isinstance(error, CkplanError) else str(error)
    line = next(iter(what.strip().splitlines()), type(error).__name__)
    return line.partition(_DETAILS)[0]


def describe_failure(error: BaseException) -> str:
    """Describe a failure, such as ``raised ValueError in backward: bad shape``."""
    frames = traceback.extract_tb(error.__traceback__)
    phases = [_PHASES.get(f.name) for f in frames if f.filename == step.__file__]
    phase = next((f" in {found}" for found in reversed(phases) if found), "")
    return f"raised {type(error).__name__}{phase}: {first_line(error)}"


def location_hint(error: BaseException) -> str:
    """A hint: the innermost line outside torch, Python and ckplan."""
    ours = str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<"
    python = str(Path(traceback.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [
        frame
        for frame in frames
        if not frame.filename.startswith(ours)
        and str(Path(frame.filename).parent) != python
    ]
    if not theirs:
        return "run a training step of the workload alone in Python"
    return f"look at {theirs[-1].filename}, line {theirs[-1].lineno}"


def check_finite(loss: torch.Tensor, title: str) -> None:
    """Refuse a step with a non-finite loss.

    Raises:
        WorkloadError: The loss is NaN or infinite.
    """
    value = loss.item()
    if not cmath.isfinite(value):
        raise WorkloadError(
            f"the loss of {title} is {value}",
            needed="a finite loss: NaN equals NaN, whatever differs before it",
            hint="look at the batch, the learning rate and --amp",
        )


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _is_want_of_memory(error: BaseException) -> bool:
    if isinstance(error, RuntimeError):
        return any(sign in str(error).lower() for sign in _OUT_OF_MEMORY)
    return isinstance(error, MemoryError)
