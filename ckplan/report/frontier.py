"""The report of ``frontier``: the trade-off between memory and time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from ckplan import units
from ckplan.report.plots import save_figure
from ckplan.report.tables import add_row, make_table, section, share
from ckplan.solving.solution import Baseline, FrontierPoint

_MARKERS = "xsDP^*vhX<>pd8"


def frontier_report(
    model: str,
    points: Sequence[FrontierPoint],
    reserve_bytes: int = 0,
    on_card: Sequence[Baseline] = (),
) -> RenderableType:
    """One row for every memory of the frontier, the unplanned step last.

    Of plans whose memory prints alike, the cheapest is shown. With a reserve, a column
    shows the budget that each plan needs.

    Args:
        model: Its name.
        points: The frontier.
        reserve_bytes: Memory to leave free.
        on_card: What each point reserves on a card, and whether it fits; or nothing.
    """
    unplanned_bytes = points[-1].peak_bytes
    columns = ["budget"] if reserve_bytes else []
    columns += ["peak", *(["reserved", "fits"] if on_card else []), "of unplanned"]
    table = make_table(*columns, "overhead", "bound", "regions", texts=0)
    rooms: Sequence[Baseline | None] = on_card or [None] * len(points)
    by_memory = {
        units.format_bytes(point.peak_bytes): (point, room)
        for point, room in zip(points, rooms, strict=True)
    }
    for peak, (point, room) in by_memory.items():
        budget = units.format_bytes(point.peak_bytes + reserve_bytes)
        add_row(
            table,
            *([budget] if reserve_bytes else []),
            peak,
            *(_room(room) if room is not None else []),
            share(point.peak_bytes, unplanned_bytes),
            units.format_percent(point.overhead, sign=True),
            units.format_percent(point.bound_overhead, sign=True),
            str(len(point.regions)),
        )
    reserve = f", with {units.format_bytes(reserve_bytes)} in reserve"
    title = f"Frontier of {model}{reserve if reserve_bytes else ''}"
    return Group(section(title, table))


def _room(room: Baseline) -> list[str]:
    reserved = room.reserved_bytes or room.peak_bytes
    return [units.format_bytes(reserved), "yes" if room.fits else "no"]


def frontier_json(
    model: str,
    points: Sequence[FrontierPoint],
    others: Sequence[Baseline],
    reserve_bytes: int = 0,
    on_card: Sequence[Baseline] = (),
) -> dict[str, Any]:
    """The frontier and the baselines as JSON; ``fits`` is null without a card."""
    rooms: Sequence[Baseline | None] = on_card or [None] * len(points)
    return {
        "model": model,
        "reserve_bytes": reserve_bytes,
        "points": [
            {
                "budget_bytes": point.peak_bytes + reserve_bytes,
                "peak_bytes": point.peak_bytes,
                "reserved_bytes": None if room is None else room.reserved_bytes,
                "fits": None if room is None else room.fits,
                "overhead": point.overhead,
                "bound_overhead": point.bound_overhead,
                "regions": len(point.regions),
            }
            for point, room in zip(points, rooms, strict=True)
        ],
        "baselines": [
            {
                "name": other.name,
                "peak_bytes": other.peak_bytes,
                "overhead": other.overhead,
            }
            for other in others
        ],
    }


def save_plot(
    path: Path,
    model: str,
    points: Sequence[FrontierPoint],
    others: Sequence[Baseline],
    *,
    force: bool,
) -> None:
    """Draw the frontier as steps, the bound as a line and the baselines as points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    peaks = [point.peak_bytes / units.GIB for point in points]
    overheads = [100 * point.overhead for point in points]
    bounds = [100 * point.bound_overhead for point in points]
    axes.plot(peaks, overheads, drawstyle="steps-post", marker=".", label="ckplan")
    axes.plot(peaks, bounds, linestyle="--", color="gray", label="lower bound")
    for name, group, marker in zip(*_practices(others), strict=True):
        axes.plot(
            [other.peak_bytes / units.GIB for other in group],
            [100 * other.overhead for other in group],
            marker=marker,
            linestyle="",
            label=name,
        )
    axes.set_xlabel("predicted peak of the training step (GiB)")
    axes.set_ylabel("predicted overhead (% of the unplanned step)")
    axes.set_title(f"Memory and time of {model}")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize="small")
    save_figure(path, figure, force=force)


def _practices(
    baselines: Sequence[Baseline],
) -> tuple[list[str], list[list[Baseline]], list[str]]:
    """Names of strategies, their baselines and a marker each; ``every n`` is one."""
    groups: dict[str, list[Baseline]] = {}
    for baseline in baselines:
        name = re.sub(r"^every \d+ ", "every n ", baseline.name)
        groups.setdefault(name, []).append(baseline)
    markers = [_MARKERS[number % len(_MARKERS)] for number in range(len(groups))]
    return list(groups), list(groups.values()), markers
