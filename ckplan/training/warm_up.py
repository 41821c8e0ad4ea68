"""What torch computes only the first time.

MKL chooses the kernel of a vector function when it is first called. Where two threads
make that call together, one of them may run a coarser kernel, that once
(pytorch/pytorch#188792). So the first step of a process may have other bits than the
same step of another, and what it rebuilds other bits than what it dropped.
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
    """Call every vector function once, on one element: one thread does that alone."""
    with _disable_current_modes():
        for dtype in (torch.float32, torch.float64):
            one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
            for name in _FUNCTIONS:
                getattr(torch, name)(one)
