"""Plans of one batch at another: replayed, within the budget, nearly as cheap."""

from __future__ import annotations

from dataclasses import replace

import graphs
import pytest

from ckplan.graph.graph import Graph
from ckplan.simulating.simulate import Simulator
from ckplan.solving.planner import Planner
from ckplan.tuning import batches as tuning_batches
from ckplan.tuning.batches import Batches
from ckplan.tuning.transfer import TransferredPlans, transferred


def step_at(rows: int) -> Graph:
    graph = graphs.chain(
        6,
        width_bytes=10 * rows,
        hidden_bytes=40 * rows,
        stats_bytes=rows,
        weight_bytes=50,
        seconds=3.0 + rows,
    )
    return replace(graph, fingerprint={**graph.fingerprint, "batch": [f"x[{rows}]"]})


@pytest.fixture(scope="module")
def there() -> Planner:
    return Planner(step_at(8))


@pytest.mark.parametrize("rows", [5, 8, 20])
def test_they_fit_and_cost_as_little_as_those_searched_there(
    there: Planner, rows: int
) -> None:
    own = Planner(step_at(rows))
    found = TransferredPlans(there, Simulator(step_at(rows)))
    least, most = found.floor.peak_bytes, own.unplanned.peak_bytes
    assert least >= own.floor.peak_bytes
    assert found.unplanned.peak_bytes == most
    assert found.within(most) == (found.unplanned, ())
    assert found.within(least - 1) is None
    for place in range(8):
        budget_bytes = least + (most - least) * place // 8
        timeline, regions = found.within(budget_bytes) or pytest.fail("no plan")
        best, _ = own.within(budget_bytes) or pytest.fail("no plan")
        assert timeline.peak_bytes <= budget_bytes
        replayed = Simulator(step_at(rows)).run(regions)
        assert replayed.peak_bytes == timeline.peak_bytes
        assert replayed.overhead == timeline.overhead
        assert timeline.overhead <= best.overhead + 0.05


def test_a_search_gives_plans_to_near_batches_until_these_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning_batches, "_LARGE", 1)
    batches = Batches(lambda rows, _: step_at(rows), (4, 8))
    batches.at(4)
    searched = batches.plans(12)
    assert searched is batches.planner(12)
    assert isinstance(batches.plans(16), TransferredPlans)
    assert batches.plans(16) is batches.plans(16)
    assert batches.plans(12) is searched
    assert isinstance(batches.plans(90), Planner)  # too far from 12
    batches.recorded_at(16)
    assert isinstance(batches.plans(16), Planner)


def test_steps_that_run_other_ops_are_searched_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning_batches, "_LARGE", 1)
    batches = Batches(lambda rows, _: step_at(rows), (4, 8))
    batches.at(4)
    searched = batches.planner(12)
    assert transferred(searched, Simulator(graphs.chain(5))) is None
    monkeypatch.setattr(batches, "at", lambda rows, _=1: graphs.chain(rows))
    assert isinstance(batches.plans(12), Planner)
    assert isinstance(batches.plans(16), Planner)
