"""Losses for models that return no loss: targets that a training loop would hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

_AUXILIARY_WEIGHTS = {"image": 0.4, "pixel": 0.5}
"""Weights of auxiliary heads: Szegedy et al. 2016, and torchvision's references."""


class _Target:
    """A target that is moved to the device of the output once, in the first step."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target

    def on(self, output: torch.Tensor) -> torch.Tensor:
        if self._target.device != output.device:
            self._target = self._target.to(output.device)
        return self._target


class CrossEntropy:
    """Cross entropy of logits, those of auxiliary heads included, and class labels.

    Args:
        labels: Class numbers, one per image or one per pixel.
        kind: ``image`` or ``pixel``; sets the weight of auxiliary heads.
    """

    def __init__(self, labels: torch.Tensor, kind: str = "image") -> None:
        self._labels = _Target(labels)
        self._weight = _AUXILIARY_WEIGHTS[kind]

    def __call__(self, output: Any, batch: Any) -> torch.Tensor:
        """The loss of a tensor, a tuple or a mapping of logits; the first is main."""
        del batch
        found = output.values() if isinstance(output, Mapping) else output
        logits = [found] if isinstance(found, torch.Tensor) else list(found)
        heads = [one for one in logits if isinstance(one, torch.Tensor)]
        losses = [F.cross_entropy(one.float(), self._labels.on(one)) for one in heads]
        loss = losses[0]
        for other in losses[1:]:
            loss = loss + self._weight * other
        return loss


class Denoising:
    """Mean squared error of the predicted and the added noise (Ho et al. 2020).

    Where a model predicts a variance, too, the first half of its channels is the noise.
    """

    def __init__(self, noise: torch.Tensor) -> None:
        self._noise = _Target(noise)

    def __call__(self, output: Any, batch: Any) -> torch.Tensor:
        """The loss of a model's output or of its field ``sample``."""
        del batch
        found = getattr(output, "sample", output)
        predicted = found[0] if isinstance(found, tuple) else found
        noise = self._noise.on(predicted)
        if predicted.shape[1] != noise.shape[1]:
            predicted = predicted[:, : noise.shape[1]]
        return F.mse_loss(predicted.float(), noise.float())


def sum_of_losses(output: Any, batch: Any) -> torch.Tensor:
    """The sum of all losses that a detector returns in a mapping."""
    del batch
    loss: torch.Tensor = torch.stack(list(output.values())).sum()
    return loss
