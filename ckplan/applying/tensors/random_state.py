"""The random states of torch: of a generator, or of a device's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckplan.errors import ApplyError
from ckplan.training import randomness

_KNOWN = ("cpu", "cuda", "meta")


def random_state(
    device: torch.device, generator: torch.Generator | None
) -> torch.Tensor:
    """The state of a generator, or of a device's own.

    Raises:
        ApplyError: Nobody knows the device's own.
    """
    if generator is not None:
        return randomness.state_of_generator(generator)
    check_restorable(device)
    if device.type == "cuda":
        return _cuda_random_state(device)
    return torch.get_rng_state()


def check_restorable(device: torch.device) -> None:
    """Refuse a device whose random state is not restored, such as ``mps``.

    Raises:
        ApplyError: It is none of CPU and CUDA.
    """
    if device.type not in _KNOWN:
        raise ApplyError(
            f"cannot draw the same random numbers again on {device.type}",
            needed="a model on the CPU or a CUDA device",
            hint="take the plan off: ckplan.remove(model)",
        )


def _cuda_random_state(device: torch.device) -> torch.Tensor:
    """The state of a GPU's own generator.

    Raises:
        ApplyError: A CUDA graph is being captured, which cannot keep it.
    """
    if torch.cuda.is_current_stream_capturing():
        raise ApplyError(
            f"cannot keep the random state of {device} while a CUDA graph is captured",
            needed="a forward outside of the capture, or one that draws nothing",
            hint="take the plan off to capture: ckplan.remove(model)",
        )
    return torch.cuda.get_rng_state(device)


def set_random_state(
    device: torch.device, generator: torch.Generator | None, state: torch.Tensor
) -> None:
    """Set the state of a generator, or of a device's own."""
    if generator is not None:
        generator.set_state(state)
    elif device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def device_of_draw(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    """The device of an op: of its first argument, or the one that it names."""
    if args and isinstance(args[0], torch.Tensor):
        return args[0].device
    return torch.device(kwargs.get("device") or "cpu")
