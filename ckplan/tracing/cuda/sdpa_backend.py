"""Choose the kernel that CUDA runs for ``scaled_dot_product_attention``.

The conditions are those of torch 2.11 to 2.15 for dense tensors (``sdp_utils.cpp``).
Settings of ``torch.nn.attention.sdpa_kernel`` apply in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch.backends import cuda as switches
from torch.nn.attention import SDPBackend

from ckplan.tracing.cuda.translation import HALVES, Capability

_Tensor: TypeAlias = torch.Tensor
_FLASH, _EFFICIENT, _CUDNN, _MATH = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)
_VERSION = torch.__version__
_ANY_DROPOUT = _VERSION < (2, 12)  # in cuDNN's kernel; later only multiples of 1/16
_ALIGNED = _VERSION >= (2, 13)  # inputs of the memory-efficient kernel
_COUNTS_FOR_CUDNN = _VERSION >= (2, 13)  # no more sequences or heads than are launched
_COUNTS_FOR_FLASH = _VERSION >= (2, 15)
_WIDE_BY_CUDNN = _VERSION >= (2, 14)  # widths depend on its version
_SHARES_HEADS = _VERSION >= (2, 14)  # one head of keys is enough, grouped or not
_BUNDLED_CUDNN = 92600 if _VERSION >= (2, 15) else 92400 if _WIDE_BY_CUDNN else 92000
_PREFERRED_CUDNN = 91500  # newer versions are preferred
_NARROW_CUDNN = 92200  # newer versions take wide heads
_MOST_LAUNCHED = 65535
_NEWEST = (12, 1)  # newest capability of the fused kernels


class AttentionArgs(NamedTuple):
    """The arguments of one call; sequences of shape [batch, heads, length, width]."""

    query: _Tensor
    key: _Tensor
    value: _Tensor
    mask: _Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool  # fewer heads of keys and values than of queries

    @property
    def tensors(self) -> tuple[_Tensor, _Tensor, _Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def needs_grad(self) -> bool:
        """Whether the call needs a backward."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)


def choose_backend(asked: AttentionArgs, capability: Capability) -> SDPBackend:
    """The kernel that a GPU of this capability runs.

    Raises:
        RuntimeError: ``sdpa_kernel`` allows none of the kernels that fit.
    """
    fits: dict[SDPBackend, Callable[[AttentionArgs, Capability], bool]] = {
        _CUDNN: _cudnn_fits,
        _FLASH: _flash_fits,
        _EFFICIENT: _efficient_fits,
        _MATH: lambda asked, capability: switches.math_sdp_enabled(),
    }
    for backend in _order(capability):
        if backend in fits and fits[backend](asked, capability):
            return backend
    raise RuntimeError(
        "no kernel of scaled_dot_product_attention fits among those that "
        "torch.nn.attention.sdpa_kernel allows"
    )


def _order(capability: Capability) -> list[SDPBackend]:
    """Kernels in order of preference; data-center Hopper and Blackwell prefer cuDNN."""
    order = [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]
    untouched = order[:3] == [_FLASH, _EFFICIENT, _MATH]
    unwanted = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "0") not in ("0", "")
    recent = _cudnn_version() > _PREFERRED_CUDNN
    if untouched and recent and not unwanted and capability[0] in (9, 10):
        return [_CUDNN, *(one for one in order if one != _CUDNN)]
    return order


def _cudnn_version() -> int:
    """Version of torch's cuDNN; in a CPU build, that of its CUDA build."""
    return torch.backends.cudnn.version() or _BUNDLED_CUDNN


def _flash_fits(asked: AttentionArgs, capability: Capability) -> bool:
    width = asked.query.shape[-1]
    lengths = {asked.query.shape[-2], asked.key.shape[-2]}
    return (
        switches.flash_sdp_enabled()
        and (8, 0) <= capability <= _NEWEST
        and _is_dense(asked, HALVES)
        and asked.mask is None
        and {t.shape[-1] for t in asked.tensors} == {width}
        and width <= 256
        and not (_COUNTS_FOR_FLASH and _is_many(asked.query))
        and _flash_backward_fits(asked, capability)
        and not (asked.causal and len(lengths) > 1)
        and _heads_match(asked)
        and _rows_are_whole(asked, or_single=True)
    )


def _flash_backward_fits(asked: AttentionArgs, capability: Capability) -> bool:
    """Whether backward fits; consumer GPUs lack shared memory for wide heads."""
    small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    width = asked.query.shape[-1]
    wide = width > 192 and not (asked.dropout == 0 and width > 224)
    return not (asked.needs_grad and small and wide)


def _efficient_fits(asked: AttentionArgs, capability: Capability) -> bool:
    alignment = _efficient_alignment(asked.query.dtype, capability)
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.float32)
    if capability >= (8, 0):
        dtypes = (*dtypes, torch.bfloat16)
    width, wide = asked.query.shape[-1], asked.value.shape[-1]
    apart = not (_ALIGNED and capability >= (8, 0)) or all(
        not tensor.storage_offset() % alignment for tensor in asked.tensors
    )
    return (
        switches.mem_efficient_sdp_enabled()
        and (5, 0) <= capability <= _NEWEST
        and _is_dense(asked, dtypes)
        and width == asked.key.shape[-1]
        and min(width, wide) > 0
        and not width % alignment
        and not wide % alignment
        and apart
        and (_heads_match if _SHARES_HEADS else _heads_are_as_many)(asked)
        and _rows_are_whole(asked, or_single=False)
    )


def _efficient_alignment(dtype: torch.dtype, capability: Capability) -> int:
    """Required alignment of widths and of tensors' addresses, in elements."""
    half = dtype in HALVES
    if capability >= (8, 0) or (capability >= (7, 0) and half):
        return 8 if half else 4  # tensor cores
    return 1


def _cudnn_fits(asked: AttentionArgs, capability: Capability) -> bool:
    deterministic = (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    return (
        switches.cudnn_sdp_enabled()
        and (8, 0) <= capability <= _NEWEST
        and _is_dense(asked, HALVES)
        and not deterministic
        and (_ANY_DROPOUT or (asked.dropout * 16).is_integer())
        and not (_COUNTS_FOR_CUDNN and _is_many(asked.query))
        and _cudnn_takes_widths(asked, capability)
        and _cudnn_takes_lengths(asked, capability)
        and _cudnn_takes_mask(asked)
        and _heads_match(asked, apart=True)
        and _rows_are_whole(asked, or_single=True)
    )


def _cudnn_takes_widths(asked: AttentionArgs, capability: Capability) -> bool:
    """Whether cuDNN takes the widths: up to 128, and more on data-center cards."""
    both = query, value = asked.query.shape[-1], asked.value.shape[-1]
    widest = max(both)
    if query % 8 or value % 8:
        return False
    if widest <= 128 or capability not in ((9, 0), (10, 0), (10, 3)):
        return widest <= 128
    if not _WIDE_BY_CUDNN:
        return both == (192, 128) or (capability == (9, 0) and widest <= 256)
    if _cudnn_version() <= _NARROW_CUDNN:
        return both == (192, 128)
    in_backward = both in ((192, 128), (256, 256))
    return widest <= 256 and (in_backward or not asked.needs_grad)


def _cudnn_takes_lengths(asked: AttentionArgs, capability: Capability) -> bool:
    """Whether cuDNN takes the lengths; excludes known bugs of its versions."""
    queries, keys = asked.query.shape[-2], asked.key.shape[-2]
    version = _cudnn_version()
    if keys == 1 or (queries == 1 and asked.dropout > 0):
        return False
    if _VERSION >= (2, 14) and capability[0] == 10 and 91900 <= version <= 92500:
        return queries != 1
    if _VERSION >= (2, 15) and capability[0] == 9 and version < 92600:
        return keys % 128 != 64 or asked.causal or not asked.needs_grad
    return True


def _cudnn_takes_mask(asked: AttentionArgs) -> bool:
    """Whether cuDNN takes the mask: no gradient, 2 or 4 broadcastable dimensions."""
    mask, (batch, heads, length, _) = asked.mask, asked.query.shape
    if mask is None:
        return True
    wanted = (batch, heads, length, asked.key.shape[-2])[-mask.dim() :]
    fits = all(n in (1, size) for n, size in zip(mask.shape, wanted, strict=True))
    return mask.dim() in (2, 4) and fits and not mask.requires_grad


def _is_many(query: _Tensor) -> bool:
    return max(query.shape[:2]) > _MOST_LAUNCHED


def _is_dense(asked: AttentionArgs, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether tensors have 4 dimensions, one of these dtypes and nonzero lengths."""
    same = {t.dtype for t in asked.tensors} == {asked.query.dtype}
    whole = all(t.dim() == 4 and t.shape[-2] for t in asked.tensors)
    return same and whole and asked.query.dtype in dtypes


def _heads_match(asked: AttentionArgs, *, apart: bool = False) -> bool:
    """Whether numbers of heads are equal, or keys and values validly share heads.

    ``apart`` allows different numbers of heads for keys and values.
    """
    if _heads_are_as_many(asked):
        return True
    batches = {t.shape[0] for t in asked.tensors}
    query, key, value = (t.shape[-3] for t in asked.tensors)
    shared = asked.grouped or (_SHARES_HEADS and key == value == 1)
    alike = key == value or (apart and query % value == 0)
    return len(batches) == 1 and shared and alike and query % key == 0


def _heads_are_as_many(asked: AttentionArgs) -> bool:
    batches = {t.shape[0] for t in asked.tensors}
    return len(batches) == 1 and len({t.shape[-3] for t in asked.tensors}) == 1


def _rows_are_whole(asked: AttentionArgs, *, or_single: bool) -> bool:
    """Whether last dimensions have stride 1, also in the mask."""
    rows = all(t.stride(-1) == 1 for t in asked.tensors)
    rows = rows or (or_single and asked.query.shape[-1] == 1)
    return rows and (asked.mask is None or asked.mask.stride(-1) == 1)
