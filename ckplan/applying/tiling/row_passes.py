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
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from ckplan.applying.tiling.row_products import (
    EVERY,
    empty_output,
    inner_gradient,
    rows_of,
    write_input_gradient,
    write_output,
    write_weights,
)
from ckplan.applying.tiling.row_program import RowProgram
from ckplan.applying.tiling.row_steps import run_steps
from ckplan.plan.tiles import RowTiles


class RowWise(torch.autograd.Function):
    """A row-wise call that keeps its input alone for backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, program: RowProgram, tiles: RowTiles, *rest: Tensor
    ) -> Tensor:
        """Compute the output, [R, O] or [N, O, ...], by tiles of rows."""
        ctx.save_for_backward(hidden, *rest)
        ctx.program, ctx.tiles = program, tiles
        rows = rows_of(program, hidden)
        made = empty_output(program, rest, rows)
        for part in program.cut_rows(tiles, len(rows)):
            value, _ = run_steps(program, rest, rows[part], EVERY, tracked=False)
            write_output(program, rest, value, made[part])
            del value
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients by tiles."""
        hidden, *rest = ctx.saved_tensors
        program, tiles, operands = ctx.program, ctx.tiles, tuple(rest)
        rows = rows_of(program, hidden)
        for_hidden, _, _, *wanted = ctx.needs_input_grad
        made = None
        if for_hidden:
            made = _by_rows(program, operands, tiles, rows, given).view(hidden.shape)
        if not any(wanted):
            return made, None, None, *(None for _ in wanted)
        outs = [
            torch.empty_like(one) if is_wanted else None
            for one, is_wanted in zip(operands, wanted, strict=True)
        ]
        _by_columns(program, operands, tiles, rows, given, outs)
        return made, None, None, *outs


def _by_rows(
    program: RowProgram,
    operands: tuple[Tensor, ...],
    tiles: RowTiles,
    rows: Tensor,
    given: Tensor,
) -> Tensor:
    """The gradient of the input."""
    made = torch.empty_like(rows)
    for part in program.cut_rows(tiles, len(rows)):
        value, leaves = run_steps(program, operands, rows[part], EVERY, tracked=True)
        edge, seen = get_gradient_edge(value), _seen(program, value)
        del value  # unless the elementwise ops keep it
        inner = inner_gradient(program, operands, given[part], seen, EVERY)
        del seen
        gradients = list(torch.autograd.grad([edge], leaves, [inner]))
        del edge, leaves, inner
        write_input_gradient(program, operands, rows[part], gradients, made[part])
    return made


def _by_columns(
    program: RowProgram,
    operands: tuple[Tensor, ...],
    tiles: RowTiles,
    rows: Tensor,
    given: Tensor,
    outs: list[Tensor | None],
) -> None:
    """Write the gradients of weights and biases."""
    final = program.final
    assert final is not None
    for part in tiles.of_columns(program.sizes(final)[0]):
        value, leaves = run_steps(program, operands, rows, part, tracked=True)
        write_weights(operands, final, (value.detach(), given), outs, (part, EVERY))
        edge, seen = get_gradient_edge(value), _seen(program, value)
        del value
        inner = inner_gradient(program, operands, given, seen, part)
        del seen
        gradients = list(torch.autograd.grad([edge], leaves, [inner]))
        del edge, leaves, inner
        for (_, of), gradient in zip(program.first, gradients, strict=True):
            write_weights(operands, of, (rows, gradient), outs, (EVERY, part))
        del gradients, gradient


def _seen(program: RowProgram, value: Tensor) -> Tensor | None:
    """The value that backward of the last product looks at, if it does."""
    return value.detach() if program.spatial else None
