"""Fingerprints of workloads: versions, shapes and names that a plan depends on."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ckplan.training.workload import Workload, tensors_of


def fingerprint(workload: Workload, device: torch.device) -> dict[str, Any]:
    """Identify a step by torch version, device, source, batch and parameter shapes."""
    batch = workload.batch
    if isinstance(batch, Mapping):
        shapes = batch_shapes((), batch)
    else:
        shapes = batch_shapes(batch if isinstance(batch, (tuple, list)) else (batch,))
    if workload.step is not None:  # its batch is not the arguments of the model
        shapes = {f"step.{name}": shape for name, shape in shapes.items()}
    found = loop_fingerprint(workload.model, device, shapes)
    return found | ({"source": workload.source} if workload.source else {})


def loop_fingerprint(
    model: nn.Module, device: torch.device, batch: Mapping[str, str]
) -> dict[str, Any]:
    """Identify a step of somebody's loop, whose batch has these shapes."""
    return {
        "torch": torch_version(),
        "device": device.type,
        "batch": batch,
        "parameters": parameter_shapes(model),
    }


def batch_shapes(
    args: tuple[Any, ...] | list[Any], kwargs: Mapping[Any, Any] | None = None
) -> dict[str, str]:
    """Shapes of a model's arguments by name; positionals by position."""
    named = {str(position): value for position, value in enumerate(args)}
    named.update({str(key): value for key, value in (kwargs or {}).items()})
    return {name: _describe(value) for name, value in named.items()}


def count_elements(shapes: str) -> int:
    """Number of elements in tensors of these shapes.

    >>> count_elements("int64[8,256] float32[]"), count_elements("NoneType")
    (2049, 0)
    """
    found = re.findall(r"\[([0-9,]*)\]", shapes)
    return sum(math.prod(map(int, filter(None, one.split(",")))) for one in found)


def torch_version() -> str:
    """Version of torch without the build, such as ``2.13.0``."""
    return torch.__version__.partition("+")[0]


def parameter_shapes(model: nn.Module) -> dict[str, str]:
    """Every parameter as ``float32[768,3072]``, by name."""
    return {name: _describe(value) for name, value in model.named_parameters()}


def _describe(value: object) -> str:
    """A tensor as ``int64[8,256]``; other values by their type."""
    tensors = tensors_of(value)
    if not tensors:
        return type(value).__name__
    return " ".join(
        f"{str(t.dtype).removeprefix('torch.')}[{','.join(map(str, t.shape))}]"
        for t in tensors
    )
