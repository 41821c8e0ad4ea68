"""Updates in groups of parameters: the same bits, smaller temporaries."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ckplan
from ckplan.errors import CkplanError, WorkloadError
from ckplan.simulating.simulate import simulate
from ckplan.solving.remedies import remedies
from ckplan.training.allocator import log_allocations
from ckplan.training.step import Training

LAYER_BYTES = 64 * 65 * 4
SIZE = "20KiB"  # one layer, and its neighbour's bias
OPTIMIZERS = {
    "AdamW": {},
    "Adam": {"weight_decay": 0.1, "amsgrad": True},
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "Adafactor": {},
    "NAdam": {},
    "RAdam": {},
    "Rprop": {},
    "ASGD": {},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "RMSprop": {"centered": True},
}


def build(name: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    some, others = [*model[:3].parameters()], [*model[3:].parameters()]
    groups = [{"params": some, "lr": 1e-3}, {"params": others}]
    kind = getattr(torch.optim, name)
    return model, kind(groups, lr=1e-2, foreach=True, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Three steps under a scheduler; the peak of the last update."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with log_allocations() as log:
            optimizer.step()
        scheduler.step()
    return log.peak_bytes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_give_the_same_bits(name: str) -> None:
    plain, whole = build(name, **OPTIMIZERS[name])
    model, grouped = build(name, **OPTIMIZERS[name])
    assert ckplan.update_in_groups(grouped, SIZE) is grouped
    peaks = train(plain, whole), train(model, grouped)
    assert peaks[1] <= peaks[0]
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    for key, state in whole.state_dict()["state"].items():
        found = grouped.state_dict()["state"][key]
        assert all(torch.equal(found[k], v) for k, v in state.items() if k in found)
        assert found.keys() == state.keys()
    assert [len(one["params"]) for one in grouped.param_groups] == [6, 10]


def test_temporaries_are_as_large_as_a_group() -> None:
    model, optimizer = build("AdamW")
    whole = train(model, optimizer)
    assert whole >= 5 * LAYER_BYTES  # of the larger group of parameters
    ckplan.update_in_groups(optimizer, SIZE)
    assert train(model, optimizer) <= 20 * 1024 + 100
    ckplan.update_in_groups(optimizer, "40KiB")
    assert 20 * 1024 < train(model, optimizer) <= 40 * 1024 + 100
    ckplan.update_in_groups(optimizer, None)
    assert train(model, optimizer) == whole


def test_a_closure_runs_once_and_a_failed_step_leaves_the_groups() -> None:
    model, optimizer = build("AdamW")
    ckplan.update_in_groups(optimizer, SIZE)
    calls = []

    def closure() -> float:
        optimizer.zero_grad()
        model(torch.ones(1, 64)).sum().backward()
        calls.append(1)
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert len(calls) == 1
    groups = optimizer.param_groups

    def failing() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(failing)
    assert optimizer.param_groups is groups
    twin = copy.deepcopy(optimizer)
    assert len(twin.state_dict()["state"]) == 16
    twin.step()


@pytest.mark.parametrize(
    ("make", "size", "message"),
    [
        (lambda p: torch.optim.LBFGS(p), SIZE, "LBFGS in groups: it has no foreach"),
        (lambda p: type("Own", (torch.optim.AdamW,), {})(p), SIZE, "cannot update Own"),
        (lambda p: 3, SIZE, "cannot update int in groups"),
        (lambda p: torch.optim.AdamW(p), 0, "cannot update groups of 0"),
        (lambda p: torch.optim.AdamW(p), "few", "few"),
    ],
)
def test_what_cannot_be_grouped_is_refused(make: Any, size: Any, message: str) -> None:
    with pytest.raises(CkplanError, match=message) as error:
        ckplan.update_in_groups(make([*nn.Linear(2, 2).parameters()]), size)
    assert str(error.value).count("\n") == 2


@pytest.mark.parametrize(
    "text", ["adamw:fused=1MiB", "adamw:foreach=", "adamw:foreach=x", "sgd:foreach=0B"]
)
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(WorkloadError, match="is no size of groups") as error:
        Training(text)
    assert str(error.value).count("\n") == 2


def test_a_scheduler_that_was_made_before_sees_the_steps() -> None:
    model, optimizer = build("AdamW")
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    ckplan.update_in_groups(optimizer, SIZE)
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    scheduler.step()  # warnings are errors


def test_the_peak_of_a_grouped_update_is_predicted_and_offered() -> None:
    model, _ = build("AdamW")
    whole, grouped = (
        ckplan.profile(model, torch.randn(4, 64), optimizer=name, replay=False)
        for name in ("adamw:foreach", f"adamw:foreach={SIZE}")
    )
    peaks = simulate(whole).peak_bytes, simulate(grouped).peak_bytes
    assert peaks[0] - peaks[1] > 6 * LAYER_BYTES
    (one,) = (r for r in remedies(whole, ()) if "update in groups" in r.name)
    assert one.bits == "same"
    assert one.how == "--optimizer adamw:foreach=16KiB"
    assert one.peak_bytes == pytest.approx(peaks[1], rel=0.03)
    assert not any("update in groups" in r.name for r in remedies(grouped, ()))
