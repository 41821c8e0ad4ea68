"""Live bytes over one training step: what timelines of all kinds come down to.

Predicted, dry-run and measured timelines have their own clocks. Side by side they are
compared phase by phase, each phase drawn equally wide.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Curve:
    """Live bytes at points of a step, in order of time."""

    points: tuple[tuple[float, int], ...]  # seconds, bytes alive from then on
    bounds: tuple[float, ...]  # seconds at which each phase begins, and the end

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return max((level for _, level in self.points), default=0)

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
        first, last = bisect_right(seconds, start), bisect_right(seconds, stop)
        return max(
            (level for _, level in self.points[max(first - 1, 0) : last]), default=0
        )
