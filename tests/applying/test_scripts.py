"""Recompute programs as scripts: right in whatever order backward asks."""

from __future__ import annotations

import copy
import gc
import random
from contextlib import suppress
from itertools import permutations
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ckplan import applying
from ckplan.applying.rebuilding import schedule
from ckplan.applying.rebuilding.rebuilder import Rebuilder
from ckplan.applying.rebuilding.schedule import Schedule, Stage
from ckplan.applying.rebuilding.script import _copied, _view_of_retained
from ckplan.applying.recording.saved_tensors import Dropped
from ckplan.applying.tensors.retained import place_of, retain
from ckplan.errors import ApplyError
from ckplan.plan.names import OpName
from ckplan.plan.plan import Plan, PlannedRegion


class Heads(nn.Module):
    """Three outputs that share what they are made from; some ops write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.tanh(self.stem(x))
        part, rest = torch.sin(self.head(h)).chunk(2, 1)
        scaled = self.drop(torch.cos(h)) * h.exp()
        y = h * h
        square = y.add_(1.0).sigmoid() * y.mul_(2.0).sin()
        largest, where = (h * x).max(1)
        return part * rest.exp(), scaled, square + largest[:, None] * where[:, None]


NESTED = PlannedRegion(
    ".", inner=(PlannedRegion("stem"), PlannedRegion("head"), PlannedRegion("drop"))
)
PLANS = {
    "whole": Plan(regions=(PlannedRegion("."),)),
    "kept": Plan(regions=(PlannedRegion(".", save=(OpName.parse("./tanh"),)),)),
    "nested": Plan(regions=(NESTED,)),
    "encoded": Plan(
        regions=(
            PlannedRegion(".", encode=((OpName.parse("drop/bernoulli_"), "bits"),)),
        )
    ),
}
ORDERS = [*permutations(range(3)), (0,), (2,), (1, 1), (0, 2, 0)]


def pair(plan: str) -> tuple[nn.Module, nn.Module]:
    plain = Heads()
    planned = copy.deepcopy(plain)
    applying.apply(planned, PLANS[plan])
    return plain, planned


def batch(step: int) -> torch.Tensor:
    torch.manual_seed(step)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
    return x.requires_grad_()


def asked(model: nn.Module, step: int, order: tuple[int, ...], *, whole: bool) -> Any:
    """Gradients of the outputs one by one, then of all at once."""
    x = batch(step)
    outs, found = model(x), list[torch.Tensor]()
    for number in order:
        loss = outs[number].square().sum()
        inputs = [x, *model.parameters()]
        options = {"retain_graph": True, "allow_unused": True}
        grads = torch.autograd.grad(loss, inputs, **options)
        found += [grad for grad in grads if grad is not None]
    if whole:
        found += torch.autograd.grad(sum(out.sum() for out in outs), [x])
    return [*found, torch.get_rng_state()]


@pytest.mark.parametrize("plan", PLANS)
def test_backward_may_ask_in_any_order(plan: str) -> None:
    plain, planned = pair(plan)
    for step, order in enumerate([*ORDERS, *reversed(ORDERS)]):
        one, other = (
            asked(m, step, order, whole=step % 2 > 0) for m in (plain, planned)
        )
        assert len(one) == len(other) and all(map(torch.equal, one, other)), order


@pytest.mark.parametrize("plan", PLANS)
def test_two_forwards_that_go_backward_by_turns(plan: str) -> None:
    """They share a schedule, but each is at its own stage of it."""
    plain, planned = pair(plan)
    for step in range(3):
        found = []
        for model in (plain, planned):
            first, second = batch(step), batch(step + 50)
            outs = [*zip(model(first), model(second), strict=True)]
            grads: list[torch.Tensor] = []
            for number in ((0, 1, 2), (2, 0, 1), (1, 2, 0))[step]:
                for x, out in zip((first, second), outs[number], strict=True):
                    grads += torch.autograd.grad(out.sum(), x, retain_graph=True)
            found.append(grads)
        assert all(map(torch.equal, *found)), step


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_of_gradients_and_graphs_that_are_kept(plan: str) -> None:
    plain, planned = pair(plan)
    for step in range(3):
        found = []
        for model in (plain, planned):
            model.zero_grad()
            x = batch(step)
            loss = sum(out.square().sum() for out in model(x))
            loss.backward(retain_graph=True)
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            grad.square().sum().backward(retain_graph=True)
            loss.backward()
            found.append([x.grad, *(p.grad for p in model.parameters())])
        assert all(map(torch.equal, *found)), step


def raising_once(error: type[BaseException]) -> Any:
    real, calls = Rebuilder._draw, iter(range(9))

    def draw(self: Rebuilder, *args: Any) -> None:
        real(self, *args)
        if next(calls) == 0:
            raise error("on the way")

    return mock.patch.object(Rebuilder, "_draw", draw)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("plan", PLANS)
def test_an_error_while_a_script_runs_is_not_gone_on_from(
    plan: str, error: type[BaseException]
) -> None:
    plain, planned = pair(plan)
    for step in range(6):
        x = batch(step)
        loss = sum(out.square().sum() for out in planned(x))
        if step % 2:
            state = torch.get_rng_state()
            with raising_once(error):
                try:
                    loss.backward(retain_graph=True)
                    missed = True
                except error:
                    missed = False
            assert torch.equal(state, torch.get_rng_state()) and torch.is_grad_enabled()
            if not missed:
                with pytest.raises(ApplyError, match="interrupted"):
                    loss.backward()
        x, other = batch(step), batch(step)
        one = torch.autograd.grad(sum(out.sum() for out in plain(x)), x)
        torch.manual_seed(step)
        two = torch.autograd.grad(sum(out.sum() for out in planned(other)), other)
        assert torch.equal(*one, *two), step


@pytest.mark.parametrize("written", range(1, 30, 4))
def test_an_interrupt_while_a_script_is_written_leaves_no_half_of_it(
    written: int,
) -> None:
    plain, planned = pair("whole")
    calls = iter(range(1000))
    real = schedule._Machine.run

    def run(self: Any, *args: Any) -> None:
        if next(calls) == written:
            raise KeyboardInterrupt
        real(self, *args)

    patched = mock.patch.object(schedule._Machine, "run", run)
    with patched, suppress(KeyboardInterrupt):
        sum(out.square().sum() for out in planned(batch(0))).backward()
    for order in ORDERS:
        one, other = (asked(m, 1, order, whole=True) for m in (plain, planned))
        assert all(map(torch.equal, one, other)), order


def test_an_interrupt_between_two_saved_tensors_is_gone_on_from() -> None:
    """A stage whose script is half written is written from its beginning."""
    plain, planned = pair("whole")
    real, calls = Schedule._write, iter(range(1000))

    def write(self: Any, rebuild: Any, script: Any, number: int) -> None:
        real(self, rebuild, script, number)
        if next(calls) == 1:
            raise KeyboardInterrupt

    x = batch(0)
    loss = sum(out.square().sum() for out in planned(x))
    with mock.patch.object(Schedule, "_write", write), pytest.raises(KeyboardInterrupt):
        loss.backward(retain_graph=True)
    planned.zero_grad()
    x.grad = None
    loss.backward()
    other = batch(0)
    sum(out.square().sum() for out in plain(other)).backward()
    assert torch.equal(x.grad, other.grad)


def test_orders_that_never_come_back_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def num_stages() -> int:
        gc.collect()
        return sum(type(one) is Stage for one in gc.get_objects())

    before = num_stages()
    monkeypatch.setattr(schedule, "_MOST_ANSWERS", 10)
    plain, planned = pair("whole")
    rng = random.Random(0)
    for step in range(60):
        order = tuple(rng.sample(range(3), 3))
        one, other = (asked(m, step, order, whole=True) for m in (plain, planned))
        assert all(map(torch.equal, one, other)), order
        del one, other
    assert num_stages() - before <= 30


@pytest.mark.usefixtures("quick_collector")
@pytest.mark.parametrize("plan", PLANS)
def test_what_is_never_asked_for_is_freed_with_the_graph(plan: str) -> None:
    _, planned = pair(plan)
    for step in range(3):
        outs = planned(batch(step))
        torch.autograd.grad(outs[0].sum(), [*planned.parameters()][:1])
        del outs
    gc.disable()
    try:
        before = len(gc.get_objects())
        for step in range(20):
            outs = planned(batch(step))
            torch.autograd.grad(outs[step % 1].sum(), [*planned.parameters()][:1])
            del outs
        kinds = Rebuilder, Dropped
        assert not [1 for one in gc.get_objects() if type(one) in kinds]
        assert len(gc.get_objects()) - before < 20
    finally:
        gc.enable()


@pytest.mark.parametrize("plan", PLANS)
def test_values_are_freed_after_their_last_use(plan: str) -> None:
    """At the end of backward nothing is there but what forwards share."""
    _, planned = pair(plan)
    found: list[Rebuilder] = []
    real = Rebuilder.__init__

    def init(self: Rebuilder, *args: Any) -> None:
        real(self, *args)
        found.append(self)

    with mock.patch.object(Rebuilder, "__init__", init):
        for step in range(2):
            sum(out.sum() for out in planned(batch(step))).backward()
    for one in found:
        assert not one._values and not one._encoded and not one._states
    assert len(found) == 2


@pytest.mark.parametrize("to", ["layout", "type"])
def test_a_parameter_laid_out_anew_before_backward_is_an_error(to: str) -> None:
    """Its old strides over new bytes would be other weights."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Tanh())
    applying.apply(model, Plan(regions=(PlannedRegion("."),)))
    for step in range(3):
        x = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(step))
        out = model(x.requires_grad_())
        (model.double if to == "type" else torch.nn.Module.to)(
            *(() if to == "type" else (model,)),
            **({} if to == "type" else {"memory_format": torch.channels_last}),
        )
        with pytest.raises(ApplyError, match="another memory format or type"):
            out.square().sum().backward()
        model.float().to(memory_format=torch.contiguous_format)


def test_a_retained_tensor_is_taken_as_it_is_only_where_its_view_is_the_same() -> None:
    whole = torch.randn(4, 4, dtype=torch.complex64)
    views = [
        *(whole, whole.conj(), whole.real, whole.conj().imag),
        *(whole.t(), whole[:2], whole[1:3], whole[::2], whole.view(2, 8)),
    ]
    for held in views:
        retained = retain(held)
        copied = _copied(retained, "region")
        for wanted in views:
            taken = _view_of_retained(copied, place_of(wanted), "region")
            assert torch.equal(taken, wanted) and taken is not held
            taken = _view_of_retained(retained, place_of(wanted), "region")
            assert torch.equal(taken, wanted)
            assert taken.stride() == wanted.stride()
            assert (taken is held) == (held is wanted)
