"""Workspaces of attention kernels, in bytes beyond their outputs.

They are exact up to the allocator's rounding (``tests/helpers/on_dummy_gpu.py``),
except for cuDNN, whose kernels report their needs only when they run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ckplan.gpus import Gpu
from ckplan.graph.records import NO_WORKSPACE, Workspace
from ckplan.tracing.cuda.layouts import Blocks, contiguous_copies
from ckplan.tracing.cuda.translation import HALVES
from ckplan.tracing.recording.recording import RawOp, TensorMeta
from ckplan.units import in_blocks, round_up

_FLOAT_BYTES = 4
_FLASH_ROWS = 128  # lengths are rounded up to this
_MOST_SPLITS = 128
_WIDEST_IN_REGISTERS = 128


def flash(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
    """Partial outputs and sums if keys are split to keep the card busy.

    Follows ``num_splits_heuristic`` of FlashAttention. Dropout never splits keys.
    """
    batch, heads, length, width = tensors[0].shape
    args, kwargs = op.arguments
    if (args[3] if len(args) > 3 else kwargs.get("dropout_p", 0)) > 0:
        return Workspace(after=(in_blocks(1),))  # the random generator's offset
    tile = 256 if width <= 64 else 128 if width <= 128 else 64
    blocks = -(-tensors[1].shape[2] // tile)
    tasks = batch * heads * -(-length // 64)
    splits = _splits(tasks, 2 * gpu.multiprocessors, blocks)
    if splits == 1:
        return NO_WORKSPACE
    rows = splits * batch * heads * length * _FLOAT_BYTES
    return Workspace(after=(in_blocks(rows), in_blocks(rows * _flash_width(width))))


def _splits(tasks: int, slots: int, blocks: int) -> int:
    """The fewest parts that keep 85% as many slots busy as the best number."""
    if tasks >= 0.8 * slots:
        return 1
    busy: dict[int, float] = {}
    for parts in range(1, min(_MOST_SPLITS, slots, blocks) + 1):
        if parts == 1 or -(-blocks // parts) != -(-blocks // (parts - 1)):
            waves = tasks * parts / slots
            busy[parts] = waves / math.ceil(waves)
    best = max(busy.values(), default=0)
    return next((n for n, share in busy.items() if share >= 0.85 * best), 1)


def _flash_width(width: int) -> int:
    """A head's width, rounded up as in the kernel."""
    return round_up(width, 32 if width <= 128 else 64)


def flash_backward(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
    """Softmax sums and query gradients in float32; gradients of expanded heads.

    The output and its gradient are copied if they are not laid out as [batch, length,
    heads]. In deterministic mode, each multiprocessor sums its own gradients.
    """
    del op
    gradient, query, key, _, out = tensors[:5]
    batch, heads, length, width = query.shape
    rows = batch * heads * round_up(length, _FLASH_ROWS)
    parts = -(-gpu.multiprocessors // (batch * heads)) if _deterministic() else 1
    sums = rows * _FLOAT_BYTES
    gradients = parts * rows * _flash_width(width) * _FLOAT_BYTES
    unfolded: Blocks = ()
    if key.shape[1] != heads:
        unfolded = (
            in_blocks(batch * heads * key.shape[2] * width * key.dtype.itemsize),
        ) * 2
    copied = contiguous_copies(_heads_inside(one) for one in (gradient, out))
    return Workspace(copied, (in_blocks(sums), in_blocks(gradients), *unfolded))


def _heads_inside(tensor: TensorMeta) -> TensorMeta:
    """Transpose [batch, heads, length, width] to [batch, length, heads, width]."""
    shape, stride = tensor.shape, tensor.stride
    return TensorMeta(
        (shape[0], shape[2], shape[1], shape[3]),
        (stride[0], stride[2], stride[1], stride[3]),
        tensor.dtype,
    )


def cudnn_backward(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
    """Softmax sums and query gradients in float32, as in cuDNN's frontend.

    Kernels of cuDNN can need more.
    """
    del op, gpu
    query = tensors[1]
    rows = math.prod(query.shape[:3])
    return Workspace(after=(in_blocks((rows + query.numel) * _FLOAT_BYTES),))


def efficient(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
    """A float32 accumulator for wide 16-bit outputs."""
    del gpu
    query, out = tensors[0], op.returned[0]
    wide = max(query.shape[-1], out.shape[-1]) > _WIDEST_IN_REGISTERS
    adds = query.dtype in HALVES and wide
    return Workspace(after=(in_blocks(out.numel * _FLOAT_BYTES),) if adds else ())


class _Tile(NamedTuple):
    """The tile of a kernel of the memory-efficient backward."""

    rows: int  # queries
    columns: int  # keys
    keeps: bool  # whether gradients of keys and values stay in registers


def _tile(width: int, half: bool, capability: tuple[int, int], drops: bool) -> _Tile:
    """The tile of the first kernel in ``cutlassB.h`` that the card can run."""
    roomy = capability == (8, 0) or capability[0] in (9, 10)  # much shared memory
    if width <= 64 or not (half or roomy):
        return _Tile(64, 64, half)
    if half and width <= 128 and capability >= (8, 0):
        if width <= 96 and capability in ((8, 6), (8, 9)) and not drops:
            return _Tile(128, 64, True)
        return _Tile(128, 128, True) if roomy else _Tile(64, 64, False)
    return _Tile(128, 64, half and width <= 128)


def efficient_backward(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
    """Sums of gradient times output, then gradients in tiles of float32.

    Follows ``kernel_backward.h`` and ``attention_backward.cu``.
    """
    gradient, query, key, value = tensors[:4]
    batch, heads, length, width = query.shape
    keys, wide = key.shape[2], value.shape[-1]
    half, many = query.dtype in HALVES, batch * heads
    drops = op.arguments[0][9] > 0
    tile = _tile(max(width, wide), half, gpu.capability, drops)
    splits = -(-keys // tile.columns)
    if _deterministic() or (many >= 256 and keys <= 2 * tile.columns):
        splits = 1
    of_keys = 0
    if half and not tile.keeps:
        splits = max(min(splits, 200 // many), 1)
        both = round_up(width, tile.rows) + round_up(wide, tile.rows)
        of_keys = splits * tile.columns * both
    tiles = -(-length // tile.rows) * -(-width // tile.columns)
    of_queries = tiles * (tile.rows * tile.columns + 4)
    sums = in_blocks(many * length * _FLOAT_BYTES)
    product: Blocks = ()
    if not half:  # product, and transposed sums [batch, heads, length]
        turned = (sums,) if min(heads, length) > 1 else ()
        product = in_blocks(gradient.numel * _FLOAT_BYTES), *turned
    added = (in_blocks(many * (of_keys + of_queries) * _FLOAT_BYTES),)
    of_heads: Blocks = ()
    if key.shape[1] != heads:  # gradients of all heads, besides their sums
        each = many * keys * key.dtype.itemsize
        of_heads = in_blocks(each * width), in_blocks(each * wide)
    copied = contiguous_copies((_heads_inside(gradient),))
    return Workspace(copied, (*of_heads, sums, *max(product, added, key=sum)))


def _deterministic() -> bool:
    """Whether torch requires deterministic kernels, not only warns."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
