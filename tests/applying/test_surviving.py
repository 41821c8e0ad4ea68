"""Training goes on: what fails in the middle leaves a planned model as good as new."""

from __future__ import annotations

import gc
import io
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from small_models import build
from torch import nn
from torch.utils.checkpoint import checkpoint
from trained import state_of, train

import ckplan
from ckplan.applying.hooks import session
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.training.step import Training, make_step
from ckplan.training.workload import Workload

PLAN = Plan(regions=(PlannedRegion("[0..1]"), PlannedRegion("2", "rerun")))
PROGRAMS = Plan(regions=(PlannedRegion("[0..2]"),))
RUN = Plan(regions=(PlannedRegion("", run=("0", "2")),))
PLANS = pytest.mark.parametrize("plan", [PROGRAMS, RUN, PLAN], ids=["", "run", "rerun"])


def planned(plan: Plan) -> Workload:
    workload = build("residual")
    ckplan.apply(workload.model, plan)
    return workload


def as_good_as_new(workload: Workload) -> bool:
    """Whether it trains as one that nothing happened to."""
    fresh = build("residual")
    workload.model.load_state_dict(fresh.model.state_dict())
    workload.model.zero_grad()
    assert not session.running.regions
    assert not session.running.calls
    return all(map(torch.equal, train(fresh), train(workload)))


class Failing(torch.autograd.Function):
    """Raises in forward or in backward, once."""

    armed: type[BaseException] | None = None
    in_forward = False

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        if Failing.in_forward:
            Failing.fail()
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        if not Failing.in_forward:
            Failing.fail()
        return gradient

    @staticmethod
    def fail() -> None:
        error, Failing.armed = Failing.armed, None
        if error is not None:
            raise error("as if memory ran out")


@PLANS
@pytest.mark.parametrize("in_forward", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize("error", [ValueError, MemoryError, KeyboardInterrupt])
def test_an_exception_in_the_middle(
    plan: Plan, in_forward: bool, error: type[BaseException]
) -> None:
    workload = planned(plan)
    hook = workload.model[1].up.register_forward_hook(
        lambda module, args, out: Failing.apply(out)
    )
    Failing.armed, Failing.in_forward = error, in_forward
    with pytest.raises(error, match="as if"):
        workload.model(workload.batch).square().mean().backward()
    hook.remove()
    assert as_good_as_new(workload)


class Patient(nn.Module):
    """Goes on where what it calls is interrupted."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.inner(x)
        except KeyboardInterrupt:
            return x


def test_an_interrupt_that_a_forward_outlives() -> None:
    model = nn.Sequential(Patient(build("residual").model), nn.Linear(64, 64))
    calls = (PlannedRegion("0.inner.[0..2]"), PlannedRegion("1"))
    ckplan.apply(model, Plan(regions=calls))
    hook = (
        model[0]
        .inner[1]
        .up.register_forward_hook(lambda module, args, out: Failing.apply(out))
    )
    Failing.armed, Failing.in_forward = KeyboardInterrupt, True
    model(torch.randn(8, 64)).sum().backward()
    hook.remove()
    assert not session.running.regions
    assert not session.running.calls
    model(torch.randn(8, 64)).sum().backward()
    assert [r.runs for r in ckplan.status(model).regions] == [2, 1, 1, 2]


@PLANS
def test_part_of_the_graph(plan: Plan) -> None:
    found = []
    for workload in (build("residual"), planned(plan)):
        model = workload.model
        torch.manual_seed(0)
        loss = model(workload.batch).square().mean()
        found.append(torch.autograd.grad(loss, [*model[2].parameters()]))
    assert all(map(torch.equal, *found))
    assert as_good_as_new(workload)


@pytest.mark.parametrize("plan", [PROGRAMS, RUN], ids=["", "run"])
def test_a_second_backward_finds_what_the_first_one_rebuilt(plan: Plan) -> None:
    found = []
    for workload in (build("residual"), planned(plan)):
        torch.manual_seed(0)
        loss = workload.model(workload.batch).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad for p in workload.model.parameters()])
    assert all(map(torch.equal, *found))
    assert as_good_as_new(workload)


@PLANS
def test_a_backward_of_a_backward_is_right(plan: Plan) -> None:
    found = []
    for workload in (build("residual"), planned(plan)):
        torch.manual_seed(0)
        x = workload.batch.clone().requires_grad_()
        out = workload.model(x).square().mean()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        gradient.square().sum().backward()
        found.append([p.grad for p in workload.model.parameters()])
    assert all(map(torch.equal, *found))
    assert as_good_as_new(workload)


@PLANS
def test_two_planned_models_in_one_graph(plan: Plan) -> None:
    found = []
    for make in (lambda: build("residual"), lambda: planned(plan)):
        first, second = make(), make()
        torch.manual_seed(0)
        second.model(first.model(first.batch)).square().mean().backward()
        parameters = (*first.model.parameters(), *second.model.parameters())
        found.append([p.grad for p in parameters])
    assert all(map(torch.equal, *found))


@PLANS
def test_a_planned_model_inside_another(plan: Plan) -> None:
    found = []
    for make in (lambda: build("residual"), lambda: planned(plan)):
        inner = make()
        outer = nn.Sequential(inner.model, nn.Linear(64, 64))
        torch.manual_seed(3)
        for parameter in outer[1].parameters():
            parameter.data.uniform_(-0.1, 0.1)
        if inner.model._forward_pre_hooks:
            ckplan.apply(outer, Plan(regions=(PlannedRegion("1"),)))
        torch.manual_seed(0)
        outer(inner.batch).square().mean().backward()
        found.append([p.grad for p in outer.parameters()])
    assert all(map(torch.equal, *found))


def in_two_threads(run: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@PLANS
def test_threads_train_replicas_side_by_side(plan: Plan) -> None:
    expected = train(build("residual"))
    found: dict[int, list[torch.Tensor]] = {}
    models = [planned(plan) for _ in range(2)]
    turn = threading.Lock()

    def run(number: int) -> None:
        step = make_step(models[number], Training("adamw"))
        with turn:  # one random state for all
            torch.manual_seed(1)
            found[number] = state_of(step, [step.run() for _ in range(3)])

    in_two_threads(run)
    for number in range(2):
        assert all(map(torch.equal, expected, found[number]))


def test_checkpoints_in_a_thread_of_backward_count_calls_anew_in_every_step() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Tanh())

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.block, x, use_reentrant=True)

    model = ckplan.apply(Checkpointed(), Plan(regions=(PlannedRegion("block#0"),)))
    with ThreadPoolExecutor(1) as other:  # as the engine has one for each GPU
        for step in range(3):
            loss = model(torch.ones(2, 4, requires_grad=True)).sum()
            other.submit(loss.backward).result()
            assert ckplan.status(model).regions[0].runs == step + 1


def test_models_that_are_gone_leave_no_numbers_of_calls() -> None:
    numbers = session.running.numbers
    gc.collect()
    before = len(numbers)
    for _ in range(3):
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        ckplan.apply(model, Plan(regions=(PlannedRegion("0"),)))
        model(torch.ones(1, 2)).sum().backward()
    assert len(numbers) > before
    del model
    gc.collect()
    assert len(numbers) == before


@PLANS
def test_replicas_of_data_parallel_run_their_own_weights_in_threads(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["torch.nn.parallel.replicate"]  # made to do without GPUs
    monkeypatch.setattr(module, "_get_device_index", lambda device, optional: device)
    monkeypatch.setattr(
        module,
        "_broadcast_coalesced_reshape",
        lambda tensors, devices, detach=False: [
            [tensor.clone() for tensor in tensors] for _ in devices
        ],
    )

    def step_of(workload: Workload) -> list[torch.Tensor | None]:
        model = workload.model.eval()  # dropout would draw in any order
        model.zero_grad()
        replicas = nn.parallel.replicate(model, [0, 1])
        outputs: dict[int, torch.Tensor] = {}

        def run(number: int) -> None:
            outputs[number] = replicas[number](workload.batch * (number + 1))

        in_two_threads(run)
        loss = outputs[0].square().mean() + outputs[1].square().mean()
        own = [
            tensor
            for replica in replicas
            for part in replica.modules()
            for tensor in part._former_parameters.values()
        ]
        for tensor in own:
            tensor.retain_grad()
        loss.backward()
        return [tensor.grad for tensor in (*own, *model.parameters())]

    plain, with_plan = build("residual"), planned(plan)
    for _ in range(3):
        expected, actual = step_of(plain), step_of(with_plan)
        assert all(map(torch.equal, expected, actual))
    assert all(region.runs == 6 for region in ckplan.status(with_plan.model).regions)


@PLANS
def test_a_checkpoint_saved_and_loaded_in_the_middle(plan: Plan) -> None:
    def trained(make: Callable[[], Workload], saved: bool) -> list[torch.Tensor]:
        workload = make()
        step = make_step(workload, Training("adamw"))
        torch.manual_seed(1)
        losses = [step.run()]
        if saved:
            assert step.optimizer is not None
            file = io.BytesIO()
            state = step.optimizer.state_dict()
            torch.save((workload.model.state_dict(), state), file)
            file.seek(0)
            model_state, optimizer_state = torch.load(file)
            workload = make()
            workload.model.load_state_dict(model_state)
            step = make_step(workload, Training("adamw"))
            assert step.optimizer is not None
            step.optimizer.load_state_dict(optimizer_state)
            torch.manual_seed(2)
        else:
            torch.manual_seed(2)
        return state_of(step, [*losses, step.run(), step.run()])

    expected = trained(lambda: build("residual"), saved=False)
    assert all(map(torch.equal, expected, trained(lambda: planned(plan), saved=True)))


@PLANS
def test_the_whole_model_is_saved_and_loaded(plan: Plan) -> None:
    workload = planned(plan)
    file = io.BytesIO()
    torch.save(workload.model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    twin = Workload(again, workload.batch, workload.loss)
    assert all(map(torch.equal, train(build("residual")), train(twin)))
    assert all(region.runs == 3 for region in ckplan.status(again).regions)
