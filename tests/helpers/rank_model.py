"""What two ranks train: a model whose widths are uneven."""

from __future__ import annotations

import torch
from torch import nn

from ckplan.training.workload import Workload

WIDTH = 63  # uneven: two ranks have 32 and 31 rows


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH + 1)
        self.down = nn.Linear(4 * WIDTH + 1, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.drop(self.down(hidden))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(301, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 301, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.h:
            x = block(x)
        return self.head(x)


def build() -> tuple[Model, torch.Tensor]:
    torch.manual_seed(0)
    return Model(), torch.randint(301, (4, 64))


def loss_of(output: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), ids.flatten())


def make() -> Workload:
    model, batch = build()
    return Workload(model, batch, loss_of)


def units(model: Model) -> nn.ModuleList:
    return model.h
