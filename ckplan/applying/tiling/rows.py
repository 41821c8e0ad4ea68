"""The values of a head by row, as a function that autograd differentiates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckplan.applying.tiling.autocast import autocast_of
from ckplan.applying.tiling.once import differentiated_once
from ckplan.applying.tiling.passes import (
    Head,
    RowGradients,
    RowValues,
    WeightGradients,
    by_tokens,
    by_vocabulary,
)


class Weights(NamedTuple):
    """The operands of a head that may need gradients."""

    hidden: Tensor  # [T, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]


def row_values(
    weights: Weights,
    make_head: Callable[[Tensor, Tensor, Tensor | None], Head],
    expected: RowGradients | None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets, and sums of all log-probabilities, by row.

    Args:
        weights: The operands; their gradients are made from tiles.
        make_head: Makes the head from its operands. Other tensors that it holds must
            not change until backward.
        expected: The gradients that backward will give. If they come so, the gradient
            of ``hidden`` is made in forward, while the logits are there; else backward
            makes the logits once more.

    Returns:
        Two tensors of shape [T]; in place of the sums a zero, if the head has none.
    """
    picked, sums = _RowValues.apply(*weights, make_head, expected)
    return picked, sums


class _RowValues(torch.autograd.Function):
    """Forward and backward of ``row_values``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        make_head: Callable[..., Head],
        expected: RowGradients | None,
    ) -> tuple[Tensor, Tensor]:
        ahead = expected if ctx.needs_input_grad[0] else None
        made = None if ahead is None else torch.empty_like(hidden)
        head = make_head(hidden, weight, bias)
        with autocast_of(hidden.device, None):
            values, totals = by_tokens(head, ahead, made)
        ctx.make_head, ctx.is_ahead = make_head, ahead is not None
        kept = (hidden, weight, bias, head.sum_weight, made, totals)
        expected_rows = ahead or (None, None)
        ctx.save_for_backward(*kept, values.highest, values.log_sum, *expected_rows)
        ctx.set_materialize_grads(False)
        sums = values.sums
        return values.picked, hidden.new_zeros(()) if sums is None else sums

    @staticmethod
    @differentiated_once
    def backward(
        ctx: Any, picked: Tensor | None, sums: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, _, made, totals, *rest = ctx.saved_tensors
        highest, log_sum, *expected = rest
        head = ctx.make_head(hidden, weight, bias)
        rows = torch.zeros_like(highest, dtype=head.dtype)
        given = RowGradients(
            rows if picked is None else picked,
            (rows if sums is None else sums) if head.has_sums else None,
        )
        del rows
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        with autocast_of(hidden.device, None):
            if not (ctx.is_ahead and _are_equal(given, RowGradients(*expected))):
                made = None
                if for_hidden or head.has_sums:
                    made = torch.empty_like(hidden)
                    _, totals = by_tokens(head, given, made)
            wanted = WeightGradients(
                torch.empty_like(weight) if for_weight else None,
                torch.empty_like(bias) if bias is not None and for_bias else None,
            )
            if for_weight or for_bias:
                values = RowValues(given.picked, None, highest, log_sum)
                by_vocabulary(head, given, values, totals, wanted)
        return made if for_hidden else None, *wanted, None, None


def _are_equal(given: RowGradients, expected: RowGradients) -> bool:
    """Whether gradients are bit for bit those of the forward."""
    pairs = zip(given, expected, strict=True)
    return all(
        one is None or other is None or torch.equal(one, other) for one, other in pairs
    )
