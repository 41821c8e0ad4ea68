"""Models whose forward needs values, which fake tensors do not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ckplan.training.workload import Workload

ROWS = 8192


class Branching(nn.Module):
    """Goes where a float says, which fake tensors do not know."""

    def __init__(self) -> None:
        super().__init__()
        first, others = nn.Linear(64, 256), (nn.Linear(256, 256) for _ in range(4))
        self.layers = nn.ModuleList([first, *others])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x = torch.tanh(x) if x.sum().item() < 1e30 else x
        return x


class Choosing(Branching):
    """Works on the rows that a mask leaves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            chosen = (x[:, 0] < 1e30).nonzero().squeeze(-1)
            x = torch.tanh(layer(x[chosen]))
        return x


def mean_square(output: torch.Tensor, batch: Any) -> torch.Tensor:
    del batch
    return output.square().mean()


def workload(kind: type[Branching], rows: int = ROWS) -> Workload:
    torch.manual_seed(0)
    return Workload(kind(), torch.randn(rows, 64), mean_square)
