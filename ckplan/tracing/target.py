"""The device that a step is planned for: a local one, or a card not installed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ckplan.errors import CkplanError
from ckplan.gpus import DEFAULT, Gpu, find, load
from ckplan.tracing.cuda.translation import Capability
from ckplan.training.failures import first_line


@dataclass(frozen=True, slots=True)
class TraceTarget:
    """The device that a step is planned for."""

    device: torch.device
    gpu: Gpu | None  # card whose roofline gives seconds; None: seconds are measured
    is_here: bool  # False: tracing predicts what CUDA would do
    host: float = 1.0  # speed of the training machine's processor, as a part of ours

    @property
    def placed(self) -> torch.device:
        """The device of tensors while the step is traced."""
        return self.device if self.is_here else torch.device("cpu")

    @property
    def capability(self) -> Capability:
        """Compute capability of the local GPU or the named card."""
        if self.is_here:
            return torch.cuda.get_device_capability(self.device)
        assert self.gpu is not None, "internal error: no card to translate to"
        return self.gpu.capability

    def begin(self) -> None:
        """Initialize CUDA if the step runs on a local GPU.

        CPU memory that this takes does not belong to the step. The GPU has a random
        state only afterwards, and profiling restores that state at its end.

        Raises:
            CkplanError: The GPU has no free memory.
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


def find_target(
    device: str | torch.device, gpu: str | None, host: float = 1.0
) -> TraceTarget:
    """Check the device and the card that a step is planned for.

    A named card counts as local only if the local GPU has the same compute capability.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        gpu: A card of ``ckplan gpus``, or None.
        host: Speed of the processor that will launch the step on a GPU, relative to
            the one of this machine.

    Raises:
        CkplanError: The card or the device does not exist, or the speed is no positive
            number, or another than 1 and there is no GPU to launch on.
    """
    device = str(device)
    name, _, number = device.partition(":")
    if name not in ("cpu", "cuda") or not (number or "0").isdigit():
        raise CkplanError(
            f"cannot profile on the device {device!r}",
            needed="cpu or cuda; cuda needs no GPU",
            hint="--device cpu",
        )
    _check_host(host, name)
    card = find(gpu) if gpu else None
    if card is not None and card.platform != "cuda" and name != "cpu":
        raise CkplanError(
            f"cannot profile for {card.name}: the kernels of {card.platform} are not "
            "known",
            needed="a card of CUDA, whose bytes are close, for a plan with a reserve",
            hint=f"--gpu H200, then ckplan solve --gpu-memory {card.capacity_bytes}B",
        )
    if name == "cpu":
        return TraceTarget(torch.device(device), card, is_here=True)
    if not torch.cuda.is_available():
        return TraceTarget(
            torch.device(device), card or find(DEFAULT), is_here=False, host=host
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
    return TraceTarget(torch.device(device), card, is_like, host)


def local_card(device: torch.device) -> Gpu:
    """A card of this machine, for its roofline.

    Of one that no table has, figures are those of the card there that is most like it:
    of its compute capability, if any, and with about as many multiprocessors.
    """
    here = torch.cuda.get_device_properties(device)
    try:
        return find(here.name)
    except CkplanError:
        pass
    capability, count = (here.major, here.minor), here.multi_processor_count

    def unlike(card: Gpu) -> tuple[bool, bool, int, int]:
        return (
            card.platform != "cuda",
            card.capability != capability,
            abs(card.multiprocessors - count),
            abs(card.capacity_bytes - here.total_memory),
        )

    return replace(
        min(load().values(), key=unlike),
        name=here.name,
        capability=capability,
        multiprocessors=count,
        capacity_bytes=here.total_memory,
    )


def runs_nothing(gpu: str | None) -> bool:
    """Whether no kernel runs to profile for a card: none is here."""
    return gpu is not None and not torch.cuda.is_available()


def begin_copy() -> None:
    """Prepare a copy of the process, in which the threads of kernels are missing."""
    torch.set_num_threads(1)


def _check_host(host: float, device: str) -> None:
    if not (math.isfinite(host) and host > 0):
        raise CkplanError(
            f"a host cannot be {host:g} times as fast as this one",
            needed="a positive number",
            hint="--host 2 for a processor twice as fast",
        )
    if host != 1 and device == "cpu":
        raise CkplanError(
            "a host launches the ops of a GPU, and this step runs on the CPU itself",
            needed="--gpu or --device cuda",
            hint="leave out --host, and profile on the machine that trains",
        )
