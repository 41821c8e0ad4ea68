"""The passes over the tiles of a written-out norm, as a function that autograd knows.

Shapes: R rows, D columns. Forward and the gradient of the input go by tiles of rows. A
row's gradient needs its own statistics alone; they are kept, [R, 1], for gradients of
parameters, which go by tiles of columns with all rows in each: no sum is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ckplan.applying.tiling.norm_program import NormProgram
from ckplan.applying.tiling.once import differentiated_once
from ckplan.plan.tiles import RowTiles


def run_norm(program: NormProgram, tiles: RowTiles, given: Tensor) -> Tensor:
    """The output of a norm, in tiles.

    Its input is passed once for each use, so that autograd adds their gradients to
    others in the order of the plain norm.
    """
    uses = [given] * program.uses
    made: Tensor = NormWise.apply(program, tiles, *uses, *program.operands)
    return made


class NormWise(torch.autograd.Function):
    """A norm that keeps its input alone for backward."""

    @staticmethod
    def forward(
        ctx: Any, program: NormProgram, tiles: RowTiles, *given: Tensor
    ) -> Tensor:
        """Compute the output, with the shape of the input, by tiles of rows."""
        source, operands = given[0], given[program.uses :]
        ctx.save_for_backward(source, *operands)
        ctx.program, ctx.tiles = program, tiles
        rows = source.view(-1, source.shape[-1])
        made = torch.empty_like(source, dtype=program.dtype)
        for part in tiles.of_rows(len(rows)):
            made.view(rows.shape)[part] = program.run(
                [rows[part]] * program.uses, operands
            )
        return made

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients by tiles."""
        program, tiles = ctx.program, ctx.tiles
        source, *operands = ctx.saved_tensors
        rows = source.detach().view(-1, source.shape[-1])
        given = given.reshape(rows.shape)
        for_uses = ctx.needs_input_grad[2 : 2 + program.uses]
        for_operands = ctx.needs_input_grad[2 + program.uses :]
        uses, known = _by_rows(program, tiles, rows, operands, given, any(for_uses))
        outs = _by_columns(program, tiles, rows, operands, given, known, for_operands)
        return None, None, *(_like(source, one) for one in uses), *outs


def _like(source: Tensor, rows: Tensor | None) -> Tensor | None:
    return None if rows is None else rows.view(source.shape)


def _by_rows(
    program: NormProgram,
    tiles: RowTiles,
    rows: Tensor,
    operands: Sequence[Tensor],
    given: Tensor,
    is_wanted: bool,
) -> tuple[list[Tensor | None], dict[int, Tensor]]:
    """The gradient of the input for each use, and the statistics of all rows."""
    made = [torch.empty_like(rows) if is_wanted else None for _ in range(program.uses)]
    known: dict[int, Tensor] = {}
    fixed = [one.detach() for one in operands]
    for part in tiles.of_rows(len(rows)):
        leaves = [rows[part].requires_grad_(is_wanted) for _ in made]
        found: dict[int, Tensor] = {}
        with torch.set_grad_enabled(is_wanted):
            value = program.run(leaves, fixed, noted=found)
        for number, one in found.items():
            if number not in known:
                known[number] = one.new_empty(len(rows), 1)
            known[number][part] = one
        del found, one
        edge = get_gradient_edge(value) if is_wanted else None
        del value
        if edge is None:
            continue
        gradients = list(torch.autograd.grad([edge], leaves, [given[part]]))
        del edge, leaves
        for out, gradient in zip(made, gradients, strict=True):
            assert out is not None
            out[part] = gradient
        del gradients, gradient
    return made, known


def _by_columns(
    program: NormProgram,
    tiles: RowTiles,
    rows: Tensor,
    operands: Sequence[Tensor],
    given: Tensor,
    known: dict[int, Tensor],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of the parameters."""
    outs = [
        torch.empty_like(one) if is_wanted else None
        for one, is_wanted in zip(operands, wanted, strict=True)
    ]
    for part in tiles.of_columns(rows.shape[1]) if any(wanted) else ():
        cut = [one[part].detach() for one in operands]
        leaves = [
            one.requires_grad_()
            for one, is_wanted in zip(cut, wanted, strict=True)
            if is_wanted
        ]
        with torch.enable_grad():
            value = program.run([rows[:, part]] * program.uses, cut, known)
        edge = get_gradient_edge(value)
        del value
        gradients = torch.autograd.grad([edge], leaves, [given[:, part]])
        del edge
        places = (out for out in outs if out is not None)
        for out, gradient in zip(places, gradients, strict=True):
            out[part] = gradient
        del gradients, gradient
    return outs
