"""The report of ``verify``: planned steps compared with unplanned steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table

from ckplan import units
from ckplan.errors import VerifyError
from ckplan.report.energy import energy_section
from ckplan.report.phases import seconds_section
from ckplan.report.tables import add_row, key_value_table, make_table, section
from ckplan.report.timeline import timeline_report

if TYPE_CHECKING:
    from ckplan.verifying.dry_run import DryRun
    from ckplan.verifying.outcome import AbstractOutcome
    from ckplan.verifying.verify import Verification

_NONE = "n/a"
_FAR = 0.05  # of a peak: what no prediction errs by


def verification_report(found: Verification) -> RenderableType:
    """Predicted and measured figures, and whether results are bitwise equal."""
    rows = [
        ("budget", _size(found.budget_bytes)),
        ("fits", "yes" if found.fits else "no"),
        ("loss", _equal(found.loss_equal, close=found.is_close)),
        ("gradients", _equal(found.gradients_equal, close=found.is_close)),
        ("buffers", _equal(found.buffers_equal)),
        ("random state", _equal(found.random_state_equal)),
        *(("differs", name) for name in found.different),
        *_spilled(found),
        *_regions(found),
        *(("note", note) for note in found.notes),
    ]
    return Group(
        section("Predicted and measured", _numbers(found)),
        *seconds_section(found),
        *energy_section(found.energy),
        *([timeline_report(found.curves)] if found.curves else []),
        section("Planned against unplanned", key_value_table(rows)),
    )


def remarks(found: AbstractOutcome, *, has_trace: bool) -> Iterator[str]:
    """What users should know of the plan, its regions, and what is not predicted."""
    recorded = ", ".join(found.regions_recorded)
    anew = (
        f"each step records the forwards of {recorded} anew, as nothing tells that "
        "they repeat an earlier one; `by: rerun` may be faster"
    )
    idle = [f"the region {call} never ran" for call in found.regions_idle]
    warnings = [*idle, *([anew] if recorded else []), *_far_off(found)]
    yield from (f"warning: {warning}" for warning in warnings)
    if not has_trace:
        yield "no trace of it: --trace FILE predicts seconds and timeline"


def _far_off(found: AbstractOutcome) -> Iterator[str]:
    """What to do with a plan whose prediction is that of another step."""
    predicted = found.predicted_peak_bytes
    measured = getattr(found, "measured_peak_bytes", None)  # a dry run has none
    if predicted and measured and abs(measured / predicted - 1) > _FAR:
        yield (
            f"the peak is {measured / predicted:.2f} times what the plan predicts: "
            "profile and solve it again"
        )


def dry_run_report(found: DryRun) -> RenderableType:
    """Predicted and dry-run figures, and the limits of a dry run."""
    table = make_table("", "predicted", "dry run")
    peaks = (found.predicted_peak_bytes, found.dry_run_peak_bytes)
    unplanned = (
        found.unplanned_predicted_peak_bytes,
        found.unplanned_dry_run_peak_bytes,
    )
    add_row(table, "peak", *map(_size, peaks))
    add_row(table, "peak unplanned", *map(_size, unplanned))
    rows = [
        ("budget", _size(found.budget_bytes)),
        ("fits", "yes" if found.fits else "no"),
        *_regions(found),
        *(("note", note) for note in found.notes),
    ]
    return Group(
        section("Predicted and dry run, without values", table),
        timeline_report(found.curves),
        key_value_table(rows),
    )


def dry_run_error(found: DryRun) -> VerifyError:
    """The error that says why a dry run failed."""
    return _exceeds("peak of the dry run", found.dry_run_peak_bytes, found)


def verification_error(found: Verification) -> VerifyError:
    """The error that says why a verification failed."""
    if not found.fits:
        return _exceeds("measured peak", found.measured_peak_bytes, found)
    if found.largest_difference and found.stated_difference:
        far, stated = f"{found.largest_difference:.1e}", found.stated_difference
        if found.largest_difference > stated:
            return VerifyError(
                f"the planned step differs from the unplanned one by {far} of the "
                "largest value",
                needed=f"at most {stated:.1e}, as the plan states for "
                f"{found.close_tiles[0]}",
                hint=f"difference: {1.06 * found.largest_difference:.1e} in the plan, "
                "or solve again without `--allow close`",
            )
    first = ", ".join(found.different[:3])
    return VerifyError(
        f"the planned step differs from the unplanned one: {first}",
        needed="the same bits in loss, gradients, buffers and random state",
        hint=f"tiles of {found.close_tiles[0]} may round otherwise; solve again "
        "without `--allow close` for the same bits"
        if found.close_tiles
        else "`ckplan profile`, which says under Hazards if the model alone differs "
        "from run to run; if not, leave these modules out, and report it as a bug",
    )


def _exceeds(what: str, peak_bytes: int, found: AbstractOutcome) -> VerifyError:
    excess = _size(peak_bytes - (found.budget_bytes or 0))
    return VerifyError(
        f"the planned step exceeds its budget by {excess}: {what} {_size(peak_bytes)}",
        needed=f"at most {_size(found.budget_bytes)}",
        hint=_remedy(found),
    )


def _remedy(found: AbstractOutcome) -> str:
    """The hint for a step that does not fit."""
    if found.other:
        return "ckplan profile and solve for this workload: the plan is of another one"
    if found.regions_kept:
        first = found.regions_kept[0]
        return f"leave out {first}, whose ops vary between steps, or a larger --reserve"
    return "ckplan solve with a smaller --budget, or with --reserve"


def _numbers(found: Verification) -> Table:
    table = make_table("", "predicted", "measured", "measured unplanned")
    add_row(
        table,
        "peak",
        _size(found.predicted_peak_bytes),
        _size(found.measured_peak_bytes),
        _size(found.unplanned_measured_peak_bytes),
    )
    of_gpu = {
        "allocated": (found.predicted_allocated_bytes, found.measured_allocated_bytes),
        "reserved": (found.predicted_reserved_bytes, found.measured_reserved_bytes),
    }
    for name, (predicted, measured) in of_gpu.items():
        if measured is not None:
            add_row(table, name, _size(predicted), _size(measured), "")
    overheads = (found.predicted_overhead, found.overhead)
    add_row(table, "overhead", *map(_percent, overheads), "")
    if found.overhead_quartiles is not None:
        low, high = map(_percent, found.overhead_quartiles)
        add_row(table, "its quartiles", "", f"{low} to {high}", "")
    return table


def _spilled(found: Verification) -> list[tuple[str, str]]:
    pinned = f"{_size(found.host_bytes)} of host memory, pinned"
    file = f"{_size(found.spilled_bytes)} in a file, while steps run"
    there = (found.host_bytes, pinned), (found.spilled_bytes, file)
    words = ", and ".join(text for num_bytes, text in there if num_bytes)
    return [("offload", words)] if words else []


def _regions(found: AbstractOutcome) -> list[tuple[str, str]]:
    ran = f"{found.regions_ran} ran, {len(found.regions_idle)} never ran"
    return [
        ("regions", ran),
        *(("never ran", call) for call in found.regions_idle),
        *(("kept all", call) for call in found.regions_kept),
        *(("recorded anew", call) for call in found.regions_recorded),
        *(("not the plan's", difference) for difference in found.other),
    ]


def _size(num_bytes: int | None) -> str:
    return _NONE if num_bytes is None else units.format_bytes(num_bytes)


def _percent(overhead: float | None) -> str:
    return _NONE if overhead is None else units.format_percent(overhead, sign=True)


def _equal(equal: bool | None, *, close: bool = False) -> str:
    if equal is None:
        return "not compared"
    if close and not equal:
        return "close, as the plan states"
    return "bitwise equal" if equal else "different"
