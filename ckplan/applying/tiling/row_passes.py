"""The passes over the tiles of a row-wise call, as a function that autograd knows.

Shapes: R rows, D features, H columns of hidden values, O outputs; of convolutions N
samples, D, H and O channels, and positions. Forward and the gradient of the input go by
tiles of rows; gradients of weights by tiles of columns, all rows in each. So no sum is
split, and hidden values are never whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ckplan.applying.tiling.once import differentiated_once
from ckplan.applying.tiling.row_products import EVERY, Products, rows_of
from ckplan.applying.tiling.row_program import RowProgram
from ckplan.applying.tiling.row_steps import run_steps
from ckplan.plan.tiles import RowTiles


class RowWise(torch.autograd.Function):
    """A row-wise call that keeps its input alone for backward."""

    @staticmethod
    def forward(
        ctx: Any, program: RowProgram, tiles: RowTiles, *given: Tensor
    ) -> Tensor:
        """Compute the output, [R, O] or [N, O, ...], by tiles of rows.

        The inputs of the first products, which have the same values, come before the
        operands.
        """
        ctx.save_for_backward(*given)
        ctx.program, ctx.tiles = program, tiles
        rest = given[program.inputs :]
        rows = rows_of(program, given[0])
        products = Products.like_whole(program, rest, rows)
        made = products.empty_output(rows)
        for part in program.cut_rows(tiles, len(rows)):
            value, _ = run_steps(products, rows[part], EVERY, tracked=False)
            products.write_output(value, made[part])
            del value
        return made

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients by tiles."""
        program, tiles = ctx.program, ctx.tiles
        hidden = ctx.saved_tensors[: program.inputs]
        rest = ctx.saved_tensors[program.inputs :]
        rows = rows_of(program, hidden[0])
        wanted = ctx.needs_input_grad[2 + program.inputs :]
        made: list[Tensor | None] = [None for _ in hidden]
        if any(ctx.needs_input_grad[2 : 2 + program.inputs]):
            products = Products.like_whole(program, rest, rows)
            found = _by_rows(products, tiles, rows, given)
            made = [one.view(hidden[0].shape) for one in found]
        if not any(wanted):
            return None, None, *made, *(None for _ in wanted)
        outs = [
            torch.empty_like(one) if is_wanted else None
            for one, is_wanted in zip(rest, wanted, strict=True)
        ]
        _by_columns(Products(program, rest), tiles, rows, given, outs)
        return None, None, *made, *outs


def _by_rows(
    products: Products, tiles: RowTiles, rows: Tensor, given: Tensor
) -> list[Tensor]:
    """The gradients of the inputs."""
    made = [torch.empty_like(rows) for _ in range(products.program.inputs)]
    for part in products.program.cut_rows(tiles, len(rows)):
        value, leaves = run_steps(products, rows[part], EVERY, tracked=True)
        edge, seen = get_gradient_edge(value), _seen(products, value)
        del value  # unless the elementwise ops keep it
        inner = products.inner_gradient(given[part], seen)
        del seen
        gradients = list(torch.autograd.grad([edge], leaves, [inner]))
        del edge, leaves, inner
        outs = [one[part] for one in made]
        products.write_input_gradient(rows[part], gradients, outs)
    return made


def _by_columns(
    products: Products,
    tiles: RowTiles,
    rows: Tensor,
    given: Tensor,
    outs: list[Tensor | None],
) -> None:
    """Write the gradients of weights and biases."""
    program, final = products.program, products.final
    for part in tiles.of_columns(program.sizes(final)[0]):
        value, leaves = run_steps(products, rows, part, tracked=True)
        products.write_weights(final, (value.detach(), given), outs, (part, EVERY))
        edge, seen = get_gradient_edge(value), _seen(products, value)
        del value
        inner = products.inner_gradient(given, seen, part)
        del seen
        gradients = list(torch.autograd.grad([edge], leaves, [inner]))
        del edge, leaves, inner
        for (_, of), gradient in zip(program.first, gradients, strict=True):
            products.write_weights(of, (rows, gradient), outs, (EVERY, part))
        del gradients, gradient


def _seen(products: Products, value: Tensor) -> Tensor | None:
    """The value that backward of the last product looks at, if it does."""
    return value.detach() if products.program.spatial else None
