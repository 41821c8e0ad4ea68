"""Workspaces of CUDA's kernels: bytes beyond their outputs, for each op.

Workspaces are known as far as torch's source fixes them: contiguous copies, partial
results of reductions, tables of sorted indices. Workspaces that cuDNN chooses at run
time are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from ckplan.gpus import Gpu
from ckplan.graph.records import MULTIPLIES, NO_WORKSPACE, Workspace
from ckplan.simulating.reductions import Processors, Reduction, partial_result_blocks
from ckplan.tracing.cuda import attention_workspaces as attention
from ckplan.tracing.cuda import group_norm_workspaces as group_norm
from ckplan.tracing.cuda.cublas import temporary_blocks
from ckplan.tracing.cuda.indexing_workspaces import (
    FLOAT_BYTES,
    INDEX_BYTES,
    embedding_backward,
    index_put,
    scattered,
    without,
)
from ckplan.tracing.cuda.layouts import (
    Blocks,
    contiguous_copies,
    has_contiguous_strides,
    suggests_channels_last,
)
from ckplan.tracing.recording.recording import RawOp, TensorMeta
from ckplan.units import in_blocks

_LOW = (torch.float16, torch.bfloat16)

_Needs = Callable[[RawOp, Sequence[TensorMeta], Gpu], Workspace]
"""(op, its tensors, card) -> workspace of the op."""


def workspace_of(op: RawOp, gpu: Gpu) -> Workspace:
    """Blocks that an op's kernel allocates beyond its outputs: the largest total."""
    needs = _WORKSPACES.get(op.func.overloadpacket.__name__)
    tensors = [leaf for leaf in op.args if isinstance(leaf, TensorMeta)]
    return needs(op, tensors, gpu) if needs else NO_WORKSPACE


def hidden_bytes(op: RawOp) -> int:
    """Bytes of an op's output storages beyond its output tensors.

    A reduced loss keeps the storage that its elements were computed in.
    """
    name = op.func.overloadpacket.__name__
    reduced = name in _HIDING and op.returned and not op.returned[0].shape
    return op.args[0].num_bytes - op.returned[0].num_bytes if reduced else 0


def _reduced(part_bytes: Callable[[torch.dtype], int]) -> _Needs:
    """Workspaces of a reduction, by the bytes of a thread's partial result."""

    def needs(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
        tensor, out = tensors[0], op.returned[0].dtype
        if op.returned[0].numel == tensor.numel:
            return NO_WORKSPACE  # elementwise, as the maximum of two tensors
        copy: Blocks = ()
        as_is = out == tensor.dtype or (out == torch.float32 and tensor.dtype in _LOW)
        if not as_is and op.func.overloadpacket.__name__ in _CONVERTING:
            copy = (in_blocks(tensor.numel * out.itemsize),)
            tensor = TensorMeta(tensor.shape, tensor.stride, out)
        aside = _put_aside(tensor, _dims(op, tensor), out, part_bytes, gpu)
        return Workspace(after=(*copy, *aside))

    return needs


def _put_aside(
    tensor: TensorMeta,
    dims: Iterable[int],
    out: torch.dtype,
    part_bytes: Callable[[torch.dtype], int],
    gpu: Gpu,
) -> Blocks:
    return partial_result_blocks(
        Reduction(
            tensor.shape,
            tensor.stride,
            frozenset(dims),
            tensor.dtype.itemsize,
            part_bytes(tensor.dtype),
            out.itemsize,
        ),
        Processors(gpu.multiprocessors, gpu.threads),
    )


def _dims(op: RawOp, tensor: TensorMeta) -> list[int]:
    """The dimensions that an op reduces; all if none is given."""
    args, kwargs = op.arguments
    names = [argument.name for argument in op.func._schema.arguments]
    if "dim" not in names:
        return list(range(len(tensor.shape)))
    place = names.index("dim")
    dim = args[place] if place < len(args) else kwargs.get("dim")
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    rank = len(tensor.shape)
    return [d % rank for d in dims if rank] or list(range(rank))


def _sum(dtype: torch.dtype) -> int:
    return max(dtype.itemsize, FLOAT_BYTES)


def _extreme(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _with_index(dtype: torch.dtype) -> int:
    del dtype
    return 2 * INDEX_BYTES


def _moments(dtype: torch.dtype) -> int:
    return 32 if dtype == torch.float64 else 16


def _truth(dtype: torch.dtype) -> int:
    del dtype
    return 1


def _copied(*places: int, inside: bool = False, any_layout: bool = False) -> _Needs:
    """Workspaces of ops that make the tensor arguments at some places contiguous.

    Copies are made after the output is allocated if ``inside`` is set; channels-last
    tensors are not copied if ``any_layout`` is set.
    """

    def needs(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
        del op, gpu
        these = [tensors[place] for place in places if place < len(tensors)]
        if any_layout:
            lies = partial(has_contiguous_strides, channels_last=True)
            these = [one for one in these if not lies(one)]
        copied = contiguous_copies(these)
        return Workspace(after=copied) if inside else Workspace(copied)

    return needs


def _multiplied(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
    """The workspace of cuBLAS, and copies of operands that it cannot read."""
    copied = (in_blocks(t.num_bytes) for t in tensors[-2:] if not _for_cublas(t))
    name = op.func.overloadpacket.__name__
    return Workspace(after=(*copied, *temporary_blocks(name, tensors, gpu.capability)))


def _for_cublas(tensor: TensorMeta) -> bool:
    if len(tensor.shape) < 2:
        return True
    (rows, columns), (down, along) = tensor.shape[-2:], tensor.stride[-2:]
    return (along == 1 and down >= max(1, columns)) or (
        down == 1 and along >= max(1, rows)
    )


def _softmax_backward(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
    """The product of the gradient and the output, and contiguous copies of both."""
    del op, gpu
    product = in_blocks(tensors[1].num_bytes)
    return Workspace(after=(*contiguous_copies(tensors[:2]), product))


def _roll(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
    """A result between dimensions, or a contiguous copy for one dimension."""
    del gpu
    shifts = op.arguments[0][1]
    several = not isinstance(shifts, int) and len(shifts) > 1
    return Workspace(
        (in_blocks(tensors[0].num_bytes),) if several else contiguous_copies(tensors)
    )


def _convolution(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
    """Copies that give the input and the weight the same layout."""
    del op, gpu
    return Workspace(
        contiguous_copies(tensors[:2], any(map(suggests_channels_last, tensors[:2])))
    )


def _convolution_backward(
    op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu
) -> Workspace:
    """The largest of the workspaces for the gradients of input, weight and bias.

    Each gradient is computed in turn. Outputs that are allocated later are subtracted.
    """
    gradient, input_, weight = tensors[:3]
    last = suggests_channels_last(input_) or suggests_channels_last(weight)
    into, of_weight, of_bias = op.arguments[0][-1]
    found = [NO_WORKSPACE]
    if into:
        copied = contiguous_copies((gradient, weight), last)
        later = in_blocks(weight.num_bytes) if of_weight else 0
        found.append(Workspace(without(copied, later)))
    if of_weight:
        found.append(Workspace(contiguous_copies((gradient, input_), last)))
    if of_bias:
        dims = [0, *range(2, len(gradient.shape))]
        aside = _put_aside(gradient, dims, gradient.dtype, _sum, gpu)
        found.append(Workspace(after=aside))
    return max(found, key=lambda one: one.bytes)


def _safe_softmax(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
    """One byte per score for "is -inf", and one per row for "all are -inf"."""
    del op, gpu
    count = tensors[0].numel
    rows = count // max(tensors[0].shape[-1], 1)
    return Workspace(after=(in_blocks(count), in_blocks(rows)))


def _elements(reduced: int, otherwise: int = 0) -> _Needs:
    """Workspaces of a number of tensors like the first argument.

    Args:
        reduced: The number if the output is reduced.
        otherwise: The number if it is not.
    """

    def needs(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
        one, out = tensors[0], op.returned[0]
        if out.shape == one.shape:
            return Workspace((in_blocks(one.num_bytes),) * otherwise)
        aside = _put_aside(one, _dims(op, one), out.dtype, _sum, gpu)
        return Workspace((in_blocks(one.num_bytes),) * reduced, aside)

    return needs


def _like_its_output(times: int) -> _Needs:
    """Workspaces of a number of tensors like the output."""

    def needs(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
        del tensors, gpu
        return Workspace((in_blocks(op.returned[0].num_bytes),) * times)

    return needs


def _counted(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
    """A contiguous copy, and a copy in the output's dtype."""
    del gpu
    same = tensors[0].dtype == op.returned[0].dtype
    cast = () if same else (in_blocks(op.returned[0].num_bytes),)
    return Workspace((*contiguous_copies(tensors[:1]), *cast))


def _bilinear_backward(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
    """A contiguous copy, unless the gradients have the same size."""
    if op.returned[0].shape == tensors[0].shape:
        return NO_WORKSPACE
    return _copied(0, inside=True, any_layout=True)(op, tensors, gpu)


def _columns(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
    """A contiguous copy, and another tensor of the same size."""
    del op, gpu
    return Workspace((*contiguous_copies(tensors[:1]), in_blocks(tensors[0].num_bytes)))


_POOLS = (
    "avg_pool2d",
    "avg_pool3d",
    "_adaptive_avg_pool2d",
    "adaptive_max_pool2d",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "avg_pool3d_backward",
    "_adaptive_avg_pool2d_backward",
    "adaptive_max_pool2d_backward",
    "max_pool3d_with_indices_backward",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact2d",
    "upsample_nearest2d_backward",
)
_POOLS_OF_BOTH = ("avg_pool2d_backward", "max_pool2d_with_indices_backward")
_SELECTIONS = (
    "col2im",
    "kthvalue",
    "median",
    "reflection_pad2d",
    "reflection_pad2d_backward",
    "topk",
    "upsample_bicubic2d_backward",
    "upsample_nearest1d",
)
_WORKSPACES: dict[str, _Needs] = {
    **dict.fromkeys(("sum", "nansum", "mean", "prod"), _reduced(_sum)),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _reduced(_sum)),
    **dict.fromkeys(("amax", "amin"), _reduced(_extreme)),
    **dict.fromkeys(("max", "min", "argmax", "argmin"), _reduced(_with_index)),
    **dict.fromkeys(("var", "var_mean", "std", "std_mean"), _reduced(_moments)),
    **dict.fromkeys(("any", "all"), _reduced(_truth)),
    **dict.fromkeys(("_softmax", "_log_softmax"), _copied(0, inside=True)),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _copied(0)),
    "nll_loss_backward": _copied(1),
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _copied(0, 1, inside=True),
    "native_layer_norm": _copied(0),
    "native_layer_norm_backward": _copied(0, 1),
    "_fused_rms_norm": _copied(0),
    "_fused_rms_norm_backward": _copied(0, 1),
    "native_group_norm": group_norm.forward,
    "native_group_norm_backward": group_norm.backward,
    "embedding": _copied(1),
    **dict.fromkeys(_POOLS, _copied(0, inside=True, any_layout=True)),
    **dict.fromkeys(_POOLS_OF_BOTH, _copied(0, 1, inside=True, any_layout=True)),
    **dict.fromkeys(_SELECTIONS, _copied(0, inside=True)),
    **dict.fromkeys(MULTIPLIES, _multiplied),
    **dict.fromkeys(("cumsum", "cumprod"), _counted),
    "roll": _roll,
    "im2col": _columns,
    "upsample_bilinear2d_backward": _bilinear_backward,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention": attention.flash,
    "_scaled_dot_product_flash_attention_backward": attention.flash_backward,
    "_scaled_dot_product_cudnn_attention_backward": attention.cudnn_backward,
    "_scaled_dot_product_efficient_attention": attention.efficient,
    "_scaled_dot_product_efficient_attention_backward": attention.efficient_backward,
    "_safe_softmax": _safe_softmax,
    "embedding_dense_backward": embedding_backward,
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), index_put),
    "masked_scatter": scattered,
    "mse_loss": _elements(1),
    "smooth_l1_loss": _elements(1),
    "huber_loss": _elements(1),
    **dict.fromkeys(("soft_margin_loss", "binary_cross_entropy"), _elements(0)),
    "soft_margin_loss_backward": _like_its_output(2),
    "binary_cross_entropy_with_logits": _elements(2, otherwise=1),
    "logsumexp": _elements(1),
}
_CONVERTING = ("sum", "nansum", "mean", "prod")
_HIDING = {"mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy"}
