"""A plan is followed without generating the code of the step without a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
from ckplan.errors import InfeasibleError, PlanError
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


def losses(call: Any, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The loss and the gradients of a step."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = call(x)
    loss.backward()
    return [loss.detach(), *(one.grad.clone() for one in model.parameters())]


def test_a_last_batch_of_fewer_rows_follows_the_plan_of_the_others() -> None:
    planner = planner_of(*MODELS["deep"]())
    plan = a_plan(planner)
    torch._dynamo.reset()
    model, x = MODELS["deep"]()
    unplanned = torch.compile(model, fullgraph=True, dynamic=False)
    batches = [x, x[:24], x.repeat(2, 1)]
    expected = [losses(unplanned, model, one) for one in batches[:2]]
    torch._dynamo.reset()
    backend = ckplan.backend(plan)
    call = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    for one, other in zip(batches, expected, strict=False):
        for mine, right in zip(losses(call, model, one), other, strict=True):
            torch.testing.assert_close(mine, right)
    whole, smaller = backend.chosen
    assert smaller.saved == whole.saved is not None
    assert smaller.replayed.peak_bytes < whole.replayed.peak_bytes
    assert backend.plans == [plan]
    backend.chosen[:] = [replace(one, budget_bytes=1) for one in backend.chosen]
    plan_of_less = replace(plan, budget_bytes=whole.replayed.peak_bytes)
    backend._wanted = plan_of_less
    with pytest.warns(UserWarning, match=r"a batch takes .*, more than the "):
        losses(call, model, batches[2])


class Other(nn.Module):
    """Runs other ops on a batch of few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = Deep(depth=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.deep(x if len(x) > 16 else x.sin())


def test_a_batch_that_runs_other_ops_is_divided_as_torch_does() -> None:
    model, x = Other(), torch.randn(64, 32)
    torch._dynamo.reset()
    backend = ckplan.backend(a_plan(planner_of(model, x)))
    call = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    call(x).backward()
    call(x[:8]).backward()
    assert [one.saved is None for one in backend.chosen] == [False, True]
    torch._dynamo.reset()
    backend = ckplan.backend(a_plan(planner_of(model, x)))
    call = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    with pytest.raises(PlanError, match="it is for the compiled graph"):
        call(x[:8])  # nothing is known of the batch that it is for


def test_within_a_budget_a_smaller_batch_is_not_searched_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    model, x = MODELS["deep"]()
    backend = ckplan.backend("90%")
    call = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    call(x).backward()
    (first,) = backend.chosen
    assert first.saved is not None

    def searched(*_: object) -> None:
        raise InfeasibleError("a search", needed="none", hint="none")

    monkeypatch.setattr(CompiledPlanner, "solve", searched)
    call(x[:60]).backward()  # it does not fit without a plan
    call(x[:16]).backward()
    _, near, small = backend.chosen
    assert (near.saved, small.saved) == (first.saved, None)
    most = first.budget_bytes
    assert most is not None and near.replayed.peak_bytes <= most
    with pytest.raises(InfeasibleError, match="a search"):
        call(x.repeat(2, 1))


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
