"""One call, one block: ``auto`` and ``planned``; batches that nobody planned for."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from small_models import build
from torch import nn
from trained import measured_peak, train

import ckplan
from ckplan import applying
from ckplan.errors import ApplyError, InfeasibleError
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.solving.planner import Planner
from ckplan.training.workload import Workload


def test_auto_fits_the_budget_and_computes_the_same() -> None:
    expected = train(build("residual"))
    workload = build("residual")
    budget = round(0.85 * measured_peak(build("residual")))
    found = ckplan.auto(
        workload.model, workload.batch, budget=budget, loss=workload.loss
    )
    assert found is workload.model
    plan = ckplan.status(found).plan
    assert plan.budget_bytes == budget
    assert plan.regions
    assert all(map(torch.equal, expected, train(workload)))
    again = build("residual")
    applying.apply(again.model, plan)
    assert measured_peak(again) <= budget


def test_auto_takes_all_that_profile_takes() -> None:
    how: dict[str, Any] = {
        "optimizer": "sgd",
        "gpu": "T4",
        "shard": "fsdp2",
        "world_size": 2,
    }
    workload, twin = build("residual"), build("residual")
    how["loss_fn"] = workload.loss
    ckplan.auto(workload.model, workload.batch, "200%", **how, units=["[0..1]"])
    graph = ckplan.profile(twin.model, twin.batch, **how, units=["[0..1]"])
    assert ckplan.status(workload.model).plan == ckplan.solve(graph, "200%")
    with pytest.raises(TypeError, match="'optimiser'"):
        ckplan.auto(twin.model, twin.batch, "90%", optimiser="sgd")


def test_auto_leaves_a_model_alone_that_no_plan_fits() -> None:
    workload = build("residual")
    with pytest.raises(InfeasibleError):
        ckplan.auto(workload.model, workload.batch, "1kB", loss=workload.loss)
    with pytest.raises(ApplyError, match="has no plan"):
        ckplan.status(workload.model)


def test_planned_lasts_as_long_as_its_block_and_gives_back_what_was_there() -> None:
    model = build("residual").model
    inner, outer = (Plan(regions=(PlannedRegion(calls),)) for calls in ("1", "[0..2]"))
    with ckplan.planned(model, outer) as same:
        assert same is model
        assert ckplan.status(model).plan is outer
        with pytest.raises(KeyError), ckplan.planned(model, inner):
            assert ckplan.status(model).plan is inner
            raise KeyError
        assert ckplan.status(model).plan is outer
    with pytest.raises(ApplyError, match="has no plan"):
        ckplan.status(model)


def step(workload: Workload, batch: torch.Tensor) -> None:
    workload.model(batch).square().mean().backward()


def test_a_batch_larger_than_planned_is_said_once_with_the_bytes() -> None:
    workload = build("residual")
    graph = ckplan.profile(workload.model, workload.batch, loss=workload.loss)
    applying.apply(workload.model, ckplan.solve(graph, budget="90%"))
    rows, width = workload.batch.shape
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(workload, workload.batch)
        step(workload, workload.batch[: rows // 2])
        with torch.no_grad():
            workload.model(torch.randn(2 * rows, width))
    with pytest.warns(UserWarning, match=r"larger than planned: 0 is .*512.* up to"):
        step(workload, torch.randn(2 * rows, width))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(workload, torch.randn(3 * rows, width))


class Pair(nn.Module):
    """Takes two tensors in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, pair: list[torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        return scale * self.layers(pair[0]) + pair[1]


def test_a_batch_in_a_list_that_grows_is_said() -> None:
    model, pair = Pair(), [torch.ones(4, 8), torch.ones(4, 8)]
    planned = {"batch": {"0": "float32[4,8] float32[4,8]"}}
    applying.apply(model, Plan(fingerprint=planned))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            model(pair, scale=2.0).sum().backward()
    with pytest.warns(UserWarning, match="larger than planned"):
        model([one.repeat(2, 1) for one in pair], scale=2.0).sum().backward()


def test_a_plan_without_a_fingerprint_expects_no_shapes() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    applying.apply(model, Plan(regions=(PlannedRegion("0"),)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(9, 4)).sum().backward()


def deep() -> Workload:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(16)]
    return Workload(nn.Sequential(*blocks), torch.randn(4096, 32))


def test_a_deep_chain_fits_a_budget_that_needs_runs_of_calls() -> None:
    graph = ckplan.profile(deep().model, deep().batch)
    planner = Planner(graph)
    assert planner.floor.peak_bytes < 0.75 * planner.unplanned.peak_bytes
    plan = ckplan.solve(graph, budget=planner.floor.peak_bytes)
    assert any(region.run for region in plan.regions)
    expected = train(deep())
    workload = deep()
    ckplan.apply(workload.model, plan)
    assert all(map(torch.equal, expected, train(workload)))
    workload = deep()
    ckplan.apply(workload.model, plan)
    assert measured_peak(workload) <= planner.floor.peak_bytes
