"""Fake tensors whose sizes follow from values that are known.

A model that puts images into its text asks how many tokens stand for one. These counts
come from token ids, whose values are known, so that their fake tensors have sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

_torch_tensor = torch.tensor


def fake_like(real: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, strides and dtype, made by the current modes."""
    return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)


def with_positions(
    args: tuple[Any, ...], value_of: Callable[[torch.Tensor], torch.Tensor | None]
) -> tuple[Any, ...]:
    """Arguments of ``x[mask]`` with fake positions in place of masks that are known.

    Args:
        args: ``x`` and its indices.
        value_of: Gives the value of a fake tensor, or None if it is not known.
    """
    indices: list[Any] = []
    for index in args[1]:
        is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool
        mask = value_of(index) if is_mask else None
        if mask is None:
            indices.append(index)
            continue
        with _disable_current_modes():
            count = int(mask.sum())
        indices += (
            torch.empty(count, dtype=torch.long, device=index.device)
            for _ in range(mask.dim())
        )
    return (args[0], indices, *args[2:])


def tensor_of_known(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``torch.tensor`` that asks fake numbers in a list for their values."""
    if isinstance(data, (list, tuple)):
        data = pytree.tree_map_only(FakeTensor, lambda x: x.tolist(), data)
    return _torch_tensor(data, *args, **kwargs)
