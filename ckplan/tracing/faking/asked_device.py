"""The device of a fake tensor, which torch asks for more often than it runs ops.

The mode that is asked first answers: to pass the question on through all modes takes
as long as to run an op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_DEVICE = torch.ops.prim.device.default
_META = torch.device("meta")


def asked_device(func: Any, args: tuple[Any, ...]) -> torch.device | None:
    """What the fake mode answers to the question; None for any other op or tensor."""
    if func is not _DEVICE or not isinstance(args[0], FakeTensor):
        return None
    return _META if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
