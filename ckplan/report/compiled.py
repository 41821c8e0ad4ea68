"""The reports of ``verify --compile`` and ``compare --compile``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from ckplan import units
from ckplan.errors import VerifyError
from ckplan.report.tables import add_row, key_value_table, make_table, section

if TYPE_CHECKING:
    from ckplan.verifying.compiled_comparison import CompiledComparison
    from ckplan.verifying.compiled_steps import CompiledVerification

_NONE = "n/a"
_LEAST = "least: contractions that any choice runs again which saves no more bytes"
_WRONGLY = (
    "torch.compile itself computes another step than the uncompiled one, with a plan "
    "and without: look for the op that it compiles wrongly, such as "
    "x.add_(a @ b, alpha=0.1) (issue 167313 of pytorch), before you train compiled"
)


def compiled_report(found: CompiledVerification) -> RenderableType:
    """Replayed and measured peaks, seconds, and whether results are bitwise equal."""
    table = make_table("", "replayed", "measured")
    peaks = found.replayed_peak_bytes, found.measured_peak_bytes
    add_row(table, "peak", *map(units.format_bytes, peaks))
    unplanned = found.unplanned_replayed_peak_bytes, found.unplanned_measured_peak_bytes
    add_row(table, "peak unplanned", *map(units.format_bytes, unplanned))
    equal = {
        "loss": found.loss_equal,
        "gradients": found.gradients_equal,
        "buffers": found.buffers_equal,
    }
    rounded = found.largest_difference <= found.rounding
    other = "equal but for rounding" if rounded else "different"
    state = "bitwise equal" if found.random_state_equal else "different"
    limit = found.budget_bytes
    said = [
        ("budget", _NONE if limit is None else units.format_bytes(limit)),
        ("fits", "yes" if found.fits else "no"),
        *([("graphs", str(found.graphs))] if found.graphs > 1 else ()),
        *(
            ("runs uncompiled", f"{path}, keeps {units.format_bytes(num_bytes)}")
            for path, num_bytes in found.uncompiled_bytes.items()
        ),
        *((name, "bitwise equal" if yes else other) for name, yes in equal.items()),
        ("random state", state),
        *(("differs", name) for name in found.different),
        ("largest difference", f"{found.largest_difference:.1e}"),
        ("from uncompiled", _difference(found.largest_difference_from_eager)),
        *(("rounding alone", name) for name in found.rounding_alone),
        *(
            ("unplanned steps differ", f"by {by:.1e} in {name}")
            for name, by in found.unplanned_differences.items()
        ),
        ("step", _seconds(found.step_seconds)),
        ("step unplanned", _seconds(found.unplanned_step_seconds)),
        ("overhead", _percent(found.overhead)),
        ("overhead estimated", _percent(found.predicted_overhead)),
    ]
    parts: list[RenderableType] = [
        section("Forward and backward, compiled", table),
        section("Planned against unplanned", key_value_table(said)),
    ]
    if found.compiled_wrongly:
        parts.append(Text(_WRONGLY, style="bold red"))
    return Group(*parts)


def compiled_error(found: CompiledVerification) -> VerifyError:
    """The error for compiled steps that differ, or exceed their budget."""
    if not found.fits and found.budget_bytes is not None:
        peak, budget = map(
            units.format_bytes, (found.measured_peak_bytes, found.budget_bytes)
        )
        return VerifyError(
            f"the compiled step exceeds its budget: measured peak {peak}",
            needed=f"at most {budget}",
            hint="a smaller budget: temporary memory of uncompiled code is beside it"
            if found.uncompiled_bytes
            else "report it, with the model: the replay should be exact",
        )
    first = ", ".join(found.different[:3])
    return VerifyError(
        f"the planned compiled step differs from the unplanned one: {first}",
        needed="the same bits, or gradients that differ by rounding alone",
        hint="train without this plan, and please report it",
    )


def compared_report(found: CompiledComparison) -> RenderableType:
    """Ways to divide a compiled step: replayed peaks, estimated seconds."""
    budget = units.format_bytes(found.budget_bytes)
    headers = ("", "peak", "saved", "step", "overhead", "least", "fits", "gradients")
    table = make_table(*headers)
    for one in found.steps:
        add_row(
            table,
            one.name,
            units.format_bytes(one.peak_bytes),
            units.format_bytes(one.saved_bytes),
            units.format_seconds(one.step_seconds),
            _percent(one.overhead),
            _percent(one.least_overhead),
            "yes" if one.fits else "no",
            "wrong" if one.is_wrong else "right",
            bold=one is found.steps[-1],
        )
    title = f"{found.model}, compiled, within {budget}: peaks replayed, time estimated"
    parts: list[RenderableType] = [section(title, table)]
    parts.append(Text(_LEAST))
    if any(one.draws_again for one in found.steps):
        parts.append(Text("wrong: backward draws other random numbers than forward"))
    if any(one.reads_changed for one in found.steps):
        parts.append(Text("wrong: backward reads a buffer after forward changed it"))
    return Group(*parts)


def _difference(fraction: float | None) -> str:
    return (
        "not compared: other random numbers" if fraction is None else f"{fraction:.1e}"
    )


def _seconds(seconds: float | None) -> str:
    return _NONE if seconds is None else units.format_seconds(seconds)


def _percent(overhead: float | None) -> str:
    return _NONE if overhead is None else units.format_percent(overhead, sign=True)
