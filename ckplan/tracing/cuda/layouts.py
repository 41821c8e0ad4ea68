"""Whether tensors have the layouts that kernels need, and bytes of copies."""

from __future__ import annotations

from collections.abc import Iterable

from ckplan.tracing.recording.recording import TensorMeta
from ckplan.units import in_blocks

Blocks = tuple[int, ...]
"""Sizes in bytes of blocks that a kernel allocates at once."""

_IMAGES = (4, 5)  # numbers of dimensions that channels-last layouts have


def contiguous_copies(tensors: Iterable[TensorMeta], last: bool = False) -> Blocks:
    """Blocks of copies of tensors that are not contiguous (or channels-last)."""
    return tuple(
        in_blocks(t.num_bytes) for t in tensors if not has_contiguous_strides(t, last)
    )


def has_contiguous_strides(tensor: TensorMeta, channels_last: bool = False) -> bool:
    """Whether a tensor is contiguous, or contiguous in channels-last order."""
    dims = list(range(len(tensor.shape)))
    if channels_last:
        dims = [0, *dims[2:], 1]
    expected = 1
    for dim in reversed(dims):
        if tensor.shape[dim] != 1 and tensor.stride[dim] != expected:
            return not tensor.numel
        expected *= tensor.shape[dim]
    return True


def suggests_channels_last(tensor: TensorMeta) -> bool:
    """Whether a tensor's strides suggest channels last.

    Follows ``Tensor.suggest_memory_format`` (``c10/core/MemoryFormat.h``).
    """
    if len(tensor.shape) not in _IMAGES:
        return False
    least = 0
    for dim in (1, *reversed(range(2, len(tensor.shape))), 0):
        stride = tensor.stride[dim]
        alone = least == tensor.stride[1]
        if not tensor.shape[dim] or stride < least or (not dim and alone):
            return False
        least = stride * max(tensor.shape[dim], 1)
    return tensor.stride[1] > 0
