"""The products of a row-wise call, and their gradients: matrices, or 1x1 convolutions.

Rows of a matrix product are those of its input, [R, inputs]. Rows of a convolution are
its samples, [N, inputs, *spatial]: kernels sum over the positions of a sample in an
order of their own. Columns are outputs of the first products.

On a CPU with one thread, torch computes 1x1 convolutions of 16 or more samples in
float32 by oneDNN, and others by a matrix product (``use_mkldnn`` in
``aten/src/ATen/native/Convolution.cpp``). A dilation, which does nothing to a 1x1
convolution, sends fewer samples to oneDNN, too, so that a tile has the bits of the
whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ckplan.applying.tiling.row_program import Operands, RowProgram

EVERY = slice(None)
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # dimensions -> format
_MANY_SAMPLES = 16  # that torch leaves to oneDNN, on a CPU with one thread


def rows_of(program: RowProgram, hidden: Tensor) -> Tensor:
    """The input with its rows as first dimension."""
    return hidden if program.spatial else hidden.view(-1, hidden.shape[-1])


def format_of(rows: Tensor) -> torch.memory_format:
    """The memory format of the input of a convolution, and of what it makes."""
    last = _FORMATS.get(rows.dim(), torch.contiguous_format)
    is_plain = rows.is_contiguous() or not rows.is_contiguous(memory_format=last)
    return torch.contiguous_format if is_plain else last


@dataclass(frozen=True, slots=True)
class Products:
    """The products of a call, for tiles of its rows.

    Args:
        program: What the call computes.
        operands: Its parameters.
        dilation: Of convolutions.
    """

    program: RowProgram
    operands: tuple[Tensor, ...]
    dilation: int = 1

    @classmethod
    def like_whole(
        cls, program: RowProgram, operands: tuple[Tensor, ...], rows: Tensor
    ) -> Products:
        """Those with the bits of the whole, for tiles of these rows."""
        is_by_size = (
            rows.device.type == "cpu"
            and rows.dtype == torch.float32
            and torch.backends.mkldnn.is_available()
            and torch.backends.mkldnn.enabled
            and torch.get_num_threads() == 1
        )
        is_many = is_by_size and len(rows) >= _MANY_SAMPLES
        return cls(program, operands, 2 if is_many else 1)

    @property
    def final(self) -> Operands:
        """The last product."""
        assert self.program.final is not None
        return self.program.final

    def empty_output(self, rows: Tensor) -> Tensor:
        """The output of the call without content, for all rows."""
        _, outputs = self.program.sizes(self.final)
        if not self.program.spatial:
            return rows.new_empty(len(rows), outputs)
        like = rows[:, :1].expand(-1, outputs, *rows.shape[2:])
        return torch.empty_like(like, memory_format=format_of(rows))

    def make(self, of: Operands, rows: Tensor, columns: slice = EVERY) -> Tensor:
        """Multiply rows by some columns of a weight, and add the bias."""
        bias = None if of.bias is None else self.operands[of.bias][columns]
        if self.program.spatial:
            weight = self.operands[of.weight][columns]
            geometry = pointwise(rows.dim(), self.dilation)
            return torch.convolution(rows, weight, bias, *geometry)
        weight = self.program.weight(self.operands, of)[:, columns]
        if bias is None:
            return torch.mm(rows, weight)
        return torch.addmm(bias, rows, weight)

    def write_output(self, value: Tensor, out: Tensor) -> None:
        """Write the last product of some rows."""
        of = self.final
        if self.program.spatial:
            out.copy_(self.make(of, value))
            return
        weight = self.program.weight(self.operands, of)
        if of.bias is None:
            torch.mm(value, weight, out=out)
        else:
            torch.addmm(self.operands[of.bias], value, weight, out=out)

    def inner_gradient(
        self, given: Tensor, value: Tensor | None, columns: slice = EVERY
    ) -> Tensor:
        """The gradient of some columns of what the last product reads.

        A convolution is told their value, too: its layout decides the kernel.
        """
        of = self.final
        if not self.program.spatial:
            weight = self.program.weight(self.operands, of)
            return torch.mm(given, weight[columns].t())
        assert value is not None
        weight = self.operands[of.weight][:, columns].contiguous()
        return self._of_input(given, value, weight)

    def write_input_gradient(
        self, rows: Tensor, gradients: list[Tensor], outs: list[Tensor]
    ) -> None:
        """Write the gradient of rows, from those of the first products: it pops them.

        Autograd adds in this order: the last product first. If each product has an
        input of its own, each has an output here.
        """
        for place, (_, of) in enumerate(reversed(self.program.first)):
            is_apart = len(outs) > 1
            out, number = outs[-1 - place if is_apart else 0], 0 if is_apart else place
            if self.program.spatial:
                weight = self.operands[of.weight]
                made = self._of_input(gradients.pop(), rows, weight)
                (out.add_ if number else out.copy_)(made)
                del made
                continue
            weight = self.program.weight(self.operands, of).t()
            if number:
                out.add_(torch.mm(gradients.pop(), weight))
            else:
                torch.mm(gradients.pop(), weight, out=out)

    def write_weights(
        self,
        of: Operands,
        values: tuple[Tensor, Tensor],
        outs: list[Tensor | None],
        part: tuple[slice, slice],
    ) -> None:
        """Write a part [inputs, outputs] of the gradient of a weight, and of its bias.

        Args:
            of: Which product.
            values: What it reads, and the gradient of what it makes, for all rows.
            outs: Gradients of operands; None where none is wanted.
            part: Slices of inputs and outputs. The bias comes with the first inputs.
        """
        inputs, gradient = values
        out = outs[of.weight]
        bias = None if of.bias is None or part[0].start else outs[of.bias]
        if self.program.spatial:
            weight = self.operands[of.weight][part[1], part[0]]
            mask = False, out is not None, bias is not None
            _, made, total = self._gradients(gradient, inputs, weight, mask)
            if out is not None and made is not None:
                out[part[1], part[0]] = made
            if bias is not None and total is not None:
                bias[part[1]] = total
            return
        if bias is not None:
            torch.sum(gradient, 0, out=bias[part[1]])
        if out is not None and of.is_transposed:
            torch.mm(gradient.t(), inputs, out=out[part[1], part[0]])
        elif out is not None:
            torch.mm(inputs.t(), gradient, out=out[part])

    def _of_input(self, given: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        """The gradient of what a convolution reads."""
        found, *_ = self._gradients(given, inputs, weight, (True, False, False))
        assert found is not None
        return found

    def _gradients(
        self,
        given: Tensor,
        inputs: Tensor,
        weight: Tensor,
        mask: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, ...]:
        """Gradients of input, weight and bias of a convolution, those of the mask."""
        if not any(mask):
            return None, None, None
        geometry = pointwise(inputs.dim(), self.dilation)
        found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
            given, inputs, weight, [len(weight)], *geometry, mask
        )
        return found


def pointwise(
    dimensions: int, dilation: int = 1
) -> tuple[list[int], list[int], list[int], bool, list[int], int]:
    """Arguments of a 1x1 convolution: stride, padding, dilation, and so on."""
    ones, zeros = [1] * (dimensions - 2), [0] * (dimensions - 2)
    return ones, zeros, [dilation] * (dimensions - 2), False, zeros, 1
