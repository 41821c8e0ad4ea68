"""What reductions put aside on CUDA, beside what PyTorch's own allocator was asked for.

The figures are requests that torch 2.13's ``sum`` made of the caching allocator on an
A100 and on a T4, by device properties.
"""

from __future__ import annotations

import math

import pytest

from ckplan.tracing.cuda.reductions import Processors, Reduction, partial_result_blocks
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
