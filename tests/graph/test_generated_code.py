"""Plans of compiled code in a trace: the peak is that of the code, the file checked."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from graphs import chain

from ckplan.errors import GraphError, InfeasibleError
from ckplan.graph.file import dumps, loads
from ckplan.graph.graph import Graph
from ckplan.graph.records import GeneratedCode
from ckplan.plan import file as plan_file
from ckplan.plan.region import Region
from ckplan.plan.resolve import resolve
from ckplan.simulating.simulate import Simulator
from ckplan.solving.planner import Planner
from ckplan.solving.solve import to_plan

STEP = chain(3)


def generated(step: Graph = STEP) -> Graph:
    """A step with three plans, whose code takes more than the ops alone."""
    layers = [c for c in range(len(step.calls)) if step.calls[c].fqn == "h.0"]
    few, most = (Region(layers[0]),), (Region(0),)
    plans = [((), 0.0, 900), (few, 0.02, 800), (most, 0.1, 700)]
    simulator = Simulator(step)
    codes = (
        GeneratedCode(
            tuple(region.saving for region in regions),
            simulator.run(regions).peak_bytes,
            more + simulator.unplanned_bytes[0],
            "compiled backward",
            overhead,
        )
        for regions, overhead, more in plans
    )
    return replace(step, generated=tuple(codes))


GRAPH = generated()
UNPLANNED, FEW, MOST = GRAPH.generated


def test_it_is_read_as_it_was_written() -> None:
    assert loads(dumps(GRAPH), "x") == GRAPH
    assert "generated" not in json.loads(dumps(STEP))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((0, 0), [[99, None, []]]),
        ((0, 0), [[0, 99, []]]),
        ((0, 0), [[0, None, [[10**6, 0]]]]),
        ((0, 0), [[0, None, [[0, 9]]]]),
        ((0, 0), [[2, None, []], [1, None, []]]),
        ((0, 0), [[0, None]]),
        ((0, 1), -1),
        ((0, 2), 1.5),
        ((0, 4), -1.1),
        ((0,), [[], 1, 2]),
    ],
)
def test_what_is_out_of_range_is_refused(place: tuple[int, ...], value: Any) -> None:
    content = json.loads(dumps(GRAPH))
    rows = content["generated"]
    for step in place[:-1]:
        rows = rows[step]
    rows[place[-1]] = value
    with pytest.raises(GraphError, match=r"malformed|out of range"):
        loads(json.dumps(content), "x")


def test_a_plan_may_be_faster_than_what_torch_chooses() -> None:
    faster = replace(FEW, overhead=-0.02)
    step = loads(dumps(replace(GRAPH, generated=(UNPLANNED, faster, MOST))), "x")
    found = Planner(step).solve(FEW.peak_bytes)
    assert found.timeline.overhead == pytest.approx(-0.02)
    assert (found.bound_overhead, found.gap) == (-0.02, pytest.approx(0.0))
    plan = to_plan(step, found)
    assert plan.predicted is not None and plan.predicted.overhead == -0.02
    assert plan_file.loads(plan_file.dumps(plan), "x").predicted == plan.predicted


def test_a_budget_gets_the_cheapest_code_that_fits() -> None:
    planner = Planner(GRAPH)
    peaks = UNPLANNED.peak_bytes, FEW.peak_bytes, MOST.peak_bytes
    for code in GRAPH.generated:
        found = planner.solve(code.peak_bytes)
        assert found.timeline.peak_bytes == code.peak_bytes
        assert found.timeline.overhead == pytest.approx(code.overhead)
        assert found.timeline.peak_at == code.peak_at
        assert found.bound_overhead == 0.0
    assert planner.solve(FEW.peak_bytes - 1).timeline.peak_bytes == MOST.peak_bytes
    assert planner.floor.peak_bytes == min(peaks)
    assert [point.peak_bytes for point in planner.frontier()] == sorted(peaks)
    assert planner.least_memory(0.05).timeline.peak_bytes == FEW.peak_bytes
    with pytest.raises(InfeasibleError, match="the floor of"):
        planner.solve(min(peaks) - 1)


def test_a_plan_in_a_file_takes_what_its_code_takes() -> None:
    solution = Planner(GRAPH).solve(FEW.peak_bytes)
    plan = to_plan(GRAPH, solution)
    regions = resolve(plan, GRAPH)
    assert Simulator(GRAPH).run(regions).peak_bytes == FEW.peak_bytes


def test_code_of_another_step_does_not_count() -> None:
    wider = replace(
        GRAPH, storages=tuple(replace(s, bytes=s.bytes + 1) for s in GRAPH.storages)
    )
    found = Simulator(wider).run()
    assert found.peak_bytes == found.simulated_peak_bytes != UNPLANNED.peak_bytes
