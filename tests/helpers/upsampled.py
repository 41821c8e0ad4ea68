"""A model of which torch 2.13 compiles backward to kernels in a wrong order."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Upsampled(nn.Module):
    """Features of two resolutions, brought together and made as large as the image.

    Backward of each interpolation scatters into zeros, which a sum then reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Conv2d(3, 8, 3, stride=4, padding=1)
        self.coarse = nn.Conv2d(3, 8, 3, stride=8, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Conv2d(16, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From an image [batch, 3, height, width] to [batch, 5, height, width]."""
        fine = self.fine(x)
        coarse = _resized(self.coarse(x), fine)
        both = self.norm(torch.cat([fine, coarse], 1)).relu()
        return _resized(self.head(both), x)


def _resized(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return F.interpolate(x, size=like.shape[-2:], mode="bilinear", align_corners=False)
