"""Correct strides and dtypes where fake kernels differ from real kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

_ALWAYS_CONTIGUOUS = (
    torch.ops.aten._log_softmax_backward_data.default,
    torch.ops.aten.glu_backward.default,
    torch.ops.aten.huber_loss_backward.default,
    torch.ops.aten.log_sigmoid_backward.default,
    torch.ops.aten.log_sigmoid_forward.default,
    torch.ops.aten.mse_loss_backward.default,
    torch.ops.aten.native_layer_norm_backward.default,
    torch.ops.aten.smooth_l1_loss_backward.default,
)
_CHANNELS_LAST = {torch.channels_last: 4, torch.channels_last_3d: 5}  # dimensions
_BATCH_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
_SOME_MEMORY_FORMAT = (
    torch.ops.aten.native_batch_norm.default,
    _BATCH_NORM_BACKWARD,
)
"""Real kernels return contiguous or channels-last; fake ones follow inputs."""
_BY_ELEMENT = (
    torch.ops.aten.elu_backward.default,
    torch.ops.aten.hardsigmoid.default,
    torch.ops.aten.hardsigmoid_backward.default,
    torch.ops.aten.hardswish.default,
    torch.ops.aten.hardswish_backward.default,
    torch.ops.aten.hardtanh_backward.default,
    torch.ops.aten.leaky_relu_backward.default,
    torch.ops.aten.mish_backward.default,
    torch.ops.aten.softplus_backward.default,
)
"""Pointwise ops without torch's tag."""
_KEEPS_STRIDES = (
    torch.ops.aten.clone.default,
    torch.ops.aten.hardtanh.default,
)
"""Pointwise ops whose outputs keep the strides of their inputs."""
_NORMS = (
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.native_group_norm.default,
    torch.ops.aten.native_layer_norm.default,
)
"""Their statistics are float32 if weights are, as under autocast."""
_GROUP_NORM_BACKWARD = torch.ops.aten.native_group_norm_backward.default
"""Its gradient has its input's dtype; the fake kernel takes that of weights."""


def as_kernels_do(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """An op's fake output with the dtypes and strides of its real kernel."""
    if func in _NORMS and _is_mixed(args):
        out = (out[0], *(x.float() for x in out[1:]))
    elif func is _GROUP_NORM_BACKWARD and _is_mixed(args):
        out = (None if out[0] is None else out[0].to(args[1].dtype), *out[1:])
    return _laid_out(func, args, out)


def _is_mixed(args: tuple[Any, ...]) -> bool:
    """Whether the input has 16 bits and weights have 32."""
    types = [x.dtype for x in args if isinstance(x, torch.Tensor)]
    return types[0].itemsize == 2 and torch.float32 in types


def _laid_out(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """An op's output in its kernel's layout; layouts decide which ops run next."""
    if func in _ALWAYS_CONTIGUOUS or _is_by_element(func, args):
        formats = [torch.contiguous_format]
    elif func in _SOME_MEMORY_FORMAT:
        formats = [torch.contiguous_format, *_CHANNELS_LAST]
    else:
        return out

    def lay_out(x: torch.Tensor) -> torch.Tensor:
        ours = [one for one in formats if x.dim() == _CHANNELS_LAST.get(one, x.dim())]
        ours = [one for one in ours if x.is_contiguous(memory_format=one)]
        if ours and func is _BATCH_NORM_BACKWARD:
            return x
        # Strides of dimensions of size 1 count, too: they decide "channels last".
        one = ours[0] if ours else torch.contiguous_format
        made = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=one)
        return x if x.stride() == made.stride() else made

    return pytree.tree_map_only(torch.Tensor, lay_out, out)


def _is_by_element(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a pointwise op reads contiguous images of one shape.

    Strides of dimensions of size 1 can still mean "channels last", as fake kernels
    assume. Real kernels return contiguous tensors for certain only without broadcasting
    a number.
    """
    images = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
    if not any(1 in x.shape and x.dim() in _CHANNELS_LAST.values() for x in images):
        return False
    if torch.Tag.pointwise not in func.tags and func not in _BY_ELEMENT:
        return False
    if func._schema.is_mutable or func in _KEEPS_STRIDES:
        return False
    schema = func._schema.arguments
    broadcasts = (func._overloadname == "Scalar" and len(images) == 1) or any(
        isinstance(one.type, torch.TensorType) and not isinstance(x, torch.Tensor)
        for one, x in zip(schema, args, strict=False)
    )
    return not broadcasts and all(
        x.is_contiguous() and x.shape == images[0].shape for x in images
    )
