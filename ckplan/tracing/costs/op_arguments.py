"""Make real arguments for one recorded op, to measure it alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils import _pytree as pytree

from ckplan.tracing.recording.recording import RawOp, TensorMeta
from ckplan.training.data_dependent import MASK_DTYPES

Run: TypeAlias = Callable[[], object]
"""A function to measure."""


_WRITE_AT_INDEX = (
    torch.ops.aten.index_put,
    torch.ops.aten.index_put_,
    torch.ops.aten._index_put_impl_,
)
_WRITE_INTO = (
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.bmm,
    torch.ops.aten.baddbmm,
)
_RECURRENT = (
    torch.ops.aten._cudnn_rnn.default,
    torch.ops.aten._cudnn_rnn_backward.default,
)


def make_runner(op: RawOp, device: torch.device) -> Run:
    """A function that runs the op on made-up content."""
    args, kwargs = arguments(op, device)

    def run() -> object:
        with torch.set_grad_enabled(op.in_grad_mode):
            return op.func(*args, **kwargs)

    return run


def make_writer(op: RawOp, device: torch.device) -> Run:
    """The same into memory that is there before, if the op can write there.

    Other ops that take ``out`` make a new tensor and copy it.
    """
    if op.func.overloadpacket not in _WRITE_INTO:
        return make_runner(op, device)
    args, kwargs = arguments(op, device)
    out = make_tensor(op.returned[0], device)
    return lambda: op.func.overloadpacket.out(*args, **kwargs, out=out)


def arguments(op: RawOp, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for an op: 0.5 in floating tensors, 0 in integer tensors.

    Masks choose as many elements as in the step, so that outputs and workspaces have
    the same size.
    """
    flat = [make_tensor(leaf, device) for leaf in op.args]
    chosen = chosen_indices(op)
    if chosen is not None:
        mask = torch.zeros_like(
            flat[chosen.place], memory_format=torch.contiguous_format
        )
        mask.view(-1)[: chosen.elements] = 1
        flat[chosen.place] = mask
    if op.func is torch.ops.aten._grouped_mm.default and flat[2] is not None:
        _spread(*flat[:3])
    given, kwargs = pytree.tree_unflatten(flat, op.spec)
    args = [*given]
    if op.func in _RECURRENT:  # the recording has one weight of this flat buffer
        weights, buffer = args[1], args[3]
        args[3] = buffer.new_zeros(sum(weight.numel() for weight in weights))
    return args, kwargs


class ChosenIndices(NamedTuple):
    """The number of elements that a mask chooses."""

    place: int  # index of the mask in the op's flat arguments
    elements: int


def chosen_indices(op: RawOp) -> ChosenIndices | None:
    """The number of elements that a mask chose, computed from shapes.

    It is known for one mask in ``nonzero``, in indexing, and in writes at an index.
    None for all other ops.
    """
    packet = op.func.overloadpacket
    if packet is torch.ops.aten.nonzero:
        return ChosenIndices(0, op.returned[0].shape[0])
    if packet is not torch.ops.aten.index and packet not in _WRITE_AT_INDEX:
        return None
    (tensor, indices, *values), _ = op.arguments
    given = [(at, one) for at, one in enumerate(indices, 1) if one is not None]
    (place, mask), *others = given
    through = values[0] if values else op.returned[0]
    if others or mask.dtype not in MASK_DTYPES or not through.shape:
        return None  # a scalar is written to an unknown number of elements
    return ChosenIndices(place, through.numel * mask.numel // max(tensor.numel, 1))


def input_bytes(op: RawOp) -> int:
    """Bytes of all inputs, also unread ones such as that of ``empty_like``."""
    return sum(leaf.num_bytes for leaf in op.args if isinstance(leaf, TensorMeta))


def make_tensor(leaf: Any, device: torch.device) -> Any:
    """Make a tensor from its description; return other leaves unchanged."""
    if not isinstance(leaf, TensorMeta):
        return leaf
    geometry = zip(leaf.shape, leaf.stride, strict=True)
    sizes = [size if step else 1 for size, step in geometry]  # writable
    tensor = torch.empty_strided(sizes, leaf.stride, dtype=leaf.dtype, device=device)
    floating = leaf.dtype.is_floating_point or leaf.dtype.is_complex
    return tensor.fill_(0.5 if floating else leaf.dtype == torch.bool).expand(
        leaf.shape
    )


def _spread(a: torch.Tensor, b: torch.Tensor, stops: torch.Tensor) -> None:
    """Give every expert the same number of tokens instead of none."""
    tokens = a.shape[-1] if a.dim() == b.dim() else a.shape[-2]
    groups = torch.arange(1, len(stops) + 1, device=stops.device)
    stops.copy_(groups * tokens // len(stops))
