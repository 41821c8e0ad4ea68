"""What a training step holds beside compiled code: state, gradients, temporaries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ckplan
from ckplan.compiling import lowering
from ckplan.compiling.optimizers import OptimizerBytes, optimizer_bytes
from ckplan.compiling.outside import Outside
from ckplan.errors import ApplyError, CkplanError, InfeasibleError
from ckplan.training.allocator import log_allocations


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 200))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("AdamW", {}),
        ("AdamW", {"fused": True}),
        pytest.param("AdamW", {"foreach": True}, marks=pytest.mark.slow),
        ("SGD", {"momentum": 0.9}),
        pytest.param("Adagrad", {}, marks=pytest.mark.slow),
    ],
)
def test_bytes_of_an_optimizer_are_those_of_its_second_step(
    kind: str, options: dict[str, Any]
) -> None:
    model = layers()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3, **options)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)  # patches `step`
    before = optimizer.state_dict()
    found = optimizer_bytes(optimizer)
    assert str(optimizer.state_dict()) == str(before)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    schedule.step()
    state = [
        t for one in optimizer.state.values() for t in one.values() if t is not None
    ]
    with log_allocations() as log:
        optimizer.step()
    assert found == OptimizerBytes(
        gradient_bytes=sum(p.numel() * 4 for p in model.parameters()),
        state_bytes=sum(t.untyped_storage().nbytes() for t in state),
        step_peak_bytes=log.peak_bytes,
    )
    assert optimizer_bytes(optimizer) == found  # it has its state now


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AdamW", "Adagrad", "NAdam"])
def test_bytes_of_a_compiled_optimizer_are_those_of_its_second_step(kind: str) -> None:
    model = layers()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3)
    uncompiled = optimizer_bytes(optimizer)
    optimizer.step = torch.compile(optimizer.step)
    found = optimizer_bytes(optimizer)
    assert found.state_bytes == uncompiled.state_bytes
    assert found.step_peak_bytes < uncompiled.step_peak_bytes
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    with log_allocations() as log:
        optimizer.step()
    assert found.step_peak_bytes == log.peak_bytes


def test_the_code_of_a_compiled_optimizer_is_replayed() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(32, 64).parameters(), lr=1e-3)
    assert optimizer_bytes(optimizer).step_peak_bytes > 0
    optimizer.step = torch.compile(optimizer.step)
    assert optimizer_bytes(optimizer).step_peak_bytes == 0  # one kernel writes in place
    assert not optimizer.state


class Breaking(torch.optim.Optimizer):
    """Breaks in its loop, so that Dynamo compiles nothing of its step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})

    @torch.no_grad()
    def step(self) -> None:
        for one in self.param_groups[0]["params"]:
            torch._dynamo.graph_break()
            one.sub_(1e-3 * one.grad)


class Around(torch.optim.Optimizer):
    """Steps another one, as SAM and Lookahead do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self) -> None:
        self.inner.step()


def test_an_optimizer_around_another_is_refused_and_left_as_it_is() -> None:
    model = layers()
    inner = torch.optim.AdamW(model.parameters())
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    with pytest.raises(ApplyError, match=r"another optimizer, \.inner, of type AdamW"):
        optimizer_bytes(Around(inner))
    assert not inner.state


def test_a_compiled_optimizer_of_which_nothing_compiles_counts_as_it_runs() -> None:
    optimizer = Breaking(layers())
    as_it_runs = optimizer_bytes(optimizer)
    assert as_it_runs.step_peak_bytes >= 64 * 200 * 4
    optimizer.step = torch.compile(optimizer.step)
    assert optimizer_bytes(optimizer) == as_it_runs


def test_a_budget_is_of_the_whole_step() -> None:
    optimizer = torch.optim.SGD(layers().parameters(), lr=1e-3, momentum=0.9)
    mine = optimizer_bytes(optimizer)
    accumulating = Outside(1000, optimizer, True)
    extra = mine.state_bytes + mine.gradient_bytes
    whole = accumulating.peak_bytes(10**6, 10**5)
    assert whole == 10**6 + extra
    assert accumulating.budget_bytes("100%", 10**6, 10**5) == whole
    assert accumulating.left_by(whole, 10**5) == 10**6 - 1000
    assert Outside(0, optimizer, False).left_by(10**6, 1) == 10**6 - mine.state_bytes
    assert Outside(7, None, False).left_by(1000, 1) == 993
    # where forward and backward take little, the optimizer's step has the peak
    assert accumulating.peak_bytes(10, 10) == 10 + extra + mine.step_peak_bytes
    with pytest.raises(InfeasibleError, match="the step of SGD alone takes more"):
        accumulating.left_by(extra, 10**5)


def test_what_cannot_be_counted_is_said() -> None:
    optimizer = torch.optim.Adafactor(layers().parameters())
    with pytest.raises(ApplyError, match="cannot count the bytes of Adafactor") as said:
        optimizer_bytes(optimizer)
    assert str(said.value).count("\n") == 2
    with pytest.raises(CkplanError, match="cannot count accumulated gradients"):
        ckplan.backend("80%", accumulate=True)


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_the_optimizer_s_state_is_left_out_of_a_plan_s_budget(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowering, "compile_with", lambda graph, *_: graph.forward)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=not compiled)
    if compiled:
        optimizer.step = torch.compile(optimizer.step)
    backend = ckplan.backend("100%", optimizer=optimizer)
    assert backend.peak_bytes == 0
    call = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    call(torch.randn(64, 8)).sum().backward()
    (chosen,) = backend.chosen
    state_bytes = optimizer_bytes(optimizer).state_bytes
    assert backend.outside.bytes == optimizer_bytes(optimizer)
    assert backend.peak_bytes == chosen.replayed.peak_bytes + state_bytes
    assert chosen.plan.budget_bytes == chosen.replayed.peak_bytes
