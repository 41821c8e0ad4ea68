"""What autocast does to products, for code that runs them in its place."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_of(
    device: torch.device, dtype: torch.dtype | None
) -> AbstractContextManager[object]:
    """A scope with autocast to a dtype; with none, if it is None.

    It keeps no copies of parameters for later ops.
    """
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(
        device.type, dtype, enabled=dtype is not None, cache_enabled=False
    )


def cast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast gives to products, if it is on."""
    if not torch.amp.is_autocast_available(device.type):
        return None
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
