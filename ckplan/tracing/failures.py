"""Whether fake tensors, CUDA or the model itself is the reason of a failure."""

from __future__ import annotations

from collections.abc import Callable

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from ckplan.errors import WorkloadError
from ckplan.tracing.faking.fake_mode import FAILED, why_not_fake
from ckplan.training.failures import first_line, wants_gpu


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
    if wants_gpu(cause) or not why_not_fake(cause).startswith(FAILED):
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
