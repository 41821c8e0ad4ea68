"""The moments of a step that a plot shows: a few, including every peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckplan.simulating.alive import Alive, largest_alive
from ckplan.simulating.allocations import Level
from ckplan.simulating.curve import PHASES, predicted_curve
from ckplan.simulating.simulate import Timeline

_PER_PHASE = 90


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment of a step, as plots show it."""

    place: float  # 0 to 3: every phase is 1 wide
    seconds: float  # since the step began
    where: str
    by_kind: dict[str, int]
    alive: tuple[Alive, ...]  # the largest ones
    reserved_bytes: int | None  # by PyTorch's allocator, on a GPU

    @property
    def live_bytes(self) -> int:
        """Total live bytes."""
        return sum(self.by_kind.values())


def sample_moments(timeline: Timeline, per_phase: int = _PER_PHASE) -> list[int]:
    """Half moments in order: the one with most live bytes in each part of a phase."""
    found: dict[int, int] = {}
    live = timeline.live_bytes
    for moment, (place, _) in enumerate(predicted_curve(timeline).placed()):
        part = min(int(place * per_phase), per_phase * len(PHASES) - 1)
        if part not in found or live[moment] > live[found[part]]:
            found[part] = moment
    return sorted({*found.values(), timeline.peak_moment} if live else found.values())


def sample(timeline: Timeline, levels: Sequence[Level] = ()) -> list[Sample]:
    """The moments that a plot shows, with the tensors alive at each.

    Args:
        timeline: The step, planned or not.
        levels: Levels of PyTorch's allocator at each half moment, if known.
    """
    curve = predicted_curve(timeline)
    placed = curve.placed()
    return [
        Sample(
            placed[moment][0],
            curve.points[moment][0],
            timeline.graph.place(moment // 2),
            timeline.bytes_by_kind(moment),
            largest_alive(timeline, moment),
            levels[moment].reserved_bytes if levels else None,
        )
        for moment in sample_moments(timeline)
        if moment < len(placed)
    ]
