"""A step at any batch, from steps recorded at a few batches.

Bytes and seconds between and beyond recorded batches are on the line through the two
nearest ones. If bytes are not linear in the rows, every batch is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckplan.errors import GraphError
from ckplan.graph.extrapolate import extrapolate
from ckplan.graph.graph import Graph

RecordAt = Callable[[int, int], Graph]
"""Records a step: rows of the micro-batch, micro-batches per optimizer step."""


class Batches:
    """The steps of one way to train, at every batch.

    Args:
        record: Records a step.
        probes: Batches that are recorded first; two different ones.
        accumulates: Whether gradients of several micro-batches are added up.
    """

    def __init__(
        self, record: RecordAt, probes: tuple[int, int], *, accumulates: bool
    ) -> None:
        self._record = record
        self._probes = probes
        self.accumulates = accumulates
        self.recorded: dict[int, Graph] = {}
        self.not_linear: str | None = None  # why every batch is recorded
        self._drawn: dict[int, Graph] = {}
        self._several: dict[tuple[int, int], Graph] = {}

    def recorded_at(self, rows: int) -> Graph:
        """The step at a batch, recorded; drawn ones are then drawn anew."""
        if rows not in self.recorded:
            self.recorded[rows] = self._record(rows, 2 if self.accumulates else 1)
            self._drawn.clear()
            self._several.clear()
        return self.recorded[rows]

    def at(self, rows: int) -> Graph:
        """The step at a batch: recorded, or drawn through two recorded ones."""
        if rows in self.recorded or self.not_linear:
            return self.recorded_at(rows)
        for probe in self._probes:
            self.recorded_at(probe)
        if rows in self.recorded:
            return self.recorded[rows]
        if rows not in self._drawn:
            below = sorted(r for r in self.recorded if r < rows)
            above = sorted(r for r in self.recorded if r > rows)
            few, many = sorted(
                (below[-1], above[0])
                if below and above
                else (below[-2:] if below else above[:2])
            )
            try:
                drawn = extrapolate(
                    self.recorded[few], self.recorded[many], (few, many, rows)
                )
            except GraphError as error:
                self.not_linear = error.what
                return self.recorded_at(rows)
            self._drawn[rows] = drawn
        return self._drawn[rows]

    def with_accumulation(self, rows: int, accumulate: int) -> Graph:
        """The step at a batch, with the seconds of all its micro-batches."""
        graph = self.at(rows)
        if graph.num_batches == accumulate:
            return graph
        key = rows, accumulate
        if key not in self._several:
            options: dict[str, Any] = {**graph.options, "accumulate": accumulate}
            self._several[key] = replace(graph, options=options)
        return self._several[key]
