"""Functions that torch compiled, inside of regions: there they run uncompiled."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import FrameType

import torch

_DYNAMO = "torch._dynamo"


def uncompiled() -> AbstractContextManager[object]:
    """A scope in which they run op by op, as the modes of a region must see them."""
    if _DYNAMO not in sys.modules:  # nothing was compiled
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


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
