"""Whether fake tensors, CUDA or the model itself is the reason of a failure."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from ckplan.errors import WorkloadError
from ckplan.training.failures import first_line, untraceable_feature, wants_gpu

_FAILED = "fake ones failed"


def why_not_fake(error: BaseException) -> str:
    """Explain why a model fails on fake tensors, with a remedy if there is one."""
    used = untraceable_feature(error)
    if used:
        return f"the step uses {used}"
    op = getattr(error, "func", None)
    if isinstance(error, DataDependentOutputException):
        return "the model asks for the value of a tensor (.item(), if, numpy)"
    if isinstance(error, DynamicOutputShapeException):
        return f"what shape {op} returns depends on values"
    higher = re.search(r"rule registered for HigherOrderOperator (\S+)", str(error))
    if higher:
        return f"{higher.group(1)} is called with functions, which no mode sees"
    without = re.search(r"fake impl registered for <CustomOpDef\((.*?)\)>", str(error))
    if isinstance(error, UnsupportedOperatorException) or without:
        name = without.group(1) if without else op
        return (
            f"the op {name} has no fake kernel; to trace without memory, give it one "
            "with torch.library.register_fake"
        )
    return f"{_FAILED} ({type(error).__name__}: {first_line(error)})"


def is_want_of_values(error: BaseException) -> bool:
    """Whether a step failed since fake tensors have no values."""
    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


def failure_of_model(
    error: Exception, on_cpu: Callable[[], None]
) -> WorkloadError | None:
    """The failure of a step that fails in the same way on a CPU; None if it does not.

    Args:
        error: The failure on fake tensors that act like CUDA.
        on_cpu: Takes the same step on fake tensors of a CPU.
    """
    cause = error.__cause__ or error
    if wants_gpu(cause) or not why_not_fake(cause).startswith(_FAILED):
        return None
    try:
        on_cpu()
    except WorkloadError as again:
        found = again.__cause__ or again
        same = type(found) is type(cause) and first_line(found) == first_line(cause)
        return again if same else None
    except Exception:
        return None
    return None
