"""The two passes over the tiles of a head: by tokens, and by the vocabulary.

Shapes: T tokens, t of one tile; V words, v of one tile; D features. Both passes call
the kernels that autograd calls (``_log_softmax``, its backward, the matrix products) on
fewer rows or columns, so that every output is the same sum in the same order. The
buffers of a pass are allocated once, for its largest tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ckplan.plan.tiles import Tiles

_aten = torch.ops.aten
_log_softmax = _aten._log_softmax.out
_log_softmax_backward = _aten._log_softmax_backward_data.out


class RowValues(NamedTuple):
    """What a head gives by row: tensors of shape [T]."""

    picked: Tensor  # log-probability of the target
    sums: Tensor | None  # (weighted) sum of all log-probabilities
    highest: Tensor  # logit, in float32 or float64
    log_sum: Tensor  # logarithm of the sum of exp(logit - highest), same dtype


class RowGradients(NamedTuple):
    """Gradients of the first two values of a row: tensors of shape [T]."""

    picked: Tensor
    sums: Tensor | None


class WeightGradients(NamedTuple):
    """Gradients of the parameters of a head, and None where none is wanted."""

    weight: Tensor | None  # [V, D]
    bias: Tensor | None  # [V]


@dataclass(frozen=True)
class Head:
    """A head on its input: ``cap(hidden @ weight.T + bias)``, cast to ``dtype``."""

    hidden: Tensor  # [T, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    target: Tensor  # [T], in [0, V)
    dtype: torch.dtype  # in which log-probabilities are computed
    tiles: Tiles
    adds_bias: bool = False  # after the product, in an op of its own
    soft_cap: float | None = None
    has_sums: bool = False  # whether rows have sums
    sum_weight: Tensor | None = None  # [V], of the words in these sums

    @property
    def wide(self) -> torch.dtype:
        """The dtype in which kernels compute sums of exponentials."""
        return torch.promote_types(self.dtype, torch.float32)

    def logits(self, rows: slice, words: slice, out: Tensor) -> Tensor:
        """Logits of a tile, before the soft cap and the cast."""
        factors = self.hidden[rows], self.weight[words].t()
        if self.bias is None:
            return torch.mm(*factors, out=out)
        if self.adds_bias:
            return torch.mm(*factors, out=out).add_(self.bias[words])
        return torch.addmm(self.bias[words], *factors, out=out)

    def cap(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Apply the soft cap; also returns its hyperbolic tangents, for ``uncap``."""
        if self.soft_cap is None:
            return logits, None
        tangents = torch.tanh(logits / self.soft_cap)
        return tangents * self.soft_cap, tangents

    def uncap(self, gradient: Tensor, tangents: Tensor | None) -> Tensor:
        """Turn the gradient of capped logits into that of the logits."""
        if self.soft_cap is None or tangents is None:
            return gradient
        inside = _aten.tanh_backward(gradient * self.soft_cap, tangents)
        return inside / self.soft_cap

    def seed(self, given: RowGradients, rows: slice, words: slice) -> Tensor | None:
        """Gradients that all log-probabilities of a tile get from the sums."""
        if given.sums is None:
            return None
        of_row = given.sums[rows, None]
        return of_row if self.sum_weight is None else of_row * self.sum_weight[words]


class _Buffer:
    """Memory for the tiles of a pass; smaller tiles use its beginning."""

    def __init__(self, like: Tensor, numel: int, dtype: torch.dtype) -> None:
        self._flat = torch.empty(numel, dtype=dtype, device=like.device)

    def zero(self) -> _Buffer:
        self._flat.zero_()
        return self

    def view(self, rows: int, columns: int) -> Tensor:
        return self._flat[: rows * columns].view(rows, columns)


def by_tokens(
    head: Head, given: RowGradients | None, hidden_gradient: Tensor | None
) -> tuple[RowValues, Tensor | None]:
    """Pass over tiles of tokens: values by row, and the gradient of ``hidden``.

    Args:
        head: The head.
        given: Gradients of the values; None if only values are wanted.
        hidden_gradient: Of shape [T, D], written if gradients are given.

    Returns:
        The values, and the sum by row of the gradients of all log-probabilities, if
        gradients are given and rows have sums.
    """
    size, num_words, like = len(head.hidden), len(head.weight), head.hidden
    cuts = head.tiles.of_tokens(size)
    most = max((rows.stop - rows.start for rows in cuts), default=0) * num_words
    made = _Buffer(like, most, like.dtype)
    cast = made if head.dtype == like.dtype else _Buffer(like, most, head.dtype)
    logs = _Buffer(like, most, head.dtype)
    seeds = _Buffer(like, most if given else 0, head.dtype).zero()
    values = _empty_values(head, size)
    totals = like.new_empty(size, dtype=head.dtype) if given and head.has_sums else None
    for rows in cuts:
        shape, words = (rows.stop - rows.start, num_words), slice(0, num_words)
        place = head.target[rows, None]
        raw = head.logits(rows, words, made.view(*shape))
        logits, tangents = head.cap(raw)
        if head.dtype != like.dtype:
            logits = cast.view(*shape).copy_(logits)
        log = _log_softmax(logits, 1, False, out=logs.view(*shape))
        _keep_values(head, values, rows, logits, log)
        del logits
        if given is None or hidden_gradient is None:
            continue
        seed, of_sums = seeds.view(*shape), head.seed(given, rows, words)
        if of_sums is not None:
            seed.copy_(of_sums.expand_as(seed))
        seed.scatter_add_(1, place, given.picked[rows, None])
        if totals is not None:
            totals[rows] = _row_totals(seed)
        out = cast.view(*shape)
        _log_softmax_backward(seed, log, 1, head.dtype, out=out)
        seed.scatter_(1, place, 0.0)
        if head.dtype != like.dtype:
            out = made.view(*shape).copy_(out)
        torch.mm(head.uncap(out, tangents), head.weight, out=hidden_gradient[rows])
    return values, totals


def by_vocabulary(
    head: Head,
    given: RowGradients,
    values: RowValues,
    totals: Tensor | None,
    wanted: WeightGradients,
) -> None:
    """Pass over tiles of the vocabulary: the gradients of weight and bias.

    All tokens are in each tile, so that no sum over tokens is split.

    Args:
        head: The head.
        given: Gradients of the values by row.
        values: The values by row, of the pass over tokens.
        totals: What ``by_tokens`` returned.
        wanted: Gradients to write.
    """
    size, like = len(head.hidden), head.hidden
    cuts = head.tiles.of_vocabulary(len(head.weight))
    most = max((words.stop - words.start for words in cuts), default=0)
    made = _Buffer(like, size * most, like.dtype)
    logs, seeds, outs = (
        _Buffer(like, size * (most + 1), head.dtype).zero() for _ in range(3)
    )
    for words in cuts:
        num_words = words.stop - words.start
        seed, log, out = (one.view(size, num_words + 1) for one in (seeds, logs, outs))
        flat = made.view(size, num_words)
        _by_words(head, given, values, totals, wanted, words, (seed, log, out, flat))


def _by_words(
    head: Head,
    given: RowGradients,
    values: RowValues,
    totals: Tensor | None,
    wanted: WeightGradients,
    words: slice,
    buffers: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """One tile of the vocabulary; buffers have a column more, but for the last."""
    seed, log, out, flat = buffers
    logits, tangents = head.cap(head.logits(slice(0, len(flat)), words, flat))
    log[:, -1] = 0.0
    _log_probabilities(logits, values, out=log[:, :-1])
    del logits
    place = _places(head.target, words)
    if totals is None:
        # The extra column gets the gradients of the words outside the tile, so that
        # the kernel's sums by row are those of whole rows.
        seed.zero_().scatter_(1, place, given.picked[:, None])
        _log_softmax_backward(seed, log, 1, head.dtype, out=out)
    else:
        _backward_of_sums(head, given, totals, (seed, log, out), place, words)
    gradient = head.uncap(flat.copy_(out[:, :-1]), tangents)
    if wanted.weight is not None:
        torch.mm(gradient.t(), head.hidden, out=wanted.weight[words])
    if wanted.bias is not None:
        wanted.bias[words] = gradient.sum(0)


def _places(target: Tensor, words: slice) -> Tensor:
    """Column of every target in a tile, [T, 1]; one past the last if it is outside."""
    place = target - words.start
    num_words = words.stop - words.start
    place.masked_fill_((place < 0) | (place >= num_words), num_words)
    return place[:, None]


def _backward_of_sums(
    head: Head,
    given: RowGradients,
    totals: Tensor,
    buffers: tuple[Tensor, Tensor, Tensor],
    place: Tensor,
    words: slice,
) -> None:
    """Backward of log-probabilities if all of them have a gradient.

    The kernel gives its own exponentials for gradients that are -1 in the extra column;
    the rest is one fused multiply and add, as in the kernel.
    """
    seed, log, out = buffers
    seed.zero_()
    seed[:, -1] = -1.0
    _log_softmax_backward(seed, log, 1, head.dtype, out=out)
    of_sums = head.seed(given, slice(0, len(seed)), words)
    if of_sums is not None:
        seed[:, :-1] = of_sums
    seed.scatter_add_(1, place, given.picked[:, None])
    torch.addcmul(seed, out, totals[:, None], value=-1, out=out)


def _log_probabilities(logits: Tensor, values: RowValues, out: Tensor) -> None:
    """Log-probabilities of a tile, by the kernel's own two subtractions."""
    highest, log_sum = values.highest[:, None], values.log_sum[:, None]
    if out.dtype == highest.dtype:
        out.copy_(logits).sub_(highest).sub_(log_sum)
    else:
        out.copy_((logits - highest).sub_(log_sum))


def _row_totals(seed: Tensor) -> Tensor:
    """Sums by row, in the order of the kernel of log-softmax's backward.

    That kernel returns ``seed - exp(log) * total``: a column of zeros gives the total.
    """
    padded = torch.cat([seed, seed.new_zeros(len(seed), 1)], 1)
    out = _aten._log_softmax_backward_data(
        padded, torch.zeros_like(padded), 1, seed.dtype
    )
    return -out[:, -1]


def _empty_values(head: Head, size: int) -> RowValues:
    def rows(dtype: torch.dtype) -> Tensor:
        return head.hidden.new_empty(size, dtype=dtype)

    sums = rows(head.dtype) if head.has_sums else None
    return RowValues(rows(head.dtype), sums, rows(head.wide), rows(head.wide))


def _keep_values(
    head: Head, values: RowValues, rows: slice, logits: Tensor, log: Tensor
) -> None:
    """Write the values of one tile."""
    values.picked[rows] = log.gather(1, head.target[rows, None])[:, 0]
    if values.sums is not None:
        weighted = log if head.sum_weight is None else log * head.sum_weight
        values.sums[rows] = weighted.sum(1)
    exact = log
    if log.dtype != head.wide:
        exact = torch.log_softmax(logits, 1, dtype=head.wide)
    values.highest[rows] = logits.amax(1).to(head.wide)
    values.log_sum[rows] = -exact.amax(1)
