"""Unusual training steps: recorded in exact bytes, planned to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from measured import peak_bytes_of
from torch import nn
from torch.nn import functional
from trained import measured_peak, train
from unusual_steps import OPTIMIZERS, Layer, Nested, Stack, Tied, own_loss

import ckplan
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.resolve import resolve
from ckplan.simulating.simulate import simulate
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec
from ckplan.training.step import Training, make_step
from ckplan.training.workload import Workload, tensors_of


class HookedLayer(Layer):
    """Hooks on tensors inside: they change gradients, and count."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        hidden.register_hook(lambda grad: grad.clamp(-1e-4, 1e-4))
        out = x + self.down(functional.gelu(hidden))
        out.register_hook(lambda grad: grad * 2)
        return out


class Scaled(torch.autograd.Function):
    """Saves an input, an output and a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        out = torch.exp(x * scale)
        ctx.save_for_backward(x, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, out = ctx.saved_tensors
        return grad * out * ctx.scale + 0 * x, None


class Split(torch.autograd.Function):
    """Several outputs, one of which nothing can be differentiated by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        half = x.shape[-1] // 2
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        ctx.save_for_backward(signs)
        return x[..., :half] * 2, x[..., half:] * 3, signs

    @staticmethod
    def backward(ctx: Any, one: Any, other: Any, signs: Any) -> torch.Tensor:
        del signs
        (kept,) = ctx.saved_tensors
        return torch.cat([one * 2, other * 3], -1) + 0 * kept


class FunctionLayer(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other, signs = Split.apply(torch.tanh(self.up(x)))
        hidden = torch.cat([Scaled.apply(one, 0.1), other], -1)
        return x + self.down(hidden * signs.abs())


class InPlaceLayer(Layer):
    """In-place ops on fresh tensors and on views of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        hidden[:, :32].mul_(2)
        hidden.add_(1).tanh_()
        first, second = hidden.chunk(2, -1)
        hidden = torch.cat([first.relu(), second.T.contiguous().T], -1)
        out = self.down(hidden)
        out += x
        return out.view(-1, 8, 8).transpose(1, 2).reshape(x.shape)


class ViewsLayer(Layer):
    """Views of views, expanded, strided, and copied onto themselves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        one, two, three, four = hidden.view(-1, 4, 64).unbind(1)
        summed = one.expand(2, *one.shape).sum(0).tanh()
        strided = torch.as_strided(two.contiguous(), (two.shape[0], 64), (64, 1))
        copy = hidden.clone()
        copy[:, ::2] = hidden[:, 1::2].exp() * 0.01
        copy[1:].copy_(copy[:-1].clone())
        product = (three * four).squeeze().transpose(0, 1).T
        return x + self.down(torch.tanh(copy)) + summed + strided.sigmoid() + product


class BackwardHooksLayer(Layer):
    """Hooks of modules and parameters on their way back."""

    def __init__(self) -> None:
        super().__init__()
        self.down.register_full_backward_pre_hook(lambda module, grad: (grad[0] * 2,))
        self.down.register_full_backward_hook(lambda module, given, grad: None)
        self.down.weight.register_hook(lambda grad: grad * 2)


class NestedLayer(Layer):
    def forward(self, given: Any) -> Nested:
        x = given.x if isinstance(given, Nested) else given
        hidden = torch.tanh(self.up(x))
        out = x + self.down(functional.gelu(hidden))
        return Nested(out, {"norms": [out.square().mean(), (hidden.mean(), None)]})


class SeveralLosses(Stack):
    """A loss after every layer, and a plain number among the outputs."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        losses = []
        for layer in self.h:
            x = layer(x)
            losses.append(x.square().mean())
        return {"losses": losses, "last": x, "count": len(losses)}


class Called(nn.Module):
    """One cell many times, with a state that is a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(64, 64)
        self.layer = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, outs = None, []
        for _ in range(6):
            state = self.cell(x, state)
            outs.append(self.layer(state[0]))
        return torch.stack(outs)


STEPS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "tensor hooks": (lambda: Stack(HookedLayer), "h.[0..2]"),
    "own functions": (lambda: Stack(FunctionLayer), "h.[0..2]"),
    "in place and views": (lambda: Stack(InPlaceLayer), "h.[0..2]"),
    "views": (lambda: Stack(ViewsLayer), "h.[0..2]"),
    "backward hooks": (lambda: Stack(BackwardHooksLayer), "h.[0..2]"),
    "nested outputs": (lambda: Stack(NestedLayer), "h.[0..2]"),
    "several losses": (SeveralLosses, "h.[0..2]"),
    "tied": (Tied, "h.1"),
    "called often": (Called, "layer"),
}


def applied(workload: Workload, plan: Plan) -> Workload:
    ckplan.apply(workload.model, plan)
    return workload


def build(name: str) -> Workload:
    torch.manual_seed(0)
    model = STEPS[name][0]()
    batch = torch.randint(512, (256,)) if name == "tied" else torch.randn(256, 64)
    return Workload(model, batch, own_loss)


def profiled(name: str) -> Graph:
    made = build(name)
    return ckplan.profile(made.model, made.batch, loss=made.loss, replay=False)


@pytest.mark.parametrize(
    "name",
    [
        # Views and outputs that are nested are in others, too.
        pytest.param(name, marks=pytest.mark.slow)
        if name in ("views", "nested outputs")
        else name
        for name in STEPS
    ],
)
def test_unusual_steps_are_recorded_and_planned_exactly(name: str) -> None:
    graph = profiled(name)
    unplanned = simulate(graph).peak_bytes
    assert unplanned == pytest.approx(measured_peak(build(name)), rel=0.003)
    expected = train(build(name))
    solved = ckplan.solve(graph, goal="min-memory")
    assert solved.regions
    every = Plan(regions=(PlannedRegion(STEPS[name][1]),))
    for plan in (every, solved):
        actual = train(applied(build(name), plan))
        assert all(map(torch.equal, expected, actual)), plan.regions
        predicted = simulate(graph, resolve(plan, graph)).peak_bytes
        measured = measured_peak(applied(build(name), plan))
        assert predicted == pytest.approx(measured, rel=0.003)


FACTORY = """
import torch
from unusual_steps import OPTIMIZERS, Stack, Tied, own_loss

def build(kind="AdamW", model="Stack"):
    torch.manual_seed(0)
    made = {"Stack": Stack, "Tied": Tied}[model]()
    batch = torch.randint(512, (256,)) if model == "Tied" else torch.randn(256, 64)
    OPTIMIZERS.clear()
    for parameter in made.parameters():
        own = getattr(torch.optim, kind)([parameter], lr=1e-3)
        OPTIMIZERS.append(own)

        def update(parameter, own=own):
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    return made, batch, own_loss
"""


@pytest.mark.parametrize(
    ("kind", "model"), [("AdamW", "Tied"), ("SGD", "Stack"), ("Adafactor", "Tied")]
)
def test_optimizers_in_backward_are_recorded_and_planned_exactly(
    kind: str, model: str, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(FACTORY)
    spec = WorkloadSpec(f"{tmp_path / 'model.py'}", {"kind": kind, "model": model})
    none = Training("none")
    graph = profile_workload(spec, training=none, replay=False)
    make = spec.load()

    def measured(plan: Plan) -> int:
        step = make_step(applied(make(), plan), none)
        step.run()
        step.zero_grad()
        held = [step.workload.batch, *step.workload.model.parameters()]
        held += tensors_of([list(own.state.values()) for own in OPTIMIZERS])
        return peak_bytes_of(step.run, held)

    def trained(plan: Plan) -> list[torch.Tensor]:
        step = make_step(applied(make(), plan), none)
        torch.manual_seed(1)
        losses = [step.run() for _ in range(3)]
        return [*losses, *step.workload.model.parameters()]

    expected = trained(Plan())
    for plan in (Plan(), Plan(regions=(PlannedRegion("h.1"),))):
        predicted = simulate(graph, resolve(plan, graph)).peak_bytes
        assert predicted == pytest.approx(measured(plan), rel=0.003)
        assert all(map(torch.equal, expected, trained(plan)))
