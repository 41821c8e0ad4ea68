"""A plan is followed without generating the code of the step without a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled import Convolutions, Deep, count_lowered, planner_of
from torch import nn

import ckplan
from ckplan.compiling import search
from ckplan.compiling.plan_cache import path_of
from ckplan.compiling.saved_values import saved_in_any
from ckplan.compiling.search import CompiledPlanner, plan_graph
from ckplan.plan.plan import Plan

MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "deep": lambda: (Deep(depth=2), torch.randn(64, 32)),
    "convolutions": lambda: (Convolutions(8, 2), torch.randn(2, 3, 8, 8)),
}


def a_plan(planner: CompiledPlanner) -> Plan:
    """The one that is estimated to cost most."""
    return planner.chosen(planner.candidates[-1]).plan


def backend_of(plan: Plan, name: str) -> ckplan.Backend:
    """A backend that has followed a plan in a step."""
    torch._dynamo.reset()
    backend = ckplan.backend(plan)
    model, x = MODELS[name]()
    torch.compile(model, backend=backend, fullgraph=True)(x).backward()
    return backend


@pytest.mark.parametrize("name", MODELS)
def test_what_a_plan_saves_is_found_without_unplanned_code(name: str) -> None:
    planner = planner_of(*MODELS[name]())
    for one in planner.candidates:
        assert one.saved in saved_in_any(planner.joint, planner.describe(one, None))


@pytest.mark.parametrize("name", MODELS)
def test_no_unplanned_code_is_generated_until_it_is_asked_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = planner_of(*MODELS[name]())
    plan = a_plan(planner)
    lowered = count_lowered(monkeypatch)
    (chosen,) = backend_of(plan, name).chosen
    assert (None,) not in lowered
    assert chosen.plan == plan
    assert (chosen.saved, chosen.replayed) == (
        planner.named(plan).saved,
        planner.follow(plan).replayed,
    )
    lowered.clear()
    assert chosen.unplanned == planner.unplanned
    assert chosen.candidate == planner.named(plan)
    assert lowered == [(None,)]
    assert chosen.unplanned == planner.unplanned
    assert len(lowered) == 1


def test_where_a_plan_may_mean_two_things_unplanned_code_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = planner_of(*MODELS["deep"]())
    plan = a_plan(planner)
    lowered = count_lowered(monkeypatch)
    both = frozenset({planner.named(plan).saved, frozenset[str]()})
    monkeypatch.setattr(search, "saved_in_any", lambda joint, plan: both)
    (chosen,) = backend_of(plan, "deep").chosen
    assert lowered[0] == (None,)
    assert chosen.saved == planner.named(plan).saved


def test_a_budget_is_planned_after_a_plan_was_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = planner_of(*MODELS["deep"]())
    plan = a_plan(planner)
    backend_of(plan, "deep")
    path = path_of(planner.traced)
    assert path is not None
    assert path.exists()  # without the unplanned replay
    lowered = count_lowered(monkeypatch)
    after = plan_graph(planner.traced, quick=True)
    assert after is not None
    assert a_plan(after) == plan
    assert lowered[0] == (None,)


def test_larger_storages_behind_a_batch_are_another_plan() -> None:
    rows = torch.randn(128, 32)
    found: list[Any] = [
        path_of(planner_of(Deep(depth=1), one).traced)
        for one in (rows[:64].clone(), rows[:64], rows[64:])
    ]
    assert found[0] != found[1]
    assert found[1] == found[2]
