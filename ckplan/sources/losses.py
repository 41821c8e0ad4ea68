"""Losses for models that return none, of their output and its target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

_AUXILIARY_WEIGHTS = {"image": 0.4, "pixel": 0.5}
"""Weights of auxiliary heads: Szegedy et al. 2016, and torchvision's references."""


def cross_entropy(
    output: Any, labels: torch.Tensor, kind: str = "image"
) -> torch.Tensor:
    """Cross entropy of logits, those of auxiliary heads included.

    Args:
        output: A tensor, a tuple or a mapping of logits; the first is main.
        labels: Class numbers, one per image or one per pixel.
        kind: ``image`` or ``pixel``; sets the weight of auxiliary heads.
    """
    found = output.values() if isinstance(output, Mapping) else output
    logits = [found] if isinstance(found, torch.Tensor) else list(found)
    heads = [one for one in logits if isinstance(one, torch.Tensor)]
    losses = [F.cross_entropy(one.float(), labels) for one in heads]
    loss = losses[0]
    for other in losses[1:]:
        loss = loss + _AUXILIARY_WEIGHTS[kind] * other
    return loss


def denoising(output: Any, noise: torch.Tensor) -> torch.Tensor:
    """Mean squared error of the predicted and the added noise (Ho et al. 2020).

    Where a model predicts a variance, too, the first half of its channels is the noise.

    Args:
        output: Of a model, or with a field ``sample``.
        noise: That was added.
    """
    found = getattr(output, "sample", output)
    predicted = found[0] if isinstance(found, tuple) else found
    if predicted.shape[1] != noise.shape[1]:
        predicted = predicted[:, : noise.shape[1]]
    return F.mse_loss(predicted.float(), noise.float())


def sum_of_losses(output: Any, batch: Any) -> torch.Tensor:
    """The sum of all losses that a detector returns in a mapping."""
    del batch
    loss: torch.Tensor = torch.stack(list(output.values())).sum()
    return loss
