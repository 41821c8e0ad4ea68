"""The exact reference: never above any plan, never below any bound."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import graphs
import pytest

import ckplan
from ckplan.errors import CkplanError
from ckplan.graph.records import EngineCosts
from ckplan.simulating.simulate import Simulator
from ckplan.solving.bound import LowerBound
from ckplan.solving.milp import solve_exactly
from ckplan.solving.planner import Planner
from ckplan.solving.solve import Objective, add_exact_bound, find

SECONDS = 60.0


@pytest.mark.parametrize("engine", [False, True], ids=["ops", "engine"])
@pytest.mark.parametrize("seed", range(40))
def test_no_plan_of_a_random_step_beats_the_exact_schedule(
    seed: int, *, engine: bool
) -> None:
    rng = Random(seed)
    graph = graphs.random_step(rng)
    if engine:
        graph = graphs.with_engine(graph, rng)
    simulator = Simulator(graph)
    for timeline in graphs.random_programs(simulator, rng, 2):
        budget = timeline.peak_bytes
        exact = solve_exactly(simulator, budget, SECONDS)
        assert exact.optimal
        assert exact.overhead is not None
        assert exact.overhead <= timeline.overhead + 1e-6
        backward = range(graph.num_forward, graph.backward_stop)
        for tight in ((), rng.choices(backward, k=3)):
            bound = LowerBound(simulator, tight).overhead(budget)
            assert bound <= exact.overhead + 1e-6


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_plans_of_a_chain_are_near_the_exact_schedule(blocks: int) -> None:
    planner = Planner(replace(graphs.chain(blocks), engine=EngineCosts(0.1, 0.1)))
    low, high = planner.floor.peak_bytes, planner.unplanned.peak_bytes
    for budget in (low, (low + high) // 2, (low + 3 * high) // 4, high):
        solution = add_exact_bound(planner, find(planner, Objective(budget)), SECONDS)
        assert solution.exact is not None
        assert solution.exact.overhead is not None
        assert solution.exact.optimal
        overhead = solution.timeline.overhead
        assert solution.bound_overhead <= solution.exact.overhead + 1e-6
        assert solution.exact.overhead <= overhead + 1e-6


def test_a_budget_that_no_schedule_fits_is_proven() -> None:
    simulator = Simulator(graphs.chain(2))
    exact = solve_exactly(simulator, 10, SECONDS)
    assert (exact.optimal, exact.overhead) == (True, None)


def test_a_step_that_fits_needs_nothing_to_run_again() -> None:
    simulator = Simulator(graphs.chain(2))
    exact = solve_exactly(simulator, simulator.run().peak_bytes, SECONDS)
    assert (exact.optimal, exact.overhead) == (True, 0.0)


def test_without_time_there_is_a_bound_and_no_claim() -> None:
    graph = graphs.chain(6)
    planner = Planner(graph)
    exact = solve_exactly(planner.simulator, planner.floor.peak_bytes, 0.0)
    assert not exact.optimal
    assert exact.bound_overhead >= 0


def test_python_asks_for_it_by_name() -> None:
    graph = graphs.chain(2)
    budget = Planner(graph).floor.peak_bytes
    chain, exact = (ckplan.solve(graph, budget, method=m) for m in ("chain", "milp"))
    assert exact.regions == chain.regions
    assert exact.bound["any_schedule"] >= chain.bound["any_schedule"]
    with pytest.raises(CkplanError, match="search exactly with levers"):
        ckplan.solve(graph, budget, method="milp", spill_rate="1GB")
    with pytest.raises(CkplanError, match="search exactly with levers"):
        ckplan.solve(graph, budget, method="milp", allow="tiles")
    assert ckplan.solve(graph, budget, method="milp", allow=None) == exact
    with pytest.raises(CkplanError, match=r"cannot read the overhead \[1\]"):
        ckplan.solve(graph, max_overhead=[1])  # type: ignore[arg-type]
    with pytest.raises(CkplanError, match="no card is called '5'"):
        ckplan.solve(graph, gpu=5)  # type: ignore[arg-type]
    with pytest.raises(CkplanError, match="unknown method 'best'"):
        ckplan.solve(graph, budget, method="best")
