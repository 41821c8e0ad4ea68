"""What a plan depends on: versions, shapes and names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ckplan.training.workload import Workload, tensors_of


def fingerprint(workload: Workload, device: torch.device) -> dict[str, Any]:
    """What makes a traced step the one it is."""
    batch = workload.batch
    if not isinstance(batch, Mapping):
        parts = batch if isinstance(batch, (tuple, list)) else (batch,)
        batch = {str(position): part for position, part in enumerate(parts)}
    return {
        "torch": torch_version(),
        "device": device.type,
        "batch": {str(key): _describe(value) for key, value in batch.items()},
        "parameters": parameter_shapes(workload.model),
    }


def torch_version() -> str:
    """Without the build: ``2.13.0``."""
    return torch.__version__.partition("+")[0]


def parameter_shapes(model: nn.Module) -> dict[str, str]:
    """Every parameter as ``float32[768,3072]``, by name."""
    return {name: _describe(value) for name, value in model.named_parameters()}


def _describe(value: object) -> str:
    """``int64[8,256]``, or the type of what is no tensor."""
    tensors = tensors_of(value)
    if not tensors:
        return type(value).__name__
    return " ".join(
        f"{str(t.dtype).removeprefix('torch.')}[{','.join(map(str, t.shape))}]"
        for t in tensors
    )
