"""Planned against unplanned seconds, with their spread, or why there are none.

Both steps run in turns, so the ratio of each round is of the same moments. On a busy
machine these ratios say more about the other programs than about the plan. No figure is
given then.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ckplan.tracing.costs.spread import Load, Quartiles, machine_load, quartiles
from ckplan.verifying.phases import PhaseSeconds, TimedStep, median_phases

__all__ = ["Load", "Quartiles", "Timing", "compare_times", "machine_load", "quartiles"]

LEAST_ROUNDS = 3
MOST_SPREAD = 0.10  # between the quartiles, as a fraction of the unplanned step
MOST_RELATIVE_SPREAD = 0.25  # of the overhead itself, if that is more


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured seconds of both steps; None where nothing was measured."""

    unplanned_seconds: float | None  # medians
    planned_seconds: float | None
    unplanned: PhaseSeconds | None
    planned: PhaseSeconds | None
    overhead: Quartiles | None = None  # None too if it could not be measured
    added_seconds: Quartiles | None = None  # by the plan, in forward and backward
    problem: str | None = None  # why time could not be measured


def compare_times(
    unplanned: Sequence[TimedStep], planned: Sequence[TimedStep], load: Load
) -> Timing:
    """Compare steps that ran in turns.

    Args:
        unplanned: Steps without the plan; empty if the two do not fit together.
        planned: Steps with the plan, one per round; empty if none was timed.
        load: Load of the machine before the steps.
    """
    overhead = quartiles(
        [b.seconds / a.seconds - 1 for a, b in zip(unplanned, planned, strict=False)]
    )
    added = quartiles(
        [
            b.phases.model_seconds - a.phases.model_seconds
            for a, b in zip(unplanned, planned, strict=False)
            if a.phases is not None and b.phases is not None
        ]
    )
    problem = _problem(overhead, min(len(unplanned), len(planned)), load)
    if not planned:
        problem = None
    return Timing(
        _median(unplanned),
        _median(planned),
        median_phases(unplanned),
        median_phases(planned),
        None if problem else overhead,
        None if problem else added,
        problem,
    )


def _problem(overhead: Quartiles | None, rounds: int, load: Load) -> str | None:
    """Why seconds say nothing, in one line."""
    if load.is_high:
        return (
            f"the machine is busy (load average {load.running:.1f}, {load.cores} cores)"
        )
    if overhead is None:
        return None
    if rounds < LEAST_ROUNDS:
        return f"a spread needs at least {LEAST_ROUNDS} rounds, not {rounds}"
    most = max(MOST_SPREAD, MOST_RELATIVE_SPREAD * abs(overhead.median))
    spread = overhead.high - overhead.low
    if spread <= most:
        return None
    return (
        f"the quartiles of the rounds are {100 * spread:.1f} points apart, more than "
        f"{100 * most:.1f}"
    )


def _median(steps: Sequence[TimedStep]) -> float | None:
    return statistics.median(step.seconds for step in steps) if steps else None
