"""The products of a row-wise call, and their gradients: matrices, or 1x1 convolutions.

Rows of a matrix product are those of its input, [R, inputs]. Rows of a convolution are
its samples, [N, inputs, *spatial]: kernels sum over the positions of a sample in an
order of their own. Columns are outputs of the first products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ckplan.applying.tiling.row_program import Operands, RowProgram

EVERY = slice(None)
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # dimensions -> format


def rows_of(program: RowProgram, hidden: Tensor) -> Tensor:
    """The input with its rows as first dimension."""
    return hidden if program.spatial else hidden.view(-1, hidden.shape[-1])


def format_of(rows: Tensor) -> torch.memory_format:
    """The memory format of the input of a convolution, and of what it makes."""
    last = _FORMATS.get(rows.dim(), torch.contiguous_format)
    is_plain = rows.is_contiguous() or not rows.is_contiguous(memory_format=last)
    return torch.contiguous_format if is_plain else last


def layouts_of(rows: Tensor) -> tuple[torch.memory_format, ...]:
    """The memory formats that the input of products may have."""
    last = _FORMATS.get(rows.dim())
    return (torch.contiguous_format, *(() if last is None else (last,)))


def empty_output(
    program: RowProgram, operands: tuple[Tensor, ...], rows: Tensor
) -> Tensor:
    """The output of the call without content, for all rows."""
    assert program.final is not None
    weight = operands[program.final.weight]
    if not program.spatial:
        outputs = program.weight(operands, program.final).shape[-1]
        return rows.new_empty(len(rows), outputs)
    like = rows[:, :1].expand(-1, len(weight), *rows.shape[2:])
    return torch.empty_like(like, memory_format=format_of(rows))


def product_of(
    program: RowProgram,
    operands: tuple[Tensor, ...],
    of: Operands,
    rows: Tensor,
    columns: slice = EVERY,
) -> Tensor:
    """Multiply rows by some columns of a weight, and add the bias."""
    bias = None if of.bias is None else operands[of.bias][columns]
    if program.spatial:
        weight = operands[of.weight][columns]
        return torch.convolution(rows, weight, bias, *pointwise(rows.dim()))
    weight = program.weight(operands, of)[:, columns]
    return torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)


def write_output(
    program: RowProgram, operands: tuple[Tensor, ...], value: Tensor, out: Tensor
) -> None:
    """Write the last product of some rows."""
    of = program.final
    assert of is not None
    if program.spatial:
        out.copy_(product_of(program, operands, of, value))
    elif of.bias is None:
        torch.mm(value, program.weight(operands, of), out=out)
    else:
        torch.addmm(operands[of.bias], value, program.weight(operands, of), out=out)


def inner_gradient(
    program: RowProgram,
    operands: tuple[Tensor, ...],
    given: Tensor,
    value: Tensor | None,
    columns: slice,
) -> Tensor:
    """The gradient of some columns of what the last product reads.

    A convolution is told their value, too: its layout decides the kernel.
    """
    of = program.final
    assert of is not None
    if not program.spatial:
        return torch.mm(given, program.weight(operands, of)[columns].t())
    assert value is not None
    weight = operands[of.weight][:, columns].contiguous()
    found, *_ = _gradients(given, value, weight, (True, False, False))
    assert found is not None
    return found


def write_input_gradient(
    program: RowProgram,
    operands: tuple[Tensor, ...],
    rows: Tensor,
    gradients: list[Tensor],
    out: Tensor,
) -> None:
    """Write the gradient of rows, from those of the first products, which it pops."""
    # Autograd adds in this order: the last product first.
    for number, (_, of) in enumerate(reversed(program.first)):
        if program.spatial:
            mask = True, False, False
            made, *_ = _gradients(gradients.pop(), rows, operands[of.weight], mask)
            assert made is not None
            (out.add_ if number else out.copy_)(made)
            del made
        elif number:
            weight = program.weight(operands, of).t()
            out.add_(torch.mm(gradients.pop(), weight))
        else:
            weight = program.weight(operands, of).t()
            torch.mm(gradients.pop(), weight, out=out)


def write_weights(
    operands: tuple[Tensor, ...],
    of: Operands,
    values: tuple[Tensor, Tensor],
    outs: list[Tensor | None],
    part: tuple[slice, slice],
) -> None:
    """Write a part [inputs, outputs] of the gradient of a weight, and of its bias.

    Args:
        operands: The parameters.
        of: Which product.
        values: What it reads, and the gradient of what it makes, for all rows.
        outs: Gradients of operands; None where none is wanted.
        part: Slices of inputs and outputs. The bias comes with the first inputs.
    """
    inputs, gradient = values
    out = outs[of.weight]
    bias = None if of.bias is None or part[0].start else outs[of.bias]
    if inputs.dim() == 2:
        if bias is not None:
            torch.sum(gradient, 0, out=bias[part[1]])
        if out is not None and of.is_transposed:
            torch.mm(gradient.t(), inputs, out=out[part[1], part[0]])
        elif out is not None:
            torch.mm(inputs.t(), gradient, out=out[part])
        return
    weight = operands[of.weight][part[1], part[0]]
    mask = False, out is not None, bias is not None
    _, made, total = _gradients(gradient, inputs, weight, mask)
    if out is not None and made is not None:
        out[part[1], part[0]] = made
    if bias is not None and total is not None:
        bias[part[1]] = total


def _gradients(
    given: Tensor, inputs: Tensor, weight: Tensor, mask: tuple[bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of input, weight and bias of a convolution, those of the mask."""
    if not any(mask):
        return None, None, None
    found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
        given, inputs, weight, [len(weight)], *pointwise(inputs.dim()), mask
    )
    return found


def pointwise(
    dimensions: int,
) -> tuple[list[int], list[int], list[int], bool, list[int], int]:
    """Arguments of a 1x1 convolution: stride, padding, dilation, and so on."""
    ones, zeros = [1] * (dimensions - 2), [0] * (dimensions - 2)
    return ones, zeros, ones, False, zeros, 1
