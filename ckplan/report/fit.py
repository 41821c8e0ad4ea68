"""The report of ``fit``: which cards a step fits on, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from ckplan import units
from ckplan.fitting.fit import (
    SMALLER_BATCH,
    WITH_A_PLAN,
    CardFit,
    Fit,
)
from ckplan.report.remedies import remedies_table, remedy_json
from ckplan.report.tables import add_row, key_value_table, make_table, section
from ckplan.simulating.alive import peak_tensors
from ckplan.simulating.simulate import simulate

_MOST_NAMED = 3
_MOST_CARDS = 3  # with remedies of their own


def fit_report(found: Fit) -> RenderableType:
    """A row for every card, then what is uncertain, and remedies where needed."""
    batch = f", batch {found.rows}" if found.rows else ""
    cards = _with_remedies(found)
    return Group(
        section(f"Where {found.graph.model} fits{batch}", _cards(found)),
        *(section(_why(card), remedies_table(card.remedies)) for card in cards),
        key_value_table(_facts(found)),
    )


def fit_json(found: Fit, source: str) -> dict[str, Any]:
    """The same as JSON; batches are null where they are not known."""
    return {
        "model": found.graph.model,
        "source": source,
        "batch": found.rows,
        "fits": found.fits,
        "cards": [_card_json(card) for card in found.cards],
        "cheapest": found.cheapest,
        "uncertain": [
            {"what": what, "cards": names} for what, names in _uncertain(found).items()
        ],
        "notes": list(found.notes),
    }


def verdict(card: CardFit) -> str:
    """The answer for one card in words."""
    if card.how == WITH_A_PLAN:
        overhead = units.format_percent(card.planned_overhead or 0.0, sign=True)
        return f"plan, {overhead}"
    if card.how == SMALLER_BATCH:
        return f"plan, batch {card.largest_planned}"
    return card.how


def _cards(found: Fit) -> Table:
    known = any(card.largest_planned is not None for card in found.cards)
    columns = ["fits", "usable", "needs", "at least"]
    columns += ["batch", "planned"] if known else []
    table = make_table("", *columns, texts=2)
    for card in found.cards:
        batches = card.largest_unplanned, card.largest_planned
        add_row(
            table,
            card.name,
            verdict(card) + (" ?" if card.uncertain else ""),
            units.format_bytes(card.limit_bytes),
            units.format_bytes(card.needed_bytes),
            units.format_bytes(card.least_bytes),
            *(("-" if one is None else str(one) for one in batches) if known else ()),
        )
    return table


def _facts(found: Fit) -> Iterator[tuple[str, str]]:
    if found.cheapest is not None:
        yield (
            "cheapest",
            f"{found.cheapest}: least price, else least memory, that will do",
        )
    elif len(found.cards) > 1:
        yield "cheapest", "none of them will do"
    step = simulate(found.graph)
    yield "peak", f"{units.format_bytes(step.peak_bytes)} during {step.peak_at}"
    for row in peak_tensors(step, _MOST_NAMED):
        yield "", str(row)
    yield "needs, at least", "as it is, and under the smallest plan"
    if any(card.largest_planned is not None for card in found.cards):
        yield "batch, planned", "largest as it is, and under the smallest plan"
    for what, names in _uncertain(found).items():
        of = ", ".join(names) if len(names) <= _MOST_CARDS else f"{len(names)} cards"
        yield "? UNCERTAIN", f"{what} ({of})"
    yield from (("note", note) for note in found.notes)


def _uncertain(found: Fit) -> dict[str, list[str]]:
    """What is estimated -> the cards that it is estimated for."""
    by_what: dict[str, list[str]] = {}
    for card in found.cards:
        for what in card.uncertain:
            by_what.setdefault(what, []).append(card.name)
    return by_what


def _with_remedies(found: Fit) -> Iterable[CardFit]:
    """Named cards that do not fit as they are; of all cards, if none does, the best."""
    wanting = [card for card in found.cards if card.remedies]
    if found.all_named or len(found.cards) <= _MOST_CARDS:
        return wanting
    if found.fits:
        return ()
    return sorted(wanting, key=lambda card: -card.limit_bytes)[:1]


def _why(card: CardFit) -> str:
    if card.fits:
        return f"{card.name}: cheaper than a {verdict(card)}"
    short = units.format_bytes(card.least_bytes - card.limit_bytes)
    return f"{card.name}: {short} short under the smallest plan; what would make it fit"


def _card_json(card: CardFit) -> dict[str, Any]:
    return {
        "name": card.name,
        "fits": card.fits,
        "how": card.how,
        "planned_overhead": card.planned_overhead,
        "largest_batch_unplanned": card.largest_unplanned,
        "largest_batch_planned": card.largest_planned,
        "limit_bytes": card.limit_bytes,
        "needed_bytes": card.needed_bytes,
        "least_bytes": card.least_bytes,
        "uncertain": list(card.uncertain),
        "remedies": [remedy_json(one) for one in card.remedies],
    }
