"""Seconds by phase: predicted ones add up, measured ones follow the clock."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace

import graphs
import pytest
import torch

import ckplan
from ckplan.graph.records import EngineCosts
from ckplan.plan.resolve import resolve
from ckplan.simulating.simulate import simulate
from ckplan.verifying import phases
from ckplan.verifying.phases import PhaseClock, PhaseSeconds, predicted_seconds

CPU = torch.device("cpu")


@pytest.mark.parametrize("batches", [1, 4])
def test_predicted_phases_add_up_to_the_predicted_step(batches: int) -> None:
    engine = EngineCosts(watch_seconds=1e-3, rerun_seconds=2e-3)
    once = replace(graphs.chain(4), engine=engine)
    graph = replace(once, options={"accumulate": batches})
    plan = ckplan.solve(graph, goal="min-memory")
    timeline = simulate(graph, resolve(plan, graph))
    found = predicted_seconds(timeline, graph)
    assert found.engine_seconds and found.recomputation_seconds
    engine_seconds = sum(effect.engine_seconds for effect in timeline.effects)
    assert found.engine_seconds == pytest.approx(batches * engine_seconds)
    added = found.recomputation_seconds + found.engine_seconds
    assert added == pytest.approx(timeline.recompute_seconds)
    one_batch = simulate(once, resolve(plan, once)).recompute_seconds
    assert added == pytest.approx(batches * one_batch)
    total = graph.step_seconds + timeline.recompute_seconds
    assert found.total_seconds == pytest.approx(total)
    more = (batches - 1) * (once.step_seconds - found.optimizer_seconds)
    assert graph.step_seconds == pytest.approx(once.step_seconds + more)
    assert plan.predicted is not None
    alone = ckplan.solve(once, goal="min-memory")
    assert alone.predicted is not None
    assert plan.predicted.overhead == pytest.approx(timeline.overhead, abs=1e-4)
    both = plan.bound["any_schedule"] * alone.predicted.overhead
    assert both == pytest.approx(
        alone.bound["any_schedule"] * plan.predicted.overhead, rel=0.01
    )  # bound and plan grow alike
    unplanned = predicted_seconds(simulate(graph), graph)
    assert unplanned.forward_seconds == found.forward_seconds
    assert unplanned.engine_seconds == unplanned.recomputation_seconds == 0


def test_seconds_of_tiles_count_once() -> None:
    graph = graphs.chain(4)
    slower = [replace(op, seconds=1.5 * op.seconds) for op in graph.ops]
    tiled = simulate(replace(graph, ops=tuple(slower)))
    more = tiled.graph.step_seconds - graph.step_seconds
    found = predicted_seconds(replace(tiled, added_seconds=more), graph)
    assert (
        found.forward_seconds
        == predicted_seconds(simulate(graph), graph).forward_seconds
    )
    assert found.recomputation_seconds == pytest.approx(more)
    assert found.total_seconds == pytest.approx(tiled.graph.step_seconds)


def test_every_turn_of_a_phase_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 21.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = PhaseClock(CPU)
    for phase in ("forward", "backward", "forward", "backward", "optimizer"):
        clock.enter(phase)
    assert clock.stop() == PhaseSeconds(2.0 + 4.0, 3.0 + 5.0, 1.0 + 6.0)


def test_on_a_gpu_events_are_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        """Done when the device is; the device is a millisecond behind each."""

        made = 0

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.done = False

        def record(self) -> None:
            Event.made += 1
            self.when = float(Event.made)

        def synchronize(self) -> None:
            self.done = True

        def elapsed_time(self, other: Event) -> float:
            assert other.done
            return other.when - self.when

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    clock = PhaseClock(torch.device("cuda"))
    for phase in phases.PHASES:
        clock.enter(phase)
    found = clock.stop()
    assert found.forward_seconds == found.backward_seconds == 1e-3
    assert found.optimizer_seconds == 2e-3
