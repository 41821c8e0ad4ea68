"""The timelines of ``verify``: predicted and measured live bytes of the step."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from ckplan import units
from ckplan.report.plots import save_figure
from ckplan.report.tables import make_table, section
from ckplan.simulating.curve import PHASES, PREDICTED, Curve, Curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 16  # of every phase
_BLOCKS = tuple(map(chr, range(0x2581, 0x2589)))  # from an eighth to a full block
_LETTERS = tuple(".:-=+*#@")  # if stdout cannot encode blocks


def timeline_report(curves: Curves) -> RenderableType:
    """One sparkline per curve, scaled to the highest peak of all curves."""
    most_bytes = max(c.peak_bytes for found in curves.values() for c in found.values())
    table = make_table("", *PHASES, texts=1 + len(PHASES))
    for which, found in curves.items():
        for kind, curve in found.items():
            name = Text(f"{which}, {kind}")
            table.add_row(name, *_sparklines(curve, most_bytes))
    title = f"Live bytes over the step, in eighths of {units.format_bytes(most_bytes)}"
    return section(title, table)


def _sparklines(curve: Curve, most_bytes: int) -> list[Text]:
    signs = _BLOCKS if _can_encode_blocks() else _LETTERS
    top = len(signs) - 1

    def sign(level: int) -> str:
        return signs[max(0, min(top, -(-level * len(signs) // most_bytes) - 1))]

    phases = curve.columns(_COLUMNS)
    return [Text("".join(map(sign, phase)), no_wrap=True) for phase in phases]


def _can_encode_blocks() -> bool:
    try:
        "".join(_BLOCKS).encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def save_timeline(
    path: Path,
    model: str,
    curves: Curves,
    budget_bytes: int | None,
    *,
    owners: Mapping[str, str] | None = None,
    force: bool,
) -> None:
    """Draw unplanned and planned live bytes side by side, phase by phase.

    Args:
        path: The picture to write.
        model: Name of the model, for the title.
        curves: Curves to draw.
        budget_bytes: Budget to draw as a line, or None.
        owners: Step -> place of its peak in words.
        force: Whether to overwrite an existing file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for axes, (which, found) in zip(panels, curves.items(), strict=True):
        for kind, curve in found.items():
            places, levels = zip(*curve.placed(), strict=True)
            line = "--" if kind == PREDICTED else "-"
            height = [level / units.GIB for level in levels]
            axes.plot(places, height, line, drawstyle="steps-post", label=kind)
        if budget_bytes is not None:
            axes.axhline(
                budget_bytes / units.GIB, color="gray", linewidth=1, label="budget"
            )
        _mark_peak(axes, found, (owners or {}).get(which, ""))
        axes.set_title(f"{model}, {which}")
        axes.set_xlabel("phase of the step")
        axes.set_xticks([0.5, 1.5, 2.5], PHASES)
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, len(PHASES))
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)
    panels[0].set_ylabel("live bytes (GiB)")
    tops = [axes.get_ylim()[1] for axes in panels]
    panels[0].set_ylim(0, max(tops) * 1.2)  # room for the owners of peaks
    save_figure(path, figure, force=force)


def _mark_peak(axes: Axes, found: Mapping[str, Curve], owner: str) -> None:
    """Mark the peak of the last curve; its owner is written at the top."""
    points = [point for curve in [*found.values()][-1:] for point in curve.placed()]
    if not points:
        return
    place, level = max(points, key=lambda point: point[1])
    text = f"peak {units.format_bytes(level)}" + (f"\n{owner}" if owner else "")
    axes.plot([place], [level / units.GIB], "o", color="black", markersize=4)
    axes.annotate(
        text,
        (place, level / units.GIB),
        xytext=(0.5, 0.98),
        textcoords="axes fraction",
        ha="center",
        va="top",
        fontsize="small",
        arrowprops={"arrowstyle": "-", "linewidth": 0.7},
    )
