"""Ops whose output shapes depend on data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

MASK_DTYPES = (torch.bool, torch.uint8)


def has_data_dependent_shape(func: Any, leaves: Iterable[object]) -> bool:
    """Whether the output shape of an op depends on values of its inputs.

    Args:
        func: An overload of an op.
        leaves: Its flattened arguments; leaves with a ``dtype`` are tensors. Indexing
            counts only with a mask.
    """
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func.overloadpacket is not torch.ops.aten.index:
        return True
    _, *indices = (leaf for leaf in leaves if hasattr(leaf, "dtype"))
    return any(leaf.dtype in MASK_DTYPES for leaf in indices)
