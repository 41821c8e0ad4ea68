"""The same step at other batches, drawn from profiles of two."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ckplan.errors import CkplanError
from ckplan.graph.batch import batch_rows, batch_shapes
from ckplan.graph.extrapolate import StepLine
from ckplan.graph.graph import Graph

STEPS = (1, 2, 3, *(n << e for e in range(28) for n in (4, 5, 6, 7)))
"""Rows of a coarse search: four in every doubling."""


@dataclass
class KnownBatches:
    """A step at any number of rows of its batch.

    With one profile only its own batch is known.
    """

    graph: Graph  # at the batch that is asked for
    rows: int | None = None  # of that batch; None if not known
    other: Graph | None = None  # the same step with another number of rows
    other_rows: int = 0
    why_one: str = ""  # why other batches are not known

    def at(self, rows: int) -> Graph:
        """The step with a number of rows, drawn through the two profiles."""
        assert self.other is not None and self.rows is not None
        if rows == self.rows:
            return self.graph
        return self.other if rows == self.other_rows else self._line.at(rows)

    @cached_property
    def _line(self) -> StepLine:
        assert self.other is not None and self.rows is not None
        two = (self.other_rows, self.other), (self.rows, self.graph)
        (few, small), (many, large) = sorted(two, key=lambda pair: pair[0])
        return StepLine(small, large, few, many)


def batches_of(graphs: tuple[Graph, ...]) -> KnownBatches:
    """The batches known from one profile, or from two of the same step.

    Raises:
        CkplanError: The two differ in more than the rows of their batch.
    """
    first, *others = graphs
    if not others:
        return KnownBatches(
            first,
            batch_rows(first),
            why_one="other batches: not known from one trace; name a second one of "
            "another batch, or the workload itself",
        )
    (second,) = others
    rows, other_rows = _rows_of_both(first, second)
    found = KnownBatches(first, rows, second, other_rows)
    found.at(2 * max(rows, other_rows))  # raises if the ops differ
    return found


def _rows_of_both(first: Graph, second: Graph) -> tuple[int, int]:
    pairs = zip(batch_shapes(first), batch_shapes(second), strict=False)
    different = {
        (a, b)
        for one, other in pairs
        for a, b in zip(one, other, strict=False)
        if a != b
    }
    # Tokens of a flat batch grow with its rows: the smallest pair is of the rows.
    rows = min(different, default=(0, 0))
    if rows[0] <= 0 or any(a * rows[1] != b * rows[0] for a, b in different):
        raise CkplanError(
            "cannot draw other batches: the two traces do not differ in the rows of "
            f"their batch alone ({_batch(first)} and {_batch(second)})",
            needed="two traces of the same workload, at two batches",
            hint="ckplan profile model.py --micro-batch 4, once more with 8",
        )
    return rows


def _batch(graph: Graph) -> str:
    return str(graph.fingerprint.get("batch"))
