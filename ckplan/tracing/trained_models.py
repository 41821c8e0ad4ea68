"""Which of the modules that a script calls are the models that it trains."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from ckplan.applying.tensors.compiled import MODEL_INSIDE

_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": MODEL_INSIDE,
}


def trained_models(
    roots: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> list[nn.Module]:
    """The models that are trained: those with parameters of an optimizer.

    Args:
        roots: The modules that ran outside all others, under gradients.
        optimizers: The optimizers that have stepped.
    """
    trained = {
        id(p)
        for one in optimizers
        for group in one.param_groups
        for p in group["params"]
    }
    found = map(inside_wrapper, roots)
    return [m for m in found if any(id(p) in trained for p in m.parameters())]


def inside_wrapper(module: nn.Module) -> nn.Module:
    """The module that wrappers of torch run."""
    while (inside := _WRAPPERS.get(type(module).__name__)) is not None:
        module = cast(nn.Module, getattr(module, inside))
    return module


def size_of(model: nn.Module) -> int:
    """Number of its parameters' elements."""
    return sum(p.numel() for p in model.parameters())
