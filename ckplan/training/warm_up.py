"""Warm-up of kernels whose first call may round differently.

MKL selects the kernel of a vector function at its first call. If two threads make that
call at the same time, one of them may run a less accurate kernel once
(pytorch/pytorch#188792). The first step can then differ between processes, and a
recomputed tensor can differ from the freed one.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.utils._python_dispatch import _disable_current_modes

_FUNCTIONS = (
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "erfc"),
    *("erfinv", "exp", "exp2", "expm1", "lgamma", "log", "log10", "log1p", "log2"),
    *("rsqrt", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)


@cache
def warm_up_vector_kernels() -> None:
    """Call every vector function once on one element, which uses one thread."""
    with _disable_current_modes():
        for dtype in (torch.float32, torch.float64):
            one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
            for name in _FUNCTIONS:
                getattr(torch, name)(one)
