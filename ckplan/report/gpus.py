"""The report of ``ckplan gpus``: the cards that ckplan knows."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rich.console import Group, RenderableType

from ckplan import units
from ckplan.gpus import RATES, Gpu
from ckplan.report.tables import add_row, key_value_table, make_table, section


def cards_report(cards: Collection[Gpu]) -> RenderableType:
    """One row per card: its memory and its peak rates."""
    table = make_table("", "GiB", "usable", "GB/s", *RATES)
    for card in cards:
        rates = (card.flop_rates.get(rate) for rate in RATES)
        add_row(
            table,
            card.name,
            f"{card.memory_bytes / units.GIB:.4g}",
            f"{card.usable_bytes / units.GIB:.2f}",
            f"{card.bandwidth / 1e9:.0f}",
            *("-" if rate is None else f"{rate / 1e12:g}" for rate in rates),
        )
    return Group(
        section("Cards, with dense peak rates in TFLOP/s", table),
        key_value_table(
            [("sources", "`ckplan gpus NAME` and --json show one for each figure")]
        ),
    )


def card_report(card: Gpu) -> RenderableType:
    """Every figure of one card and its source."""
    rates = (f"{name} {rate / 1e12:g}" for name, rate in card.flop_rates.items())
    figures = {
        "memory": units.format_bytes(card.memory_bytes),
        "capacity": units.format_bytes(card.capacity_bytes),
        "context": units.format_bytes(card.context_bytes),
        "bandwidth": f"{card.bandwidth / 1e9:.0f} GB/s",
        "link": f"{card.link / 1e9:g} GB/s each way",
        "peer": f"{card.peer / 1e9:g} GB/s each way, to other cards",
        "launch_us": units.format_seconds(card.launch_seconds),
        "capability": "{}.{}".format(*card.capability),
        "multiprocessors": str(card.multiprocessors),
        "tflops": f"{', '.join(rates)} TFLOP/s",
    }
    names = {
        "launch_us": "launch",
        "capability": "compute capability",
        "tflops": "dense peak",
    }
    table = make_table("", "", "source", texts=3)
    for key, value in figures.items():
        add_row(table, names.get(key, key), value, card.sources[key])
    usable = units.format_bytes(card.usable_bytes)
    title = f"{card.name}: {usable} usable (capacity less context)"
    return Group(section(title, table))


def cards_json(cards: Collection[Gpu]) -> dict[str, Any]:
    """The cards as JSON."""
    return {"gpus": [_card_json(card) for card in cards]}


def _card_json(card: Gpu) -> dict[str, Any]:
    return {
        "name": card.name,
        "memory_bytes": card.memory_bytes,
        "capacity_bytes": card.capacity_bytes,
        "context_bytes": card.context_bytes,
        "usable_bytes": card.usable_bytes,
        "bytes_per_second": card.bandwidth,
        "link_bytes_per_second": card.link,
        "peer_bytes_per_second": card.peer,
        "launch_seconds": card.launch_seconds,
        "capability": list(card.capability),
        "multiprocessors": card.multiprocessors,
        "flops_per_second": dict(card.flop_rates),
        "sources": dict(card.sources),
    }
