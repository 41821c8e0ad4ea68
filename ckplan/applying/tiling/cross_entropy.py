"""Cross entropy of a head, in tiles: ``tiled_cross_entropy``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ckplan.applying.tiling.passes import Head, RowGradients
from ckplan.applying.tiling.rows import Weights, row_values
from ckplan.errors import ApplyError
from ckplan.plan.tiles import Tiles

_Rows = tuple[Tensor, Tensor]
_IGNORED = -100  # where a row is left out of the reductions below
_EXAMPLE = "ckplan.tiled_cross_entropy(hidden, lm_head.weight, labels)"


def tiled_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    soft_cap: float | None = None,
    upcast: bool = True,
    shift: bool = False,
    tiles: tuple[int, int] = (16, 16),
    expected_gradient: float | Tensor = 1.0,
) -> Tensor:
    """``cross_entropy(linear(hidden, weight, bias).float(), target)``, in tiles.

    The logits are never whole. Loss and gradient of ``hidden`` are made by tiles of
    tokens; the gradients of ``weight`` and ``bias`` by tiles of the vocabulary, with
    all tokens in each. No sum is split, so the results have the bits of the plain
    computation wherever kernels sum in the same order for fewer rows or columns.
    ``check_bits`` tests that for a shape. It costs one more product of the head.

    Args:
        hidden: Input of the head, of shape [..., D].
        weight: Weight of the head, of shape [V, D], in the dtype of ``hidden`` (under
            autocast both are cast as a linear layer does).
        target: Classes, int64, in the shape of ``hidden`` without D.
        bias: Of shape [V].
        class_weight: Of shape [V], as ``weight`` of ``F.cross_entropy``.
        ignore_index: Target of rows without a loss.
        reduction: ``mean``, ``sum`` or ``none``.
        label_smoothing: As in ``F.cross_entropy``.
        soft_cap: Logits become ``soft_cap * tanh(logits / soft_cap)``, before the cast.
        upcast: Cast the logits to float32. Without it, log-probabilities of 16-bit
            logits are rounded elsewhere, and the gradient of ``weight`` is only close.
        shift: Row i of a sequence is compared with target i + 1; the last row has no
            loss. ``hidden`` is [..., S, D] then.
        tiles: Numbers of tiles of tokens and of the vocabulary. Fewer are made where
            they would be narrower than 32 tokens or 64 words.
        expected_gradient: The gradient that the loss gets in backward: 1 for
            ``loss.backward()``, 1 / n for ``(loss / n).backward()``. Any other gradient
            costs one more product of the head; results are the same. Not used for
            ``reduction="none"``.

    Returns:
        The loss: a scalar, or for ``none`` of the shape of ``target``; with ``shift``,
        one shorter. It can be differentiated once.

    Raises:
        ApplyError: Shapes, dtypes or options do not fit together.
        PlanError: A number of tiles is below 1.
    """
    _check(hidden, weight, target, bias, class_weight)
    _check_options(reduction, label_smoothing, soft_cap, shift and target.dim() == 0)
    shape = target.shape
    hidden, weight, bias, upcast = _autocast(hidden, weight, bias, upcast)
    labels = _shifted(target, ignore_index) if shift else target
    ignored = (labels == ignore_index).reshape(-1)
    flat = labels.reshape(-1).masked_fill(ignored, 0)
    _check_classes(flat, len(weight))
    weights = Weights(hidden.reshape(-1, hidden.shape[-1]), weight, bias)
    dtype = weight.dtype
    if upcast:
        dtype = torch.promote_types(dtype, torch.float32)
    make_head = partial(
        Head,
        target=flat,
        dtype=dtype,
        tiles=Tiles(*tiles),
        adds_bias=not _fuses_bias(hidden),
        soft_cap=soft_cap,
        has_sums=label_smoothing > 0,
        sum_weight=None if class_weight is None else class_weight.to(dtype),
    )
    reduce = partial(
        _reduce,
        chosen=partial(_without_last, shape=shape) if shift else lambda rows: rows,
        target=flat,
        ignored=ignored,
        class_weight=None if class_weight is None else class_weight.to(dtype),
        num_words=len(weight),
        reduction=reduction,
        smoothing=label_smoothing,
    )
    expected = None
    if reduction != "none" and torch.is_grad_enabled() and hidden.requires_grad:
        expected = _gradients(
            reduce, flat, dtype, label_smoothing > 0, expected_gradient
        )
    loss = reduce(row_values(weights, make_head, expected))
    if reduction != "none":
        return loss
    return loss.view(*shape[:-1], shape[-1] - 1) if shift else loss.view(shape)


def _reduce(
    rows: _Rows,
    *,
    chosen: Callable[[Tensor], Tensor],
    target: Tensor,
    ignored: Tensor,
    class_weight: Tensor | None,
    num_words: int,
    reduction: str,
    smoothing: float,
) -> Tensor:
    """Loss of row values, by the ops and in the order of ``F.cross_entropy``.

    ``nll_loss`` of one column sums rows in the same order as of all words.
    """
    picked, target, ignored = map(chosen, (rows[0], target, ignored))
    column = torch.where(ignored, _IGNORED, 0)
    of_row = None if class_weight is None else class_weight[target]
    nll = _nll(picked, column, of_row, reduction)
    if not smoothing:
        return nll
    smooth = (-chosen(rows[1])).masked_fill(ignored, 0.0)
    if reduction == "sum":
        smooth = smooth.sum()
    elif reduction == "mean" and of_row is None:
        smooth = smooth.sum() / (len(ignored) - ignored.sum())
    elif reduction == "mean" and of_row is not None:
        smooth = smooth.sum() / of_row[~ignored].sum()
    return (1 - smoothing) * nll + smooth * (smoothing / num_words)


def _nll(
    picked: Tensor, column: Tensor, of_row: Tensor | None, reduction: str
) -> Tensor:
    """``F.nll_loss`` of log-probabilities by row, with weights by row."""
    if of_row is None:
        return F.nll_loss(picked[:, None], column, reduction=reduction)
    weighted = (picked * of_row)[:, None]
    if reduction != "mean":
        return F.nll_loss(weighted, column, reduction=reduction)
    total = F.nll_loss(-of_row[:, None], column, reduction="sum")
    return F.nll_loss(weighted, column, reduction="sum") / total


def _gradients(
    reduce: Callable[[_Rows], Tensor],
    target: Tensor,
    dtype: torch.dtype,
    has_sums: bool,
    gradient: float | Tensor,
) -> RowGradients:
    """Gradients of the rows for a gradient of the loss; they need no values."""
    with torch.enable_grad():
        picked, sums = (
            torch.zeros_like(target, dtype=dtype).requires_grad_() for _ in range(2)
        )
        loss = reduce((picked, sums))
        given = torch.as_tensor(gradient, dtype=loss.dtype, device=loss.device)
        wanted = (picked, sums) if has_sums else (picked,)
        found = torch.autograd.grad(loss, wanted, given.detach().reshape(()))
    return RowGradients(found[0], found[1] if has_sums else None)


def _fuses_bias(hidden: Tensor) -> bool:
    """Whether a linear layer adds its bias inside the product, without rounding it."""
    return hidden.dim() == 2 or hidden.is_contiguous()


def _shifted(target: Tensor, ignore_index: int) -> Tensor:
    """The next target of every row; none for the last."""
    return F.pad(target, (0, 1), value=ignore_index)[..., 1:]


def _without_last(rows: Tensor, shape: torch.Size) -> Tensor:
    """Leave out the last row of every sequence."""
    return rows.view(shape)[..., :-1].reshape(-1)


def _autocast(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, upcast: bool
) -> tuple[Tensor, Tensor, Tensor | None, bool]:
    """Operands as autocast gives them to a linear layer, and whether to cast logits."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device) or hidden.dtype == torch.float64:
        return hidden, weight, bias, upcast
    dtype = torch.get_autocast_dtype(device)
    bias = None if bias is None else bias.to(dtype)
    return hidden.to(dtype), weight.to(dtype), bias, True


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
) -> None:
    """Refuse tensors that do not fit together."""
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:]:
        raise _refused(
            f"hidden is {list(hidden.shape)} and weight {list(weight.shape)}",
            "hidden of shape [..., D] and weight of shape [V, D]",
        )
    if target.shape != hidden.shape[:-1] or target.dtype != torch.int64:
        raise _refused(
            f"target is {target.dtype} {list(target.shape)}, for hidden of shape "
            f"{list(hidden.shape)}",
            f"target of torch.int64 {list(hidden.shape[:-1])}",
        )
    for name, one in (("bias", bias), ("class_weight", class_weight)):
        if one is not None and one.shape != weight.shape[:1]:
            raise _refused(
                f"{name} is {list(one.shape)}", f"{name} of shape {len(weight)}"
            )
    cast = torch.is_autocast_enabled(hidden.device.type)
    mixed = {hidden.dtype, weight.dtype} | ({bias.dtype} if bias is not None else set())
    if not hidden.is_floating_point() or (len(mixed) > 1 and not cast):
        raise _refused(
            f"operands are {', '.join(sorted(map(str, mixed)))}",
            "hidden, weight and bias of one floating dtype",
        )


def _check_options(
    reduction: str, smoothing: float, soft_cap: float | None, scalar: bool
) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise _refused(f"reduction is {reduction!r}", "mean, sum or none")
    if not 0.0 <= smoothing <= 1.0:
        raise _refused(f"label_smoothing is {smoothing}", "0 to 1")
    if soft_cap is not None and not soft_cap > 0:
        raise _refused(f"soft_cap is {soft_cap}", "a number above 0, or None")
    if scalar:
        raise _refused("there is no sequence to shift", "hidden of shape [..., S, D]")


def _check_classes(target: Tensor, num_words: int) -> None:
    """Refuse targets beyond the vocabulary; on a GPU its kernels check them."""
    if target.device.type == "cpu" and target.numel():
        low, high = target.aminmax()
        if low < 0 or high >= num_words:
            worst = int(low if low < 0 else high)
            raise _refused(
                f"target {worst} is no class", f"0 to {num_words - 1}, or ignore_index"
            )


def _refused(found: str, needed: str) -> ApplyError:
    what = f"cannot compute the loss in tiles: {found}"
    return ApplyError(what, needed=needed, hint=_EXAMPLE)
