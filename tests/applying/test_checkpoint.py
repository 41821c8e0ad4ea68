"""Reruns: what a second run fills in is what the first one saved."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ckplan import applying
from ckplan.applying.rerunning.call_check import CallCheck
from ckplan.applying.rerunning.checkpoint import Checkpoint, Numbered, Refill
from ckplan.applying.rerunning.rerun import Memory, Rerun
from ckplan.errors import ApplyError
from ckplan.plan.plan import Plan, PlannedRegion

BOTH = pytest.mark.parametrize("by", ["program", "rerun"])


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y, z = x.exp(), x.sin()
        ctx.save_for_backward(y, x, z)
        return y * z

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y, x, z = ctx.saved_tensors
        return grad * (y * z + y * x.cos())


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        y = self.drop(torch.cos(h)) * torch.sin(self.second(h)).exp()
        return y * (h * h).relu_()


class Checkpointing(Mixed):
    """Checkpoints itself inside, one of them around random numbers."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def layer(y: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.first(y.sin())).exp()

        y: torch.Tensor = checkpoint(layer, x.cos(), use_reentrant=self.reentrant)
        inner = super().forward
        return y * checkpoint(inner, x.sin(), use_reentrant=self.reentrant)


class Reentrant(Checkpointing):
    reentrant = True


class Catching(Mixed):
    """Goes on after any exception: also after the one that ends a second run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sin(self.first(x))
        try:
            h = torch.tanh(h * 2)
        except Exception:
            h = h * 3
        try:
            return h.exp()
        except Exception:
            return Own.apply(h)


class Custom(Mixed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Own.apply(torch.tanh(self.first(x)))
        return torch.sin(x) * y


def back(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().sum().backward()


def three_times(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x).square().sum()
    for last in (False, False, True):
        loss.backward(retain_graph=not last)


def of_a_backward(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x).square().sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    grad.square().sum().backward()


def in_parts(model: nn.Module, x: torch.Tensor) -> None:
    out = model(x)
    torch.autograd.grad(out[0].sum(), [*model.parameters()][:1], retain_graph=True)
    out.square().sum().backward()


def cast(model: nn.Module, x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().sum()
    loss.backward()


def cast_in_backward_alone(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x).square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()


def cast_otherwise_in_backward(model: nn.Module, x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = model(x).float().square().sum()
    with torch.autocast("cpu", torch.float16):
        loss.backward()


def after_an_error(model: nn.Module, x: torch.Tensor) -> None:
    def fail(grad: torch.Tensor) -> None:
        raise ValueError

    out = model(x)
    handle = next(model.parameters()).register_hook(fail)
    with pytest.raises(ValueError):
        out.square().sum().backward()
    handle.remove()
    model.zero_grad()
    x.grad = None
    back(model, x)


def around(model: nn.Module, x: torch.Tensor) -> None:
    checkpoint(model, x, use_reentrant=False).square().sum().backward()


def around_reentrant(model: nn.Module, x: torch.Tensor) -> None:
    checkpoint(model, x, use_reentrant=True).square().sum().backward()


STEPS = (
    back,
    three_times,
    of_a_backward,
    in_parts,
    cast,
    cast_in_backward_alone,
    cast_otherwise_in_backward,
    after_an_error,
    around,
    around_reentrant,
)


def same_steps(
    module: nn.Module, by: str, run: Callable[[nn.Module, torch.Tensor], None]
) -> None:
    plain = nn.Sequential(module, nn.Tanh())
    planned = copy.deepcopy(plain)
    applying.apply(planned, Plan(regions=(PlannedRegion("0", by=by),)))
    for step in range(3):
        found = []
        for model in (plain, planned):
            model.zero_grad()
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            torch.manual_seed(step)
            run(model, x.requires_grad_())
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            found.append([x.grad, *grads, torch.get_rng_state()])
        assert len(found[0]) == len(found[1])
        assert all(map(torch.equal, *found)), step


@BOTH
@pytest.mark.parametrize("run", STEPS)
@pytest.mark.parametrize("kind", [Mixed, Checkpointing, Catching, Custom])
def test_steps_of_all_kinds_are_right(
    kind: Callable[[], nn.Module],
    run: Callable[[nn.Module, torch.Tensor], None],
    by: str,
) -> None:
    same_steps(kind(), by, run)


@BOTH
def test_reentrant_checkpoints_inside(by: str) -> None:
    same_steps(Reentrant(), by, back)


def test_what_the_second_run_itself_writes_over_is_an_error() -> None:
    """Torch says so without a plan; a rerun must not save what was written later."""

    class Writing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            z = y * y.sin()
            y.add_(1.0)
            return z.cos()

    model = nn.Sequential(Writing(), nn.Tanh())
    x = torch.randn(4, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x).sum().backward()
    applying.apply(model, Plan(regions=(PlannedRegion("0", by="rerun"),)))
    for _ in range(3):
        with pytest.raises(ApplyError, match="changed in place"):
            model(x).sum().backward()


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3),
        torch.zeros(2, 1),
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(2, device="meta"),
    ],
)
def test_a_second_run_fills_only_what_is_like_the_first(other: torch.Tensor) -> None:
    first = Checkpoint("region", lambda refill: None)
    weight = torch.ones(2, requires_grad=True)
    with first.saving():
        out = weight.exp()
    refill = Refill(first)
    with refill.saving(lambda: RuntimeError("stop")), pytest.raises(RuntimeError):
        other.requires_grad_().exp()
    assert refill.differs and not refill.is_complete
    with refill.saving(lambda: RuntimeError("stop")), pytest.raises(RuntimeError):
        weight.exp()  # a forward that caught it goes on
    assert refill.differs and not refill.is_complete
    with pytest.raises(AssertionError, match="a complete run fills all"):
        out.sum().backward()


def test_a_second_run_that_saves_less_is_told() -> None:
    class Less(nn.Module):
        left = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).left -= 1
            y = Own.apply(x)
            return y.sin() if self.left >= 0 else y

    model = nn.Sequential(Less(), nn.Tanh())
    applying.apply(model, Plan(regions=(PlannedRegion("0", by="rerun"),)))
    with pytest.raises(ApplyError, match="differs from the first one"):
        model(torch.randn(4, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("kind", [Mixed, Custom, Catching])
def test_steps_leave_nothing_behind(kind: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(kind(), nn.Tanh())
    applying.apply(model, Plan(regions=(PlannedRegion("0", by="rerun"),)))

    def step() -> None:
        back(model, torch.randn(4, 6))
        model(torch.randn(4, 6))  # whose backward never runs
        in_parts(model, torch.randn(4, 6))

    for _ in range(3):
        step()
    kinds = Checkpoint, Numbered, Refill, Rerun, CallCheck
    gc.collect()
    gc.disable()
    try:
        before = sum(type(one) in kinds for one in gc.get_objects())
        for _ in range(10):
            step()
        left = sum(type(one) in kinds for one in gc.get_objects()) - before
        tensors = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
        step()
        after = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
    finally:
        gc.enable()
    assert not left and after == tensors


def test_a_graph_that_is_kept_holds_what_one_run_saves() -> None:
    """What was asked for is let go; what was not is held until it is."""
    model = nn.Sequential(Mixed(), nn.Tanh())
    applying.apply(model, Plan(regions=(PlannedRegion("0", by="rerun"),)))
    others = {id(one) for one in gc.get_objects() if type(one) is Numbered}
    loss = model(torch.randn(4, 6, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    numbered = [
        one
        for one in gc.get_objects()
        if type(one) is Numbered and id(one) not in others
    ]
    assert numbered and all(one.tensor is None for one in numbered)


def test_replicas_of_a_module_have_modules_of_their_own() -> None:
    """The wrapper is shared, as by replicas in threads; what it found is not."""
    memory, modules = Memory(), [nn.Sequential(Mixed()), nn.Sequential(Mixed())]
    found = [memory.modules_of(module) for module in modules]
    assert memory.modules_of(modules[1]) is found[1]
    for one, module in zip(found, modules, strict=True):
        assert one.are_of(module)
        assert all(map(torch.equal, one.parameters, module.parameters()))
    assert memory.modules_of(modules[0]) is not found[1]


def test_a_module_exchanged_between_two_forwards_keeps_the_first_apart() -> None:
    plain = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4)), nn.Tanh())
    planned = copy.deepcopy(plain)
    applying.apply(planned, Plan(regions=(PlannedRegion("0", by="rerun"),)))
    other = nn.Linear(6, 6)
    found = []
    for model in (plain, planned):
        torch.manual_seed(0)
        x = torch.randn(4, 6, requires_grad=True)
        first = model(x)
        model[0][0] = copy.deepcopy(other)
        second = model(functional.relu(x))
        second.sum().backward()
        found.append([x.grad, first.detach(), torch.get_rng_state()])
    assert all(map(torch.equal, *found))


# -- an argument that holds its own graph ------------------------------------------


class Kept:
    """An argument that the forward fills, as caches of keys and values are."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []


class Fills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, kept: Kept) -> torch.Tensor:
        kept.tensors.append(self.linear(x).sin())
        return kept.tensors[-1].exp() * kept.tensors[-1]


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Fills()
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = Kept()
        self.seen = weakref.ref(kept)
        return self.inner(x, kept)


@pytest.mark.parametrize("fails", [False, True])
def test_an_argument_that_holds_its_own_graph_is_freed(*, fails: bool) -> None:
    """Also if it cannot run again; a second try says so again."""
    model = Around()
    applying.apply(model, Plan(regions=(PlannedRegion("inner", "rerun"),)))
    loss = model(torch.ones(2, 4, requires_grad=True)).sum()
    if fails:
        with torch.no_grad():
            model.inner.linear.weight.add_(1.0)
        for _ in range(2):
            with pytest.raises(ApplyError, match="was changed in place"):
                loss.backward(retain_graph=True)
    else:
        loss.backward()
    del loss
    gc.collect()
    assert model.seen() is None
