"""Workspaces of kernels that sort indices: embeddings, index_put, scatter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ckplan.gpus import Gpu
from ckplan.graph.records import NO_WORKSPACE, Workspace
from ckplan.tracing.cuda.layouts import Blocks, contiguous_copies
from ckplan.tracing.cuda.sorting import sorting_bytes
from ckplan.tracing.recording.recording import RawOp, TensorMeta
from ckplan.units import in_blocks, round_up

FLOAT_BYTES = 4
INDEX_BYTES = 8
_WIDTHS = 32
_FEW_INDICES = 3072  # up to here, embedding gradients need no sorting
_ROWS_PER_THREAD = 10  # sorted indices per thread in embedding gradients


def without(blocks: Blocks, num_bytes: int) -> Blocks:
    """Subtract bytes from blocks, starting with the last block."""
    left: list[int] = []
    for block in reversed(blocks):
        left.append(max(block - num_bytes, 0))
        num_bytes -= block - left[-1]
    return tuple(block for block in reversed(left) if block)


def embedding_backward(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
    """Sorted indices, and partial sums of the gradients of equal indices."""
    gradient, indices = tensors[:2]
    copied = contiguous_copies(tensors[:2])
    rows, _, by_frequency = op.arguments[0][2:5]
    count = indices.numel
    if count <= _FEW_INDICES and not by_frequency:
        return Workspace(copied)
    column = in_blocks(count * INDEX_BYTES)
    different = min(count, rows)
    parts = count // _ROWS_PER_THREAD + different
    wide = round_up(gradient.shape[-1], _WIDTHS)
    columns = (column,) * (4 if by_frequency else 3)
    adding = (
        *(in_blocks(different * INDEX_BYTES),) * 2,
        in_blocks(parts * INDEX_BYTES),
        in_blocks(parts * wide * FLOAT_BYTES),
    )
    sorting = sorting_bytes(count, rows, gpu.capability)
    before = without((sorting,), in_blocks(op.returned[0].num_bytes))
    return Workspace(copied, (*columns, *max(adding, before, key=sum)))


def index_put(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
    """Sorted indices if values are accumulated, and a contiguous copy of values."""
    args, kwargs = op.arguments
    adds = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    indices = [one for one in args[1] if one is not None]
    if not adds or any(one.dtype == torch.bool for one in indices):
        return NO_WORKSPACE
    count = math.prod(torch.broadcast_shapes(*(one.shape for one in indices)))
    sizes = zip(args[0].shape, args[1], strict=False)
    rows = math.prod(size for size, index in sizes if index is not None)
    sorting = sorting_bytes(count, rows - 1, gpu.capability)
    column = in_blocks(count * INDEX_BYTES)
    return Workspace(contiguous_copies((args[2],)), (*(column,) * 4, sorting))


def scattered(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
    """The number of chosen values up to each position."""
    del op, gpu
    return Workspace((in_blocks(tensors[1].numel * INDEX_BYTES),))
