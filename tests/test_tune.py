"""``tune``, ``largest_batch`` and ``auto(tune=True)`` on real models, end to end."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ckplan
from ckplan.errors import CkplanError, InfeasibleError, WorkloadError
from ckplan.graph.graph import Graph
from ckplan.graph.transplant import transplanted
from ckplan.integrations.loop import LoopPlanner
from ckplan.plan import file as plan_file
from ckplan.plan.plan import Plan
from ckplan.tracing.other_steps import OtherSteps
from ckplan.training.step import TrainingStep
from ckplan.training.workload import as_workload, with_rows
from ckplan.units import MIB

WIDTH = 64
HOW: dict[str, Any] = {
    "loss_fn": nn.functional.mse_loss,
    "optimizer": "sgd:single",
    "replay": False,
    "gpu": "RTX 4090",  # its roofline: nothing is measured
}


def model() -> nn.Sequential:
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))
        for _ in range(4)
    ]
    return nn.Sequential(*blocks)


def batch(rows: int = 64) -> dict[str, Any]:
    return {"batch": torch.randn(rows, WIDTH), "target": torch.randn(rows, WIDTH)}


def peak(rows: int) -> int:
    graph = ckplan.profile(model(), **batch(rows), **HOW)
    return ckplan.solve(graph, goal="min-memory").predicted.unplanned_peak_bytes


@pytest.mark.parametrize(
    "other", [{"accumulate": 2}, {"optimizer": "adafactor"}, {"optimizer": "sgd:fused"}]
)
def test_another_way_at_another_batch_is_as_recorded(other: dict[str, Any]) -> None:
    base = model()

    def at(rows: int, **how: Any) -> Graph:
        return ckplan.profile(base, **batch(rows), **{**HOW, **how})

    few, many = 4, 64
    found = transplanted(at(many, **other), at(many), at(few))
    assert found == at(few, **other)
    wider = ckplan.profile(nn.Sequential(*base, *base), **batch(many), **HOW)
    assert transplanted(wider, at(many), at(few)) is None


@pytest.mark.parametrize(
    "other", [{"accumulate": 3}, {"optimizer": "adafactor"}, {"optimizer": "sgd:fused"}]
)
def test_a_known_first_step_changes_nothing_that_is_recorded(
    other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, steps = model(), OtherSteps()
    how = {**HOW, "check": False}
    assert ckplan.profile(base, **batch(4), **how, in_step=steps) == ckplan.profile(
        base, **batch(4), **how
    )
    assert steps.first.gradients == dict(base.named_parameters()).keys()
    whole = ckplan.profile(base, **batch(8), **{**how, **other})
    monkeypatch.setattr(TrainingStep, "run", None)  # no whole step any more
    monkeypatch.setattr(TrainingStep, "accumulate", None)
    short = ckplan.profile(base, **batch(8), **{**how, **other}, in_step=steps)
    assert short == whole


class Counting(nn.Linear):
    """Its forward depends on how often it ran."""

    ran = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ran += 1
        return super().forward(x)


def test_of_a_model_that_its_first_step_changes_nothing_is_known() -> None:
    steps = OtherSteps()
    ckplan.profile(Counting(WIDTH, WIDTH), **batch(4), **HOW, in_step=steps)
    assert steps.first.gradients is None


@pytest.mark.slow
def test_the_largest_batch_is_the_largest_whose_profile_fits() -> None:
    rows = ckplan.largest_batch(
        model(), **batch(), budget=24 * MIB, planned=False, **HOW
    )
    assert peak(rows) <= 24 * MIB < peak(rows + 1)
    assert ckplan.largest_batch(model(), **batch(), budget=24 * MIB, **HOW) > rows


def loss_of(model: nn.Module, rows: int) -> torch.Tensor:
    return model(torch.randn(rows, WIDTH)).square().mean()


def test_auto_applies_the_tuned_plan_and_says_its_setting() -> None:
    planned = ckplan.auto(
        model(), **batch(), budget="24MiB", tune=True, total_batch=2**14, **HOW
    )
    plan = ckplan.status(planned).plan
    assert plan is not None
    rows, many = plan.workload["micro_batch"], plan.workload["accumulate"]
    assert rows * many == 2**14
    assert many > 1
    assert plan.fingerprint["batch"] == {"0": f"float32[{rows},{WIDTH}]"}
    plan = replace(plan, fingerprint={**plan.fingerprint, "device": "cpu"})
    ckplan.apply(planned, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the setting itself
        loss_of(planned, rows).backward()
    ckplan.apply(planned, plan)
    with pytest.warns(UserWarning, match=f"a micro-batch of {rows}, and 0 is"):
        loss_of(planned, rows // 2)
    ckplan.apply(planned, plan)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.warns(UserWarning, match="no autocast, and forward runs with autocast"),
    ):
        loss_of(planned, rows)
    again = plan_file.loads(plan_file.dumps(plan), "plan.yaml")
    assert again.workload == plan.workload
    assert f"training: {{micro_batch: {rows}" in plan_file.dumps(plan)


@pytest.mark.parametrize(
    ("made", "how", "error", "message"),
    [
        (
            {"batch": torch.randn(5, 3, WIDTH), "target": torch.randn(3, WIDTH)},
            {"budget": "1GiB"},
            WorkloadError,
            "cannot find the rows",
        ),
        (batch(), {"budget": "1kB"}, InfeasibleError, "no batch fits"),
        (
            batch(),
            {"budget": None, "gpu": None},
            CkplanError,
            "neither a budget nor a card",
        ),
        (batch(), {"budget": "1GiB", "allow": ["x"]}, CkplanError, "cannot allow"),
    ],
)
def test_bad_input(
    made: dict[str, Any], how: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ckplan.tune(model(), **{**made, **HOW, **how})


def test_rows_are_cut_and_repeated_in_order() -> None:
    given = torch.arange(6.0).reshape(3, 2)
    workload = as_workload({"model": model(), "batch": (given, torch.tensor(1))}, "f")
    cut, number = with_rows(workload, 2).batch
    assert torch.equal(cut, given[:2])
    assert number == 1
    assert torch.equal(with_rows(workload, 4).batch[0], torch.cat([given, given[:1]]))


def test_a_loop_is_told_what_it_does_otherwise() -> None:
    plan = Plan("Sequential", workload={"micro_batch": 4, "accumulate": 2})
    same = {"micro_batch": 4, "accumulate": 2, "amp": None}
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LoopPlanner(plan, None).begin(trained, optimizer, same)
    other = {**same, "accumulate": 1, "amp": "bf16"}
    with pytest.warns(UserWarning, match="accumulate 1 in place of 2, amp bf16 in"):
        LoopPlanner(plan, None).begin(trained, optimizer, other)
