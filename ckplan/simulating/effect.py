"""What one region alone does to a step: what it drops, holds, makes and runs again."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

FIRST = LATER = -1


class Interval(NamedTuple):
    """Bytes alive over the half moments ``[start, stop]``.

    Within a gap, ticks of the region's replay say what came first. What is born
    ``FIRST`` is there before an op begins; what ends at ``LATER`` outlives all that
    its last half moment allocates.
    """

    start: int
    stop: int
    bytes: int
    born: int = 0  # ticks
    died: int = LATER


@dataclass(slots=True)
class Effect:
    """What one region does to the unplanned step."""

    dropped: set[int] = field(default_factory=set)  # indices of saved tensors
    retained: dict[int, int] = field(default_factory=dict)  # storage -> half moment
    # What it allocates: what is rebuilt, random states and encoded forms.
    made: list[Interval] = field(default_factory=list)
    workspaces: list[Interval] = field(default_factory=list)  # of what runs again
    # Of a gap: most bytes alive until something held goes, until the next goes, ...
    spikes: dict[int, list[int]] = field(default_factory=dict)
    # Of a gap: held storages that go in its midst, in order, and their ticks.
    going: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    encoding: dict[int, int] = field(default_factory=dict)  # half moment -> workspace
    seconds: float = 0.0  # on the busier side of the step: device or launching
    hidden_seconds: float = 0.0  # on the other side
    engine_seconds: float = 0.0  # of the CPU beside its ops, on whichever side that is
    steps: list[int] = field(default_factory=list)  # ops that run again, in order

    def hold(self, storage: int, until: int) -> None:
        """Keep a storage alive at least to a half moment."""
        self.retained[storage] = max(self.retained.get(storage, -1), until)

    def let_go(self, storage: int, gap: int, tick: int, alive_bytes: int) -> None:
        """Hold a storage no longer, in the midst of a gap."""
        self.hold(storage, gap)
        self.going.setdefault(gap, []).append((storage, tick))
        self.spikes.setdefault(gap, [alive_bytes]).append(0)

    def excess(self, gone: Mapping[int, Mapping[int, int]]) -> dict[int, int]:
        """Most bytes alive at a half moment beyond what is counted there.

        Args:
            gone: Of a gap: storages that nobody holds once this region lets them go
                there, and their bytes, which count in the whole gap.
        """
        moments = sorted(self.spikes)
        level = [0] * (len(moments) + 1)
        for interval in self.made:
            level[bisect_left(moments, interval.start)] += interval.bytes
            level[bisect_right(moments, interval.stop)] -= interval.bytes
        counted = zip(moments, accumulate(level), strict=False)
        spikes = {
            at: self.spike(at, gone.get(at, {}))[0] - sum_ for at, sum_ in counted
        }
        return {**self.encoding, **spikes}  # one at odd moments, one at even ones

    def spike(self, gap: int, gone: Mapping[int, int]) -> tuple[int, int]:
        """Most bytes alive in a gap, what went before counted off; how many went."""
        found, before, went_bytes = self.spikes.get(gap, (0,))[0], 0, 0
        for number, (storage, _) in enumerate(self.going.get(gap, ()), 1):
            went_bytes += gone.get(storage, 0)
            most = self.spikes[gap][number] - went_bytes
            if most > found:
                found, before = most, number
        return found, before

    def made_bytes(self, moment: int, part: int) -> int:
        """Bytes of what it made; in a gap, no more than are alive there at once."""
        alive = sum(i.bytes for i in self.made if i.start <= moment <= i.stop)
        return min(alive, self.spikes[moment][part] if moment in self.spikes else alive)
