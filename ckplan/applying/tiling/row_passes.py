"""The passes over the tiles of a row-wise call, as a function that autograd knows.

Shapes: R rows, D features, H columns of hidden values, O outputs. Forward and the
gradient of the input go by tiles of rows; gradients of weights by tiles of columns, all
rows in each. So no sum is split, and hidden values are never whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ckplan.applying.tiling.row_program import Operands, RowProgram
from ckplan.applying.tiling.row_steps import run_steps
from ckplan.plan.tiles import RowTiles

_EVERY = slice(None)


class RowWise(torch.autograd.Function):
    """A row-wise call that keeps its input alone for backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, program: RowProgram, tiles: RowTiles, *rest: Tensor
    ) -> Tensor:
        """Compute the output, [R, O], by tiles of rows."""
        ctx.save_for_backward(hidden, *rest)
        ctx.program, ctx.tiles = program, tiles
        rows = hidden.view(-1, hidden.shape[-1])
        assert program.final is not None
        weight = program.weight(rest, program.final)
        made = hidden.new_empty(len(rows), weight.shape[-1])
        bias = program.final.bias
        for part in tiles.of_rows(len(rows)):
            value, _ = run_steps(program, rest, rows[part], _EVERY, tracked=False)
            if bias is None:
                torch.mm(value, weight, out=made[part])
            else:
                torch.addmm(rest[bias], value, weight, out=made[part])
            del value
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients by tiles."""
        hidden, *rest = ctx.saved_tensors
        program, tiles, operands = ctx.program, ctx.tiles, tuple(rest)
        rows = hidden.view(-1, hidden.shape[-1])
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
    for part in tiles.of_rows(len(rows)):
        value, leaves = run_steps(program, operands, rows[part], _EVERY, tracked=True)
        edge = get_gradient_edge(value)
        del value  # unless the elementwise ops keep it
        gradients = _gradients(program, operands, edge, leaves, given[part], _EVERY)
        del edge, leaves
        # Autograd adds in this order: the last product first.
        for number, (_, of) in enumerate(reversed(program.first)):
            weight = program.weight(operands, of).t()
            if number == 0:
                torch.mm(gradients.pop(), weight, out=made[part])
            else:
                made[part].add_(torch.mm(gradients.pop(), weight))
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
    if final.bias is not None:
        _write_sum(given, outs[final.bias], _EVERY)
    width = program.weight(operands, final).shape[0]
    for part in tiles.of_columns(width):
        value, leaves = run_steps(program, operands, rows, part, tracked=True)
        _write_product(value.detach(), given, outs[final.weight], final, (part, _EVERY))
        edge = get_gradient_edge(value)
        del value
        gradients = _gradients(program, operands, edge, leaves, given, part)
        del edge, leaves
        for (_, of), gradient in zip(program.first, gradients, strict=True):
            _write_product(rows, gradient, outs[of.weight], of, (_EVERY, part))
            if of.bias is not None:
                _write_sum(gradient, outs[of.bias], part)
        del gradients, gradient


def _gradients(
    program: RowProgram,
    operands: tuple[Tensor, ...],
    edge: GradientEdge,
    leaves: list[Tensor],
    given: Tensor,
    columns: slice,
) -> list[Tensor]:
    """Gradients of the first products, through the elementwise ops."""
    assert program.final is not None
    weight = program.weight(operands, program.final)[columns].t()
    return list(torch.autograd.grad([edge], leaves, [torch.mm(given, weight)]))


def _write_product(
    inputs: Tensor,
    gradient: Tensor,
    out: Tensor | None,
    of: Operands,
    part: tuple[slice, slice],
) -> None:
    """Write ``inputs.t() @ gradient`` to a part [inputs, outputs] of a gradient."""
    if out is None:
        return
    if of.is_transposed:
        torch.mm(gradient.t(), inputs, out=out[part[1], part[0]])
    else:
        torch.mm(inputs.t(), gradient, out=out[part])


def _write_sum(gradient: Tensor, out: Tensor | None, part: slice) -> None:
    if out is not None:
        torch.sum(gradient, 0, out=out[part])
