"""What a call whose rows are apart computes: products, and elementwise ops between.

Products are of matrices, or 1x1 convolutions, whose rows are the samples of a batch.
Ops before the first product and after the last one run as they are, on whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ckplan.plan.tiles import RowTiles


class NotRowWise(Exception):  # noqa: N818 - control flow, caught by the caller
    """The call is not understood; the text says why."""


class Operands(NamedTuple):
    """The tensors of one product: indices into ``RowProgram.operands``."""

    weight: int
    is_transposed: bool  # as in nn.Linear and nn.Conv2d: [outputs, inputs, ...]
    bias: int | None


@dataclass(frozen=True, slots=True)
class Product:
    """``input @ weight + bias``."""

    of: Operands


@dataclass(frozen=True, slots=True)
class Value:
    """The result of an earlier step, as an argument."""

    step: int


@dataclass(frozen=True, slots=True)
class Cast:
    """Autocast's copy of a parameter, as an argument."""

    of: Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Elementwise:
    """An op on results of earlier steps, and numbers."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class RowProgram:
    """The steps of a call, in order; the last product makes its output."""

    operands: list[Tensor] = field(default_factory=list)
    dtype: torch.dtype = torch.float32  # of products; autocast casts operands to it
    steps: list[Product | Elementwise] = field(default_factory=list)
    final: Operands | None = None
    result: int = -1  # the step whose value the final product reads
    # Of the first products: one, or for each its own copy, as autocast makes them.
    inputs: int = 1
    spatial: tuple[int, ...] = ()  # sizes, of 1x1 convolutions in place of matrices
    layout: torch.memory_format = torch.contiguous_format  # of the products' input
    # What runs as it is, on whole tensors. Value 0 is the input, or the last product's
    # output; others are results. The last one is the input of the first products, or
    # the output of the call. Parameters are arguments themselves.
    lead: list[Elementwise] = field(default_factory=list)
    tail: list[Elementwise] = field(default_factory=list)

    def last_uses(self) -> list[list[int]]:
        """Step -> the earlier steps whose values no later step reads."""
        last = {self.result: len(self.steps)}
        for number, step in reversed([*enumerate(self.steps)]):
            for one in values_read(step):
                last.setdefault(one, number)
        return [
            [s for s, at in last.items() if at == n] for n in range(len(self.steps))
        ]

    @property
    def cast_operands(self) -> list[Tensor]:
        """The operands as products read them."""
        return [one.to(self.dtype) for one in self.operands]

    @property
    def parameters(self) -> list[Tensor]:
        """All tensors that the call reads beside its input."""
        given = [
            one for step in self.lead for one in (*step.args, *step.kwargs.values())
        ]
        given = [one.of if isinstance(one, Cast) else one for one in given]
        return [*self.operands, *(one for one in given if isinstance(one, Tensor))]

    @property
    def first(self) -> list[tuple[int, Operands]]:
        """The steps that are products of the input."""
        return [(n, s.of) for n, s in enumerate(self.steps) if isinstance(s, Product)]

    def weight(self, operands: tuple[Tensor, ...], of: Operands) -> Tensor:
        """The weight of a matrix product as [inputs, outputs]."""
        found = operands[of.weight]
        return found.t() if of.is_transposed else found

    def sizes(self, of: Operands) -> tuple[int, int]:
        """Inputs and outputs of a product."""
        first, second, *_ = self.operands[of.weight].shape
        return (second, first) if of.is_transposed else (first, second)

    def cut_rows(self, tiles: RowTiles, size: int) -> list[slice]:
        """Cut the rows; those of convolutions are samples."""
        return tiles.of_samples(size) if self.spatial else tiles.of_rows(size)


def values_read(step: Product | Elementwise) -> list[int]:
    """The values that a step reads, by number."""
    if isinstance(step, Product):
        return []
    found = (*step.args, *step.kwargs.values())
    return [one.step for one in found if isinstance(one, Value)]
