"""Extrapolate a step from two small batches to a larger one.

Bytes, FLOPs and seconds of a step grow linearly with the rows of its batch, if every
batch runs the same ops. Two batches give the slope and the constant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

from ckplan.errors import GraphError
from ckplan.graph.graph import Graph
from ckplan.graph.records import Encoding, Op, Storage, TensorType

_T = TypeVar("_T", Op, Storage, Encoding)
_GROWS = ("bytes", "flops", "seconds")  # last word of the names of fields that grow


def extrapolate(small: Graph, large: Graph, rows: tuple[int, int, int]) -> Graph:
    """Return the step with another number of rows.

    Args:
        small: The step at the first number of rows.
        large: The step at the second number; fields that do not grow come from it.
        rows: The rows of ``small``, of ``large``, and of the step to return.

    Raises:
        GraphError: The two steps do not run the same ops.
    """
    if any(a != b for a, b in zip(_structure(small), _structure(large), strict=True)):
        raise GraphError(
            f"cannot extrapolate the step to a batch of {rows[2]} rows: it runs other "
            f"ops at {rows[0]} rows than at {rows[1]}",
            needed="the same ops for every batch size",
            hint="profile where the whole batch fits in memory, or a smaller batch",
        )

    def extrapolated(ones: tuple[_T, ...], others: tuple[_T, ...]) -> tuple[_T, ...]:
        pairs = zip(ones, others, strict=True)
        return tuple(_extrapolated(one, other, rows) for one, other in pairs)

    both = small.encoding_of.keys() & large.encoding_of.keys()
    codings = (
        tuple(one for one in graph.encodings if (one.op, one.output) in both)
        for graph in (small, large)
    )
    return replace(
        large,
        ops=extrapolated(small.ops, large.ops),
        storages=tuple(
            replace(grown, tensor=_extrapolated_tensor(one, other, grown.bytes, rows))
            for one, other, grown in zip(
                small.storages,
                large.storages,
                extrapolated(small.storages, large.storages),
                strict=True,
            )
        ),
        encodings=extrapolated(*codings),
    )


def _extrapolated(one: _T, other: _T, rows: tuple[int, int, int]) -> _T:
    """A record with quantities on the line through two others, and at least 0."""
    found: dict[str, Any] = {}
    for field in fields(one):
        if field.name.rpartition("_")[2] in _GROWS:
            low, high = getattr(one, field.name), getattr(other, field.name)
            found[field.name] = max(
                type(high)(0), type(high)(_on_line(low, high, rows))
            )
    return replace(other, **found)


def _on_line(low: float, high: float, rows: tuple[int, int, int]) -> float:
    few, many, wanted = rows
    return high + (high - low) * (wanted - many) / (many - few)


def _extrapolated_tensor(
    one: Storage, other: Storage, num_bytes: int, rows: tuple[int, int, int]
) -> TensorType | None:
    """The tensor of a storage, with sizes on the lines through two others.

    None where that cannot be: a size is not whole, the number of dimensions differs,
    or the tensor filled its storage and no longer would.
    """
    few, many = one.tensor, other.tensor
    if few is None or many is None or few.dtype != many.dtype:
        return None
    if len(few.shape) != len(many.shape):
        return None
    sizes = [
        _on_line(low, high, rows)
        for low, high in zip(few.shape, many.shape, strict=True)
    ]
    if any(size < 0 or size != int(size) for size in sizes):
        return None
    shape = tuple(map(int, sizes))
    # Bytes per element, times the elements: sizes may differ, their ratio may not.
    filled = one.bytes * math.prod(many.shape) == other.bytes * math.prod(few.shape)
    fills = num_bytes * math.prod(many.shape) == other.bytes * math.prod(shape)
    return TensorType(many.dtype, shape) if fills or not filled else None


def _structure(graph: Graph) -> Iterator[Any]:
    """The parts that two steps must share."""
    yield graph.num_forward, graph.num_backward
    yield [(op.name, op.call, op.reads, op.writes, op.outputs) for op in graph.ops]
    yield [(one.kind, one.maker, one.last) for one in graph.storages]
    yield graph.saved
    yield graph.calls
