"""What planned steps did beside unplanned ones: the report of ``verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table

from ckplan import units
from ckplan.errors import VerifyError
from ckplan.report.tables import add_row, facts, make_table, section

if TYPE_CHECKING:
    from ckplan.verifying.verify import Verification

_NONE = "n/a"


def verification_report(found: Verification) -> RenderableType:
    """Predicted beside measured, and whether the results are the same bits."""
    said = [
        ("budget", _size(found.budget_bytes)),
        ("fits", "yes" if found.fits else "no"),
        ("loss", _equal(found.loss_equal)),
        ("gradients", _equal(found.gradients_equal)),
        ("buffers", _equal(found.buffers_equal)),
        ("random state", _equal(found.random_state_equal)),
        *(("differs", name) for name in found.different),
        ("regions", f"{found.regions_ran} ran, {len(found.regions_idle)} never did"),
        *(("never ran", call) for call in found.regions_idle),
        *(("note", note) for note in found.notes),
    ]
    return Group(
        section("Predicted and measured", _numbers(found)),
        section("Planned against unplanned", facts(said)),
    )


def failure(found: Verification) -> VerifyError:
    """Why a verification has not passed."""
    if not found.fits:
        peak, budget = map(_size, (found.measured_peak_bytes, found.budget_bytes))
        return VerifyError(
            f"the planned step exceeds its budget: measured peak {peak}",
            needed=f"at most {budget}",
            hint="ckplan solve with a smaller --budget, or with --reserve",
        )
    first = ", ".join(found.different[:3])
    return VerifyError(
        f"the planned step computes something else than the unplanned one: {first}",
        needed="the same bits in loss, gradients, buffers and random state",
        hint="leave these modules out of the plan, and please report it",
    )


def _numbers(found: Verification) -> Table:
    table = make_table("", "predicted", "measured", "measured unplanned")
    add_row(
        table,
        "peak",
        _size(found.predicted_peak_bytes),
        _size(found.measured_peak_bytes),
        _size(found.unplanned_measured_peak_bytes),
    )
    seconds = (found.step_seconds, found.unplanned_step_seconds)
    add_row(table, "step", _NONE, *map(_seconds, seconds))
    overheads = (found.predicted_overhead, found.overhead)
    add_row(table, "overhead", *map(_percent, overheads), "")
    return table


def _size(num_bytes: int | None) -> str:
    return _NONE if num_bytes is None else units.format_bytes(num_bytes)


def _seconds(seconds: float | None) -> str:
    return _NONE if seconds is None else units.format_seconds(seconds)


def _percent(overhead: float | None) -> str:
    return _NONE if overhead is None else units.format_percent(overhead, sign=True)


def _equal(equal: bool | None) -> str:
    if equal is None:
        return "not compared"
    return "bitwise equal" if equal else "different"
