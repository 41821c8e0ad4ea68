"""A model whose forward uses a buffer and then changes it, as spectral norms do."""

from __future__ import annotations

import torch
from torch import nn


class Normed(nn.Module):
    """Scaled by a buffer that every forward doubles."""

    u: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 13.0).view(3, 4))
        self.register_buffer("u", torch.tensor([[1.0, 2.0, 3.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = (torch.sigmoid(self.u).t() * self.weight).sum(0)
        with torch.no_grad():
            self.u.mul_(2.0)
        return (x * v * self.weight).sum()
