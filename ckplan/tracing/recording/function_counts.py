"""Count the functions of torch that calls of modules make, as reruns compare them."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

from ckplan.graph.records import OUTSIDE_CALLS
from ckplan.tracing.recording.recorder import StepRecorder

_ATTRIBUTES = ("__get__", "__set__")


class FunctionCounts(TorchFunctionMode):
    """Counts functions that are called while it is active."""

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not is_attribute(func):
            count_function(self._recorder)
        return func(*args, **(kwargs or {}))


def is_attribute(function: object) -> bool:
    """Whether a function reads or writes an attribute of a tensor."""
    return getattr(function, "__name__", "") in _ATTRIBUTES


def count_function(recorder: StepRecorder) -> None:
    """Count a function that the innermost running call makes itself."""
    number = recorder.current_call
    if number != OUTSIDE_CALLS:
        call = recorder.recording.calls[number]
        call.functions = (call.functions or 0) + 1
