"""Run the steps of a row-wise call: on some rows and columns, or what follows them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ckplan.applying.tiling.row_products import Products
from ckplan.applying.tiling.row_program import (
    Cast,
    Elementwise,
    Product,
    RowProgram,
    Value,
    values_read,
)


def run_steps(
    products: Products, rows: Tensor, columns: slice, *, tracked: bool
) -> tuple[Tensor, list[Tensor]]:
    """Compute the value that the final product reads, for some rows and columns.

    Args:
        products: What to compute.
        rows: Rows of the input, [r, D], or samples, [n, D, ...].
        columns: Of the hidden values.
        tracked: Whether autograd follows the elementwise ops.

    Returns:
        The value, and the results of the first products.
    """
    program = products.program
    values: dict[int, Tensor] = {}
    leaves: list[Tensor] = []
    with torch.enable_grad() if tracked else nullcontext():
        for number, dead in enumerate(program.last_uses()):
            step = program.steps[number]
            if isinstance(step, Product):
                with torch.no_grad():
                    made = products.make(step.of, rows, columns)
                if tracked:
                    leaves.append(made.requires_grad_())
            else:
                made = apply_step(step, values)
            values[number] = made
            for one in dead:
                del values[one]
    return values.pop(program.result), leaves


def apply_step(step: Elementwise, values: dict[int, Tensor]) -> Tensor:
    """Run one op on the values of earlier steps."""

    def given(one: Any) -> Any:
        if isinstance(one, Cast):
            return one.of.to(one.dtype)
        return values[one.step] if isinstance(one, Value) else one

    kwargs = {name: given(one) for name, one in step.kwargs.items()}
    made = step.function(*map(given, step.args), **kwargs)
    return made[0] if isinstance(made, tuple) else made  # a norm, without statistics


def run_lead(program: RowProgram, start: Tensor) -> list[Tensor]:
    """The inputs of the first products, as autograd follows them."""
    if program.inputs == 1:
        return [run_whole(program.lead, start)]
    *before, cast = program.lead
    source = run_whole(before, start)
    alone = replace(cast, args=(Value(0), *cast.args[1:]))
    return [apply_step(alone, {0: source}) for _ in range(program.inputs)]


def run_whole(steps: list[Elementwise], start: Tensor) -> Tensor:
    """Run what precedes the first product, or follows the last, as the module does."""
    values = {0: start}
    del start
    for number, step in enumerate(steps):
        values[number + 1] = apply_step(step, values)
        later = {one for other in steps[number + 1 :] for one in values_read(other)}
        values = {n: one for n, one in values.items() if n in later or n > number}
    return values[len(steps)]
