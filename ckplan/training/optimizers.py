"""Optimizers and the gradient scaler for training workloads, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ckplan import units
from ckplan.errors import CkplanError, WorkloadError, did_you_mean
from ckplan.training.grouped_updates import update_in_groups

KERNELS = ("foreach", "fused", "single")
"""Implementations of an update: on lists, fused in one kernel, per parameter."""
PREDICTED_ONLY = "adamw8bit"


class Adam8bit(torch.optim.Optimizer):
    """The memory of AdamW with two states of one byte per element; it does not train.

    T. Dettmers, M. Lewis, S. Shleifer, L. Zettlemoyer, "8-bit Optimizers via Block-wise
    Quantization", 2021. Its kernels update in place, need no temporaries and run on
    GPUs only. The scales of blocks, below 2 % of the states, are not counted.
    """

    def __init__(self, params: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Allocate the states, and update parameters in place."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(parameter, dtype=torch.uint8)
                parameter.add_(parameter.grad, alpha=-group["lr"])


class Scaler(torch.amp.GradScaler):
    """A gradient scaler that always steps if gradients are fake."""

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        found = optimizer_state["found_inf_per_device"].values()
        if any(isinstance(tensor, FakeTensor) for tensor in found):
            return optimizer.step(*args, **kwargs)
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)


_MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    PREDICTED_ONLY: Adam8bit,
}
_FUSED = ("adamw", "adam", "sgd", "momentum")
OPTIMIZERS = (*_MAKERS, "none", "own")


def check_optimizer(text: object) -> None:
    """Refuse text other than ``name``, ``name:kernel`` or ``name:foreach=SIZE``.

    Raises:
        WorkloadError: There is no such optimizer, it has no such kernel, or only
            ``foreach`` updates groups of a size.
    """
    if not isinstance(text, str):
        raise WorkloadError(
            f"cannot train with a {type(text).__name__}: an optimizer is passed by "
            "name",
            needed="one of " + ", ".join(OPTIMIZERS),
            hint="a file whose build() returns a dict with the key 'optimizer'",
        )
    name, colon, kernel = text.partition(":")
    if name not in OPTIMIZERS:
        near = did_you_mean(name, OPTIMIZERS)
        raise WorkloadError(
            f"unknown optimizer '{text}'",
            needed="one of " + ", ".join(OPTIMIZERS),
            hint=f"did you mean '{near}'?" if near else "--optimizer adamw",
        )
    known = _kernels_of(name)
    kernel, grouped, size = kernel.partition("=")
    if grouped and kernel in known:
        _check_group(kernel, size, text)
    if colon and kernel not in known:
        raise WorkloadError(
            f"the optimizer '{name}' has no kernel '{kernel}'",
            needed="one of " + ", ".join(known) if known else "its name alone",
            hint=f"--optimizer {name}",
        )


def _check_group(kernel: str, size: str, text: str) -> None:
    """Refuse a size of groups that is none, or of kernels that have no temporaries."""
    try:
        fits = kernel == "foreach" and units.parse_bytes(size) > 0
    except CkplanError:
        fits = False
    if not fits:
        raise WorkloadError(
            f"cannot train with '{text}': '{kernel}={size}' is no size of groups",
            needed="foreach=SIZE, the bytes of the parameters that are updated at once",
            hint="--optimizer adamw:foreach=64MiB",
        )


def _kernels_of(name: str) -> tuple[str, ...]:
    if name in _FUSED:
        return KERNELS
    return ("foreach", "single") if name == "adafactor" else ()


def make_optimizer(
    text: str, parameters: list[torch.nn.Parameter], device: str
) -> torch.optim.Optimizer:
    """Make an optimizer of a checked name, with its kernel or torch's default.

    On CUDA, torch selects ``foreach``, but not for fake parameters or for CPU tensors
    that emulate CUDA. This function selects it for them.
    """
    name, _, kernel = text.partition(":")
    kernel, _, size = kernel.partition("=")
    if not kernel and device == "cuda" and _kernels_of(name):
        kernel = "foreach"
    options = _SWITCHES[kernel] if kernel else {}
    if name == "adafactor":
        options = {key: on for key, on in options.items() if key == "foreach"}
    optimizer = _MAKERS[name](parameters, lr=1e-3, **options)
    return update_in_groups(optimizer, size) if size else optimizer


_SWITCHES = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "single": {"foreach": False, "fused": False},
}


def step_counts(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Step counters of an optimizer, which stay on the CPU for any parameters."""
    return [
        optimizer.state[parameter]["step"]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if not (group.get("capturable") or group.get("fused"))
        and isinstance(optimizer.state[parameter].get("step"), torch.Tensor)
    ]
