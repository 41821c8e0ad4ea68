"""The shapes of a step's batch, as its fingerprint has them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckplan.graph.graph import Graph
from ckplan.graph.records import TensorType

_SHAPE = re.compile(r"\[(\d+(?:,\d+)*)\]")


def batch_shapes(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """The shapes of the tensors of the batch, in order; scalars are left out."""
    return tuple(_shapes(graph.fingerprint.get("batch")))


def batch_dim(graph: Graph) -> int:
    """The dimension of the batch's tensors that counts rows, if one was named."""
    options: Mapping[str, Any] = graph.options
    known = {**options.get("workload", {}), **options}
    return int(known.get("batch_dim", 0))


def batch_rows(graph: Graph) -> int | None:
    """Rows of the batch: a size of its first tensor that counts them; None if none."""
    dim = batch_dim(graph)
    return next((s[dim] for s in batch_shapes(graph) if len(s) > dim), None)


def is_of_batch(graph: Graph, tensor: TensorType | None) -> bool:
    """Whether an input has the batch's rows: a loop may hold a data set, or averages.

    One of which no shape is known counts.
    """
    if tensor is None:
        return True
    dim, shape = batch_dim(graph), tensor.shape
    has_rows = len(shape) > dim and shape[dim] == batch_rows(graph)
    return has_rows or shape in batch_shapes(graph)


def row_dims(one: Graph, other: Graph) -> dict[str, int]:
    """Name of a tensor of the batch -> the dimension in which two batches differ."""
    batches = [graph.fingerprint.get("batch") for graph in (one, other)]
    few, many = (batch if isinstance(batch, Mapping) else {} for batch in batches)
    found: dict[str, int] = {}
    for name in few:
        pairs = zip(_shapes(few[name]), _shapes(many.get(name)), strict=False)
        for small, large in pairs:
            sizes = enumerate(zip(small, large, strict=False))
            other_sizes = [dim for dim, (a, b) in sizes if a != b]
            if other_sizes:
                found.setdefault(name, other_sizes[0])
    return found


def _shapes(batch: Any) -> Iterator[tuple[int, ...]]:
    if isinstance(batch, Mapping):
        for key in sorted(batch):
            yield from _shapes(batch[key])
    elif isinstance(batch, (list, tuple)):
        for item in batch:
            yield from _shapes(item)
    elif isinstance(batch, str) and (found := _SHAPE.search(batch)):
        sizes = tuple(map(int, found[1].split(",")))
        if math.prod(sizes):
            yield sizes
