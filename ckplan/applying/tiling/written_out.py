"""Attentions of torch's own functions, as the products of heads that they are.

``scaled_dot_product_attention`` without a fused kernel, as on a CPU with dropout, runs
the same ops as an attention that is written out; so does a sum over indices.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MATH = 0  # the choice that is no fused kernel


class Contraction(NamedTuple):
    """A sum over indices as a product of heads: how dimensions are permuted."""

    first: tuple[int, ...]  # to [..., Q, D]
    second: tuple[int, ...]  # to [..., D, K]
    made: tuple[int, ...]  # from [..., Q, K]


def contraction_of(equation: Any) -> Contraction | None:
    """What an equation of ``torch.einsum`` computes, if it is a product of heads.

    >>> contraction_of("bhqd,bhkd->bhqk")
    Contraction(first=(0, 1, 2, 3), second=(0, 1, 3, 2), made=(0, 1, 2, 3))
    """
    if not isinstance(equation, str):
        return None
    given, _, made = equation.replace(" ", "").partition("->")
    first, _, second = given.partition(",")
    letters = [*first, *second, *made]
    if not all(map(str.isalpha, letters)) or len(first) != len(second):
        return None
    if any(len(set(one)) != len(one) for one in (first, second, made)):
        return None
    heads = [one for one in made if one in first and one in second]
    summed = [one for one in first if one in second and one not in made]
    rows = [one for one in first if one not in second and one in made]
    columns = [one for one in second if one not in first and one in made]
    sizes = len(summed), len(rows), len(columns)
    if sizes != (1, 1, 1) or not len(made) == len(first) == len(heads) + 2:
        return None
    whole = [*heads, *rows, *columns]
    return Contraction(
        tuple(map(first.index, [*heads, *rows, *summed])),
        tuple(map(second.index, [*heads, *summed, *columns])),
        tuple(map(whole.index, made)),
    )


class Scaled(NamedTuple):
    """What a fused attention computes, without a fused kernel."""

    queries: Tensor  # [..., Q, D], scaled
    keys: Tensor  # [..., D, K], scaled
    values: Tensor  # [..., K, D]
    mask: Tensor | None  # is added to scores
    dropout: float
    dtype: torch.dtype  # of its result
    held: tuple[Tensor, Tensor]  # until its end, by torch as well


def scaled_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Scaled | None:
    """Begin ``scaled_dot_product_attention``, if no fused kernel runs it.

    Its ops are those of ``_scaled_dot_product_attention_math`` of torch's sources.

    Args:
        query: [..., Q, D], as are the other arguments of torch's function.
        key: [..., K, D].
        value: [..., K, D].
        attn_mask: Added to scores; of bools, those that count.
        dropout_p: Chance of a score to be dropped.
        is_causal: Whether later keys do not count.
        scale: Of scores.
        enable_gqa: Whether heads share keys.

    Returns:
        None if a fused kernel runs it, or it is not followed.
    """
    if (scale is not None and scale < 0) or query.is_nested:
        return None
    if is_causal and attn_mask is not None:  # which torch refuses
        return None
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    if torch._fused_sdp_choice(*given, scale=scale, enable_gqa=enable_gqa) != _MATH:
        return None
    dtype = query.dtype
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = _added(attn_mask, dtype)
    if dtype in (torch.float16, torch.bfloat16):
        if torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
            return None
        query, key, value = query.float(), key.float(), value.float()
    if is_causal:
        sizes = query.shape[-2], key.shape[-2]
        kept = torch.ones(sizes, dtype=torch.bool, device=query.device).tril()
        attn_mask = _added(kept, query.dtype)
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    factor = math.sqrt(scale)
    if enable_gqa:
        key, value = (
            one.repeat_interleave(query.shape[-3] // one.shape[-3], -3)
            for one in (key, value)
        )
    scaled = query * factor, key.transpose(-2, -1) * factor
    return Scaled(*scaled, value, attn_mask, dropout_p, dtype, (query, key))


def _added(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores, of which some are kept."""
    zero, gone = (kept.new_tensor(x, dtype=dtype) for x in (0.0, float("-inf")))
    return torch.where(kept, zero, gone)
