"""Scores of an attention that is written out, which are never whole.

While a module runs, products of two tensors of heads give ``LazyScores``: without
bytes, but with the ops that follow, each of which treats heads apart. A product of
their softmax with values runs by tiles of heads (``attention.py``). Any other reader
gets the scores, made by the plain ops from the same operands, so results never differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ckplan.applying.tiling.attention import (
    Attention,
    Step,
    run_attention,
)
from ckplan.applying.tiling.autocast import autocast_of, cast_dtype
from ckplan.applying.tiling.dropped import draw_mask, draws_in_order, drop
from ckplan.applying.tiling.lazy_scores import (
    FOLLOWED,
    SOFTMAX,
    LazyScores,
    Source,
    follow_op,
    is_open,
    is_plain,
    make_lazy,
)
from ckplan.applying.tiling.written_out import contraction_of, scaled_of
from ckplan.plan.tiles import RowTiles

_T = torch.Tensor
_SCALED = "query", "key", "value", "attn_mask", "dropout_p", "is_causal"
_MATMUL = frozenset({_T.matmul, _T.__matmul__, torch.matmul, torch.bmm, _T.bmm})


class FollowScores(TorchFunctionMode):
    """Runs attentions of the code within it by tiles of heads."""

    def __init__(self, tiles: RowTiles, tell_later: Callable[[str], None]) -> None:
        """Prepare to follow.

        Args:
            tiles: Their rows are heads.
            tell_later: Told the function that reads scores when the code has ended.
        """
        super().__init__()
        self.tiles, self._tell_later = tiles, tell_later
        self.tiled = 0
        self.readers: list[str] = []  # names of functions that read whole scores
        self._has_ended = False

    def __exit__(self, *error: Any) -> None:
        """Follow no more."""
        self._has_ended = True
        super().__exit__(*error)

    def _tell(self, reader: str) -> None:
        self.readers.append(reader)
        if self._has_ended:
            self._tell_later(reader)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Follow the op, run an attention in tiles, or leave the op as it is."""
        kwargs, found = kwargs or {}, None
        if func in _MATMUL and len(args) == 2 and not kwargs:
            found = self._multiply(*args)
        elif func is torch.einsum and len(args) == 3 and not kwargs:
            found = self._sum_over_indices(*args)
        elif func is F.scaled_dot_product_attention:
            named = zip(_SCALED, args, strict=False)
            found = self._run_scaled({**dict(named), **kwargs})
        elif func is F.dropout and args and is_open(args[0]):
            found = self._drop(*args, **kwargs)
        elif func in FOLLOWED and args:
            found = follow_op(func, args, kwargs)
        return func(*args, **kwargs) if found is None else found

    def _multiply(self, first: Any, second: Any) -> Tensor | None:
        """A product of heads: scores without bytes, or the end of an attention."""
        if is_plain(first) and _are_heads(first, second):
            first, second = (_cast(one) for one in (first, second))
            return make_lazy(Source(first, second, self._tell))
        if is_open(first) and is_plain(second):
            return self._attention(first, second)
        return None

    def _sum_over_indices(
        self, equation: Any, first: Any, second: Any
    ) -> Tensor | None:
        """The same, written as a sum over indices."""
        found = contraction_of(equation)
        if found is None or not is_plain(second) or second.dim() != first.dim():
            return None
        if len(found.second) != second.dim():
            return None
        if is_plain(first):
            first = first.permute(found.first)
        elif found.first != tuple(range(first.dim())):
            return None
        made = self._multiply(first, second.permute(found.second))
        is_same = found.made == tuple(range(len(found.made)))
        if made is None or (is_open(made) and not is_same):
            return None
        return made if is_same else made.permute(found.made)

    def _run_scaled(self, given: dict[str, Any]) -> Tensor | None:
        """Torch's own attention, where no fused kernel runs it."""
        operands = {name: given.get(name) for name in _SCALED[:3]}
        if not all(map(is_plain, operands.values())):
            return None
        cast = {name: _cast(one) for name, one in operands.items() if one is not None}
        with autocast_of(cast["query"].device, None):
            found = scaled_of(**{**given, **cast})
            if found is None or not _are_heads(found.queries, found.keys):
                return None
            made: LazyScores | None
            made = make_lazy(Source(found.queries, found.keys, self._tell))
            is_same = found.values.dtype == made.dtype
            if not is_same or not _fit(made, found.values):  # before numbers are drawn
                return None
            if found.mask is not None:
                made = follow_op(torch.add, (made, found.mask), {})
            if made is not None:
                made = follow_op(torch._safe_softmax, (made, -1), {})
            if made is not None and found.dropout:
                made = self._drop(made, found.dropout)
            if made is None:
                return None
            output = self._attention(made, found.values)
            return None if output is None else output.to(found.dtype)

    def _drop(
        self, lazy: LazyScores, p: float = 0.5, training: bool = True, inplace: Any = 0
    ) -> LazyScores | None:
        """Scores of which some are dropped: their numbers are drawn now."""
        if not training or not p:
            return lazy
        device = lazy.source.first.device
        if p >= 1 or inplace or not torch.is_grad_enabled():
            return None
        if not draws_in_order(device.type):
            return None
        shape = tuple(lazy.shape)
        parts = self.tiles.of_heads(*Attention(shape, ()).heads)
        mask = draw_mask(shape, 1 - p, parts, device)
        step = Step(drop, 0, (mask, 1 - p), {}, lazy.dtype, (mask._version,))
        return make_lazy(lazy.source, lazy, step)

    def _attention(self, lazy: LazyScores, values: Tensor) -> Tensor | None:
        """The product with values, if there is a softmax and heads are the same."""
        source = lazy.source
        has_softmax = any(one.function in SOFTMAX for one in lazy.steps)
        if not has_softmax or not _fit(lazy, values) or not torch.is_grad_enabled():
            return None
        values, dtype = _cast(values), cast_dtype(values.device)
        if dtype not in (None, lazy.dtype):
            step = Step(_T.to, 0, (dtype,), {}, dtype, ())
            lazy = make_lazy(source, lazy, step)
        if values.dtype != lazy.dtype:
            return None
        source.check()
        self.tiled += 1
        program = Attention(tuple(lazy.shape), lazy.steps)
        return run_attention(program, self.tiles, source.first, source.second, values)


def _are_heads(first: Tensor, second: Any) -> bool:
    """Whether a product may be one of queries and keys of heads."""
    return (
        is_plain(second)
        and first.dim() in (3, 4)
        and first.shape[:-2] == second.shape[:-2]
        and first.shape[-1] == second.shape[-2]
        and first.dtype == second.dtype
        and first.is_floating_point()
        and first.numel() > 0 < second.numel()
        and first.device == second.device
        and (first.requires_grad or second.requires_grad)
        and torch.is_grad_enabled()
    )


def _fit(scores: Tensor, values: Tensor) -> bool:
    """Whether values, [..., K, D], are of the heads and keys of scores, [..., Q, K]."""
    return (*scores.shape[:-2], scores.shape[-1]) == values.shape[:-1]


def _cast(one: Tensor) -> Tensor:
    """An operand as autocast gives it to a product."""
    dtype = cast_dtype(one.device)
    if dtype is None or not one.is_floating_point() or one.dtype == torch.float64:
        return one
    return one.to(dtype)
