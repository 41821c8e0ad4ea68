"""Whether other batches of a step are on the line through two recorded ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckplan.errors import GraphError
from ckplan.graph.graph import Graph
from ckplan.units import MIN_BLOCK_BYTES


def check_line(small: Graph, large: Graph, rows: tuple[int, int, int]) -> None:
    """Refuse two steps that are on no line.

    Args:
        small: The step at the first number of rows.
        large: The step at the second number.
        rows: The rows of ``small``, of ``large``, and those asked for, for the error.

    Raises:
        GraphError: They do not run the same ops, or a tensor grows faster than the
            rows.
    """
    _check_same(small, large, rows)
    _check_linear(small, large, rows)


def is_in_blocks(graph: Graph) -> bool:
    """Whether its bytes are in blocks of CUDA's allocator."""
    return str(graph.fingerprint.get("device", "")).startswith("cuda")


def _check_same(small: Graph, large: Graph, rows: tuple[int, int, int]) -> None:
    if any(a != b for a, b in zip(_structure(small), _structure(large), strict=True)):
        raise GraphError(
            f"cannot extrapolate the step to a batch of {rows[2]} rows: it runs other "
            f"ops at {rows[0]} rows than at {rows[1]}",
            needed="the same ops for every batch size",
            hint="profile where the whole batch fits in memory, or a smaller batch",
        )


def _check_linear(small: Graph, large: Graph, rows: tuple[int, int, int]) -> None:
    """Refuse steps with a tensor that grows faster than the rows.

    Raises:
        GraphError: With the tensor's shapes.
    """
    few, many, wanted = rows
    # Rounding to blocks moves the line by less than this.
    slack = MIN_BLOCK_BYTES * (few + many) if is_in_blocks(large) else 0
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


def _structure(graph: Graph) -> Iterator[Any]:
    """The parts that two steps must share."""
    yield graph.num_forward, graph.num_backward
    yield [(op.name, op.call, op.reads, op.writes, op.outputs) for op in graph.ops]
    yield [(one.kind, one.maker, one.last) for one in graph.storages]
    yield graph.saved
    yield graph.calls
