"""Proves that tuned settings run on cards, and leave next to nothing unused.

Steps of a card of which a part of the memory is taken away, from what the smallest plan
needs to what the workload's own batch needs without a plan, in equal parts: the tuned
setting, recorded at its batch, runs two steps on the model of PyTorch's CUDA allocator.
"Unused" is what it never reserves. A setting is limited by memory (+) if one more row
does not fit with its plan.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import _measuring as measuring
from _kept_rows import KeptRows

from ckplan import gpus
from ckplan.autotune import recorder_of_spec
from ckplan.errors import InfeasibleError
from ckplan.graph.graph import Graph
from ckplan.simulating.allocations import replayed
from ckplan.simulating.caching_allocator import NoRoomError
from ckplan.simulating.simulate import Simulator
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.training.loading import WorkloadSpec, parse_options
from ckplan.tuning.search import WaySearch
from ckplan.tuning.settings import Setting, Way
from ckplan.tuning.tune import Tuning
from ckplan.units import format_bytes

MODELS: dict[str, tuple[str, ...]] = {
    "gpt2": (),
    "bert": (),
    "resnet50": (),
    "unet": (),
    "vit": (),
}
CARDS = 20  # of each model
MOST_UNUSED = 0.03
HEADERS = ("workload", "card", "batch", "overhead", "unused", "runs", "by memory")


@dataclass(frozen=True)
class Row:
    """The tuned setting of a workload on one card."""

    model: str
    card_bytes: int
    batch: int = 0  # 0: nothing fits
    overhead: float = 0.0
    reserved_bytes: int | None = None  # None: it ran out of memory
    by_memory: bool = False

    @property
    def unused(self) -> float:
        """The share of the card that is never reserved."""
        return 1 - (self.reserved_bytes or self.card_bytes) / self.card_bytes

    def cells(self) -> list[str]:
        """The row of the table."""
        title = [self.model, format_bytes(self.card_bytes)]
        if not self.batch:
            return [*title, "nothing fits", "", "", "", ""]
        overhead = measuring.format_overhead(self.overhead)
        runs = "no" if self.reserved_bytes is None else "yes"
        shown = [str(self.batch), overhead, f"{self.unused:.1%}", runs]
        return [*title, *shown, "-+"[self.by_memory]]


def on_cards(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The table of all rows that are known, and where its claim does not hold."""
    kept = KeptRows("tuned_cards", Row, args)
    rows = kept.fill(MODELS, lambda name: _rows(name, args.gpu))
    fitting = [row for row in rows if row.batch]
    broken = [
        f"{row.model}, {format_bytes(row.card_bytes)}: out of memory"
        for row in fitting
        if row.reserved_bytes is None
    ]
    unused = [row.unused for row in fitting if row.by_memory]
    mean = statistics.mean(unused) if unused else 0.0
    if mean > MOST_UNUSED:
        broken.append(f"{mean:.1%} of the cards is unused on average")
    said = (
        f"{len(rows)} cards, {sum(r.reserved_bytes is None for r in fitting)} of "
        f"{len(fitting)} settings out of memory. {mean:.1%} unused on average, of "
        f"{len(unused)} limited by memory (+)."
    )
    table = measuring.make_table(HEADERS, [row.cells() for row in rows])
    return f"{said}\n\n{table}", broken


def searches(
    models: Sequence[tuple[str, tuple[str, ...]]], args: argparse.Namespace
) -> Iterator[tuple[str, WaySearch]]:
    """(workload with its settings, its search on a card)."""
    names = measuring.chosen([*dict.fromkeys(name for name, _ in models)], args.only)
    for name, settings in models:
        if name in names:
            title = " ".join((name, *settings))
            measuring.say(f"{title} on {args.gpu}")
            yield title, _search(name, settings, args.gpu)[0]


def _search(name: str, settings: tuple[str, ...], gpu: str) -> tuple[WaySearch, int]:
    card = gpus.find(gpu)
    spec = WorkloadSpec(measuring.location_of(name), parse_options(settings))
    record, rows, _ = recorder_of_spec(spec, gpu=card.name)
    limit = MemoryLimit(card.usable_bytes, of_reserved=True)
    return Tuning(record, limit, way=Way(), rows=rows).search(Way()), rows


def _rows(name: str, gpu: str) -> Iterator[Row]:
    search, own = _search(name, MODELS[name], gpu)
    planner = search.planner_at(own)
    least, most = planner.floor.peak_bytes, planner.unplanned.peak_bytes
    for number in range(1, CARDS + 1):
        size = least + number * (most - least) // CARDS
        limit = MemoryLimit(size, of_reserved=True)
        one, graph = _tuned(search, limit, own)
        if one is None:
            yield Row(name, size)
            continue
        larger = Simulator(search.graph_at(one.batch + 1)).run(one.regions)
        reserved = _reserved(graph, one, size)
        by_memory = not limit.allows(larger)
        yield Row(name, size, one.batch, one.overhead, reserved, by_memory)


def _tuned(
    search: WaySearch, limit: MemoryLimit, rows: int
) -> tuple[Setting | None, Graph]:
    """The best setting of a search within another limit, at a recorded batch."""
    found = search.with_limit(limit)
    found.start = rows
    try:
        best = found.best()
    except InfeasibleError:
        best = None
    if best is None:
        return None, found.graph_at(rows)
    found.check(best.batch)
    return found.setting(best.batch), found.graph_at(best.batch)


def _reserved(graph: Graph, one: Setting, size: int) -> int | None:
    """What the allocator reserves within a card; None if it runs out of memory."""
    try:
        timeline = Simulator(graph).run(one.regions)
        return replayed(timeline, capacity_bytes=size).reserved_bytes
    except NoRoomError:
        return None
