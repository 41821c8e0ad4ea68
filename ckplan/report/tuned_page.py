"""The page of a tuned answer: settings, levers and the curve, in one HTML file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckplan import files, units
from ckplan.report.extra_work import extra_work_words
from ckplan.report.html import chart_html, check_report, render_page
from ckplan.report.tuning import (
    CURVE_HEADERS,
    LEVER_HEADERS,
    communication_words,
    curve_cells,
    lever_cells,
    rate_words,
    setting_words,
    speed_words,
    unit_of,
)
from ckplan.tuning.batch_dims import dims_words
from ckplan.tuning.settings import Setting
from ckplan.tuning.tuned import Tuned

_TEMPLATE = "tuned.html.jinja"


def save_tuned_report(tuned: Tuned, path: str | Path, *, force: bool = False) -> None:
    """Write a page about the answer of ``tune``; it works offline.

    Args:
        tuned: The answer.
        path: The HTML file to write.
        force: Whether to overwrite an existing file.

    Raises:
        CkplanError: The file cannot be written, or the extra ``report`` is missing.
    """
    check_report()
    files.write_text(path, _render(tuned), force=force)


def _render(tuned: Tuned) -> str:
    from ckplan.report.figures import batches_figure

    limit = units.format_bytes(tuned.limit.bytes)
    best = tuned.best.batch
    return render_page(
        _TEMPLATE,
        title=f"Most {unit_of(tuned)}s per second of {tuned.graph.model} in {limit}",
        subtitle=f"seconds {tuned.graph.costs}; all figures predicted",
        cards=[*_cards(tuned)],
        unit=unit_of(tuned),
        settings=[*_settings(tuned)],
        lever_headers=LEVER_HEADERS,
        levers=[(lever_cells(row), row.in_best) for row in tuned.levers],
        chart=chart_html(batches_figure(tuned), first=True),
        curve_headers=CURVE_HEADERS,
        curve=[(curve_cells(row), row[0] == best) for row in tuned.curve],
        notes=tuned.notes,
    )


def _cards(tuned: Tuned) -> Iterator[tuple[str, str, str]]:
    best = tuned.best
    yield "best", speed_words(tuned, best), setting_words(best)
    sent = communication_words(best)
    step = units.format_seconds(best.step_seconds)
    yield "step", step, f"sending takes {sent}" if sent else "of the optimizer"
    peak = units.format_bytes(best.peak_bytes)
    largest_then = "".join(f"; {row}" for row in tuned.at_peak[:1])
    yield "peak", peak, f"{tuned.peak_at}{largest_then}"
    largest = f"{tuned.largest_planned} with one"
    yield "largest batch", f"{tuned.largest_unplanned} without a plan", largest
    if tuned.batch_dims:
        yield "samples", dims_words(tuned.batch_dims), "another: --batch-dim"


def _settings(tuned: Tuned) -> Iterator[tuple[str, ...]]:
    others = [(one.setting, one.gives_up) for one in tuned.next]
    for setting, gives_up in [(tuned.best, "-"), *others]:
        yield (
            setting_words(setting),
            _rate(tuned, setting),
            units.format_seconds(setting.step_seconds),
            units.format_bytes(setting.peak_bytes),
            extra_work_words(setting.extra) if setting.regions else "-",
            gives_up,
        )


def _rate(tuned: Tuned, setting: Setting) -> str:
    return rate_words((tuned.tokens_per_sample or 1) * setting.samples_per_second)
