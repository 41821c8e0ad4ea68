"""Proves that settings of `ckplan tune` are as fast as any that people choose by hand.

Ten small workloads train on the CPU, on one thread, within three limits each on the
bytes of tensors: a quarter, half and three quarters of the way from the peak of the
workload's own batch to the smallest peak that a plan gives it. The tuned setting stands
beside what people do: the largest batch without a plan, every layer checkpointed at its
largest batch, and every second one. Four micro-batches accumulated update parameters
once in four: beside them stands the setting tuned for as many samples per update
(`--total-batch`). Peaks are of processes of their own. Steps are taken in turns by
copies in one process that keeps its memory, as is what predictions are measured in. A
round is as many turns as take about twelve seconds; the mean of the faster half of its
CPU seconds counts, and of the rounds the median. Predicted speeds are of ops that are
measured once, with the same seconds in all settings.
"Order" is the share of pairs of settings that were predicted in the order measured, or
are within 3 % of each other.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import _lever_signs
import _measuring as measuring
from _copies import measured_in_turns
from _kept_rows import KeptRows

from ckplan.autotune import recorder_of_spec
from ckplan.graph.graph import Graph
from ckplan.plan.region import Region
from ckplan.simulating.simulate import Simulator
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.training.loading import WorkloadSpec, parse_options
from ckplan.training.step import Training
from ckplan.tuning.largest import largest_under
from ckplan.tuning.search import WaySearch
from ckplan.tuning.settings import Setting
from ckplan.tuning.tune import Tuning
from ckplan.units import format_bytes

_TOKENS = "layers=4", "width=128", "heads=4", "length=64", "vocab=1000", "batch=16"
MODELS: dict[str, tuple[str, ...]] = {
    "mlp": ("layers=6", "width=256", "batch=2048"),
    "gpt2": _TOKENS,
    "bert": _TOKENS,
    "llama": _TOKENS,
    "vit": ("layers=4", "batch=4"),
    "resnet50": ("batch=8", "size=64"),
    "unet": ("batch=4",),
    "mixer": ("layers=4", "width=128"),
    "convnext": ("size=64", "stages=3"),
    "t5": ("layers=2", "length=64"),
}
SHARES = (0.25, 0.5, 0.75)  # of the way from the unplanned peak to the smallest
MICRO_BATCHES = 4
MOST_SLOWER = 0.03
MOST_OFF, LEAST_WITHIN, LEAST_IN_ORDER = 0.08, 0.9, 0.95
TUNED, ACCUMULATED, TUNED_TOTAL = "tuned", "accumulated", "tuned, total kept"
HEADERS = (
    *("workload", "limit", "setting", "batch", "of limit"),
    *("samples/s", "predicted", "off"),
)


@dataclass(frozen=True)
class Row:
    """One setting of a workload within a limit, and what it took."""

    model: str
    limit_bytes: int
    setting: str
    rows: int
    accumulate: int
    peak_bytes: int
    speed: float  # samples per second, measured
    predicted: float

    @property
    def off(self) -> float:
        """The predicted speed, relative to the measured one, less 1."""
        return self.predicted / self.speed - 1

    def cells(self) -> list[str]:
        """The row of the table."""
        batch = f"{self.rows}" + f" x {self.accumulate}" * (self.accumulate > 1)
        share = f"{self.peak_bytes / self.limit_bytes:.1%}"
        speeds = f"{self.speed:,.1f}", f"{self.predicted:,.1f}", f"{self.off:+.1%}"
        limit = format_bytes(self.limit_bytes)
        return [self.model, limit, self.setting, batch, share, *speeds]


@dataclass(frozen=True)
class _Contestant:
    """A setting, and what is predicted of it."""

    name: str
    rows: int
    accumulate: int
    regions: tuple[Region, ...]
    predicted_seconds: float  # of a step of the optimizer
    training: Training
    graph: Graph

    @property
    def samples(self) -> int:
        return self.rows * self.accumulate


def by_hand(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The table of all rows that are known, and where its claim does not hold."""
    kept = KeptRows("tuned_hand", Row, args)
    rows = kept.fill(MODELS, lambda name: _measured(name, args.rounds))
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.limit_bytes), []).append(row)
    broken = [said for group in groups.values() for said in _broken(group)]
    within = sum(abs(row.off) <= MOST_OFF for row in rows)
    if within < LEAST_WITHIN * len(rows):
        broken.append(f"{within} of {len(rows)} rows are within {MOST_OFF:.0%}")
    pairs = [_in_order(*pair) for g in groups.values() for pair in combinations(g, 2)]
    if sum(pairs) < LEAST_IN_ORDER * len(pairs):
        broken.append(f"{sum(pairs)} of {len(pairs)} pairs are in the order measured")
    said = (
        f"{len(kept.rows)} of {len(MODELS)} workloads, {len(groups)} limits. Within "
        f"{MOST_OFF:.0%}: {within} of {len(rows)} rows. Order: {sum(pairs)} of "
        f"{len(pairs)} pairs."
    )
    table = measuring.make_table(HEADERS, [row.cells() for row in rows], texts=3)
    return f"{said}\n\n{table}", broken


def _broken(group: Sequence[Row]) -> Iterator[str]:
    """Where the settings within one limit break the claim."""
    totals = TUNED_TOTAL, ACCUMULATED
    kept = {one.setting: one for one in group if one.setting in totals}
    others = [one for one in group if one.setting not in totals]
    same_total = [kept[name] for name in totals if len(kept) == len(totals)]
    for tuned, *by_hand in filter(None, (others, same_total)):
        where = f"{tuned.model}, {format_bytes(tuned.limit_bytes)}: {tuned.setting}"
        best = max((one.speed for one in by_hand), default=0.0)
        if tuned.speed < best * (1 - MOST_SLOWER):
            yield f"{where} is {1 - tuned.speed / best:.1%} slower"
    for one in group:
        if one.peak_bytes > one.limit_bytes:
            yield f"{where}: {one.setting} exceeds the limit"


def _in_order(one: Row, other: Row) -> bool:
    """Whether two settings are predicted in the order in which they were measured."""
    if abs(one.speed / other.speed - 1) <= MOST_SLOWER:
        return True
    return (one.speed > other.speed) == (one.predicted > other.predicted)


def _measured(name: str, rounds: int) -> Iterator[Row]:
    """The tuned setting, then those by hand, all measured in turns, at every limit."""
    spec = WorkloadSpec(measuring.location_of(name), parse_options(MODELS[name]))
    record, rows, way = recorder_of_spec(spec)
    with _lever_signs.no_known_costs():  # of which some could be of a busy machine
        step = record(way, rows, 1)
        planner = Planner(step)
        most, least = planner.unplanned.peak_bytes, planner.floor.peak_bytes
        for share in SHARES:
            limit = MemoryLimit(most - int(share * (most - least)))
            measuring.say(f"{name}: {share:.0%} of the way to the smallest peak")
            tuning = Tuning(record, limit, way=way, rows=rows)
            found = tuning.run()
            settings = [_contestant(TUNED, found.best, found.graph)]
            settings += _practices(tuning.search(way), limit)
            if settings[-1].name == ACCUMULATED:
                total = settings[-1].samples
                other = Tuning(record, limit, way=way, rows=rows, total=total).run()
                settings.append(_contestant(TUNED_TOTAL, other.best, other.graph))
            yield from _rows(name, spec, limit, settings, rounds)


def _rows(
    name: str,
    spec: WorkloadSpec,
    limit: MemoryLimit,
    settings: Sequence[_Contestant],
    rounds: int,
) -> Iterator[Row]:
    ways = [
        (
            replace(spec, rows=one.rows),
            _lever_signs.plan_for(one.graph, one.regions),
            one.training,
        )
        for one in settings
    ]
    peaks, timed = measured_in_turns(ways, rounds)
    for one, peak, taken in zip(settings, peaks, timed, strict=True):
        seconds = statistics.median(taken)
        speeds = one.samples / seconds, one.samples / one.predicted_seconds
        yield Row(name, limit.bytes, one.name, one.rows, one.accumulate, peak, *speeds)


def _contestant(name: str, one: Setting, graph: Graph) -> _Contestant:
    way, seconds = one.way, one.step_seconds
    training = Training(way.optimizer, way.amp, one.accumulate, scaler=way.scaler)
    return _Contestant(
        name, one.batch, one.accumulate, one.regions, seconds, training, graph
    )


def _practices(search: WaySearch, limit: MemoryLimit) -> Iterator[_Contestant]:
    """What people do by hand, each at its largest batch."""
    largest = search.largest_unplanned
    if largest:
        one = search.setting(largest, planned=False)
        assert one is not None
        yield _contestant("no plan", one, search.graph_at(largest))
    plans = search.planner_at(max(largest, 1)).standard_baselines.every_call
    for name, step in (("every layer", 1), ("every second layer", 2)):
        for _, layers in plans:
            regions = layers[::step]
            rows = largest_under(search.graph_at, limit, regions, max(largest, 1))
            if rows:
                timeline = Simulator(search.graph_at(rows)).run(regions)
                seconds = timeline.graph.step_seconds + timeline.recompute_seconds
                yield _Contestant(
                    name, rows, 1, regions, seconds, Training(), search.graph_at(rows)
                )
    many = replace(search, accumulate=MICRO_BATCHES, _settings={})
    if rows := many.largest_unplanned:
        one = many.setting(rows, planned=False)
        assert one is not None
        yield _contestant(ACCUMULATED, one, many.graph_at(rows))
