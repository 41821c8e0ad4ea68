"""A multilayer perceptron with dropout, trained as an autoencoder: torch alone.

Profile it with ``ckplan profile configs/workloads/mlp.py --set layers=24``.
"""

from collections.abc import Callable

import torch
from torch import nn

Batch = dict[str, torch.Tensor]


def build(
    *, layers: int = 12, width: int = 512, batch: int = 1024, dropout: float = 0.1
) -> tuple[nn.Sequential, Batch, Callable[[torch.Tensor, Batch], torch.Tensor]]:
    """Return the model, one batch of random vectors and the loss."""
    blocks = [
        nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )
        for _ in range(layers)
    ]
    return nn.Sequential(*blocks), {"input": torch.randn(batch, width)}, rebuild_loss


def rebuild_loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Compare the output with the input."""
    return nn.functional.mse_loss(output, batch["input"])
