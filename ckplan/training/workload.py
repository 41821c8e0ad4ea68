"""A model, one batch, and how they make a loss and train."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ckplan.errors import CkplanError, WorkloadError, did_you_mean

CONTRACT = "(model, batch), (model, batch, loss_fn) or a dict with 'model' and 'batch'"
KEYS = ("model", "batch", "target", "loss_fn", "step", "optimizer")
_EARLIER_NAME = "loss"  # of the key 'loss_fn'


@dataclass(frozen=True)
class Workload:
    """A model, one batch, and how they make a loss and train.

    The loss is ``step(model, batch)`` if there is a ``step``; else
    ``loss(output, target)`` if there is a target; else ``loss(output, batch)`` if there
    is a loss; else it is found in the output.
    """

    model: nn.Module
    batch: Any  # a mapping is passed as keywords, a tuple or list as positionals
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None
    target: Any = None  # what the loss alone gets, such as labels
    step: Callable[[nn.Module, Any], torch.Tensor] | None = None
    source: str = ""  # target of a model without a file, such as "hf:gpt2"
    assumptions: tuple[str, ...] = ()  # about the batch of a source
    batch_dim: int = 0  # the dimension of the batch's tensors that counts rows

    @property
    def data(self) -> tuple[Any, Any]:
        """The batch and the target."""
        return self.batch, self.target


def as_workload(made: object, name: str) -> Workload:
    """Check what a factory returned.

    Raises:
        WorkloadError: It is not a workload; the message describes it.
    """
    parts: dict[str, Any]
    if isinstance(made, Mapping):
        parts = {str(key): value for key, value in made.items()}
        _check_keys(parts, name)
    elif isinstance(made, tuple) and len(made) in (2, 3):
        parts = dict(zip(("model", "batch", "loss_fn"), made, strict=False))
    else:
        raise _nonsense(name, f"is of type {type(made).__name__}")
    if not isinstance(parts.get("model"), nn.Module):
        kind = type(parts.get("model")).__name__
        raise _nonsense(name, f"has a model of type {kind}, not a torch.nn.Module")
    if "batch" not in parts or not tensors_of(parts["batch"]):
        raise _nonsense(name, "has a batch without tensors")
    for key in ("loss_fn", "step"):
        if parts.get(key) is not None and not callable(parts[key]):
            raise _nonsense(name, f"has a {key} of type {type(parts[key]).__name__}")
    _check_loss(parts, name)
    optimizer = parts.get("optimizer")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise WorkloadError(
            f"cannot build the workload: what {name} returned has an optimizer of type "
            f"{type(optimizer).__name__}",
            needed="a torch.optim.Optimizer of the model's parameters, or none",
            hint="--optimizer adamw, which needs none in the workload",
        )
    return Workload(
        parts["model"],
        parts["batch"],
        parts.get("loss_fn"),
        optimizer,
        parts.get("target"),
        parts.get("step"),
    )


def _check_keys(parts: dict[str, Any], name: str) -> None:
    """Refuse unknown keys; rename a key that has an earlier name."""
    if _EARLIER_NAME in parts:
        if "loss_fn" in parts:
            raise _nonsense(name, "has both 'loss' and 'loss_fn', two names of one")
        parts["loss_fn"] = parts.pop(_EARLIER_NAME)
    unknown = sorted(set(parts) - set(KEYS))
    if unknown:
        near = did_you_mean(unknown[0], KEYS)
        raise WorkloadError(
            f"cannot build the workload: what {name} returned has an unknown key "
            f"{unknown[0]!r}",
            needed="keys of " + ", ".join(KEYS),
            hint=f"did you mean '{near}'?" if near else "inputs belong into 'batch'",
        )


def _check_loss(parts: dict[str, Any], name: str) -> None:
    """Refuse a target that nothing reads, and two ways to make the loss."""
    target, loss, step = (parts.get(key) for key in ("target", "loss_fn", "step"))
    if step is not None and (target is not None or loss is not None):
        other = "target" if target is not None else "loss_fn"
        raise WorkloadError(
            f"cannot build the workload: what {name} returned has both 'step' and "
            f"'{other}'",
            needed="step(model, batch), which returns the loss itself, or loss_fn",
            hint=f"leave '{other}' out; labels that step reads belong into 'batch'",
        )
    if target is not None and loss is None:
        raise WorkloadError(
            f"cannot build the workload: what {name} returned has a 'target' and no "
            "'loss_fn'",
            needed="loss_fn(output, target), which returns the loss",
            hint="'loss_fn': torch.nn.functional.cross_entropy",
        )


def tensors_of(value: object) -> list[torch.Tensor]:
    """The tensors in a nested container, in order."""
    leaves = pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def device_of(value: object) -> torch.device:
    """The device of the tensors in a nested container: the first that is no CPU."""
    devices = (tensor.device for tensor in tensors_of(value))
    return next((one for one in devices if one.type != "cpu"), torch.device("cpu"))


def rows_of(workload: Workload) -> int:
    """Number of rows of the batch: a size of its first tensor that counts them."""
    dim = workload.batch_dim
    sizes = (t.shape[dim] for t in tensors_of(workload.batch) if t.dim() > dim >= 0)
    return next(sizes, 0)


def _counts_rows(tensor: torch.Tensor, rows: int, dim: int) -> int | None:
    """The dimension of a tensor that counts rows: that of the batch, else the first.

    So lengths, or padding masks, are cut beside inputs that have time first.
    """
    places = dict.fromkeys((dim, 0))
    return next(
        (d for d in places if tensor.dim() > d and tensor.shape[d] == rows), None
    )


def first_rows(workload: Workload, rows: int) -> Workload:
    """The same workload with the first rows of its batch, copied.

    A tensor that comes twice, as inputs and labels, is one tensor in the copy, too.
    """
    whole = rows_of(workload)
    copied: dict[int, torch.Tensor] = {}

    def first(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        place = _counts_rows(leaf, whole, workload.batch_dim)
        if place is None:
            return leaf
        if id(leaf) not in copied:
            copied[id(leaf)] = leaf.narrow(place, 0, rows).clone()
        return copied[id(leaf)]

    batch, target = pytree.tree_map(first, workload.data)
    return replace(workload, batch=batch, target=target)


def with_batch_dim(workload: Workload, batch_dim: int | None) -> Workload:
    """The same workload with rows at the dimension that somebody named, if any.

    Raises:
        WorkloadError: It is no dimension, or tensors of the batch have no rows there.
    """
    if batch_dim is None:
        return workload
    if type(batch_dim) is not int or batch_dim < 0:
        raise WorkloadError(
            f"cannot take dimension {batch_dim!r} of the batch as its samples",
            needed="the number of the dimension that counts samples, 0 or more",
            hint="--batch-dim 1 (batch_dim=1 in Python)",
        )
    named = replace(workload, batch_dim=batch_dim)
    if not _has_rows(named):
        raise _no_rows(named)
    return named


def at_rows(workload: Workload, rows: int | None, batch_dim: int | None) -> Workload:
    """The workload with rows at a dimension, both as they are where they are None.

    Raises:
        WorkloadError: As of ``with_batch_dim`` and ``with_rows``.
    """
    named = with_batch_dim(workload, batch_dim)
    return named if rows is None else with_rows(named, rows)


def with_rows(workload: Workload, rows: int) -> Workload:
    """The same workload with another number of rows: cut, or repeated in order.

    Of one row, inputs such as ``float32[1]`` stay as they are: they are rather a scale.

    Raises:
        WorkloadError: The tensors have other sizes where rows are counted, or there are
            none.
    """
    whole, dim = rows_of(workload), workload.batch_dim
    if not _has_rows(workload):
        raise _no_rows(workload)

    copied: dict[int, torch.Tensor] = {}  # inputs that are labels, too, are one tensor
    one_row = (t for t in tensors_of(workload.batch) if t.shape == (1,) and whole == 1)
    scales = {id(tensor) for tensor in one_row if tensor.is_floating_point()}

    def resized(leaf: Any) -> Any:
        if not (isinstance(leaf, torch.Tensor) and leaf.dim()):
            return leaf
        place = _counts_rows(leaf, whole, dim)
        if place is None or id(leaf) in scales:
            return leaf
        if id(leaf) not in copied:
            times = -(-rows // whole)
            repeated = leaf.repeat(
                [times if d == place else 1 for d in range(leaf.dim())]
            )
            copied[id(leaf)] = repeated.narrow(place, 0, rows).clone()
        return copied[id(leaf)]

    batch, target = pytree.tree_map(resized, workload.data)
    return replace(workload, batch=batch, target=target)


def _has_rows(workload: Workload) -> bool:
    """Whether every tensor counts as many rows, or has size 1 there."""
    rows, dim = rows_of(workload), workload.batch_dim
    return rows > 0 and all(
        tensor.shape[dim if tensor.dim() > dim else 0] == 1
        or _counts_rows(tensor, rows, dim) is not None
        for tensor in tensors_of(workload.data)
        if tensor.dim()
    )


def _no_rows(workload: Workload) -> WorkloadError:
    """The error for tensors of which none, or several, sizes can be the rows."""
    found = tensors_of(workload.data)
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in found)
    others = (
        dim
        for dim in range(max((tensor.dim() for tensor in found), default=0))
        if dim != workload.batch_dim and _has_rows(replace(workload, batch_dim=dim))
    )
    other, place = next(others, None), workload.batch_dim
    hint = "a factory that puts the batch dimension first in every tensor"
    if other is not None:
        hint = (
            f"--batch-dim {other} (batch_dim={other} in Python), if samples are there"
        )
    if any(tensor.numel() == 0 for tensor in found):
        hint = "a batch of one row or more"
    return WorkloadError(
        f"cannot find the rows of the batch: its tensors are {shapes}",
        needed="tensors whose "
        + ("first size" if place == 0 else f"size at dimension {place}")
        + " is the number of rows",
        hint=hint,
    )


def mode_notes(model: nn.Module) -> Iterator[str]:
    """What a trace says of a model that is not in its training mode."""
    if not model.training:
        yield (
            "the model is in evaluation mode, without dropout: if it trains otherwise, "
            "call model.train() before, in the workload's factory, too"
        )


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
    for tensor in tensors_of(workload.data):
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
    moved = {id(leaf): leaf.to(device) for leaf in tensors_of(workload.data)}
    batch, target = pytree.tree_map(
        lambda leaf: moved.get(id(leaf), leaf), workload.data
    )
    return replace(workload, model=model, batch=batch, target=target)


def _nonsense(name: str, found: str) -> WorkloadError:
    return WorkloadError(
        f"cannot build the workload: what {name} returned {found}",
        needed=CONTRACT,
        hint="return model, {'input_ids': ids, 'labels': ids}",
    )
