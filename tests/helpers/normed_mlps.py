"""Modules that hold a norm, or more, before their MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class WrittenRms(nn.Module):
    """A norm as in Llama, written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, rows: Tensor) -> Tensor:
        wide = rows.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(rows.dtype)


class Permute(nn.Module):
    """Dimensions in another order."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, one: Tensor) -> Tensor:
        return one.permute(self.dims)


class OnPictures(nn.Module):
    """Shows rows as pictures to a module, and back."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.width = inner, width

    def forward(self, rows: Tensor) -> Tensor:
        picture = rows.reshape(4, -1, 8, self.width).permute(0, 3, 1, 2).contiguous()
        made: Tensor = self.inner(picture)
        return made.permute(0, 2, 3, 1).reshape(rows.shape)


def norm_first(norm: nn.Module, mlp: nn.Module) -> nn.Module:
    """A norm and an MLP as one call."""
    return nn.Sequential(norm, mlp)


def flat(norm: nn.Module, width: int, hidden: int) -> nn.Module:
    """The same without a module for the MLP, as many write it."""
    first, last = nn.Linear(width, hidden), nn.Linear(hidden, width)
    return nn.Sequential(norm, first, nn.GELU(), last)


def convnext(width: int, hidden: int) -> nn.Module:
    """The branch of a ConvNeXt block."""
    return nn.Sequential(
        nn.Conv2d(width, width, 3, padding=1, groups=width),
        Permute(0, 2, 3, 1),
        nn.LayerNorm(width),
        nn.Linear(width, hidden),
        nn.GELU(),
        nn.Linear(hidden, width),
        Permute(0, 3, 1, 2),
    )
