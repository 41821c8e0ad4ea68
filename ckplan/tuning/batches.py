"""A step at any batch, from steps recorded at a few batches.

Bytes and seconds between and beyond recorded batches are on the line through the two
nearest ones. If bytes are not linear in the rows, every batch is recorded. Where a row
takes longer in the larger of the first two, both are measured once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from ckplan.errors import GraphError
from ckplan.graph.extrapolate import StepLine, seconds_per_row
from ckplan.graph.graph import Graph
from ckplan.graph.records import MEASURED
from ckplan.graph.transplant import transplanted
from ckplan.simulating.simulate import Simulator
from ckplan.solving.planner import Planner
from ckplan.solving.reserved_limit import Plans
from ckplan.tuning.transfer import TransferredPlans, transferred

RecordAt = Callable[[int, int], Graph]
"""Records a step: rows of the micro-batch, micro-batches per optimizer step."""
_MOST_PROBES = 5  # batches that are recorded to find two that run the same ops
_KEPT, _KEPT_PLANNERS = 24, 8  # drawn steps, and those whose plans were searched
ALL_TRIED = 24  # largest number of batches that are all tried
_GRID = 12  # batches of a grid
NEAR = 4  # ratio of two batches at most, for plans of one at the other
_CLOSE, _NOISE = 1e-3, 5e-2  # relative difference of seconds that is none: if measured
_Totals = tuple[float, float, float, float]
_LARGE = 500  # ops of a step; a search in smaller ones is quick


def probe_rows(rows: int) -> tuple[int, int]:
    """Two batches to record: that of the workload if it has two rows, and another.

    A batch of one row often runs other ops than all others, which need no copies.

    >>> probe_rows(1), probe_rows(3), probe_rows(8)
    ((2, 4), (3, 6), (8, 4))
    """
    first = max(rows, 2)
    return first, first // 2 if first >= 4 else 2 * first


class Batches:
    """The steps of one way to train, at every batch.

    Args:
        record: Records a step.
        probes: Batches that are recorded first; two different ones.
        again: Records a step that is known once more, with seconds measured anew.
        accumulates: Whether gradients of several micro-batches are added up.
        like: The batches of a way with the same forward and backward, except for ops
            that no row adds to: one probe is then enough.
    """

    def __init__(
        self,
        record: RecordAt,
        probes: tuple[int, int],
        *,
        again: RecordAt | None = None,
        accumulates: bool = False,
        like: Batches | None = None,
    ) -> None:
        self._record, self._again = record, again
        self._probes = probes
        self._like = like
        self.accumulates = accumulates
        self._many = 2 if accumulates else 1  # micro-batches of what is recorded
        self.recorded: dict[int, Graph] = {}
        self.not_linear: str | None = None  # why every batch is recorded
        self.corrected: list[int] = []  # where the recorded step was not as drawn
        self._ends: dict[int, Graph] = {}  # of lines: recorded, and the second probe
        self._lines: dict[tuple[int, int], StepLine] = {}
        self._not_on_lines: dict[tuple[int, int], str] = {}  # pairs of ends -> why
        self._totals: dict[tuple[int, int, int], tuple[_Totals, ...]] = {}
        self._drawn: dict[tuple[int, int], Graph] = {}
        self._planners: dict[tuple[int, int], Planner] = {}
        self._searched: list[tuple[int, int]] = []  # where plans were asked for
        self._transferred: dict[tuple[int, int], TransferredPlans] = {}

    @property
    def any_recorded(self) -> Graph:
        """A step that was recorded, whatever its batch."""
        return next(iter(self._ends.values()))

    @property
    def is_of_card(self) -> bool:
        """Whether a step is known, and nothing runs to record it."""
        return bool(self._ends) and self.any_recorded.costs != MEASURED

    def recorded_at(self, rows: int) -> Graph:
        """The step at a batch, recorded; drawn ones are then drawn anew."""
        if rows not in self.recorded:
            graph = self._record(rows, self._many)
            self.recorded[rows] = self._ends[rows] = graph
            self._drawn.clear()
            self._planners.clear()
            self._searched.clear()
            self._transferred.clear()
        return self.recorded[rows]

    def check(self, rows: int) -> bool:
        """Record the step at a batch; whether it is like the drawn one.

        If it is, the lines remain, with all steps and plans that were drawn on them.
        """
        drawn = self._at(rows)
        if rows in self.recorded:
            return True
        graph = self._record(rows, self._many)
        if not _are_alike(drawn, graph):
            self.corrected.append(rows)
            self.recorded[rows] = self._ends[rows] = graph
            for known in (self._drawn, self._planners, self._transferred):
                known.clear()
            self._searched.clear()
            return False
        self.recorded[rows] = graph
        for cache in (self._drawn, self._planners, self._transferred):
            for key in [key for key in cache if key[0] == rows]:
                del cache[key]
        return True

    def at(self, rows: int, accumulate: int = 1) -> Graph:
        """The step at a batch: recorded, or drawn through two recorded ones.

        Args:
            rows: Rows of a micro-batch.
            accumulate: Micro-batches of an optimizer step, all of whose seconds count.
        """
        key = rows, accumulate
        if key not in self._drawn:
            graph = self._at(rows)
            if graph.num_batches != accumulate:
                options: dict[str, Any] = {**graph.options, "accumulate": accumulate}
                graph = replace(graph, options=options)
            if len(self._drawn) >= _KEPT:
                del self._drawn[next(iter(self._drawn))]
            self._drawn[key] = graph
        return self._drawn[key]

    def planner(self, rows: int, accumulate: int = 1) -> Planner:
        """The plans of the step at a batch, which several limits share."""
        key = rows, accumulate
        if key not in self._planners:
            graph = self.at(rows, accumulate)
            if len(self._planners) >= _KEPT_PLANNERS:
                del self._planners[next(iter(self._planners))]
            self._planners[key] = Planner(graph)
        return self._planners[key]

    def plans(self, rows: int, accumulate: int = 1) -> Plans:
        """The plans at a batch, for a drawn one those of a near batch if known."""
        key = rows, accumulate
        if key in self._transferred:
            return self._transferred[key]
        near = self.searched_near(rows, accumulate)
        if near is not None and near != (self, rows):
            batches, nearest = near
            there = batches.planner(nearest, accumulate)
            found = transferred(there, Simulator(self.at(rows, accumulate)))
            if found is not None:
                self._transferred[key] = found
                return found
        if near != (self, rows):
            self._searched.append(key)
        return self.planner(rows, accumulate)

    def searched_near(self, rows: int, accumulate: int) -> tuple[Batches, int] | None:
        """The nearest batch whose plans were searched, of this way or of one like it.

        None if there is none near enough for its plans to be good ones, or if this
        step is recorded or small: then its own plans are searched.
        """
        step = self.at(rows, accumulate)
        if len(step.ops) < _LARGE or rows in self.recorded:
            return None
        found = [
            (max(n, rows) / min(n, rows), batches, n)
            for batches in (self, self._like)
            if batches is not None
            for n, many in batches._searched
            if many == accumulate
        ]
        near = [one for one in found if one[0] <= NEAR]
        return min(near, key=lambda one: one[0])[1:] if near else None

    def step_seconds(self, rows: int, accumulate: int = 1) -> float:
        """Seconds of the unplanned step at a batch, which is not drawn for them."""
        self._record_probes()
        pair = None
        while not (rows in self._ends or self.not_linear or pair):
            pair = self._pair(rows)
        if pair is None:
            return self.at(rows, accumulate).step_seconds
        few, many = pair
        end = few if rows < few else many
        key = few, many, (rows > many) - (rows < few)  # on a side, or between
        if key not in self._totals:
            small, large = self._ends[few], self._ends[many]
            found = _totals_of(small, large, few, many, rows)
            self._totals[key] = tuple(found)
        return max(
            accumulate * (batch + more * (rows - end)) + update + grown * (rows - end)
            for batch, more, update, grown in self._totals[key]
        )

    def _at(self, rows: int) -> Graph:
        if rows in self.recorded or self.not_linear:
            return self.recorded_at(rows)
        self._record_probes()
        if rows in self._ends:
            return self._ends[rows]
        pair = self._pair(rows)
        return self._at(rows) if pair is None else self._lines[pair].at(rows)

    def _pair(self, rows: int) -> tuple[int, int] | None:
        """Two ends on whose line a batch is; None if that is asked for too early.

        Then another batch was recorded, or every one is from now on.
        """
        for few, many in self._pairs(rows):
            if (few, many) not in self._lines:
                small, large = self._ends[few], self._ends[many]
                line = self._lines[few, many] = StepLine(small, large, few, many)
                try:
                    line.check(rows)
                except GraphError as error:
                    self._not_on_lines[few, many] = error.what
            if (few, many) not in self._not_on_lines:
                return few, many
        if self.is_of_card and len(self._ends) < _MOST_PROBES:
            self.recorded_at(2 * max(self._ends))  # two larger ones may run the same
        else:
            self.not_linear = next(reversed(self._not_on_lines.values()))
        return None

    def _pairs(self, rows: int) -> Iterable[tuple[int, int]]:
        """Pairs of ends to draw a batch through, the best one first."""
        few, many = sorted(self._probes)
        others = combinations(sorted(self._ends, reverse=True), 2)
        turned = ((small, large) for large, small in others)
        return dict.fromkeys((self._nearest(rows), (few, many), *turned))

    def _record_probes(self) -> None:
        first, second = self._probes
        self.recorded_at(first)
        if second in self._ends:
            return
        if self._like is not None and self._like is not self:
            here, there = (self._like.recorded_at(n) for n in self._probes)
            made = transplanted(self.recorded[first], here, there)
            if made is not None:
                self._ends[second] = made
                return
        self.recorded_at(second)
        self._measure_again()

    def _measure_again(self) -> None:
        """Record both probes once more if a row takes longer in the larger one.

        A program beside one recording has that effect, and so have caches that are too
        small. The pair in which a row takes less too long is kept.
        """
        few, many = sorted(self._probes)
        pair = {rows: self._ends[rows] for rows in (few, many)}
        before = _longer_rows(pair)
        if self._again is None or pair[few].costs != MEASURED or before <= 1 + _NOISE:
            return
        found = {rows: self._again(rows, self._many) for rows in self._probes}
        if _longer_rows(found) < before:
            self.recorded.update(found)
            self._ends.update(found)
            self._drawn.clear()

    def _nearest(self, rows: int) -> tuple[int, int]:
        """The two ends around a batch, or the two nearest ones."""
        below = sorted(n for n in self._ends if n < rows)
        above = sorted(n for n in self._ends if n > rows)
        if below and above:
            return below[-1], above[0]
        few, many = below[-2:] if below else above[:2]
        return few, many


def _longer_rows(steps: Mapping[int, Graph]) -> float:
    """Seconds of a row in the larger of two batches, relative to the smaller."""
    few, many = ((n, steps[n].step_seconds) for n in sorted(steps))
    return few[0] * many[1] / (many[0] * few[1]) if few[1] else 1.0


def _totals_of(
    small: Graph, large: Graph, few: int, many: int, wanted: int
) -> Iterator[_Totals]:
    """Seconds of a batch and per row, then of the update, in each queue.

    They are those at the end that is nearer to the wanted batch, of which they grow
    with the rows as the seconds of every op do.
    """
    stop = large.backward_stop
    for name in ("seconds", "launch_seconds"):
        low, high = ([getattr(op, name) for op in g.ops] for g in (small, large))
        slopes = [
            seconds_per_row((few, a), (many, b), wanted)
            for a, b in zip(low, high, strict=False)
        ]
        at = low if wanted < few else high
        yield sum(at[:stop]), sum(slopes[:stop]), sum(at[stop:]), sum(slopes[stop:])


def _are_alike(one: Graph, other: Graph) -> bool:
    """Whether peaks are equal, and seconds nearly: as far as measuring tells."""
    peaks = {Simulator(graph).run().peak_bytes for graph in (one, other)}
    most = _NOISE if other.costs == MEASURED else _CLOSE
    close = math.isclose(one.step_seconds, other.step_seconds, rel_tol=most)
    return len(peaks) == 1 and close


def grid(most: int) -> list[int]:
    """Batches up to the largest one, at most ``ALL_TRIED``, in geometric steps.

    >>> grid(3), grid(1000)[-3:]
    ([1, 2, 3], [285, 534, 1000])
    """
    if most <= ALL_TRIED:
        return [*range(1, most + 1)]
    steps = {round(most ** (k / (_GRID - 1))) for k in range(_GRID)}
    return sorted(steps)
