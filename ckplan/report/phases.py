"""Predicted and measured seconds of a verified step by phase, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from ckplan import units
from ckplan.report.tables import add_row, make_table, section

if TYPE_CHECKING:
    from ckplan.verifying.phases import PhaseSeconds
    from ckplan.verifying.verify import Verification

_HEADERS = (
    "predicted\nunplanned",
    "predicted\nplanned",
    "measured\nunplanned",
    "measured\nplanned",
)
_EXPLAINED = (
    "added: what forward and backward take longer with the plan. Recomputation runs in "
    "backward, the engine in both; timers see only the sum of the two."
)
_UNKNOWN: tuple[float | None, ...] = (None, None, None)


def seconds_section(found: Verification) -> Iterator[RenderableType]:
    """The table of seconds, or why there is none; nothing if nothing is known."""
    phases, problem = found.phases, found.timing_problem
    said = [] if problem is None else [Text(f"time could not be measured: {problem}")]
    if phases.predicted is not None or (phases.measured is not None and not problem):
        yield section("Seconds", _table(found), *(said or [Text(_EXPLAINED)]))
    elif said:
        yield section("Seconds", *said)


def _table(found: Verification) -> RenderableType:
    phases, predicted = found.phases, found.phases.predicted
    measured: tuple[PhaseSeconds | None, ...] = (None, None)
    totals: tuple[float | None, ...] = (None, None)
    if found.timing_problem is None:
        measured = phases.measured_unplanned, phases.measured
        totals = found.unplanned_step_seconds, found.step_seconds
    steps = (phases.predicted_unplanned, predicted, *measured)
    table = make_table("", *_HEADERS)
    every = [_UNKNOWN if step is None else _by_phase(step) for step in steps]
    for name, *seconds in zip(
        ("forward", "backward", "optimizer"), *every, strict=True
    ):
        add_row(table, name, *map(_seconds, seconds))
    parts = (None, None) if predicted is None else _by_plan(predicted)
    for name, part in zip(("recomputation", "engine"), parts, strict=True):
        add_row(table, name, "", _seconds(part), "", "")
    added = None if phases.added_seconds is None else phases.added_seconds.median
    total = None if predicted is None else sum(_by_plan(predicted))
    add_row(table, "added", "", _seconds(total), "", _seconds(added))
    add_row(
        table,
        "step",
        *(_seconds(step.total_seconds if step else None) for step in steps[:2]),
        *map(_seconds, totals),
        bold=True,
    )
    return table


def _by_phase(step: PhaseSeconds) -> tuple[float | None, ...]:
    return step.forward_seconds, step.backward_seconds, step.optimizer_seconds


def _by_plan(step: PhaseSeconds) -> tuple[float, float]:
    return step.recomputation_seconds or 0.0, step.engine_seconds or 0.0


def _seconds(seconds: float | None) -> str:
    return "n/a" if seconds is None else units.format_seconds(seconds)
