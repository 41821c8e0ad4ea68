"""Live bytes over one training step: predicted, dry-run or measured.

Each of these has its own clock. They are compared phase by phase, and each phase is
drawn equally wide.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from ckplan.simulating.simulate import Timeline

PHASES = ("forward", "backward", "optimizer")
UNPLANNED, PLANNED = "unplanned", "planned"
PREDICTED, MEASURED, DRY_RUN = "predicted", "measured", "dry run"


@dataclass(frozen=True, slots=True)
class Curve:
    """Live bytes at points of a step, in order of time."""

    points: tuple[tuple[float, int], ...]  # (seconds, live bytes from then on)
    bounds: tuple[float, ...]  # start of each phase, and the end, in seconds

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return max((level for _, level in self.points), default=0)

    def placed(self) -> list[tuple[float, int]]:
        """The points as (position, live bytes); every phase is 1 wide."""
        found = []
        for second, level in self.points:
            phase = min(max(bisect_right(self.bounds, second) - 1, 0), len(PHASES) - 1)
            start, stop = self.bounds[phase : phase + 2]
            if second >= self.bounds[0]:
                share = (second - start) / (stop - start) if stop > start else 1.0
                found.append((phase + min(share, 1.0), level))
        return found

    def columns(self, width: int) -> list[list[int]]:
        """Most live bytes in each of ``width`` equal parts of every phase."""
        seconds = [second for second, _ in self.points]
        found = []
        for start, stop in pairwise(self.bounds):
            edges = [start + (stop - start) * i / width for i in range(width + 1)]
            found.append([self._most(seconds, *edge) for edge in pairwise(edges)])
        return found

    def as_json(self) -> dict[str, Any]:
        """Plain values, with units in the keys."""
        names = (*PHASES, "end")
        return {
            "phase_seconds": dict(zip(names, self.bounds, strict=True)),
            "seconds": [round(second, 9) for second, _ in self.points],
            "live_bytes": [level for _, level in self.points],
        }

    def _most(self, seconds: list[float], start: float, stop: float) -> int:
        first, last = bisect_left(seconds, start), bisect_left(seconds, stop)
        if first == len(seconds) or seconds[first] > start:
            first = max(first - 1, 0)  # the level before the part applies at its start
        within = self.points[first : max(last, first + 1)]
        return max((level for _, level in within), default=0)


Curves: TypeAlias = Mapping[str, Mapping[str, Curve]]
"""UNPLANNED and PLANNED -> PREDICTED, MEASURED, DRY_RUN -> curve, where known."""


def curves_json(curves: Curves) -> dict[str, Any]:
    """All curves as plain values."""
    return {
        which: {kind.replace(" ", "_"): c.as_json() for kind, c in found.items()}
        for which, found in curves.items()
    }


def predicted_curve(timeline: Timeline) -> Curve:
    """The simulated live bytes at the start times of the ops.

    Recomputation has no width of its own: it happens in the gap before an op. The half
    moment after the last op is left out.
    """
    graph = timeline.graph
    begins = [0.0, *accumulate(graph.critical_seconds)]
    moments = enumerate(timeline.live_bytes[:-1])
    points = tuple((begins[moment // 2], level) for moment, level in moments)
    phases = (0, graph.num_forward, graph.num_forward + graph.num_backward)
    return Curve(points, (*(begins[op] for op in phases), begins[-1]))
