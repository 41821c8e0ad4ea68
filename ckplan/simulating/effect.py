"""The effect of one region on a step: storages dropped, held, allocated; ops rerun."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import NamedTuple

BEFORE_OP = AFTER_MOMENT = NO_STORAGE = -1
REBUILT, ENCODED, COPIED, RETURNED = "rebuilt", "encoded", "copied", "returned"


class Interval(NamedTuple):
    """Bytes alive over the half moments ``[start, stop]``.

    Ticks order the events of one region within a gap. A start tick of ``BEFORE_OP``
    means: allocated before the op begins. A stop tick of ``AFTER_MOMENT`` means: freed
    after all allocations of the last half moment.
    """

    start: int
    stop: int
    bytes: int
    start_tick: int = 0
    stop_tick: int = AFTER_MOMENT
    storage: int = NO_STORAGE  # whose content it has
    form: str = ""  # REBUILT, ENCODED, COPIED or RETURNED


class Work(NamedTuple):
    """What a region adds to the two queues of a GPU's step at a half moment."""

    moment: int
    launch_seconds: float  # of the CPU, the engine left out
    device_seconds: float
    engine_seconds: float = 0.0  # of the CPU


@dataclass(slots=True)
class Effect:
    """The changes that one region makes to the unplanned step."""

    dropped: set[int] = field(default_factory=set)  # indices of saved tensors
    retained: dict[int, int] = field(
        default_factory=dict
    )  # storage -> held until this half moment
    # Allocations of the region: rebuilt values, random states and encoded forms.
    allocated: list[Interval] = field(default_factory=list)
    workspaces: list[Interval] = field(default_factory=list)  # of ops that rerun
    # Gap -> most bytes alive before the first held storage is freed, then before the
    # second, and so on.
    gap_peaks: dict[int, list[int]] = field(default_factory=dict)
    # Gap -> (held storage, tick) of those freed within the gap, in order.
    freed_in_gap: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    encoding: dict[int, int] = field(default_factory=dict)  # half moment -> workspace
    seconds: float = (
        0.0  # in the busier queue of the unplanned step: what solvers add up
    )
    engine_seconds: float = 0.0  # CPU time of the engine itself
    steps: list[int] = field(default_factory=list)  # ops that rerun, in order
    gaps: list[int] = field(default_factory=list)  # half moment of each of these
    coded: list[tuple[int, float]] = field(
        default_factory=list
    )  # (half moment, seconds) of encoding and decoding
    work: list[Work] = field(default_factory=list)  # on a GPU: more in its queues
    # Moved values, see moving.py:
    moved: dict[int, int] = field(default_factory=dict)  # storage -> op that made it
    small: dict[int, int] = field(default_factory=dict)  # bytes of those encoded before
    asked: int = -1  # gap of the first dropped tensor that backward asks for
    begun: int = 0  # how many of them begin to return then
    returns: list[tuple[int, int]] = field(default_factory=list)  # (storage, gap)
    wants: list[tuple[int, int]] = field(default_factory=list)  # (storage, gap)
    exhausted: int = -1  # gap in which the last of them is wanted
    exhausted_tick: int = 0  # when, within the gap

    def hold(self, storage: int, until: int) -> None:
        """Keep a storage alive at least to a half moment."""
        self.retained[storage] = max(self.retained.get(storage, -1), until)

    def free_in_gap(self, storage: int, gap: int, tick: int, alive_bytes: int) -> None:
        """Hold a storage until a tick within a gap, when ``alive_bytes`` are alive."""
        self.hold(storage, gap)
        self.freed_in_gap.setdefault(gap, []).append((storage, tick))
        self.gap_peaks.setdefault(gap, [alive_bytes]).append(0)

    def excess(self, freed: Mapping[int, Mapping[int, int]]) -> dict[int, int]:
        """Half moment -> peak bytes beyond those that intervals count there.

        Args:
            freed: Gap -> storage -> bytes, of storages that this region is the last to
                hold. Intervals count these bytes for the whole gap.
        """
        moments = sorted(self.gap_peaks)
        change = [0] * (len(moments) + 1)
        for interval in self.allocated:
            change[bisect_left(moments, interval.start)] += interval.bytes
            change[bisect_right(moments, interval.stop)] -= interval.bytes
        counted = zip(moments, accumulate(change), strict=False)
        gap_peaks = {
            gap: self.gap_peak(gap, freed.get(gap, {}))[0] - sum_
            for gap, sum_ in counted
        }
        return {
            **self.encoding,
            **gap_peaks,
        }  # odd moments and even moments: never the same key

    def gap_peak(self, gap: int, freed: Mapping[int, int]) -> tuple[int, int]:
        """Peak bytes of a gap, less those freed before it, and how many were freed."""
        found, before, freed_bytes = self.gap_peaks.get(gap, (0,))[0], 0, 0
        for number, (storage, _) in enumerate(self.freed_in_gap.get(gap, ()), 1):
            freed_bytes += freed.get(storage, 0)
            most = self.gap_peaks[gap][number] - freed_bytes
            if most > found:
                found, before = most, number
        return found, before

    def allocated_at(self, moment: int, part: int) -> list[Interval]:
        """Its allocations alive at a half moment; in a gap, when most bytes are.

        Args:
            moment: The half moment.
            part: In a gap, how many held storages are freed before.
        """
        alive = [one for one in self.allocated if one.start <= moment <= one.stop]
        if moment not in self.gap_peaks:
            return alive
        alive += (one for one in self.workspaces if one.start == moment)
        change = Counter[float]()
        spans = [_ticks(one, moment) for one in alive]
        for one, (since, until) in zip(alive, spans, strict=True):
            change[since] += one.bytes
            change[until] -= one.bytes
        freed = [tick for _, tick in self.freed_in_gap.get(moment, ())]
        low, high = [-1, *freed][part], [*freed, inf][part]
        ticks = sorted(change)
        level = dict(
            zip(ticks, accumulate(change[tick] for tick in ticks), strict=True)
        )
        within = [tick for tick in ticks if low <= tick <= high] or [low]
        peak = max(within, key=lambda tick: level.get(tick, 0))
        return [
            one
            for one, (since, until) in zip(alive, spans, strict=True)
            if since <= peak < until
        ]

    def allocated_bytes(self, moment: int, part: int) -> int:
        """Bytes of its allocations; in a gap, at most those alive there together."""
        alive = sum(i.bytes for i in self.allocated if i.start <= moment <= i.stop)
        return min(
            alive, self.gap_peaks[moment][part] if moment in self.gap_peaks else alive
        )


def _ticks(interval: Interval, gap: int) -> tuple[float, float]:
    """The ticks [start, stop) of a gap that an interval is alive."""
    since = interval.start_tick if interval.start == gap else BEFORE_OP
    ends = interval.stop == gap and interval.stop_tick != AFTER_MOMENT
    return since, interval.stop_tick if ends else inf
