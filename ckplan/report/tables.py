"""The rich building blocks of all reports."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ckplan import units


def make_table(*headers: str, texts: int = 1) -> Table:
    """A table without lines: ``texts`` columns that wrap, then right-aligned ones."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for position, header in enumerate(headers):
        if position < texts:
            table.add_column(header, overflow="fold")
        else:
            table.add_column(header, justify="right", no_wrap=True)
    return table


def add_row(table: Table, *cells: str, bold: bool = False) -> None:
    """Add a row of plain text; brackets are not read as markup."""
    table.add_row(*map(Text, cells), style="bold" if bold else None)


def key_value_table(rows: Iterable[tuple[str, str]]) -> Table:
    """A table of names and values, one pair per line."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def section(title: str, *parts: RenderableType) -> Group:
    """Parts under a bold title, followed by an empty line."""
    return Group(
        Text(title, style="bold"), *(Padding(p, (0, 0, 0, 2)) for p in parts), ""
    )


def share(part: int, whole: int) -> str:
    """A part in percent of a whole; a dash if the whole is 0."""
    return units.format_percent(part / whole) if whole else "-"


def render(report: RenderableType) -> str:
    """A report as text, in colour if stdout is a terminal with colours."""
    console = Console(highlight=False)
    with console.capture() as capture:
        console.print(report)
    lines = (line.rstrip() for line in capture.get().splitlines())
    return "\n".join(lines).rstrip("\n") + "\n"
