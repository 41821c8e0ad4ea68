"""The ops of a call that can run in tiles of rows, as they are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ckplan.graph.graph import Graph
from ckplan.plan.tiles import RowTiles

_WORD = 64  # bits


class Drawn(NamedTuple):
    """The mask of dropout on scores, which tiles keep as bits of whole heads."""

    op: int  # that draws its numbers
    storage: int
    heads: int  # of all samples
    size: int  # scores of a head

    @property
    def bytes(self) -> int:
        """Bytes of the bits."""
        return self.unpacked_bytes(self.heads) // 8

    def unpacked_bytes(self, heads: int) -> int:
        """Bytes of the truth values of some heads, with padding."""
        return heads * -(-self.size // _WORD) * _WORD

    def drawing_bytes(self, heads: int) -> int:
        """Most bytes while those of some heads are drawn and packed."""
        unpacked = self.unpacked_bytes(heads)
        return heads * self.size + unpacked + unpacked // 8


@dataclass(frozen=True)
class RowOps:
    """Ops of a row-wise call, by number and in order, and what they make."""

    forward: tuple[int, ...]  # the last one makes the output
    first: tuple[int, ...]  # products of the input
    inner_gradient: int  # op: the product that begins the way back
    inner: int  # storage that it makes
    elementwise: tuple[int, ...]  # of backward
    hidden_gradients: tuple[int, ...]  # ops: products, and sums of them
    weight_gradients: tuple[int, ...]  # ops
    interior: frozenset[int]  # storages that tiles never hold whole
    leaf_gradients: tuple[int, ...]  # storages: gradients of the first products
    hidden: int  # storage of the first products' input; of an attention, an operand
    given: int  # storage of the output's gradient
    rows: int  # samples, of convolutions
    width: int  # of hidden values
    spatial: tuple[int, ...]  # sizes, of convolutions
    tensor_bytes: int  # of a hidden value
    gradient_bytes: int  # of the input's gradient
    # Of an attention: samples and heads, which are rows, and the storages it reads.
    heads: tuple[int, int] | None = None
    operands: frozenset[int] = frozenset()
    drawn: Drawn | None = None  # what its dropout draws
    weights: frozenset[int] = frozenset()  # storages: parameters, or casts of them
    copies: frozenset[int] = frozenset()  # storages: of the input, by autocast
    unused: tuple[int, ...] = ()  # ops: casts of scores that nobody reads

    @property
    def product(self) -> int:
        """The op that makes the output."""
        return self.forward[-1]

    @property
    def backward(self) -> tuple[int, ...]:
        """All ops of backward, in order."""
        ends = *self.hidden_gradients, *self.weight_gradients
        return tuple(sorted({self.inner_gradient, *self.elementwise, *ends}))

    @property
    def halved(self) -> frozenset[int]:
        """Ops of backward that both passes over tiles run a half of."""
        ends = {self.inner_gradient, *self.hidden_gradients}
        return frozenset(ends & {*self.weight_gradients})

    @property
    def in_rows(self) -> tuple[int, ...]:
        """Ops of the pass that makes the input's gradient."""
        return (*self._again, *self.hidden_gradients)

    @property
    def in_columns(self) -> tuple[int, ...]:
        """Ops of the pass that makes gradients of weights."""
        return (*self._again, *self.weight_gradients)

    @property
    def _again(self) -> tuple[int, ...]:
        return (*self.forward[:-1], self.inner_gradient, *self.elementwise)

    @property
    def has_gradients_apart(self) -> bool:
        """Whether the input has more than one gradient, which autograd adds."""
        return self.heads is not None or bool(self.copies)

    def cut_rows(self, tiles: RowTiles) -> list[slice]:
        """The tiles of rows."""
        if self.heads is not None:
            return tiles.of_heads(*self.heads)
        cut = tiles.of_samples if self.spatial else tiles.of_rows
        return cut(self.rows)


def gradients_of_parameters(graph: Graph, found: RowOps) -> Iterator[int]:
    """The storages of gradients of weights and biases."""
    others = {*found.interior, *row_gradients(graph, found)}
    for number in found.weight_gradients:
        yield from (s for s in graph.creates[number] if s not in others)


def row_gradients(graph: Graph, found: RowOps) -> Iterator[int]:
    """The storages of gradients that the pass over rows makes."""
    if found.has_gradients_apart:
        yield from (graph.ops[number].outputs[0] for number in found.hidden_gradients)
    elif found.hidden_gradients:
        yield graph.ops[found.hidden_gradients[-1]].outputs[0]
