"""A layer as Megatron builds it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def mean_square(output: Any, batch: Any) -> torch.Tensor:
    del batch
    return output.float().square().mean()


class MegatronLayer(nn.Module):
    """A layer as Korthikanti et al. count it: attention unfused, dropout thrice."""

    def __init__(self, width: int, heads: int, p: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop_scores, self.drop1, self.drop2 = (nn.Dropout(p) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop1(self.out(self.attend(self.qkv(self.norm1(x)))))
        return x + self.drop2(self.down(F.gelu(self.up(self.norm2(x)))))

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        length, batch, wide = qkv.shape
        each = wide // 3 // self.heads
        parts = qkv.view(length, batch * self.heads, 3 * each).transpose(0, 1)
        query, key, value = parts.split(each, dim=-1)
        scores = torch.baddbmm(
            query.new_empty(batch * self.heads, length, length),
            query,
            key.transpose(1, 2),
            beta=0.0,
            alpha=1 / math.sqrt(each),
        )
        weights = self.drop_scores(torch.softmax(scores, dim=-1))
        return torch.bmm(weights, value).transpose(0, 1).reshape(length, batch, -1)
