"""A model, one batch, and optionally a loss and an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ckplan.errors import CkplanError, WorkloadError

CONTRACT = "(model, batch), (model, batch, loss_fn) or a dict with 'model' and 'batch'"


@dataclass(frozen=True)
class Workload:
    """A model, one batch, and optionally a loss and an optimizer."""

    model: nn.Module
    batch: Any  # a mapping is passed as keywords, a tuple or list as positionals
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None
    source: str = ""  # target of a model without a file, such as "hf:gpt2"
    assumptions: tuple[str, ...] = ()  # about the batch of a source


def as_workload(made: object, name: str) -> Workload:
    """Check what a factory returned.

    Raises:
        WorkloadError: It is not a workload; the message describes it.
    """
    parts: dict[str, Any]
    if isinstance(made, Mapping):
        unknown = set(made) - {"model", "batch", "loss", "optimizer"}
        if unknown:
            raise _nonsense(name, f"has an unknown key {min(map(str, unknown))!r}")
        parts = {str(key): value for key, value in made.items()}
    elif isinstance(made, tuple) and len(made) in (2, 3):
        parts = dict(zip(("model", "batch", "loss"), made, strict=False))
    else:
        raise _nonsense(name, f"is of type {type(made).__name__}")
    if not isinstance(parts.get("model"), nn.Module):
        kind = type(parts.get("model")).__name__
        raise _nonsense(name, f"has a model of type {kind}, not a torch.nn.Module")
    if "batch" not in parts or not tensors_of(parts["batch"]):
        raise _nonsense(name, "has a batch without tensors")
    if parts.get("loss") is not None and not callable(parts["loss"]):
        raise _nonsense(name, f"has a loss of type {type(parts['loss']).__name__}")
    optimizer = parts.get("optimizer")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise _nonsense(name, f"has an optimizer of type {type(optimizer).__name__}")
    return Workload(**parts)


def tensors_of(value: object) -> list[torch.Tensor]:
    """The tensors in a nested container, in order."""
    leaves = pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def rows_of(workload: Workload) -> int:
    """Number of rows of the batch: the first size of its first non-scalar tensor."""
    sizes = (t.shape[0] for t in tensors_of(workload.batch) if t.dim())
    return next(sizes, 0)


def first_rows(workload: Workload, rows: int) -> Workload:
    """The same workload with the first rows of its batch, copied."""
    whole = rows_of(workload)

    def first(leaf: Any) -> Any:
        is_tensor = isinstance(leaf, torch.Tensor) and leaf.dim()
        return leaf[:rows].clone() if is_tensor and leaf.shape[0] == whole else leaf

    return replace(workload, batch=pytree.tree_map(first, workload.batch))


def check_not_lazy(
    model: nn.Module, cannot: str, kind: type[CkplanError] = WorkloadError
) -> None:
    """Refuse a model with lazy parameters that have no shapes yet.

    Raises:
        CkplanError: A parameter is lazy; the error has type ``kind`` and names it.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise kind(
                f"cannot {cannot} a {type(model).__name__} that has not run yet: its "
                f"parameter '{name}' is lazy and has no shape",
                needed="parameters with shapes, as after a first forward",
                hint="call the model on a batch first, also in the workload's factory",
            )


def on_device(workload: Workload, device: torch.device) -> Workload:
    """The workload moved to a device, model in place.

    Raises:
        WorkloadError: A tensor is neither on that device nor on the CPU.
    """
    accepted = " or ".join(dict.fromkeys(("cpu", device.type)))
    for tensor in tensors_of(workload.batch):
        if tensor.device.type not in ("cpu", device.type):
            raise WorkloadError(
                f"the batch is on another device: a tensor of shape "
                f"{tuple(tensor.shape)} is on {tensor.device}, the model goes to "
                f"{device}",
                needed=f"a batch on {accepted}",
                hint="build model and batch on the default device; ckplan moves them",
            )
    for name, parameter in workload.model.named_parameters():
        if parameter.device.type not in ("cpu", device.type):
            raise WorkloadError(
                f"the model is on another device: '{name}' is on {parameter.device}",
                needed=f"parameters on {accepted}",
                hint="build model and batch on the default device; ckplan moves them",
            )

    if device.type == "cpu":
        return workload

    model = workload.model.to(device)
    moved = {id(leaf): leaf.to(device) for leaf in tensors_of(workload.batch)}
    batch = pytree.tree_map(lambda leaf: moved.get(id(leaf), leaf), workload.batch)
    return replace(workload, model=model, batch=batch)


def _nonsense(name: str, found: str) -> WorkloadError:
    return WorkloadError(
        f"cannot build the workload: what {name} returned {found}",
        needed=CONTRACT,
        hint="return model, {'input_ids': ids, 'labels': ids}",
    )
