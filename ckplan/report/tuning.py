"""The report of ``tune``: the best setting, the levers, and the curve over batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from ckplan import units
from ckplan.report.extra_work import extra_work_json, extra_work_words
from ckplan.report.plots import save_figure
from ckplan.report.step import alive_json
from ckplan.report.tables import add_row, key_value_table, make_table, section
from ckplan.tuning.batch_dims import dims_words
from ckplan.tuning.settings import Setting
from ckplan.tuning.tuned import LeverRow, Tuned

LEVER_HEADERS = ("", "results", "saves", "per sample", "pays", "from", "on best")
CURVE_HEADERS = ("batch", "no plan", "with a plan", "overhead", "peak")
_CURVE_ROWS = 12
_MOST_MOVERS = 3


def tuned_report(found: Tuned) -> RenderableType:
    """The best setting, two others, a row for every lever, and the curve."""
    limit = units.format_bytes(found.limit.bytes)
    return Group(
        section(
            f"Most {unit_of(found)}s per second of {found.graph.model} in {limit}",
            key_value_table(_best(found)),
        ),
        section(
            "Levers alone, and with the best setting (*: it has them; then without)",
            _levers(found),
        ),
        section("Samples per second by batch", _curve(found)),
    )


def unit_of(found: Tuned) -> str:
    """What is counted: ``sample`` or ``token``."""
    return "sample" if found.tokens_per_sample is None else "token"


def speed_words(found: Tuned, setting: Setting) -> str:
    """Samples or tokens per second."""
    times = found.tokens_per_sample or 1
    speed = rate_words(setting.samples_per_second * times)
    return f"{speed} {unit_of(found)}s per second"


def rate_words(rate: float) -> str:
    """A rate with four digits, or as a whole number.

    >>> rate_words(1.6389), rate_words(16.389), rate_words(624.56), rate_words(71234.5)
    ('1.639', '16.39', '624.6', '71,234')
    """
    whole = len(str(int(rate)))
    return f"{rate:,.{max(4 - whole, 0)}f}"


def setting_words(setting: Setting) -> str:
    """Batch, accumulation, plan and way of a setting."""
    parts = [f"batch {setting.batch}"]
    if setting.accumulate > 1:
        parts.append(f"accumulated {setting.accumulate} times")
    plan = "no plan"
    if setting.regions:
        plan = f"a plan at {units.format_percent(setting.overhead, sign=True)}"
    return ", ".join([*parts, plan, setting.way.title])


def communication_words(setting: Setting) -> str:
    """What sending adds to a step, and what hides the rest; empty if not known."""
    sent = setting.communication
    if sent is None:
        return ""
    hidden = units.format_seconds(sent.seconds - sent.exposed_seconds)
    return (
        f"{units.format_seconds(sent.exposed_seconds)}; {hidden} of "
        f"{units.format_seconds(sent.seconds)} are hidden by forward and backward "
        f"({units.format_seconds(sent.reduce_seconds)} to reduce, the rest to gather)"
    )


def _best(found: Tuned) -> Iterator[tuple[str, str]]:
    best = found.best
    yield "best", setting_words(best)
    yield "", speed_words(found, best)
    yield "step", units.format_seconds(best.step_seconds) + f" ({found.graph.costs})"
    sent = communication_words(best)
    if sent:
        yield "of it sending", sent
    yield "peak", f"{units.format_bytes(best.peak_bytes)}, in {found.peak_at}"
    if best.regions:
        yield "extra work", extra_work_words(best.extra)
    for number, row in enumerate(found.at_peak):
        yield "" if number else "largest then", str(row)
    movers = [f"{one.name} ({_bytes(one.saved_bytes)})" for one in found.movers]
    if movers:
        yield "moved most by", ", ".join(movers[:_MOST_MOVERS])
    yield (
        "largest batch",
        f"{found.largest_unplanned} without a plan, {found.largest_planned} with one",
    )
    if found.batch_dims:
        yield "samples", f"{dims_words(found.batch_dims)}; another: --batch-dim"
    for number, other in enumerate(found.next):
        name = "next" if number == 0 else ""
        yield (
            name,
            f"{setting_words(other.setting)}: {speed_words(found, other.setting)}",
        )
        yield "", f"gives up {other.gives_up}"
    for note in found.notes:
        yield "note", note


def _levers(found: Tuned) -> Table:
    table = make_table(*LEVER_HEADERS, texts=2)
    for row in found.levers:
        name, *others = lever_cells(row)
        name += " *" * row.in_best  # a pipe shows no bold letters
        add_row(table, name, *others, bold=row.in_best)
    return table


def lever_cells(row: LeverRow) -> tuple[str, ...]:
    """The texts of a lever's row under ``LEVER_HEADERS``."""
    if row.refused is not None:
        return row.name, f"refused: {row.refused}", *("-" for _ in LEVER_HEADERS[2:])
    return (
        row.name,
        row.bits,
        _bytes(row.saved_bytes),
        _seconds(row.seconds_per_sample),
        "yes" if row.pays else "no",
        "-" if row.crossover is None else str(row.crossover),
        _seconds(row.on_best_seconds_per_sample),
    )


def _bytes(size: int | None) -> str:
    return "-" if size is None else units.format_bytes(size)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else units.format_seconds(seconds)


def _curve(found: Tuned) -> Table:
    rows = found.curve
    step = max(-(-len(rows) // _CURVE_ROWS), 1)
    named = (found.best.batch, found.largest_unplanned, found.largest_planned)
    table = make_table(*CURVE_HEADERS)
    for number, row in enumerate(rows):
        if number % step == 0 or row[0] in named:
            add_row(table, *curve_cells(row), bold=row[0] == found.best.batch)
    return table


def curve_cells(row: tuple[int, Setting | None, Setting | None]) -> tuple[str, ...]:
    """The texts of a batch under ``CURVE_HEADERS``."""
    batch, bare, planned = row
    assert planned is not None, "internal error: a batch that does not fit"
    return (
        str(batch),
        "does not fit" if bare is None else rate_words(bare.samples_per_second),
        rate_words(planned.samples_per_second),
        units.format_percent(planned.overhead, sign=True),
        units.format_bytes(planned.peak_bytes),
    )


def save_tuned_plot(path: Path, found: Tuned, *, force: bool) -> None:
    """Draw samples or tokens per second by batch, without plans and with them.

    Args:
        path: The picture, .png or .svg.
        found: The answer of ``tune``.
        force: Whether to replace a file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    times = found.tokens_per_sample or 1
    planned = [(batch, one) for batch, _, one in found.curve if one]
    bare = [(batch, one) for batch, one, _ in found.curve if one]
    for name, style, points in (
        ("with a plan", "o-", planned),
        ("no plan", "s--", bare),
    ):
        speeds = [times * one.samples_per_second for _, one in points]
        axes.plot([batch for batch, _ in points], speeds, style, label=name)
    speed = times * found.best.samples_per_second
    axes.plot([found.best.batch], [speed], "*", markersize=14, label="best")
    if found.largest_unplanned:
        axes.axvline(found.largest_unplanned, linestyle=":", color="gray")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch (dotted: the largest without a plan)")
    axes.set_ylabel(f"{unit_of(found)}s per second")
    limit = units.format_bytes(found.limit.bytes)
    axes.set_title(f"{found.graph.model} in {limit}")
    axes.legend()
    save_figure(path, figure, force=force)


def tuned_json(found: Tuned) -> dict[str, Any]:
    """The same for scripts; seconds and rates are of samples."""
    return {
        "model": found.graph.model,
        "limit_bytes": found.limit.bytes,
        "best": _setting_json(found.best),
        "next": [
            {**_setting_json(one.setting), "gives_up": one.gives_up}
            for one in found.next
        ],
        "levers": [_lever_json(row) for row in found.levers],
        "largest_batch": {
            "unplanned": found.largest_unplanned,
            "planned": found.largest_planned,
        },
        "curve": [
            {
                "batch": batch,
                "unplanned": bare.samples_per_second if bare else None,
                "planned": planned.samples_per_second if planned else None,
                "overhead": planned.overhead if planned else None,
                "peak_bytes": planned.peak_bytes if planned else None,
            }
            for batch, bare, planned in found.curve
        ],
        "peak_at": found.peak_at,
        "peak_owner": found.peak_owner,
        "tensors_at_peak": [alive_json(row) for row in found.at_peak],
        "tokens_per_sample": found.tokens_per_sample,
        "batch_dims": dict(found.batch_dims),
        "costs": found.graph.costs,
        "notes": list(found.notes),
    }


def _setting_json(setting: Setting) -> dict[str, Any]:
    way = setting.way
    return {
        "batch": setting.batch,
        "accumulate": setting.accumulate,
        "amp": way.amp,
        "optimizer": way.optimizer,
        "scaler": way.scaler,
        "options": dict(way.options),
        "shard": way.shard,
        "world_size": way.ranks,
        "tiles": way.tiles,
        "offload": way.offload,
        "compile": way.compiled,
        "samples_per_second": setting.samples_per_second,
        "step_seconds": setting.step_seconds,
        "peak_bytes": setting.peak_bytes,
        "overhead": setting.overhead,
        **_communication_json(setting),
        "planned": bool(setting.regions),
        "profiled": setting.profiled,
        **extra_work_json(setting.extra),
    }


def _communication_json(setting: Setting) -> dict[str, float | None]:
    """Seconds of a step's collectives, and of what nothing hides; None if unknown."""
    sent = setting.communication
    return {
        "communication_seconds": sent.seconds if sent else None,
        "gather_seconds": sent.seconds - sent.reduce_seconds if sent else None,
        "reduce_seconds": sent.reduce_seconds if sent else None,
        "exposed_communication_seconds": sent.exposed_seconds if sent else None,
    }


def _lever_json(row: LeverRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "bits": row.bits,
        "saved_bytes": row.saved_bytes,
        "seconds_per_sample": row.seconds_per_sample,
        "pays": row.pays,
        "crossover": row.crossover,
        "on_best_seconds_per_sample": row.on_best_seconds_per_sample,
        "in_best": row.in_best,
        "refused": row.refused,
    }
