"""Extrapolate a step from two small batches to a larger one.

Bytes, FLOPs and seconds of a step grow linearly with the rows of its batch, if every
batch runs the same ops. Two batches give the slope and the constant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, TypeVar

from ckplan.graph.graph import Graph
from ckplan.graph.lines import check_line, is_in_blocks
from ckplan.graph.records import Encoding, Op, Storage, TensorType, Workspace
from ckplan.graph.redrawn import costs_of, redrawn, with_costs_of
from ckplan.units import in_blocks

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


class StepLine:
    """One step at every number of rows, on the lines through two recorded ones.

    Only the records that grow are made anew; all others are those of ``large``.
    """

    def __init__(self, small: Graph, large: Graph, few: int, many: int) -> None:
        """Check and draw nothing yet.

        Args:
            small: The step at the first number of rows.
            large: The step at the second one; what does not grow comes from it.
            few: Rows of ``small``.
            many: Rows of ``large``.
        """
        self._small, self._large, self._few, self._many = small, large, few, many
        self._blocks = is_in_blocks(large)

    def check(self, rows: int) -> None:
        """Check that there is a line.

        Args:
            rows: The number that is asked for, for the error.

        Raises:
            GraphError: The two steps do not run the same ops, or a tensor grows faster
                than the rows.
        """
        if not self._is_checked:
            three = self._few, self._many, rows
            check_line(self._small, self._large, three)
            self._is_checked = True

    def at(self, rows: int) -> Graph:
        """The step with a number of rows.

        Raises:
            GraphError: As of ``check``.
        """
        self.check(rows)
        small, large, three = self._small, self._large, (self._few, self._many, rows)
        ops, storages = list(large.ops), list(large.storages)
        for (before, after), places in self._growing_ops:
            grown = self._op(before, after, three)
            for place in places:
                ops[place] = with_costs_of(ops[place], grown)
        for (one, other, item), places in self._growing_storages:
            size, tensor = self._storage(one, other, three, item)
            for place in places:
                was = storages[place]
                storages[place] = Storage(size, was.kind, was.maker, was.last, tensor)
        shapes = [graph.fingerprint.get("batch") for graph in (small, large)]
        batch = _extrapolated_shapes(shapes[0], shapes[1], three)
        return redrawn(
            large,
            fingerprint={**large.fingerprint, **({"batch": batch} if batch else {})},
            ops=tuple(ops),
            storages=tuple(storages),
            encodings=tuple(
                self._encoding(a, b, three) for a, b in zip(*self._codings, strict=True)
            ),
        )

    _is_checked = False

    @cached_property
    def _growing_ops(self) -> list[tuple[tuple[Op, Op], list[int]]]:
        """Pairs of ops that grow, each with the places of all that grow as it does."""
        found: dict[Any, tuple[tuple[Op, Op], list[int]]] = {}
        pairs = enumerate(zip(self._small.ops, self._large.ops, strict=True))
        for place, pair in pairs:
            before, after = map(costs_of, pair)
            if before != after:
                found.setdefault((before, after), (pair, []))[1].append(place)
        return [*found.values()]

    @cached_property
    def _growing_storages(self) -> list[tuple[tuple[Storage, Storage, int], list[int]]]:
        """The same of storages, with the bytes of an element where these explain both.

        Bytes of an element are 0 where they do not.
        """
        found: dict[Any, tuple[tuple[Storage, Storage, int], list[int]]] = {}
        pairs = enumerate(zip(self._small.storages, self._large.storages, strict=True))
        for place, (one, other) in pairs:
            sizes = one.bytes, one.tensor, other.bytes, other.tensor
            if sizes[:2] == sizes[2:]:
                continue
            if sizes not in found:
                item = _item_bytes(one, other) if self._blocks else 0
                found[sizes] = (one, other, item), []
            found[sizes][1].append(place)
        return [*found.values()]

    @cached_property
    def _codings(self) -> tuple[list[Encoding], list[Encoding]]:
        """The encodings that both steps have."""
        both = self._small.encoding_of.keys() & self._large.encoding_of.keys()
        small, large = (
            [one for one in graph.encodings if (one.op, one.output) in both]
            for graph in (self._small, self._large)
        )
        return small, large

    def _op(self, one: Op, other: Op, rows: tuple[int, int, int]) -> Op:
        grown = _extrapolated(one, other, rows)
        if one.workspace == other.workspace:
            return grown
        workspace = _extrapolated_blocks(one.workspace, other.workspace, rows)
        workspace = workspace.map(in_blocks) if self._blocks else workspace
        return replace(grown, workspace=workspace)

    def _storage(
        self, one: Storage, other: Storage, rows: tuple[int, int, int], item: int
    ) -> tuple[int, TensorType | None]:
        """Bytes and tensor of a storage."""
        size = max(0, int(_on_line(one.bytes, other.bytes, rows)))
        tensor = _extrapolated_tensor(one, other, size, rows)
        if item and tensor is not None:
            size = item * math.prod(tensor.shape)
        return (in_blocks(size) if self._blocks else size), tensor

    def _encoding(
        self, one: Encoding, other: Encoding, rows: tuple[int, int, int]
    ) -> Encoding:
        grown = _extrapolated(one, other, rows)
        if not self._blocks:
            return grown
        return replace(
            grown,
            bytes=in_blocks(grown.bytes),
            encode_workspace_bytes=in_blocks(grown.encode_workspace_bytes),
            decode_workspace_bytes=in_blocks(grown.decode_workspace_bytes),
        )


def extrapolate(small: Graph, large: Graph, rows: tuple[int, int, int]) -> Graph:
    """The step with another number of rows: ``StepLine``, for one number.

    Args:
        small: The step at the first number of rows.
        large: The step at the second number; fields that do not grow come from it.
        rows: The rows of ``small``, of ``large``, and of the step to return.

    Raises:
        GraphError: As of ``StepLine.at``.
    """
    few, many, wanted = rows
    return StepLine(small, large, few, many).at(wanted)


def _item_bytes(one: Storage, other: Storage) -> int:
    """Bytes of an element that explain two storages in whole blocks; 0 if none do."""
    few, many = one.tensor, other.tensor
    if few is None or many is None or not math.prod(many.shape):
        return 0
    for item in (many.item_bytes, 1, 2, 4, 8, 16):
        if in_blocks(item * math.prod(few.shape)) == one.bytes and (
            in_blocks(item * math.prod(many.shape)) == other.bytes
        ):
            return item
    return 0


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
        if low == high:
            continue
        if name.endswith("seconds"):
            few, many, wanted = rows
            slope = seconds_per_row((few, low), (many, high), wanted)
            found[name] = low + slope * (wanted - few)
            if wanted > many:
                found[name] = high + slope * (wanted - many)
        else:
            found[name] = max(0, int(_on_line(low, high, rows)))
    return replace(other, **found) if found else other


def seconds_per_row(
    one: tuple[int, float], other: tuple[int, float], wanted: int
) -> float:
    """What a row adds to the seconds of an op, from (rows, seconds) at two batches.

    Between the two, seconds are on the line through both. Beyond them, from the nearer
    one on, more rows take no less time, and at most in proportion: what measuring adds
    to that is noise, which a line would carry far.

    Args:
        one: The smaller batch and its seconds.
        other: The larger one and its seconds.
        wanted: The batch that seconds are wanted of.

    >>> seconds_per_row((1, 3.0), (2, 4.0), 5), seconds_per_row((1, 3.0), (2, 2.0), 5)
    (1.0, 0.0)
    >>> [seconds_per_row((2, 1.0), (4, 4.0), wanted) for wanted in (1, 3, 5)]
    [0.5, 1.5, 1.0]
    """
    (few, low), (many, high) = one, other
    slope = (high - low) / (many - few)
    if few <= wanted <= many:
        return slope
    rows, seconds = one if wanted < few else other
    return min(max(slope, 0.0), seconds / rows)


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
