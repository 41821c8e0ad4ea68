"""Keep compilation out of hooks, and run compiled functions uncompiled in regions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from threading import Lock
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch

MODEL_INSIDE = "_orig_mod"
"""Attribute of what ``torch.compile`` makes of a model: the model itself."""
_DYNAMO = "torch._dynamo"
_frame_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""Gives what compiles the frames that begin now; no function if none are compiled."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


def uncompiled_function(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Break the graph where a compiled model calls a function, and run it there.

    In eager steps, the wrapper of ``torch.compiler.disable`` would cost more than most
    hooks do, and its making imports Dynamo.
    """

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_dynamo_compiling() or callable(_frame_callback()):
            disabled: Callable[_P, _T] = torch.compiler.disable(function)
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call


class _Uncompiled:
    """Torch's stance is global: the last open region restores it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._open = 0  # regions, of all threads
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._open:
                self._stance = torch.compiler.set_stance("force_eager")
            self._open += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._open -= 1
            if not self._open and self._stance is not None:
                self._stance.__exit__(None, None, None)


_UNCOMPILED = _Uncompiled()
_NOTHING = nullcontext()


def uncompiled() -> AbstractContextManager[object]:
    """A scope in which compiled functions run op by op, visible to modes."""
    # Where Dynamo was not imported, nothing was compiled.
    return _UNCOMPILED if _DYNAMO in sys.modules else _NOTHING


def still_uncompiled() -> AbstractContextManager[object]:
    """The same for a forward that calls nothing that was not called before."""
    dynamo = sys.modules.get(_DYNAMO)
    if dynamo is None:
        return _NOTHING
    backends = getattr(dynamo.eval_frame, "cached_backends", {0: "unknown"})
    # ``torch.compiler.disable`` counts as None.
    return _UNCOMPILED if any(backends.values()) else _NOTHING


def is_within_compiled() -> bool:
    """Whether one is being called, or a model around: modes are put back at its end."""
    dynamo = sys.modules.get(_DYNAMO)
    if dynamo is None:
        return False
    wrappers, disabled = dynamo.eval_frame.__name__, dynamo.eval_frame.DisableContext
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        of_wrapper = frame.f_globals.get("__name__") == wrappers
        if of_wrapper and not isinstance(frame.f_locals.get("self"), disabled):
            return True
        frame = frame.f_back
    return False
