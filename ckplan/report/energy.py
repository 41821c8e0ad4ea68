"""Measured joules of a verified step, without the plan and with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ckplan import units
from ckplan.report.tables import add_row, make_table, section

if TYPE_CHECKING:
    from ckplan.verifying.energy import Energy
    from ckplan.verifying.timing import Quartiles


def energy_section(found: Energy | None) -> Iterator[RenderableType]:
    """The table of joules, with quartiles; nothing if none were measured."""
    if found is None:
        return
    table = make_table("", "planned", "quartiles", "unplanned", "quartiles")
    both = found.planned_joules_per_step, found.unplanned_joules_per_step
    _add(table, "per step", both, 1)
    if found.samples_per_step:
        _add(table, "per sample", both, found.samples_per_step)
    if found.added is not None:
        low, median, high = (units.format_percent(x, sign=True) for x in found.added)
        add_row(table, "added", median, f"{low} to {high}", "", "")
    shortest = units.format_seconds(found.shortest_window_seconds)
    said = (
        f"{found.windows} windows a side in turns, the shortest of {shortest}; all "
        f"that {found.counters} took, idle power and other programs included"
    )
    yield section("Energy, measured", table, Text(said))


def _add(
    table: Table,
    name: str,
    both: tuple[Quartiles, Quartiles | None],
    divisor: int,
) -> None:
    cells: list[str] = []
    for one in both:
        if one is None:
            cells += ["n/a", ""]
            continue
        low, median, high = (units.format_joules(x / divisor) for x in one)
        cells += [median, f"{low} to {high}"]
    add_row(table, name, *cells)
