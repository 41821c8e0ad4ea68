"""An MLP as in Llama."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Gated(nn.Module):
    """Two products of the input."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        made: Tensor = self.down(F.silu(self.gate(rows)) * self.up(rows))
        return made
