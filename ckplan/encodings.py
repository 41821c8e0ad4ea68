"""Lossless smaller forms of tensors: masks as bits, pooling indices as short integers.

===========  ==========================================================================
``bits``     what ``bernoulli_`` drew, zeros and ones in any dtype, and every bool
             tensor: eight elements to a byte
``int16``,   indices of max pooling, which lie within one plane of the input
``int32``
===========  ==========================================================================

Eight bools are one 64-bit word. Multiplied by ``_GATHER`` its top byte is their bits;
a byte times ``_SPREAD``, masked by ``_PICK``, has bit ``i`` in byte ``i`` only. Little-
endian machines only, as all are that torch runs on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

BITS = "bits"
_DRAWS = ("bernoulli", "bernoulli_")
_POOLS = ("max_pool2d_with_indices", "max_pool3d_with_indices")
_INTEGERS = {"int16": torch.int16, "int32": torch.int32}
_ITEM_BYTES = {"int16": 2, "int32": 4}
_GATHER = sum(1 << (56 - 7 * i) for i in range(8))
_SPREAD = sum(1 << (8 * i) for i in range(8))
_PICK = sum(1 << (9 * i) for i in range(8)) - (1 << 64)  # as a signed word


class Encoded(NamedTuple):
    """A tensor in a smaller form, with its geometry."""

    form: str
    data: torch.Tensor
    size: Sequence[int]
    stride: Sequence[int]
    dtype: torch.dtype


def form_of(
    op_name: str, output: int, dtype: torch.dtype, input_shape: Sequence[int]
) -> str | None:
    """The smaller form that an op's output always has, if it has one.

    Args:
        op_name: Aten name, such as ``bernoulli_``.
        output: Which of its outputs.
        dtype: Of that output.
        input_shape: Of its first tensor argument.
    """
    if dtype == torch.bool or (op_name in _DRAWS and dtype.is_floating_point):
        return BITS
    if op_name in _POOLS and output == 1:
        plane = math.prod(input_shape[-int(op_name[8]) :])
        return next(
            (name for name, d in _INTEGERS.items() if plane <= torch.iinfo(d).max + 1),
            None,
        )
    return None


def encoded_bytes(form: str, num_elements: int) -> int:
    """Bytes of the smaller form."""
    if form == BITS:
        return (num_elements + 7) // 8
    return num_elements * _ITEM_BYTES[form]


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor's elements lie side by side, in whatever order."""
    if 0 in size:
        return True
    expected = 1
    for step, length in sorted(zip(stride, size, strict=True)):
        if length > 1 and step != expected:
            return False
        expected *= length
    return True


def encode(form: str, tensor: torch.Tensor) -> Encoded | None:
    """A tensor in a smaller form; None where its elements do not lie side by side."""
    size, stride = tensor.size(), tensor.stride()
    if tensor.storage_offset() or not is_dense(size, stride):
        return None
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    data = _pack(flat) if form == BITS else flat.to(_INTEGERS[form])
    return Encoded(form, data, size, stride, tensor.dtype)


def decode(encoded: Encoded) -> torch.Tensor:
    """The tensor again: the same elements, geometry and dtype."""
    form, data, size, stride, dtype = encoded
    out = torch.empty_strided(size, stride, dtype=dtype, device=data.device)
    flat = out.as_strided((out.numel(),), (1,))
    if form == BITS:
        words = data.to(torch.int64).mul_(_SPREAD).bitwise_and_(_PICK)
        torch.ne(words.view(torch.uint8)[: out.numel()], 0, out=flat)
    else:
        flat.copy_(data)
    return out


def _pack(flat: torch.Tensor) -> torch.Tensor:
    length = flat.numel()
    bools = torch.empty(-(-length // 8) * 8, dtype=torch.bool, device=flat.device)
    bools[length:] = False
    bools[:length].copy_(flat)  # a third of the time that comparing with 0 takes
    words = bools.view(torch.int64).mul_(_GATHER).bitwise_right_shift_(56)
    return words.to(torch.uint8)
