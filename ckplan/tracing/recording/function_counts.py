"""Count the functions of torch that calls of modules make, as reruns compare them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ckplan.errors import WorkloadError
from ckplan.graph.records import OUTSIDE_CALLS
from ckplan.tracing.recording.recorder import StepRecorder

_ATTRIBUTES = ("__get__", "__set__")


class FunctionCounts(TorchFunctionMode):
    """Counts functions that are called while it is active and follows a recorder."""

    def __init__(self, recorder: StepRecorder | None) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        recorder = self._recorder
        if recorder is None or getattr(func, "__name__", "") in _ATTRIBUTES:
            return func(*args, **(kwargs or {}))
        first = len(recorder.recording.ops)
        out = func(*args, **(kwargs or {}))
        _count(recorder, first, out)
        self._called(func, out, recorder.current_call)
        return out

    def _called(self, function: Any, returned: object, call: int) -> None:
        """A function has returned to a call of a module."""


def _count(recorder: StepRecorder, first: int, returned: object) -> None:
    """Count a function that the innermost running call makes itself.

    Args:
        recorder: What records the forward.
        first: The first op that the function ran.
        returned: What it returned. Of its other tensors no function mode is told.
    """
    number, ops = recorder.current_call, recorder.recording.ops[first:]
    if number != OUTSIDE_CALLS:
        call = recorder.recording.calls[number]
        call.functions = (call.functions or 0) + 1
    if len(ops) < 2:
        return
    with suppress(WorkloadError):  # a tensor without bytes of its own, as within vmap
        told = recorder.storages.known(pytree.tree_leaves(returned))
        for op in ops:
            op.is_inside = told.isdisjoint((*op.outputs, *op.writes))
