"""Flatten arguments of ops as ``pytree`` does, in less time.

Nearly all ops take tensors, numbers and lists of these. The structure of such arguments
is looked up by the lengths of the lists.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

_LEAVES = frozenset(
    {
        torch.Tensor,
        nn.Parameter,
        FakeTensor,
        int,
        float,
        bool,
        str,
        type(None),
        torch.dtype,
        torch.layout,
        torch.device,
        torch.memory_format,
    }
)
_LISTS = frozenset((tuple, list))
_specs: dict[Any, pytree.TreeSpec] = {}


def flatten(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure of the arguments of an op, as of ``(args, kwargs)``."""
    flat: list[Any] = []
    key: list[Any] = []
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind in _LEAVES:
            flat.append(value)
            key.append(None)
        elif kind is list and _LEAVES.issuperset(map(type, value)):
            flat += value
            key.append(len(value))
        else:
            return pytree.tree_flatten((args, kwargs))
    shape = (*key, *kwargs) if kwargs else tuple(key)
    spec = _specs.get(shape)
    if spec is None:
        spec = _specs[shape] = pytree.tree_structure((args, kwargs))
    return flat, spec


def is_leaf(value: Any) -> bool:
    """Whether a value is known to hold no others."""
    return type(value) in _LEAVES


def tensors_in(out: Any) -> list[torch.Tensor]:
    """The tensors that an op returns."""
    if type(out) in _LEAVES:
        return [out] if isinstance(out, torch.Tensor) else []
    if type(out) in _LISTS and _LEAVES.issuperset(map(type, out)):
        return [x for x in out if isinstance(x, torch.Tensor)]
    return [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
