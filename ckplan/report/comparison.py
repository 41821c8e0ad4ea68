"""The report of ``compare``: common strategies beside the plan, with a legend."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from ckplan import units
from ckplan.report.tables import add_row, key_value_table, make_table, section
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.solution import Baseline

_LEGEND = {
    "every call": "each layer is rerun (gradient_checkpointing_enable)",
    "chen": "segments of about equal bytes (Chen et al., 2016, Algorithm 3)",
    "sqrt(n) segments": "segments of sqrt(n) of n layers",
    "rotor": "the cheapest whole layers to rerun (Beaumont et al., 2019)",
    "save matmuls": "in every layer, products and attention are kept",
    "save every 2nd": "the same, every second product",
    "tf speed": "all products of the forward are kept; the 'speed' mode of the "
    "gradient-checkpointing package for TensorFlow",
    "tf memory": "about sqrt(n) bottlenecks of the forward are kept; its 'memory' mode",
    "offload all": "whatever can move of every layer moves, the rest is rebuilt",
    "save_on_cpu": "the same, and each copy is waited for (torch.autograd.graph)",
    "chunked loss": "the head and its loss in 8 tiles, all else as it is",
    "tiled MLPs": "every MLP and attention in 8 tiles, all else as it is",
    "fused loss": "torch.nn.functional.linear_cross_entropy by chunks: other bits",
}


def comparison_report(
    model: str, limit: MemoryLimit, reserve_bytes: int, found: Sequence[Baseline]
) -> RenderableType:
    """Baselines and the plan under one budget, less a reserve."""
    title = f"Ways to train {model} within {units.format_bytes(limit.bytes)}"
    if reserve_bytes:
        title += f", with {units.format_bytes(reserve_bytes)} in reserve"
    return Group(section(title, baselines_table(found)), baselines_legend(found))


def comparison_json(
    model: str, limit: MemoryLimit, reserve_bytes: int, found: Sequence[Baseline]
) -> dict[str, Any]:
    """A comparison as JSON; ``budget_bytes`` includes the reserve."""
    return {
        "model": model,
        "budget_bytes": limit.bytes + reserve_bytes,
        "reserve_bytes": reserve_bytes,
        "baselines": [baseline_json(baseline) for baseline in found],
    }


def baselines_table(found: Collection[Baseline]) -> Table:
    """One row per strategy; ``fits`` is of the reserved bytes where they are shown."""
    on_card = any(one.reserved_bytes is not None for one in found)
    columns = ["peak", *(["reserved"] if on_card else []), "overhead", "fits"]
    table = make_table("", *columns)
    for baseline in found:
        reserved = baseline.reserved_bytes
        cells = [] if reserved is None else [units.format_bytes(reserved)]
        add_row(
            table,
            baseline.name,
            units.format_bytes(baseline.peak_bytes),
            *cells,
            units.format_percent(baseline.overhead, sign=True),
            "yes" if baseline.fits else "no",
        )
    return table


def baselines_legend(found: Collection[Baseline]) -> RenderableType:
    """What the names of strategies mean, and what ``reserved`` is."""
    names = [one.name for one in found if one.name in _LEGEND]
    rows = [(name, _LEGEND[name]) for name in names]
    if any(one.reserved_bytes is not None for one in found):
        rows.append(
            ("reserved", "by PyTorch's allocator, with its gaps: what must fit")
        )
    return key_value_table(rows)


def baseline_json(baseline: Baseline) -> dict[str, Any]:
    """A strategy as JSON; reserved bytes are null without a card."""
    return {
        "name": baseline.name,
        "peak_bytes": baseline.peak_bytes,
        "reserved_bytes": baseline.reserved_bytes,
        "overhead": baseline.overhead,
        "fits": baseline.fits,
    }
