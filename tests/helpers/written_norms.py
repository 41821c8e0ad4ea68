"""Norms that are written out, as models write them, and a model around one."""

from __future__ import annotations

import torch
from normed_mlps import WrittenRms
from torch import Tensor, nn

WIDTH, ROWS = 160, 512


class T5Norm(WrittenRms):
    """As in T5: the input is cast for its statistics alone."""

    def forward(self, rows: Tensor) -> Tensor:
        mean = rows.to(torch.float32).pow(2).mean(-1, keepdim=True)
        rows = rows * torch.rsqrt(mean + 1e-6)
        return self.weight * rows.to(self.weight.dtype)


class GemmaNorm(WrittenRms):
    """As in Gemma: an op on the weight alone."""

    def forward(self, rows: Tensor) -> Tensor:
        wide = rows.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1.0 + self.weight.float())).type_as(rows)


class LayerNorm(WrittenRms):
    """With a mean, two sums of rows, a weight and a bias."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.bias = nn.Parameter(torch.linspace(-1, 1, width))

    def forward(self, rows: Tensor) -> Tensor:
        centred = rows - rows.mean(-1, keepdim=True)
        variance = (rows - rows.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True)
        return centred / torch.sqrt(variance + 1e-6) * self.weight + self.bias


class Variance(LayerNorm):
    """By torch's own variance, and by the sum of squares."""

    def forward(self, rows: Tensor) -> Tensor:
        variance = rows.var(dim=-1, keepdim=True, unbiased=False)
        length = rows.pow(2).sum(rows.dim() - 1, keepdim=True)
        return self.weight * rows / torch.sqrt(variance + length) + self.bias


def rms_norm(width: int) -> nn.Module:
    """Torch's own, which a CPU runs in parts; it adds in place."""
    norm = nn.RMSNorm(width, eps=1e-6)
    nn.init.uniform_(norm.weight, 0.5, 1.5, generator=torch.Generator().manual_seed(0))
    return norm


NORMS = {
    "torch": rms_norm,
    "llama": WrittenRms,
    "t5": T5Norm,
    "gemma": GemmaNorm,
    "layer": LayerNorm,
    "variance": Variance,
}


class Around(nn.Module):
    """A norm between two narrow layers; what it reads may be read by others, too."""

    def __init__(self, norm: nn.Module, *, residual: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.norm, self.residual = norm, residual

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.first(rows)
        made = self.norm(rows)
        output: Tensor = self.last(rows + made if self.residual else made)
        return output


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(4, ROWS // 4, 8, generator=torch.Generator().manual_seed(0))
    return made.to(dtype)
