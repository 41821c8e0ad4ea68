"""What reductions put aside on CUDA, beside what PyTorch's own allocator was asked for.

The figures are requests that torch 2.13's ``sum`` made of the caching allocator on an
A100 and on a T4, by device properties.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from ckplan import gpus
from ckplan.simulating.reductions import Processors, Reduction, partial_result_blocks
from ckplan.tracing.cuda.workspaces import workspace_of
from ckplan.tracing.recording.recording import RawOp, TensorMeta
from ckplan.units import in_blocks

A100, T4 = Processors(108, 2048), Processors(40, 1024)


def contiguous(shape: tuple[int, ...], order: tuple[int, ...] = ()) -> list[int]:
    """Strides of a dense tensor whose dimensions lie in an order, slowest first."""
    stride = [0] * len(shape)
    expected = 1
    for dim in reversed(order or range(len(shape))):
        stride[dim], expected = expected, expected * shape[dim]
    return stride


@pytest.mark.parametrize(
    ("shape", "order", "dims", "on_a100", "on_t4"),
    [
        ((2048, 1536), (), (0,), 25_165_872, 21_233_712),
        ((2048, 384), (), (0,), 6_291_468, 6_291_468),
        ((8, 384, 14, 14), (), (0, 2, 3), 0, 0),
        ((8, 384, 14, 14), (0, 2, 3, 1), (0, 2, 3), 4_915_212, 4_915_212),
        ((64, 1000), (), (1,), 0, 0),
        ((3, 1_000_000), (), (1,), 1_488, 336),
        ((65536, 7), (), (0,), 3_592, 3_592),
        ((50257, 768), (), (0,), 113_246_232, 21_233_688),
        ((1 << 15, 1 << 15), (), (0,), 268_436_480, 268_436_480),  # in two kernels
        ((2, 3, 1 << 20), (), (0, 2), 1_740, 336),
    ],
)
def test_sums_put_aside_what_torch_asks_for(
    shape: tuple[int, ...],
    order: tuple[int, ...],
    dims: tuple[int, ...],
    on_a100: int,
    on_t4: int,
) -> None:
    stride = contiguous(shape, order)
    reduction = Reduction(shape, stride, dims, 4, 4, 4)
    for processors, asked in ((A100, on_a100), (T4, on_t4)):
        found = partial_result_blocks(reduction, processors)
        assert asked <= sum(found) < asked + 2 * 512 or (asked, found) == (0, ())
    moments = partial_result_blocks(reduction._replace(partial_bytes=16), A100)
    more = sum(moments) - sum(partial_result_blocks(reduction, A100))
    assert more == pytest.approx(3 * on_a100, abs=8192)


def test_what_is_small_or_empty_puts_nothing_aside() -> None:
    assert partial_result_blocks(Reduction((), (), (), 4, 4, 4), A100) == ()
    assert partial_result_blocks(Reduction((0, 5), (5, 1), (0,), 4, 4, 4), A100) == ()
    assert partial_result_blocks(Reduction((5, 5), (5, 1), (), 4, 4, 4), A100) == ()


@pytest.mark.parametrize("rows", [1 << power for power in range(20)])
def test_parts_are_of_whole_outputs_and_semaphores_follow(rows: int) -> None:
    found = partial_result_blocks(Reduction((rows, 256), (256, 1), (0,), 4, 4, 4), A100)
    if found:
        sums, semaphores = found
        assert sums % (256 * 4) == 0
        assert semaphores == in_blocks(4)
        assert math.log2(sums // (256 * 4)) >= 1


class Indexed(ctypes.Structure):
    """What a thread keeps of the largest element so far, as C++ lays it out."""

    _fields_ = (("value", ctypes.c_float), ("index", ctypes.c_int64))


def partial_results(op: Any, *args: Any) -> int:
    """Bytes of the partial results of a reduction of float32 on an A100."""

    def described(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return TensorMeta(tuple(value.shape), value.stride(), value.dtype)

    returned = pytree.tree_leaves(op(*args))
    flat, spec = pytree.tree_flatten((args, {}))
    inputs, outputs = (tuple(map(described, some)) for some in (flat, returned))
    raw = RawOp(op, -1, (), (), (), inputs, spec, outputs, 0, 0, False, True)
    partial, _ = workspace_of(raw, gpus.find("A100 80GB")).after  # then semaphores
    return partial


def test_an_index_is_kept_beside_every_value_that_may_be_the_largest() -> None:
    aten, x = torch.ops.aten, torch.empty((2048, 1536), device="meta")
    values = partial_results(aten.amax.default, x, [0])
    assert values % ctypes.sizeof(ctypes.c_float) == 0
    threads = values // ctypes.sizeof(ctypes.c_float)
    for op in (aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default):
        assert partial_results(op, x, 0) == threads * ctypes.sizeof(Indexed)
