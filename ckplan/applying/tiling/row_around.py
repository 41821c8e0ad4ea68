"""Note the ops before the products of a call whose rows are apart, or after them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ckplan.applying.tiling.row_program import Cast, Elementwise, NotRowWise, Value

_aten = torch.ops.aten
VIEWS = (_aten.view.default, _aten._unsafe_view.default)
TRANSPOSES = (_aten.t.default, _aten.transpose.int, _aten.permute.default)


class WholeOps:
    """Ops that run as they are, on one tensor and on what they make of it."""

    def __init__(self, start: Tensor, what: str, casts: dict[int, Tensor]) -> None:
        """Begin without ops.

        Args:
            start: The tensor.
            what: It is, in words.
            casts: id of autocast's copy -> its parameter.
        """
        self._casts = casts
        self.steps: list[Elementwise] = []
        self._made = [start]
        self._what = what
        self._value_of = {id(start): 0}

    def __contains__(self, one: Any) -> bool:
        return id(one) in self._value_of

    def add(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Note one op."""

        def noted(one: Any) -> Any:
            if one in self:
                return Value(self._value_of[id(one)])
            if id(one) in self._casts:
                return Cast(self._casts[id(one)], one.dtype)
            if isinstance(one, Tensor) and not is_constant(one):
                raise NotRowWise(f"its {self._what} meets other tensors")
            return one

        if func._schema.is_mutable and not (args[0] in self and self._base(args[0])):
            raise NotRowWise(f"it changes its {self._what} in place")
        step = Elementwise(
            func, tuple(map(noted, args)), {k: noted(v) for k, v in kwargs.items()}
        )
        self.steps.append(step)
        made = made[0] if isinstance(made, tuple) else made
        same = args[0] if func._schema.is_mutable else made
        self._made.append(same)
        self._value_of[id(same)] = self._value_of[id(made)] = len(self.steps)

    def is_last(self, one: Any) -> bool:
        """Whether a tensor is what the last op made."""
        return one in self and self._value_of[id(one)] == len(self.steps)

    def rows_of(self, one: Tensor) -> int:
        """The value whose rows a tensor is."""
        at = self._value_of[id(one)]
        while at and self.steps[at - 1].function in VIEWS:
            (source, *_) = self.steps[at - 1].args
            if self._made[source.step].shape[-1:] != one.shape[-1:]:
                break
            at = source.step
        return at

    def _base(self, one: Tensor) -> int:
        """The value that has the bytes of a view."""
        at = self._value_of[id(one)]
        while at and self.steps[at - 1].function in (*VIEWS, *TRANSPOSES):
            at = self.steps[at - 1].args[0].step
        return at


def is_constant(tensor: Any) -> bool:
    """Whether it is a parameter, or another tensor that was there before."""
    return type(tensor) in (Tensor, nn.Parameter)
