"""Functions whose gradients must not be differentiated: an error, never a zero.

Torch's own ``once_differentiable`` lets a second derivative pass as zero, if the
gradient that backward is given does not require one, as that of a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor

from ckplan.errors import ApplyError

Gradients = tuple[Tensor | None, ...]
Backward = Callable[..., Gradients]


def differentiated_once(backward: Backward) -> Backward:
    """Let the gradients that a backward makes refuse to be differentiated."""

    @wraps(backward)
    def run(ctx: Any, *given: Tensor | None) -> Gradients:
        with torch.no_grad():
            made = backward(ctx, *given)
        if not torch.is_grad_enabled():  # nobody asked for a graph of backward
            return made
        return tuple(None if one is None else _refusing(one) for one in made)

    return run


def _refusing(gradient: Tensor) -> Tensor:
    found: Tensor = _Refusing.apply(gradient.detach().requires_grad_())
    return found


class _Refusing(torch.autograd.Function):
    """Hands on a gradient, and has none itself."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> NoReturn:
        raise ApplyError(
            "cannot differentiate the gradients of a call in tiles once more",
            needed="a first derivative, or the call whole",
            hint="leave this call out of the plan, or do not tile it",
        )
