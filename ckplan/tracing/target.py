"""Where a profiled step is to run: here, or on a card that is not here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ckplan.errors import CkplanError
from ckplan.gpus import Gpu, find
from ckplan.tracing.cuda.words import Capability

DEFAULT_GPU = "A100 40GB"
"""The card that CUDA means where there is none and none is named."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the step is to run."""

    device: torch.device
    gpu: Gpu | None  # whose roofline is taken; None: seconds are measured
    is_here: bool  # or what CUDA would do is translated to

    @property
    def placed(self) -> torch.device:
        """Where tensors are while the step is traced."""
        return self.device if self.is_here else torch.device("cpu")

    @property
    def capability(self) -> Capability:
        """Of the GPU, which is here or named."""
        if self.is_here:
            return torch.cuda.get_device_capability(self.device)
        assert self.gpu is not None, "internal error: no card to translate to"
        return self.gpu.capability


def find_target(device: str, gpu: str | None) -> Target:
    """Check where a step is to run.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        gpu: A card of ``ckplan gpus``, or none.

    Raises:
        CkplanError: There is no such card, or no such device.
    """
    name, _, number = device.partition(":")
    if name not in ("cpu", "cuda") or not (number or "0").isdigit():
        raise CkplanError(
            f"cannot profile on the device {device!r}",
            needed="cpu or cuda; cuda needs no GPU",
            hint="--device cpu",
        )
    is_here = name == "cpu" or torch.cuda.is_available()
    card = gpu if is_here else gpu or DEFAULT_GPU
    return Target(torch.device(device), find(card) if card else None, is_here)
