"""Proves that the signs in the table of `ckplan tune` are right, for every lever alone.

Eight small models train on the CPU at their own batch, on one thread, without a lever
and with every lever alone: bytes that the lever saves of the peak and seconds per
sample that it adds, predicted and measured, as parts of those without. Peaks are of
processes of their own. Steps are taken in turns by copies in one process that keeps its
memory, as is what predictions are measured in. A round is as many turns as take about
twelve seconds; the mean of the faster half of its CPU seconds counts. A change is the
median over rounds, each with its own step without a lever. Less than 0.1 % has no sign,
nor has what is measured with quartiles on both sides of none. "Far" is more than 2
points off.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import _measuring as measuring
from _copies import changes, measured_in_turns
from _kept_rows import KeptRows

from ckplan.autotune import recorder_of_spec
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan, plan_fingerprint
from ckplan.plan.region import Region
from ckplan.plan.resolve import describe
from ckplan.simulating.simulate import Simulator
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.tracing.costs.cost_cache import FOLDER_VARIABLE
from ckplan.training.loading import WorkloadSpec, parse_options
from ckplan.training.step import Training
from ckplan.tuning.lever_rows import ACCUMULATE, RECOMPUTE
from ckplan.tuning.search import WaySearch
from ckplan.tuning.settings import Lever, Way, grouped_update, kernel_of, levers_of
from ckplan.tuning.tune import Tuning

_TOKENS = "layers=4", "width=128", "heads=4", "length=64", "vocab=1000"
MODELS: dict[str, tuple[str, ...]] = {
    "mlp": ("layers=6", "width=256", "batch=2048"),
    "gpt2": (*_TOKENS, "batch=16"),
    "bert": (*_TOKENS, "batch=16"),
    "llama": (*_TOKENS, "batch=16"),
    "vit": ("layers=4", "batch=4"),
    "resnet50": ("batch=4", "size=64"),
    "unet": ("batch=2",),
    "mixer": (),
}
CHANGING = "bf16", "adafactor"
FREED = 0.5  # of the way from the unplanned peak to the floor, by a plan
MICRO_BATCHES = 4
MOST_POINTS, LEAST_WITHIN = 0.02, 0.9
NOTHING = 0.001  # of the base: such a difference has no sign, and pays for no lever
HEADERS = "model", "lever", "saves", "measured", "time", "measured", "quartiles", "sign"


@dataclass(frozen=True)
class Row:
    """What a lever alone does at the workload's own batch, as fractions of the base."""

    model: str
    lever: str
    saved_predicted: float
    saved: float
    time_predicted: float
    low: float  # quartiles of the seconds per sample, less those of the base
    time: float
    high: float

    @property
    def is_right(self) -> bool:
        """Whether bytes and seconds change in the direction that was predicted.

        Seconds whose quartiles lie on both sides of none have no direction.
        """
        measured = _sign(self.time) * (_sign(self.low) == _sign(self.high))
        time_right = _sign(self.time_predicted) * measured >= 0
        right = _sign(self.saved_predicted) == _sign(self.saved)
        return right and time_right

    @property
    def is_within(self) -> bool:
        """Whether both predictions are within 2 points."""
        off = self.saved_predicted - self.saved, self.time_predicted - self.time
        return max(map(abs, off)) <= MOST_POINTS

    def cells(self) -> list[str]:
        """The row of the table."""
        changes = [self.saved_predicted, self.saved, self.time_predicted, self.time]
        spread = f"{self.low:+.1%} to {self.high:+.1%}"
        verdict = "right" if self.is_right else "wrong"
        far = "" if self.is_within else ", far"
        shown = [f"{one:+.1%}" for one in changes]
        return [self.model, self.lever, *shown, spread, f"{verdict}{far}"]


@dataclass(frozen=True)
class _Pulled:
    """One lever, as it trains, and what is predicted of it."""

    lever: str
    training: Training
    graph: Graph
    regions: tuple[Region, ...]
    peak_bytes: int
    seconds: float  # of a sample


def signs(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The table of all rows that are known, and where its claim does not hold."""
    kept = KeptRows("tuned_signs", Row, args)
    rows = kept.fill(MODELS, lambda name: _measured(name, args.rounds))
    broken = [f"{r.model}, {r.lever}: wrong sign" for r in rows if not r.is_right]
    within = sum(row.is_within for row in rows)
    if within < LEAST_WITHIN * len(rows):
        broken.append(f"{within} of {len(rows)} levers are within 2 points")
    said = (
        f"{len(kept.rows)} of {len(MODELS)} models; {within} of {len(rows)} rows within"
    )
    table = measuring.make_table(HEADERS, [row.cells() for row in rows], texts=2)
    return f"{said} 2 points.\n\n{table}", broken


def _measured(name: str, rounds: int) -> Iterator[Row]:
    """Every lever of a model alone, and the model without any, in turns."""
    spec = WorkloadSpec(measuring.location_of(name), parse_options(MODELS[name]))
    record, rows, way = recorder_of_spec(spec)
    tuning = Tuning(record, MemoryLimit(2**62), way=way, rows=rows, allow=CHANGING)
    with no_known_costs():
        base, *others = pulled = list(_pulled(tuning, way, rows))
    ways = [
        (replace(spec, rows=rows), plan_for(one.graph, one.regions), one.training)
        for one in pulled
    ]
    peaks, timed = measured_in_turns(ways, rounds)
    seconds = [
        [one_step / one.training.accumulate for one_step in taken]
        for one, taken in zip(pulled, timed, strict=True)
    ]
    for one, peak, taken in zip(others, peaks[1:], seconds[1:], strict=True):
        low, middle, high = changes(taken, seconds[0])
        yield Row(
            name,
            one.lever,
            1 - one.peak_bytes / base.peak_bytes,
            1 - peak / peaks[0],
            one.seconds / base.seconds - 1,
            low,
            middle,
            high,
        )


def plan_for(graph: Graph, regions: tuple[Region, ...]) -> Plan | None:
    """The plan with some regions, for a process that trains; None without any."""
    if not regions:
        return None
    found = describe(graph, regions)
    return Plan(graph.model, plan_fingerprint(graph.fingerprint), regions=found)


@contextmanager
def no_known_costs() -> Iterator[None]:
    """A scope in which every op is measured once, and has these seconds in all steps.

    Were each step measured by itself, the noise of two would count as a lever's.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {FOLDER_VARIABLE: folder}),
    ):
        yield


def _pulled(tuning: Tuning, way: Way, rows: int) -> Iterator[_Pulled]:
    """The step without a lever first, then with each one."""
    base = tuning.search(way)
    yield _of(base, "none", rows)
    planner = base.planner_at(rows)
    above = planner.unplanned.peak_bytes - planner.floor.peak_bytes
    found = planner.within(planner.unplanned.peak_bytes - int(FREED * above))
    if found is not None and found[1]:
        yield _of(base, RECOMPUTE, rows, found[1])
    many = replace(base, accumulate=MICRO_BATCHES, _settings={}, _lever_plans={})
    yield _of(many, f"{ACCUMULATE} {MICRO_BATCHES}", rows)
    for lever in _others(way, base.graph_at(rows)):
        yield _of(tuning.search(lever.pulled(way)), lever.name, rows)


def _others(way: Way, graph: Graph) -> Iterator[Lever]:
    """Levers that change a step, less the kernel of the optimizer that it has."""
    kernel, groups = kernel_of(graph), grouped_update(way, graph)
    for lever in levers_of(way, CHANGING):
        if lever.kernel is None or (kernel and lever.kernel != kernel):
            yield lever
    if groups is not None:
        yield groups


def _of(
    search: WaySearch, lever: str, rows: int, regions: tuple[Region, ...] = ()
) -> _Pulled:
    graph, way = search.graph_at(rows), search.way
    timeline, many = Simulator(graph).run(regions), search.accumulate
    seconds = graph.step_seconds + timeline.recompute_seconds
    training = Training(way.optimizer, way.amp, many, scaler=way.scaler)
    per_sample = seconds / (rows * many)
    return _Pulled(lever, training, graph, regions, timeline.peak_bytes, per_sample)


def _sign(change: float) -> int:
    return (change > NOTHING) - (change < -NOTHING)
