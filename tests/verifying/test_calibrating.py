"""A calibration fits the engine's costs to a measured step, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import graphs
import pytest
import torch
from verifications import verification

import ckplan
from ckplan import files
from ckplan.errors import CkplanError
from ckplan.graph.graph import Graph
from ckplan.graph.records import EngineCosts
from ckplan.plan.resolve import resolve
from ckplan.simulating.simulate import Timeline, simulate
from ckplan.tracing.costs import apply_overhead, cost_cache
from ckplan.tracing.costs.apply_overhead import calibrate_engine, known_engine_costs
from ckplan.tracing.costs.cost_cache import CostCache
from ckplan.verifying.calibrating import Calibration, calibrate, check_calibration
from ckplan.verifying.phases import predicted_seconds
from ckplan.verifying.timing import Quartiles
from ckplan.verifying.verify import Breakdown, Verification

CPU = torch.device("cpu")
CHAIN = EngineCosts(watch_seconds=0.25, rerun_seconds=0.5)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cost cache, in which the engine's costs are those of the trace."""
    monkeypatch.setenv("CKPLAN_CACHE", str(tmp_path / "costs"))
    monkeypatch.setattr(apply_overhead, "_measure", lambda _: (0.25, 0.5, 0, 0, 0, 0))
    assert calibrate_engine([], CPU, cost_cache.cost_cache(CPU)) == CHAIN
    return tmp_path / "costs"


@pytest.fixture
def trace() -> Graph:
    return replace(graphs.chain(4), engine=CHAIN)


def planned(trace: Graph) -> Timeline:
    plan = ckplan.solve(trace, goal="min-memory")
    return simulate(trace, resolve(plan, trace))


def verified(trace: Graph, overheads: Quartiles, **changes: Any) -> Verification:
    """A verification of the smallest plan, with a measured overhead."""
    timeline = planned(trace)
    unplanned = predicted_seconds(simulate(trace), trace)
    step = predicted_seconds(timeline, trace)
    return verification(
        phases=Breakdown(unplanned, step, unplanned, step),
        overhead=overheads.median,
        overhead_quartiles=(overheads.low, overheads.high),
        **changes,
    )


def around(overhead: float, spread: float = 0.0) -> Quartiles:
    return Quartiles(overhead - spread / 2, overhead, overhead + spread / 2)


def test_a_profile_after_a_calibration_predicts_what_was_measured(
    trace: Graph,
) -> None:
    measured = planned(replace(trace, engine=EngineCosts(0.4, 0.8))).overhead
    found = calibrate(verified(trace, around(measured)), trace, "cpu")
    assert found.factor.median == pytest.approx(1.6)
    assert found.engine.watch_seconds == pytest.approx(0.4)
    profiled = calibrate_engine([], CPU, cost_cache.cost_cache(CPU))
    assert profiled == found.engine
    predicted = planned(replace(trace, engine=profiled))
    plan = [effect.steps for effect in predicted.effects]
    assert plan == [effect.steps for effect in planned(trace).effects]
    assert predicted.overhead == pytest.approx(measured)


def test_calibrations_do_not_multiply(trace: Graph) -> None:
    overheads = around(planned(trace).overhead * 1.2)
    first = calibrate(verified(trace, overheads), trace, "cpu")
    again = calibrate(verified(trace, overheads), trace, "cpu")
    assert first == again
    anew = replace(trace, engine=first.engine)
    third = calibrate(verified(anew, overheads), anew, "cpu")
    assert third.factor.median == pytest.approx(1.0)
    assert third.engine.rerun_seconds == pytest.approx(first.engine.rerun_seconds)


def test_a_fresh_profile_leaves_the_calibration_out(trace: Graph) -> None:
    calibrate(verified(trace, around(planned(trace).overhead * 1.2)), trace, "cpu")
    path = cost_cache.cost_cache(CPU).path
    assert calibrate_engine([], CPU, CostCache(path, fresh=True)) == CHAIN
    assert calibrate_engine([], CPU, CostCache(path)) != CHAIN


def busy(trace: Graph) -> Calibration:
    problem = "the machine is busy (load average 14.2, 2 cores)"
    found = verified(trace, around(0.5), timing_problem=problem)
    return calibrate(found, trace, "cpu")


def of_other_workload(trace: Graph) -> Calibration:
    note = "no predicted timeline: the trace differs in torch: trace 2.12.0, here 2.13"
    found = verified(trace, around(0.5), notes=(note,))
    return calibrate(replace(found, phases=Breakdown()), trace, "cpu")


def of_other_machine(trace: Graph) -> Calibration:
    other = replace(trace, engine=EngineCosts(1.0, 2.0))
    return calibrate(verified(other, around(planned(other).overhead)), other, "cpu")


def with_little_engine(trace: Graph) -> Calibration:
    little = replace(trace, engine=EngineCosts(0.001, 0.001))
    return calibrate(verified(little, around(0.5)), little, "cpu")


def with_no_engine(trace: Graph) -> Calibration:
    none = replace(trace, engine=EngineCosts())
    return calibrate(verified(none, around(0.5)), none, "cpu")


def with_a_cheaper_plan(trace: Graph) -> Calibration:
    return calibrate(verified(trace, around(0.001)), trace, "cpu")


def with_wide_quartiles(trace: Graph) -> Calibration:
    overhead = planned(trace).overhead
    found = verified(trace, around(overhead, 0.6 * planned(trace).engine_overhead))
    return calibrate(found, trace, "cpu")


@pytest.mark.parametrize(
    ("attempt", "what"),
    [
        (busy, "time could not be measured: the machine is busy (load average 14.2"),
        (of_other_workload, "there are no predicted or no measured seconds"),
        (of_other_machine, "the engine's costs in the trace are not those kept"),
        (with_little_engine, "the engine is "),
        (with_no_engine, "the engine is 0 s of the "),
        (with_a_cheaper_plan, "the plan adds less than the ops that it reruns"),
        (with_wide_quartiles, "the engine takes 0.70 to 1.30 times what was predicted"),
        (lambda _: check_calibration(None, 5), "there is no trace of this workload"),
        (lambda trace: check_calibration(trace, 2), "2 timed steps have no spread"),
    ],
)
def test_what_says_nothing_of_the_engine_is_refused_and_not_kept(
    attempt: Callable[[Graph], object], what: str, trace: Graph, folder: Path
) -> None:
    (path,) = folder.iterdir()
    before = path.read_bytes()
    with pytest.raises(CkplanError) as caught:
        attempt(trace)
    assert caught.value.what.startswith(f"cannot calibrate: {what}")
    assert len(str(caught.value).splitlines()) == 3
    assert path.read_bytes() == before


def test_a_cache_file_cut_in_half_is_said_and_measured_anew(
    trace: Graph, folder: Path
) -> None:
    overheads = around(planned(trace).overhead * 1.2)
    calibrate(verified(trace, overheads), trace, "cpu")
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CkplanError, match="could not be read: made anew") as caught:
        calibrate(verified(trace, overheads), trace, "cpu")
    assert len(str(caught.value).splitlines()) == 3
    cache = cost_cache.cost_cache(CPU)
    assert calibrate_engine([], CPU, cache) == CHAIN
    assert "could not be read" in cache.notes[0]


def test_a_calibration_that_cannot_be_kept_is_an_error(
    trace: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CkplanError("disk full", needed="room", hint="make some")

    monkeypatch.setattr(cost_cache.files, "write_text", fail)
    with pytest.raises(CkplanError, match=r"could not be kept.*disk full"):
        calibrate(verified(trace, around(planned(trace).overhead)), trace, "cpu")


def test_another_torch_has_no_calibration_of_this_one(
    trace: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate(verified(trace, around(planned(trace).overhead * 1.2)), trace, "cpu")
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert known_engine_costs([], CPU, cost_cache.cost_cache(CPU)) == ()


def test_another_engine_has_no_costs_of_this_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    this = apply_overhead.engine_digest()
    (tmp_path / "applying" / "rebuilding").mkdir(parents=True)
    (tmp_path / "applying" / "rebuilding" / "step.py").write_text("# another engine\n")
    monkeypatch.setattr(files, "__file__", str(tmp_path / "files.py"))
    files.source_digest.cache_clear()
    try:
        assert apply_overhead.engine_digest() != this
        assert known_engine_costs([], CPU, cost_cache.cost_cache(CPU)) == ()
    finally:
        monkeypatch.undo()
        files.source_digest.cache_clear()
    assert apply_overhead.engine_digest() == this
