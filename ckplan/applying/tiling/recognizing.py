"""Which loss stands behind the ops between a head and its cross entropy."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ckplan.applying.tiling.lazy import (
    CAST,
    COPY,
    DIVIDE,
    MULTIPLY,
    SLICE,
    TANH,
    VIEW,
    LazyLogits,
    Step,
)

_SIGNATURE = inspect.signature(F.cross_entropy)
_ALL = slice(None)


@dataclass(frozen=True)
class _Chain:
    """What the ops so far have done to logits of shape [..., S, V]."""

    shape: torch.Size  # of the logits
    now: torch.Size
    dtype: torch.dtype
    soft_cap: float | None = None
    divided_by: float | None = None  # the soft cap begins
    has_tanh: bool = False  # it goes on
    is_cast: bool = False
    is_shifted: bool = False

    @property
    def is_in_cap(self) -> bool:
        """Whether a soft cap has begun and not ended."""
        return self.divided_by is not None and self.soft_cap is None

    def after(self, step: Step) -> _Chain | None:
        """The chain with one more op; None if it is not understood."""
        changed: _Chain | None = None
        if step.function in CAST:
            changed = self._cast(step)
        elif step.function in COPY:
            changed = self
        elif step.function in VIEW:
            changed = self._viewed(step)
        elif step.function in SLICE:
            changed = self._sliced(step)
        else:
            changed = self._capped(step)
        return None if changed is None else replace(changed, now=step.shape)

    def _cast(self, step: Step) -> _Chain | None:
        if step.dtype == self.dtype:
            return self
        wide = step.dtype == torch.float32 and self.dtype != torch.float64
        if not wide or self.is_in_cap:
            return None
        return replace(self, is_cast=True, dtype=step.dtype)

    def _viewed(self, step: Step) -> _Chain | None:
        """A view that leaves the words where they are."""
        return self if step.shape[-1:] == self.shape[-1:] else None

    def _sliced(self, step: Step) -> _Chain | None:
        """``[..., :-1, :]`` of logits that are still [..., S, V]."""
        (index,) = step.args
        index = index if isinstance(index, tuple) else (index,)
        if not all(one is ... or isinstance(one, slice) for one in index):
            return None  # such as an array, which compares element by element
        ahead = (_ALL,) * (len(self.now) - 2)
        wanted = slice(None, -1, None)
        if index[:1] == (...,):
            index = (*ahead, *index[1:])
        if len(index) == len(self.now) - 1:
            index = (*index, _ALL)
        if index == (_ALL,) * len(self.now):
            return self
        fits = self.now == self.shape and len(self.now) > 2
        if not fits or index != (*ahead, wanted, _ALL):
            return None
        return replace(self, is_shifted=True)

    def _capped(self, step: Step) -> _Chain | None:
        """``soft_cap * tanh(logits / soft_cap)``, before the cast."""
        number = _number(step)
        if self.is_cast or self.soft_cap is not None or step.dtype != self.dtype:
            return None
        if step.function in DIVIDE and number and self.divided_by is None:
            return replace(self, divided_by=number)
        if step.function in TANH and self.is_in_cap and not self.has_tanh:
            return replace(self, has_tanh=True)
        is_end = step.function in MULTIPLY and self.has_tanh
        if is_end and number == self.divided_by:
            return replace(self, soft_cap=number)
        return None


def _number(step: Step) -> float | None:
    """The number above zero that a step divides or multiplies by, alone."""
    if len(step.args) != 1 or step.kwargs:
        return None
    (number,) = step.args
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        return None
    return float(number) if number > 0 else None


def recognize(
    lazy: LazyLogits,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    may_be_close: bool = False,
) -> dict[str, Any] | None:
    """Arguments of ``tiled_cross_entropy`` for a call of ``F.cross_entropy``.

    Args:
        lazy: The input of the call, of a head whose logits are not whole.
        args: Arguments of the call.
        kwargs: Keyword arguments of the call.
        may_be_close: Whether results may be rounded in another place.

    Returns:
        ``target`` and options; None if tiles would not do the same.
    """
    call = _SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    logits, target, weight = lazy.logits, given["target"], given["weight"]
    chain: _Chain | None = _Chain(logits.shape, logits.shape, logits.dtype)
    for step in lazy.steps:
        chain = chain.after(step) if chain is not None else None
    if chain is None or chain.is_in_cap or len(chain.now) != 2:
        return None
    device = logits.hidden.device.type
    wide = chain.dtype in (torch.float32, torch.float64)
    upcast = wide or torch.is_autocast_enabled(device)
    if not upcast and not may_be_close:
        return None  # tiles give other bits
    plain = given["size_average"] is None and given["reduce"] is None
    fits = _is_plain(target) and target.dtype == torch.int64 and target.dim() == 1
    weighs = weight is None or (
        _is_plain(weight) and not weight.requires_grad and weight.dtype == torch.float32
    )
    if not (plain and fits and weighs and len(target) == chain.now[0]):
        return None
    if target.device != logits.hidden.device:
        return None
    return {
        "target": _of_rows(target, chain),
        "class_weight": weight,
        "ignore_index": given["ignore_index"],
        "reduction": given["reduction"],
        "label_smoothing": given["label_smoothing"],
        "soft_cap": chain.soft_cap,
        "upcast": upcast,
        "shift": chain.is_shifted,
    }


def _is_plain(one: object) -> bool:
    return isinstance(one, torch.Tensor) and type(one) in (Tensor, torch.nn.Parameter)


def _of_rows(target: Tensor, chain: _Chain) -> Tensor:
    """Targets in the shape of the rows of the logits."""
    *ahead, size = chain.shape[:-1]
    if not chain.is_shifted:
        return target.view(*ahead, size)
    return F.pad(target.view(*ahead, size - 1), (1, 0))
