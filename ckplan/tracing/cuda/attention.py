"""Which kernel CUDA would take for ``scaled_dot_product_attention``, and taking it.

The conditions are those of torch 2.13 (``sdp_utils.cpp``) for dense tensors. What
``torch.nn.attention.sdpa_kernel`` allows and prefers holds here as it does there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.backends import cuda as switches
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad

from ckplan.tracing.cuda.words import HALVES, Capability, Words

_Tensor: TypeAlias = torch.Tensor
_aten = torch.ops.aten
_FLASH, _EFFICIENT, _CUDNN, _MATH = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)
_NAMES = {
    _FLASH: "flash kernel",
    _EFFICIENT: "memory-efficient kernel",
    _CUDNN: "cuDNN's kernel, first on this card if cuDNN is newer than 9.15",
    _MATH: "math kernel, which keeps all scores",
}
_MASK_ALIGNMENT = 8  # elements
_ANY_DROPOUT = torch.__version__ < (2, 12)  # in cuDNN's kernel; later sixteenths
_WIDE_ON_HOPPER = torch.__version__ < (2, 14)
_NEWEST = (12, 1)  # capability that the fused kernels are built for


class Asked(NamedTuple):
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
        """Whether backward will come."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)


def choose(asked: Asked, capability: Capability) -> SDPBackend:
    """The kernel that a GPU of this capability takes.

    Raises:
        RuntimeError: ``sdpa_kernel`` allows none of those that can.
    """
    fits: dict[SDPBackend, Callable[[Asked, Capability], bool]] = {
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


class Attention:
    """The kernel for autograd's key."""

    def __init__(self, capability: Capability, words: Words) -> None:
        self._capability = capability
        self._words = words
        self.table: dict[str, Any] = {"scaled_dot_product_attention": self._attend}

    def _attend(
        self,
        query: _Tensor,
        key: _Tensor,
        value: _Tensor,
        attn_mask: _Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> _Tensor:
        asked = Asked(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
        backend = choose(asked, self._capability)
        self._words.say(f"attention: {_NAMES[backend]}")
        return _TAKEN[backend](asked)


# -- taking one ----------------------------------------------------------------------


def _flash(asked: Asked) -> _Tensor:
    width = asked.query.shape[-1]
    scale = 1 / math.sqrt(width) if asked.scale is None else asked.scale
    padded = [pad(t, [0, -width % 8]) if width % 8 else t for t in asked.tensors]
    out = _aten._scaled_dot_product_flash_attention(
        *padded, asked.dropout, asked.causal, False, scale=scale
    )[0]
    return out[..., :width] if width % 8 else out


def _efficient(asked: Asked) -> _Tensor:
    mask = _additive(asked)
    if mask is not None:
        mask = _aligned(mask).expand(*asked.query.shape[:-1], asked.key.shape[-2])
    rest = mask, asked.needs_grad, asked.dropout, asked.causal
    return _aten._scaled_dot_product_efficient_attention(
        *asked.tensors, *rest, scale=asked.scale
    )[0]


def _cudnn(asked: Asked) -> _Tensor:
    rest = _additive(asked), asked.needs_grad, asked.dropout, asked.causal, False
    return _aten._scaled_dot_product_cudnn_attention(
        *asked.tensors, *rest, scale=asked.scale
    )[0]


def _math(asked: Asked) -> _Tensor:
    return _aten._scaled_dot_product_attention_math(
        *asked.tensors,
        _additive(asked),
        asked.dropout,
        asked.causal,
        None,
        scale=asked.scale,
        enable_gqa=asked.grouped,
    )[0]


_TAKEN: dict[SDPBackend, Callable[[Asked], _Tensor]] = {
    _FLASH: _flash,
    _EFFICIENT: _efficient,
    _CUDNN: _cudnn,
    _MATH: _math,
}


def _additive(asked: Asked) -> _Tensor | None:
    """A boolean mask as what is added to the scores."""
    mask = asked.mask
    if mask is None or mask.dtype != torch.bool:
        return mask
    least = torch.scalar_tensor(-math.inf, dtype=asked.query.dtype, device=mask.device)
    return torch.where(mask, 0.0, least)


def _aligned(mask: _Tensor) -> _Tensor:
    """A mask whose rows begin where the memory-efficient kernel wants them."""
    if mask.stride(-1) == 1 and not any(
        s % _MASK_ALIGNMENT for s in mask.stride()[:-1]
    ):
        return mask
    length = mask.shape[-1]
    return pad(mask, [0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT])[..., :length]


# -- choosing one --------------------------------------------------------------------


def _order(capability: Capability) -> list[SDPBackend]:
    """What is preferred; Hopper and Blackwell of data centers put cuDNN first."""
    order = [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]
    untouched = order[:3] == [_FLASH, _EFFICIENT, _MATH]
    unwanted = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "0") not in ("0", "")
    if untouched and not unwanted and capability[0] in (9, 10):
        return [_CUDNN, *(one for one in order if one != _CUDNN)]
    return order


def _flash_fits(asked: Asked, capability: Capability) -> bool:
    width = asked.query.shape[-1]
    lengths = {asked.query.shape[-2], asked.key.shape[-2]}
    return (
        switches.flash_sdp_enabled()
        and (8, 0) <= capability <= _NEWEST
        and _is_dense(asked, HALVES)
        and asked.mask is None
        and {t.shape[-1] for t in asked.tensors} == {width}
        and width <= 256
        and _flash_backward_fits(asked, capability)
        and not (asked.causal and len(lengths) > 1)
        and _heads_match(asked, grouped=True)
        and _rows_are_whole(asked, or_single=True)
    )


def _flash_backward_fits(asked: Asked, capability: Capability) -> bool:
    """Wide heads need more shared memory than consumers' GPUs have."""
    small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    width = asked.query.shape[-1]
    wide = width > 192 and not (asked.dropout == 0 and width > 224)
    return not (asked.needs_grad and small and wide)


def _efficient_fits(asked: Asked, capability: Capability) -> bool:
    half = asked.query.dtype in HALVES
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    alignment = 4 if capability >= (8, 0) else 1
    if tensor_cores:
        alignment = max(alignment, 8 if half else 4)
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.float32)
    if capability >= (8, 0):
        dtypes = (*dtypes, torch.bfloat16)
    width, wide = asked.query.shape[-1], asked.value.shape[-1]
    return (
        switches.mem_efficient_sdp_enabled()
        and (5, 0) <= capability <= _NEWEST
        and _is_dense(asked, dtypes)
        and width == asked.key.shape[-1]
        and not width % alignment
        and not wide % alignment
        and _heads_match(asked, grouped=False)
        and _rows_are_whole(asked, or_single=False)
    )


def _cudnn_fits(asked: Asked, capability: Capability) -> bool:
    widths = [t.shape[-1] for t in asked.tensors]
    widest = 256 if capability == (9, 0) and _WIDE_ON_HOPPER else 128
    learned = asked.mask is not None and asked.mask.requires_grad
    single = asked.key.shape[-2] == 1 or (
        asked.dropout > 0 and asked.query.shape[-2] == 1
    )
    return (
        switches.cudnn_sdp_enabled()
        and (8, 0) <= capability <= _NEWEST
        and _is_dense(asked, HALVES)
        and not torch.are_deterministic_algorithms_enabled()
        and (_ANY_DROPOUT or (asked.dropout * 16).is_integer())
        and not any(width % 8 or width > widest for width in widths)
        and not learned
        and not single
        and _heads_match(asked, grouped=True)
        and _rows_are_whole(asked, or_single=True)
    )


def _is_dense(asked: Asked, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Four dimensions, one of these types, something to attend to."""
    same = {t.dtype for t in asked.tensors} == {asked.query.dtype}
    whole = all(t.dim() == 4 and t.shape[-2] for t in asked.tensors)
    return same and whole and asked.query.dtype in dtypes


def _heads_match(asked: Asked, *, grouped: bool) -> bool:
    batches = {t.shape[0] for t in asked.tensors}
    query, key, value = (t.shape[-3] for t in asked.tensors)
    if asked.grouped and grouped:
        return len(batches) == 1 and key == value and query % key == 0
    return len(batches) == 1 and query == key == value


def _rows_are_whole(asked: Asked, *, or_single: bool) -> bool:
    """The last dimension has stride 1, in the mask too."""
    rows = all(t.stride(-1) == 1 for t in asked.tensors)
    rows = rows or (or_single and asked.query.shape[-1] == 1)
    return rows and (asked.mask is None or asked.mask.stride(-1) == 1)
