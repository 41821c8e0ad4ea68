"""Hazards that make calls unsafe to recompute; equal calls share a row."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from ckplan.graph.graph import Graph
from ckplan.graph.records import Hazard
from ckplan.report.layers import layer_name, patterns
from ckplan.report.tables import add_row, make_table

_MOST_PATTERNS = 2


def hazards_table(graph: Graph) -> Table:
    """A table of calls, their hazard, and the recompute methods that handle it."""
    table = make_table("calls", "hazard", "recomputed by", texts=3)
    for row in hazard_rows(graph):
        add_row(table, *row)
    return table


def hazard_rows(graph: Graph) -> list[tuple[str, str, str]]:
    """The cells of these rows; equal calls share a row."""
    calls_by_cells: dict[tuple[str, str, str], list[int]] = {}
    for hazard in graph.hazards:
        ways = " or ".join(hazard.guarded_by) or "nothing"
        if hazard.kind == "again":
            ways = f"calls around: {ways}"
        key = (graph.calls[hazard.call].module, hazard.reason, ways)
        calls_by_cells.setdefault(key, []).append(hazard.call)
    return [
        (_names(graph, calls), reason, ways)
        for (_, reason, ways), calls in calls_by_cells.items()
    ]


def hazard_json(graph: Graph, hazard: Hazard) -> dict[str, Any]:
    """One hazard of one call as JSON."""
    return {
        "call": layer_name(graph, hazard.call),
        "module": graph.calls[hazard.call].module,
        "kind": hazard.kind,
        "reason": hazard.reason,
        "guarded_by": list(hazard.guarded_by),
    }


def _names(graph: Graph, calls: list[int]) -> str:
    found = [name for name, _ in patterns(graph, dict.fromkeys(calls))]
    if len(found) <= _MOST_PATTERNS:
        return ", ".join(found)
    return f"{graph.calls[calls[0]].module}, x{len(calls)}"
