"""The setting with the most samples per second, of one way to train.

Samples per second rise with the batch while the step has constant costs (launches, the
optimizer), and fall once plans must recompute. All batches are tried if they are few.
Else a geometric grid is, with the largest batch unplanned and planned; then the
neighbourhood of the best is halved until no batch in it can be better by more than
``_CLOSE``: no plan makes a step faster, so the unplanned step bounds each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

from ckplan.errors import WorkloadError
from ckplan.graph.graph import Graph
from ckplan.simulating.simulate import Timeline
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.replays import ReplayedPlan
from ckplan.tuning.batches import Batches
from ckplan.tuning.largest import largest_batch, plan_within
from ckplan.tuning.settings import Setting, Way

_ALL = 24  # largest number of batches that are all tried
_GRID = 12  # batches of a grid
_CLOSE = 1e-3  # relative gain that is not worth another batch


@dataclass
class WaySearch:
    """The settings of one way to train."""

    way: Way
    one: Batches  # no accumulation
    several: Batches  # accumulates
    limit: MemoryLimit
    accumulate: int = 1  # micro-batches per step of the optimizer
    total: int | None = None  # rows per step of the optimizer, if they are given
    start: int = 8  # batch where searches begin
    refused: dict[int, str] = field(default_factory=dict)  # batch -> why
    _settings: dict[tuple[int, bool], Setting | None] = field(default_factory=dict)

    @cached_property
    def largest_unplanned(self) -> int:
        """Largest micro-batch without a plan; 0 if not one row fits."""
        return self._largest(planned=False)

    @cached_property
    def largest_planned(self) -> int:
        """Largest micro-batch with some plan; 0 if not one row fits."""
        return max(self._largest(planned=True), self.largest_unplanned)

    def _largest(self, *, planned: bool) -> int:
        most = {} if self.total is None else {"most": self.total}
        return largest_batch(
            self.graph_at, self.limit, planned, start=self.start, **most
        )

    def accumulation(self, rows: int) -> int:
        """Micro-batches of a step of the optimizer."""
        return self.accumulate if self.total is None else max(self.total // rows, 1)

    def batches_of(self, rows: int) -> Batches:
        """The steps among which that of a micro-batch is."""
        return self.one if self.accumulation(rows) == 1 else self.several

    def graph_at(self, rows: int) -> Graph:
        """The step at a micro-batch."""
        batches = self.batches_of(rows)
        return batches.with_accumulation(rows, self.accumulation(rows))

    def setting(self, rows: int, *, planned: bool = True) -> Setting | None:
        """The fastest setting at a micro-batch; None if none fits."""
        key = rows, planned
        if key not in self._settings:
            self._settings[key] = self._find(rows, planned)
        return self._settings[key]

    def _find(self, rows: int, planned: bool) -> Setting | None:
        if rows in self.refused:
            return None
        graph = self.graph_at(rows)
        found = plan_within(graph, self.limit)
        if found is None or (found[1] and not planned):
            return None
        return self._setting_of(rows, found)

    def _setting_of(self, rows: int, found: ReplayedPlan) -> Setting:
        timeline, regions = found
        return Setting(
            way=self.way,
            batch=rows,
            accumulate=self.accumulation(rows),
            regions=regions,
            peak_bytes=timeline.peak_bytes,
            step_seconds=seconds_of(timeline),
            overhead=timeline.overhead,
            profiled=rows in self.batches_of(rows).recorded,
        )

    def best(self, *, planned: bool = True) -> Setting | None:
        """The setting with the most samples per second; None if not one row fits."""
        most = self.largest_planned if planned else self.largest_unplanned
        tried = [self.setting(n, planned=planned) for n in self._first(most)]
        found = [one for one in tried if one is not None]
        if not found:
            return None
        best = max(found, key=_speed)
        while self.total is None:
            rows = self._next(best, planned, most)
            if rows is None:
                return best
            one = self.setting(rows, planned=planned)
            best = max((one for one in (best, one) if one), key=_speed)
        return best

    def _first(self, most: int) -> list[int]:
        if most < 1:
            return []
        if self.total is not None:
            return [n for n in range(1, most + 1) if self.total % n == 0]
        return grid(most, {self.largest_unplanned} & {*range(1, most + 1)})

    def _next(self, best: Setting, planned: bool, most: int) -> int | None:
        """A batch between the best and a neighbour that may be better yet."""
        known = sorted(n for n, plan in self._settings if plan == planned and n <= most)
        place = known.index(best.batch)
        gaps = zip(known[max(place - 1, 0) :], known[place : place + 2], strict=False)
        for low, high in sorted(gaps, key=lambda gap: gap[0] - gap[1]):
            least = best.samples_per_second * (1 + _CLOSE)
            if high - low > 1 and self._bound(high) > least:
                return (low + high) // 2
        return None

    def _bound(self, rows: int) -> float:
        """Samples per second of the unplanned step, whether it fits or not."""
        return rows * self.accumulation(rows) / self.graph_at(rows).step_seconds

    def curve(self) -> list[tuple[int, Setting | None, Setting | None]]:
        """(batch, setting without a plan, with the best plan), smallest batch first."""
        rows = {n for n, _ in self._settings} or {*self._first(self.largest_planned)}
        return [
            (n, self.setting(n, planned=False), self.setting(n))
            for n in sorted(rows)
            if self.setting(n) is not None
        ]

    def check(self, rows: int) -> None:
        """Record the step at a batch; settings found on drawn steps are forgotten."""
        batches = self.batches_of(rows)
        if rows not in batches.recorded:
            try:
                batches.recorded_at(rows)
            except WorkloadError as error:
                self.refused[rows] = error.what
            self._settings.clear()
            for name in ("largest_unplanned", "largest_planned"):
                self.__dict__.pop(name, None)


def seconds_of(timeline: Timeline) -> float:
    """Seconds of a step of the optimizer: all micro-batches and all recomputation."""
    return timeline.graph.step_seconds + timeline.recompute_seconds


def grid(most: int, more: Iterable[int] = ()) -> list[int]:
    """Batches up to the largest one, at most ``_ALL``, in geometric steps.

    >>> grid(3), grid(1000)[-3:]
    ([1, 2, 3], [285, 534, 1000])
    """
    if most <= _ALL:
        return [*range(1, most + 1)]
    steps = {round(most ** (k / (_GRID - 1))) for k in range(_GRID)}
    return sorted({*steps, *more})


def _speed(setting: Setting) -> float:
    return setting.samples_per_second


Search = Callable[[Way], WaySearch]
