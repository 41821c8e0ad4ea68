"""The same step at other batches, drawn from profiles of two."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from ckplan.errors import CkplanError
from ckplan.graph.batch import batch_rows, batch_shapes
from ckplan.graph.extrapolate import extrapolate
from ckplan.graph.graph import Graph

STEPS = (1, 2, 3, *(n << e for e in range(17) for n in (4, 5, 6, 7)))
"""Rows of a coarse search: four in every doubling."""
_FINEST = 64  # part of the batch: precision of the search


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
    _drawn: dict[int, Graph] = field(default_factory=dict)

    def at(self, rows: int) -> Graph:
        """The step with a number of rows, drawn through the two profiles."""
        assert self.other is not None and self.rows is not None
        if rows == self.rows:
            return self.graph
        if rows not in self._drawn:
            two = (self.other_rows, self.other), (self.rows, self.graph)
            (few, small), (many, large) = sorted(two, key=lambda pair: pair[0])
            self._drawn[rows] = extrapolate(small, large, (few, many, rows))
        return self._drawn[rows]


def largest_rows(
    fits: Callable[[int], bool], guess: int, *, in_steps: bool = False
) -> int:
    """The largest number of rows that fits; 0 if none does.

    Args:
        fits: Whether a number of rows fits; then all smaller ones are taken to fit.
        guess: Where the search begins.
        in_steps: Whether only the numbers of ``STEPS`` are tried, which searches for
            several limits share; else the answer is exact to 1/64.
    """
    place = max(bisect_right(STEPS, guess) - 1, 0)
    if fits(STEPS[place]):
        while place + 1 < len(STEPS) and fits(STEPS[place + 1]):
            place += 1
    else:
        place -= 1
        while place >= 0 and not fits(STEPS[place]):
            place -= 1
    low = STEPS[place] if place >= 0 else 0
    if in_steps or place + 1 == len(STEPS):
        return low
    high = STEPS[place + 1]
    while high - low > max(low // _FINEST, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


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
            hint="ckplan profile model.py --set batch=..., or name one trace",
        )
    return rows


def _batch(graph: Graph) -> str:
    return str(graph.fingerprint.get("batch"))
