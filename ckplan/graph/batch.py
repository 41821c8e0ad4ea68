"""The shapes of a step's batch, as its fingerprint has them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckplan.graph.graph import Graph

_SHAPE = re.compile(r"\[(\d+(?:,\d+)*)\]")


def batch_shapes(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """The shapes of the tensors of the batch, in order; scalars are left out."""
    return tuple(_shapes(graph.fingerprint.get("batch")))


def batch_rows(graph: Graph) -> int | None:
    """The first size of the first tensor of the batch; None if there is none."""
    return next((shape[0] for shape in batch_shapes(graph)), None)


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
