"""The reports of ``profile`` and ``show TRACE``: the cost of a training step."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from ckplan import units
from ckplan.graph.caches import held_caches
from ckplan.graph.graph import Graph
from ckplan.graph.records import BEFORE_STEP, KINDS, OUTSIDE_CALLS
from ckplan.report.hazards import hazard_json, hazards_table
from ckplan.report.layers import (
    Cost,
    Forward,
    Layer,
    Row,
    fold_layers,
    forward_costs,
    layer_name,
    total_cost,
)
from ckplan.report.reserved import reserved_facts, reserved_json
from ckplan.report.tables import add_row, key_value_table, make_table, section, share
from ckplan.simulating.alive import Alive, peak_tensors
from ckplan.simulating.allocations import Reserved
from ckplan.simulating.simulate import Timeline
from ckplan.solving.remedies import cache_remedy

_MOST_ROWS = 16
_MOST_AT_PEAK = 4
_OUTSIDE = "loss, outside the model"
_LABELS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "input": "inputs",
    "activation": "activations",
}


def step_report(
    graph: Graph, timeline: Timeline, reserved: Reserved | None = None
) -> RenderableType:
    """The memory by kind, the layers that own the activations, and the notes."""
    forward = forward_costs(graph)
    rows = [
        ("peak", f"{_size(timeline.peak_bytes)} during {timeline.peak_at}"),
        *_largest_facts(timeline),
        *_caches(graph),
        *reserved_facts(reserved),
        ("forward", units.format_flops((forward.inside + forward.outside).flops)),
        ("step", _step_seconds(graph)),
        ("costs", graph.costs),
        *(("note", note) for note in graph.notes),
    ]
    memory = _memory(graph, timeline, forward)
    return Group(
        section(f"Memory of one training step of {graph.model}", memory),
        section(_layers_title(graph), _layers(graph, forward)),
        *([section("Hazards", hazards_table(graph))] if graph.hazards else []),
        key_value_table(rows),
    )


def step_json(
    graph: Graph, timeline: Timeline, trace: str, reserved: Reserved | None = None
) -> dict[str, Any]:
    """A step as JSON; layers are not folded, so each ``call`` names one call.

    ``activation_bytes`` is the sum over ``layers``. A layer whose ``part`` is "own
    code" has the ops of a call between its children, which have rows of their own.
    """
    forward = forward_costs(graph)
    both = forward.inside + forward.outside
    sums = {
        f"{kind}_bytes": graph.bytes_by_kind[kind]
        for kind in KINDS
        if kind not in ("activation", "temporary")
    }
    at_peak = timeline.peak_by_kind
    at_peak_rows = [alive_json(row) for row in peak_tensors(timeline, _MOST_ROWS)]
    typed = [row for row in at_peak_rows if row["dtype"]]
    return {
        "model": graph.model,
        "trace": trace,
        **sums,
        "activation_bytes": forward.inside.activation_bytes,
        "outside_activation_bytes": forward.outside.activation_bytes,
        "temporary_bytes": at_peak["temporary"],
        "peak_bytes": timeline.peak_bytes,
        "peak_at": timeline.peak_at,
        "largest_at_peak": next(iter(typed), None),
        "tensors_at_peak": at_peak_rows,
        **reserved_json(reserved),
        "alive_at_peak": {f"{kind}_bytes": at_peak[kind] for kind in KINDS},
        "forward_flops": both.flops,
        "forward_seconds": both.seconds,
        "step_seconds": graph.step_seconds,
        "batches_per_step": graph.num_batches,
        "costs": graph.costs,
        "notes": list(graph.notes),
        "hazards": [hazard_json(graph, hazard) for hazard in graph.hazards],
        "layers": [_layer_json(graph, layer) for layer in forward.layers],
    }


def _layers_title(graph: Graph) -> str:
    one = f" of one of {graph.num_batches} batches" if graph.num_batches > 1 else ""
    return f"Layers in forward{one}"


def _step_seconds(graph: Graph) -> str:
    batches = f" of {graph.num_batches} batches" if graph.num_batches > 1 else ""
    return f"{units.format_seconds(graph.step_seconds)}{batches}, without recomputation"


def _largest_facts(timeline: Timeline) -> list[tuple[str, str]]:
    """The tensors that own most of the peak, the largest first."""
    found = peak_tensors(timeline, _MOST_AT_PEAK)
    names = ["largest then", *[""] * len(found)]
    return [(name, str(row)) for name, row in zip(names, found, strict=False)]


def _caches(graph: Graph) -> list[tuple[str, str]]:
    """Advice, if the output holds a cache of keys and values until backward ends."""
    caches = held_caches(graph)
    if not caches:
        return []
    found = cache_remedy(graph, caches, 0)
    return [("advice", f"{found.how}: {found.name}")]


def alive_json(row: Alive) -> dict[str, Any]:
    """What is alive of one maker, as JSON."""
    maker = row.maker
    return {
        "made_by": maker.name,
        "kind": maker.kind,
        "shape": [int(size) for size in maker.shape.split(",") if size not in "-"],
        "dtype": maker.dtype or None,
        "line": maker.line or None,
        "count": row.count,
        "bytes": row.bytes,
    }


def _layer_json(graph: Graph, layer: Layer) -> dict[str, Any]:
    return {
        "call": layer_name(graph, layer.call),
        "part": "own code" if layer.own_code else "whole",
        "module": graph.calls[layer.call].module,
        "activation_bytes": layer.cost.activation_bytes,
        "forward_flops": layer.cost.flops,
        "forward_seconds": layer.cost.seconds,
    }


def _memory(graph: Graph, timeline: Timeline, forward: Forward) -> Table:
    peak, at_peak = timeline.peak_bytes, timeline.peak_by_kind
    table = make_table("", "in all", "at the peak", "share")

    def add(name: str, made: str, alive: int) -> None:
        add_row(table, name, made, _size(alive), share(alive, peak))

    outside_alive = _outside_alive(timeline)
    for kind, label in _LABELS.items():
        made, alive = graph.bytes_by_kind[kind], at_peak[kind]
        if kind == "activation":
            made, alive = forward.inside.activation_bytes, alive - outside_alive
        if made or kind != "buffer":
            add(label, _size(made), alive)
    if forward.outside.activation_bytes:
        add(_OUTSIDE, _size(forward.outside.activation_bytes), outside_alive)
    add("temporaries", "", at_peak["temporary"])
    add_row(table, "peak", "", _size(peak), share(peak, peak), bold=True)
    return table


def _outside_alive(timeline: Timeline) -> int:
    """Activation bytes alive at the peak that were made outside all calls."""
    graph, moment = timeline.graph, timeline.peak_moment
    return sum(
        storage.bytes
        for storage, stop in zip(graph.storages, timeline.stops, strict=True)
        if storage.kind == "activation"
        and 2 * storage.maker + 1 <= moment <= stop
        and (
            storage.maker == BEFORE_STEP
            or graph.ops[storage.maker].call == OUTSIDE_CALLS
        )
    )


def _layers(graph: Graph, forward: Forward) -> Table:
    rows = fold_layers(graph, forward.layers)
    most = _MOST_ROWS if len(rows) > _MOST_ROWS + 1 else len(rows)
    shown, others = rows[:most], rows[most:]
    table = make_table("", "", "activations", "share", "compute", "time")

    def add(name: str, count: int, cost: Cost, *, bold: bool = False) -> None:
        add_row(
            table,
            name,
            f"x{count}" if count > 1 else "",
            _size(cost.activation_bytes),
            share(cost.activation_bytes, forward.inside.activation_bytes),
            units.format_flops(cost.flops),
            units.format_seconds(cost.seconds),
            bold=bold,
        )

    for row in shown:
        add(_row_name(graph, row), row.count, row.cost)
    if others:
        count = sum(row.count for row in others)
        add("all others", count, total_cost(row.cost for row in others))
    add("all layers", 1, forward.inside, bold=True)
    if forward.outside != Cost():
        add(_OUTSIDE, 1, forward.outside)
    return table


def _row_name(graph: Graph, row: Row) -> str:
    name = graph.model if row.name == "." else row.name
    return f"{name}, own code" if row.own_code else name


def _size(num_bytes: int) -> str:
    return units.format_bytes(num_bytes)
