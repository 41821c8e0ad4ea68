"""A block of a transformer, and blocks whose forwards differ."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Batch = Callable[[int], tuple[torch.Tensor, ...]]


class Block(nn.Module):
    """What a transformer's block does, with randomness in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(16), nn.Linear(16, 48)
        self.out, self.drop = nn.Linear(16, 16), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:-1], 3, 16).unbind(-2)
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return x + self.drop(functional.gelu(self.out(mixed))) * scale


def same_gradients(plain: nn.Module, planned: nn.Module, batch: Batch, n: int) -> None:
    """Train both side by side; every gradient and random state must be the same."""
    for step in range(n):
        seen = []
        for model in (plain, planned):
            model.zero_grad()
            torch.manual_seed(step)
            random.seed(step)
            model(*batch(step)).square().sum().backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            seen.append([*grads, torch.get_rng_state()])
        assert len(seen[0]) == len(seen[1])
        assert all(map(torch.equal, *seen)), step


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x.exp())
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x, e = ctx.saved_tensors
        return grad * (3 * x**2 + 0 * e)


class Numbered(Block):
    """A Python number that changes every step."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.step += 1
        return super().forward(x, scale / self.step)


class Branching(Block):
    """Goes by what the data say."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if x.mean() > 0:
            x = torch.tanh(x) * 2
        return super().forward(x.clone() if x.sum() > 1 else x, scale)
