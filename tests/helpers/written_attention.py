"""Attentions that are written out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def scaled(scores: Tensor) -> Tensor:
    return (scores * 0.3).softmax(-1)


def causal(scores: Tensor) -> Tensor:
    size = scores.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool).triu(1)
    scores = (scores / 4.0).masked_fill(later, float("-inf"))
    return torch.nn.functional.softmax(scores, dim=-1)


class Attention(nn.Module):
    """Projections in one product, scores, a softmax, and a product with values."""

    def __init__(
        self, width: int, heads: int, mix: Callable[[Tensor], Tensor] = scaled
    ) -> None:
        super().__init__()
        self.heads, self.mix = heads, mix
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, rows: Tensor, mask: Tensor | None = None) -> Tensor:
        samples, length, width = rows.shape
        sizes = samples, length, self.heads, width // self.heads
        parts = self.inputs(rows).split(width, -1)
        first, second, values = (one.view(sizes).transpose(1, 2) for one in parts)
        scores = first @ second.transpose(-2, -1)
        if mask is not None:
            scores = scores + mask
        made = self.mix(scores) @ values
        return self.output(made.transpose(1, 2).reshape(rows.shape))
