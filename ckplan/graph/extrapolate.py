"""Extrapolate a step from two small batches to a larger one.

Bytes, FLOPs and seconds of a step grow linearly with the rows of its batch, if every
batch runs the same ops. Two batches give the slope and the constant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any, TypeVar

from ckplan.errors import GraphError
from ckplan.graph.graph import Graph
from ckplan.graph.records import Encoding, Op, Storage, TensorType, Workspace
from ckplan.units import MIN_BLOCK_BYTES, in_blocks

_T = TypeVar("_T", Op, Storage, Encoding)
_GROWS = ("bytes", "flops", "seconds")  # last word of the names of fields that grow
_SIZES = re.compile(r"\d+")


_GROWING = {
    record: tuple(
        field.name
        for field in fields(record)
        if field.name.rpartition("_")[2] in _GROWS
    )
    for record in (Op, Storage, Encoding)
}
"""Record -> its fields that grow with the rows."""


def extrapolate(small: Graph, large: Graph, rows: tuple[int, int, int]) -> Graph:
    """Return the step with another number of rows.

    Args:
        small: The step at the first number of rows.
        large: The step at the second number; fields that do not grow come from it.
        rows: The rows of ``small``, of ``large``, and of the step to return.

    Raises:
        GraphError: The two steps do not run the same ops, or a tensor grows faster
            than the rows.
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

    _check_linear(small, large, rows)
    both = small.encoding_of.keys() & large.encoding_of.keys()
    codings = (
        tuple(one for one in graph.encodings if (one.op, one.output) in both)
        for graph in (small, large)
    )
    one, other = (graph.fingerprint.get("batch") for graph in (small, large))
    batch = _extrapolated_shapes(one, other, rows)
    grown = replace(
        large,
        fingerprint={**large.fingerprint, **({"batch": batch} if batch else {})},
        ops=tuple(
            _with(op, workspace=_extrapolated_blocks(one.workspace, op.workspace, rows))
            for one, op in zip(
                small.ops, extrapolated(small.ops, large.ops), strict=True
            )
        ),
        storages=tuple(
            _with(grown, tensor=_extrapolated_tensor(one, other, grown.bytes, rows))
            for one, other, grown in zip(
                small.storages,
                large.storages,
                extrapolated(small.storages, large.storages),
                strict=True,
            )
        ),
        encodings=extrapolated(*codings),
    )
    return _in_blocks(small, large, grown) if _is_in_blocks(large) else grown


def _is_in_blocks(graph: Graph) -> bool:
    return str(graph.fingerprint.get("device", "")).startswith("cuda")


def _in_blocks(small: Graph, large: Graph, grown: Graph) -> Graph:
    """Sizes in blocks of CUDA's allocator, exact where the tensor is known."""

    def sized(one: Storage, other: Storage, made: Storage) -> Storage:
        few, many, new = one.tensor, other.tensor, made.tensor
        if few and many and new and math.prod(many.shape):
            # The item size that explains both storages in whole blocks.
            for item in (1, 2, 4, 8, 16):
                if in_blocks(item * math.prod(few.shape)) == one.bytes and (
                    in_blocks(item * math.prod(many.shape)) == other.bytes
                ):
                    return _with(made, bytes=in_blocks(item * math.prod(new.shape)))
        return _with(made, bytes=in_blocks(made.bytes))

    return replace(
        grown,
        ops=tuple(_with(op, workspace=op.workspace.map(in_blocks)) for op in grown.ops),
        storages=tuple(
            sized(*three)
            for three in zip(
                small.storages, large.storages, grown.storages, strict=True
            )
        ),
        encodings=tuple(
            replace(
                one,
                bytes=in_blocks(one.bytes),
                encode_workspace_bytes=in_blocks(one.encode_workspace_bytes),
                decode_workspace_bytes=in_blocks(one.decode_workspace_bytes),
            )
            for one in grown.encodings
        ),
    )


def _check_linear(small: Graph, large: Graph, rows: tuple[int, int, int]) -> None:
    """Refuse steps with a tensor that grows faster than the rows.

    Raises:
        GraphError: With the tensor's shapes.
    """
    few, many, wanted = rows
    # Rounding to blocks moves the line by less than this.
    slack = MIN_BLOCK_BYTES * (few + many) if _is_in_blocks(large) else 0
    for one, other in zip(small.storages, large.storages, strict=True):
        (low, high), (least, most) = sorted(((few, one.bytes), (many, other.bytes)))
        if high * least - most * low + slack >= 0 or one.bytes == other.bytes:
            continue
        what = f"a tensor of {one.tensor} at {few} rows is {other.tensor} at {many}"
        if other.tensor is None:
            what = f"{one.bytes} bytes at {few} rows are {other.bytes} at {many}"
        raise GraphError(
            f"cannot extrapolate the step to a batch of {wanted} rows: its bytes are "
            f"not linear in the rows: {what}",
            needed="tensors that grow in proportion to the rows of the batch",
            hint="profile the batch itself",
        )


def _extrapolated_blocks(
    one: Workspace, other: Workspace, rows: tuple[int, int, int]
) -> Workspace:
    """Blocks on the lines through two workspaces; a block that one lacks is 0."""
    return Workspace(
        *(
            tuple(
                size
                for low, high in zip_longest(few, many, fillvalue=0)
                if (size := max(0, int(_on_line(low, high, rows))))
            )
            for few, many in zip(one, other, strict=True)
        )
    )


def _extrapolated_shapes(one: Any, other: Any, rows: tuple[int, int, int]) -> Any:
    """The shapes of a batch, as a fingerprint holds them."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return {
            key: _extrapolated_shapes(value, other.get(key), rows)
            for key, value in one.items()
        }
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return [
            _extrapolated_shapes(a, b, rows) for a, b in zip(one, other, strict=False)
        ]
    if not (isinstance(one, str) and isinstance(other, str)):
        return other
    head, bracket, shape = other.partition("[")
    sizes = zip_longest(_SIZES.findall(one.partition("[")[2]), _SIZES.findall(shape))
    found = [int(_on_line(int(a or 0), int(b or 0), rows)) for a, b in sizes]
    return f"{head}[{','.join(map(str, found))}]" if bracket else other


def _extrapolated(one: _T, other: _T, rows: tuple[int, int, int]) -> _T:
    """A record with quantities on the line through two others, and at least 0."""
    found: dict[str, Any] = {}
    for name in _GROWING[type(other)]:
        low, high = getattr(one, name), getattr(other, name)
        if low != high:
            found[name] = max(type(high)(0), type(high)(_on_line(low, high, rows)))
    return replace(other, **found) if found else other


def _with(record: _T, **values: Any) -> _T:
    """A record with other values; the same one if they are its own."""
    same = all(getattr(record, name) == value for name, value in values.items())
    return record if same else replace(record, **values)


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
