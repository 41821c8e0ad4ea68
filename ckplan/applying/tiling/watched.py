"""Whether tiles would be in the way of somebody who watches."""

from __future__ import annotations

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode

_hooks_are_enabled = torch._C._autograd._saved_tensors_hooks_is_enabled


def is_watched() -> bool:
    """Whether gradients are off, or modes see the ops that run."""
    modes = _get_current_function_mode_stack()
    return not (
        torch.is_grad_enabled()
        and _hooks_are_enabled()
        and _get_current_dispatch_mode() is None
        and all(isinstance(mode, DeviceContext) for mode in modes)
    )
