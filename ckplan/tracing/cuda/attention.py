"""Run ``scaled_dot_product_attention`` with the kernel that CUDA would choose.

Preparation of arguments follows each release of torch from 2.11 to 2.15.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad

from ckplan.tracing.cuda.sdpa_backend import AttentionArgs, choose_backend
from ckplan.tracing.cuda.translation import Capability, TranslationNotes

_Tensor: TypeAlias = torch.Tensor
_aten = torch.ops.aten
_NAMES = {
    SDPBackend.FLASH_ATTENTION: "flash kernel",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient kernel",
    SDPBackend.CUDNN_ATTENTION: (
        "cuDNN's kernel, first on this card if cuDNN is newer than 9.15"
    ),
    SDPBackend.MATH: "math kernel, which keeps all scores",
}
_MASK_ALIGNMENT = 8  # elements
_SKIPS_EMPTY = torch.__version__ >= (2, 12)  # no kernel for empty inputs
_FOUR_DIMENSIONS = torch.__version__ >= (2, 14)  # kernels get 3 dimensions as 4
_LEARNS_MASKS = torch.__version__ >= (2, 14)  # also if no other tensor has a gradient


class Attention:
    """The kernel of attention at autograd's key."""

    def __init__(self, capability: Capability, words: TranslationNotes) -> None:
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
        asked = AttentionArgs(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
        if _FOUR_DIMENSIONS and {tensor.dim() for tensor in asked.tensors} == {3}:
            return self._take(_in_four_dimensions(asked)).squeeze(0)
        return self._take(asked)

    def _take(self, asked: AttentionArgs) -> _Tensor:
        if _SKIPS_EMPTY and not all(tensor.numel() for tensor in asked.tensors):
            return _nothing(asked)
        backend = choose_backend(asked, self._capability)
        self._words.add_note(f"attention: {_NAMES[backend]}")
        return _TAKEN[backend](asked)


def _in_four_dimensions(asked: AttentionArgs) -> AttentionArgs:
    """The arguments as a batch of one."""
    query, key, value = (tensor.unsqueeze(0) for tensor in asked.tensors)
    mask = asked.mask
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    return asked._replace(query=query, key=key, value=value, mask=mask)


def _nothing(asked: AttentionArgs) -> _Tensor:
    """Zeros that autograd connects to the inputs."""
    query, _, value = asked.tensors
    shape = [*query.shape[:-1], value.shape[-1]]
    zeros = torch.zeros(shape, dtype=query.dtype, device=query.device)
    first, second, third = (tensor.sum() for tensor in asked.tensors)
    return zeros + (first + second + third) * 0


# -- taking one ----------------------------------------------------------------------


def _flash(asked: AttentionArgs) -> _Tensor:
    width = asked.query.shape[-1]
    scale = 1 / math.sqrt(width) if asked.scale is None else asked.scale
    padded = [pad(t, [0, -width % 8]) if width % 8 else t for t in asked.tensors]
    out = _aten._scaled_dot_product_flash_attention(
        *padded, asked.dropout, asked.causal, False, scale=scale
    )[0]
    return out[..., :width] if width % 8 else out


def _efficient(asked: AttentionArgs) -> _Tensor:
    mask = _additive(asked)
    if mask is not None:
        mask = _aligned(mask).expand(*asked.query.shape[:-1], asked.key.shape[-2])
    rest = mask, _keeps_sums(asked), asked.dropout, asked.causal
    return _aten._scaled_dot_product_efficient_attention(
        *asked.tensors, *rest, scale=asked.scale
    )[0]


def _keeps_sums(asked: AttentionArgs) -> bool:
    """Whether the memory-efficient kernel returns tensors that backward needs."""
    learned = _LEARNS_MASKS and asked.mask is not None and asked.mask.requires_grad
    return asked.needs_grad or (learned and torch.is_grad_enabled())


def _cudnn(asked: AttentionArgs) -> _Tensor:
    rest = _additive(asked), asked.needs_grad, asked.dropout, asked.causal, False
    return _aten._scaled_dot_product_cudnn_attention(
        *asked.tensors, *rest, scale=asked.scale
    )[0]


def _math(asked: AttentionArgs) -> _Tensor:
    return _aten._scaled_dot_product_attention_math(
        *asked.tensors,
        _additive(asked),
        asked.dropout,
        asked.causal,
        None,
        scale=asked.scale,
        enable_gqa=asked.grouped,
    )[0]


_TAKEN: dict[SDPBackend, Callable[[AttentionArgs], _Tensor]] = {
    SDPBackend.FLASH_ATTENTION: _flash,
    SDPBackend.EFFICIENT_ATTENTION: _efficient,
    SDPBackend.CUDNN_ATTENTION: _cudnn,
    SDPBackend.MATH: _math,
}


def _additive(asked: AttentionArgs) -> _Tensor | None:
    """A boolean mask as an additive mask."""
    mask = asked.mask
    if mask is None or mask.dtype != torch.bool:
        return mask
    least = torch.scalar_tensor(-math.inf, dtype=asked.query.dtype, device=mask.device)
    return torch.where(mask, 0.0, least)


def _aligned(mask: _Tensor) -> _Tensor:
    """A mask with rows aligned for the memory-efficient kernel."""
    if mask.stride(-1) == 1 and not any(
        s % _MASK_ALIGNMENT for s in mask.stride()[:-1]
    ):
        return mask
    length = mask.shape[-1]
    return pad(mask, [0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT])[..., :length]
