"""Workspaces of reductions on CUDA whose blocks of threads share one output.

Each block stores its partial result, in memory of the caching allocator, for the block
that finishes last. Follows ``setReduceConfig`` of PyTorch's
``aten/src/ATen/native/cuda/Reduce.cuh``, and ``TensorIterator`` for the order of
dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckplan.units import in_blocks

_WARP = 32
_MOST_THREADS = 512  # per block
_VALUES = 16, 256  # fewest and most values per thread
_LONG = 128  # from this length on, several values are loaded at once
_FARTHEST = (1 << 31) - 1  # largest offset in bytes within one kernel
_SEMAPHORE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Processors:
    """The streaming multiprocessors of a card."""

    number: int
    threads: int  # most resident threads of each


class Reduction(NamedTuple):
    """The tensor and dimensions of a reduction."""

    shape: Sequence[int]
    stride: Sequence[int]  # in elements
    dims: Collection[int]  # reduced dimensions, from 0
    itemsize: int
    partial_bytes: int  # of a thread's partial result for one output
    out_itemsize: int
    values_at_once: int = 4  # loaded along a reduced dimension


class _Dim(NamedTuple):
    size: int
    out: int  # strides, in bytes; 0: reduced
    into: int


def partial_result_blocks(
    reduction: Reduction, processors: Processors
) -> tuple[int, ...]:
    """Bytes of blocks besides the output: partial results, semaphores.

    >>> rows = Reduction((2048, 1536), (1536, 1), {0}, 4, 4, 4)
    >>> partial_result_blocks(rows, Processors(108, 2048))
    (25165824, 512)
    """
    if not math.prod(reduction.shape):
        return ()
    return _put_aside(_iterated(reduction), reduction, processors)


def _put_aside(
    dims: list[_Dim], reduction: Reduction, processors: Processors
) -> tuple[int, ...]:
    farthest, place = max(
        ((dim.size - 1) * stride, place)
        for place, dim in enumerate(dims)
        for stride in (dim.out, dim.into)
    )
    ends = (sum((dim.size - 1) * dim[way] for dim in dims) for way in (1, 2))
    if farthest and max(ends) >= _FARTHEST:  # one kernel per half
        size = dims[place].size
        halves = (
            [*dims[:place], dims[place]._replace(size=half), *dims[place + 1 :]]
            for half in (size // 2, size - size // 2)
        )
        return max(
            (_put_aside(half, reduction, processors) for half in halves), key=sum
        )
    return _of_one_kernel(dims, reduction, processors)


def _of_one_kernel(
    dims: list[_Dim], reduction: Reduction, processors: Processors
) -> tuple[int, ...]:
    reduced = sum(not dim.out for dim in dims)
    outputs = math.prod(dim.size for dim in dims if dim.out)
    inputs = math.prod(dim.size for dim in dims if not dim.out)
    along = reduced == len(dims) or dims[0].into < dims[reduced].into
    width, height = (inputs, outputs) if along else (outputs, inputs)
    at_once = 1  # outputs per thread
    if dims[0 if along else reduced].into == reduction.itemsize:
        if along and reduced == 1 and width >= _LONG:
            width //= reduction.values_at_once
        elif not along:
            at_once = _outputs_at_once(dims, reduced, reduction.itemsize)
            width //= at_once
    width, height = _block(width, height, _MOST_THREADS // at_once)
    lanes = width if along else 1
    left = -(-inputs // lanes)  # values for each thread
    if left < min(height * _VALUES[0], _VALUES[1]):
        return ()
    left = -(-inputs // (lanes * height))
    grid = -(-(outputs // at_once) // (1 if along else width))
    most = processors.number * (processors.threads // (width * height))
    if left < _VALUES[1] or grid > most:
        return ()
    fewest, enough = (-(-left // values) for values in reversed(_VALUES))
    blocks = max(min(-(-most // grid), enough), fewest)
    if blocks == 1:
        return ()
    partial = reduction.partial_bytes * outputs * blocks
    if not along:
        partial *= width * at_once
    return in_blocks(partial), in_blocks(_SEMAPHORE_BYTES * grid)


def _block(width: int, height: int, threads: int) -> tuple[int, int]:
    """Width and height of a block of threads."""
    widest, highest = (
        1 << (min(n, threads) or 1).bit_length() - 1 for n in (width, height)
    )
    high = min(highest, threads // min(widest, _WARP))
    return min(widest, threads // high), high


def _outputs_at_once(dims: Sequence[_Dim], reduced: int, itemsize: int) -> int:
    others = [
        dim.into // itemsize for place, dim in enumerate(dims) if place != reduced
    ]
    return math.gcd(4, dims[reduced].size, *others)


def _iterated(reduction: Reduction) -> list[_Dim]:
    """Merged dimensions in the order of iteration, reduced ones first."""
    shape, kept = reduction.shape, 1
    outs = [0] * len(shape)
    for place in reversed(range(len(shape))):
        if place not in reduction.dims:
            outs[place], kept = kept * reduction.out_itemsize, kept * shape[place]
    rows = zip(shape, outs, reduction.stride, strict=True)
    dims = [_Dim(n, out, into * reduction.itemsize) for n, out, into in rows][::-1]
    for end in range(1, len(dims)):
        for place in range(end, 0, -1):
            order = _order(dims[place - 1], dims[place])
            if order < 0:
                break
            if order > 0:
                dims[place - 1 : place + 1] = dims[place], dims[place - 1]
    merged = dims[:1]
    for dim in dims[1:]:
        last = merged[-1]
        if last.size == 1:
            merged[-1] = dim
        elif dim.size == 1 or (
            (last.size * last.out, last.size * last.into) == (dim.out, dim.into)
        ):
            merged[-1] = last._replace(size=last.size * dim.size)
        else:
            merged.append(dim)
    return merged or [_Dim(1, 0, reduction.itemsize)]


def _order(one: _Dim, other: _Dim) -> int:
    """1 if two dimensions must be swapped, -1 if not, 0 if it is undecided."""
    if (one.out == 0) != (other.out == 0):
        return 1 if other.out == 0 else -1
    for mine, its in ((one.out, other.out), (one.into, other.into)):
        if mine and its:
            if mine != its:
                return 1 if mine > its else -1
            if one.size > other.size:
                return 1
    return 0
