"""Whether tiles of a call give autograd's own bits: tested, not assumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ckplan.applying.tiling.attention import Attention, Step, run_attention
from ckplan.applying.tiling.bits import Bits, compared
from ckplan.applying.tiling.norm_passes import run_norm
from ckplan.applying.tiling.norm_program import NormProgram
from ckplan.applying.tiling.row_passes import RowWise
from ckplan.applying.tiling.row_products import Products
from ckplan.applying.tiling.row_program import Product, RowProgram
from ckplan.applying.tiling.row_steps import apply_step
from ckplan.plan.tiles import RowTiles


def check_row_bits(
    program: RowProgram,
    rows: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    tiles: RowTiles,
    seed: int = 0,
) -> Bits:
    """Compare output and gradients of tiles with those of autograd, on random values.

    Args:
        program: What the MLP computes; the shapes of its parameters count.
        rows: Of its input; samples, of convolutions.
        dtype: Of all tensors.
        device: Where to test.
        tiles: Numbers of tiles.
        seed: Of the random values; the state of the generators is kept.

    Returns:
        ``same``, or ``close`` with the largest difference.
    """
    random = _random(seed, device)

    def normal(*sizes: int) -> Tensor:
        return random(sizes, dtype)

    assert program.final is not None
    _, first = program.first[0]
    inputs, outputs = program.sizes(first)[0], program.sizes(program.final)[1]
    hidden = normal(rows, inputs, *program.spatial)
    operands = [
        normal(*one.shape) / len(one) ** 0.5 if one.dim() > 1 else normal(*one.shape)
        for one in program.operands
    ]
    gradient = normal(rows, outputs, *program.spatial)

    def tiled(*given: Tensor) -> Tensor:
        made: Tensor = RowWise.apply(program, tiles, *given)
        return made

    def plain(*given: Tensor) -> Tensor:
        inputs, rest = given[: program.inputs], given[program.inputs :]
        return _whole(Products(program, rest), inputs)

    hidden = hidden.contiguous(memory_format=program.layout)
    given = *(hidden for _ in range(program.inputs)), *operands
    return compared(
        *(partial(_results, one, given, gradient) for one in (plain, tiled))
    )


def _whole(products: Products, inputs: tuple[Tensor, ...]) -> Tensor:
    """The output as autograd follows it, without tiles."""
    program = products.program
    values: dict[int, Tensor] = {}
    left = [*reversed(inputs)]
    for number, step in enumerate(program.steps):
        if isinstance(step, Product):
            hidden = left.pop() if len(left) > 1 else left[0]
            values[number] = products.make(step.of, hidden)
        else:
            values[number] = apply_step(step, values)
    return products.make(products.final, values[program.result])


def check_attention_bits(
    sizes: tuple[int, int, int, int, int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    tiles: RowTiles,
    seed: int = 0,
) -> Bits:
    """Compare an attention in tiles of heads with that of autograd, on random values.

    Keys are tested in both layouts that a product may be given. Elementwise ops have
    the same bits in any tile, so a softmax stands for all of them.

    Args:
        sizes: Samples, heads, queries, keys, and features of each.
        dtype: Of all tensors.
        device: Where to test.
        tiles: Numbers of tiles.
        seed: Of the random values; the state of the generators is kept.

    Returns:
        ``same``, or ``close`` with the largest difference.
    """
    *heads, queries, keys, features = sizes
    random = _random(seed, device)

    def normal(rows: int) -> Tensor:
        return random((*heads, rows, features), dtype)

    step = Step(torch.softmax, 0, (-1,), {}, dtype, ())
    program = Attention((*heads, queries, keys), (step,))
    given, gradient = tuple(map(normal, (queries, keys, keys))), normal(queries)

    def results(is_tiled: bool, is_copied: bool) -> dict[str, Tensor]:
        def made(first: Tensor, second: Tensor, values: Tensor) -> Tensor:
            second = second.transpose(2, 3)
            second = second.contiguous() if is_copied else second
            if is_tiled:
                return run_attention(program, tiles, first, second, values)
            return torch.softmax(first @ second, -1) @ values

        return _results(made, given, gradient)

    found = [
        compared(partial(results, False, is_copied), partial(results, True, is_copied))
        for is_copied in (False, True)
    ]
    worst = max(found, key=lambda bits: (bool(bits.where), bits.difference))
    return replace(worst, share=max(one.share for one in found))


def check_norm_bits(
    program: NormProgram,
    *,
    device: torch.device,
    tiles: RowTiles,
    seed: int = 0,
) -> Bits:
    """Compare a written-out norm in tiles with that of autograd, on random values.

    Args:
        program: What the norm computes.
        device: Where to test.
        tiles: Numbers of tiles.
        seed: Of the random values; the state of the generators is kept.

    Returns:
        ``same``, or ``close`` with the largest difference.
    """
    random = _random(seed, device)
    hidden = random(program.shape, program.given)
    gradient = random(program.shape, program.dtype)
    operands = [random(one.shape, one.dtype) for one in program.operands]

    def plain(given: Tensor, *rest: Tensor) -> Tensor:
        return program.run([given] * program.uses, rest)

    def tiled(given: Tensor, *rest: Tensor) -> Tensor:
        return run_norm(replace(program, operands=rest), tiles, given)

    given = hidden, *operands
    return compared(
        *(partial(_results, one, given, gradient) for one in (plain, tiled))
    )


def _random(
    seed: int, device: torch.device
) -> Callable[[Sequence[int], torch.dtype], Tensor]:
    """Makes random values of a shape and dtype."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return normal


def _results(
    function: Callable[..., Tensor], given: tuple[Tensor, ...], gradient: Tensor
) -> dict[str, Tensor]:
    """Output and gradients by name."""
    leaves = [one.detach().clone().requires_grad_() for one in given]
    made = function(*leaves)
    made.backward(gradient)
    names = ["hidden", *(f"parameter {n}" for n in range(len(given) - 1))]
    found = {
        name: leaf.grad
        for name, leaf in zip(names, leaves, strict=True)
        if leaf.grad is not None
    }
    return {"output": made.detach(), **found}
