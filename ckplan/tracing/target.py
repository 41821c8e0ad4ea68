"""Where a profiled step is to run: here, or on a card that is not here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ckplan.errors import CkplanError
from ckplan.gpus import Gpu, find
from ckplan.tracing.cuda.translation import Capability
from ckplan.training.failures import first_line

DEFAULT_GPU = "A100 40GB"
"""The card that CUDA means where there is none and none is named."""


@dataclass(frozen=True, slots=True)
class TraceTarget:
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

    def begin(self) -> None:
        """Let CUDA begin, where the step is to run on a GPU that is here.

        What that takes of the CPU's memory is not the step's; and only from then on
        has the GPU a random state, to be put back when all is done.

        Raises:
            CkplanError: The GPU has nothing to give.
        """
        if self.is_here and self.device.type == "cuda":
            try:
                torch.empty(1, device=self.device)
            except RuntimeError as error:
                raise CkplanError(
                    f"cannot use {self.device}: {first_line(error)}",
                    needed="a GPU that has memory left",
                    hint="close what else runs there, or set CUDA_VISIBLE_DEVICES='' "
                    "to do without it",
                ) from error


def find_target(device: str, gpu: str | None) -> TraceTarget:
    """Check where a step is to run.

    A card whose kernels are others than those of the GPU that is here is not here.

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
    card = find(gpu) if gpu else None
    if name == "cpu":
        return TraceTarget(torch.device(device), card, is_here=True)
    if not torch.cuda.is_available():
        return TraceTarget(
            torch.device(device), card or find(DEFAULT_GPU), is_here=False
        )
    if int(number or 0) >= (count := torch.cuda.device_count()):
        raise CkplanError(
            f"cannot use {device}: GPUs of this machine: {count}",
            needed=f"a number below {count}",
            hint="--device cuda",
        )
    is_like = card is None or card.capability == torch.cuda.get_device_capability(
        device
    )
    return TraceTarget(torch.device(device), card, is_like)
