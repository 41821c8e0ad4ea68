"""Backwards that keep the graph: the next one gets the same bits, and rebuilds anew."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from measured import peak_bytes_of
from torch import nn

import ckplan
from ckplan.graph import file as trace_file
from ckplan.graph.graph import Graph
from ckplan.plan.names import OpName
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.resolve import resolve
from ckplan.simulating.simulate import Simulator

WIDTH, HIDDEN, ROWS = 64, 512, 512
Grads = list[torch.Tensor]
Ways = Callable[[nn.Module, torch.Tensor, torch.Tensor], Grads]


class TwoHeads(nn.Module):
    """Two losses of one trunk."""

    def __init__(self, act: Callable[[], nn.Module] = nn.GELU) -> None:
        super().__init__()
        blocks = (
            (nn.Linear(WIDTH, HIDDEN), act(), nn.Linear(HIDDEN, WIDTH), nn.Dropout(0.1))
            for _ in range(3)
        )
        self.trunk = nn.Sequential(*(nn.Sequential(*block) for block in blocks))
        self.a, self.b = nn.Linear(WIDTH, 10), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.trunk(x)
        return self.a(x).square().mean(), self.b(x).square().mean()


def one_after_the_other(m: nn.Module, a: torch.Tensor, b: torch.Tensor) -> Grads:
    a.backward(retain_graph=True)
    b.backward()
    return []


def not_needed(m: nn.Module, a: torch.Tensor, b: torch.Tensor) -> Grads:
    (a + b).backward(retain_graph=True)
    return []


def projected(m: nn.Module, a: torch.Tensor, b: torch.Tensor) -> Grads:
    """As of PCGrad: the gradient of each loss, then of both."""
    shared = [*m.trunk.parameters()]
    grads = (torch.autograd.grad(one, shared, retain_graph=True) for one in (a, b))
    found = [*chain.from_iterable(grads)]
    (a + b).backward()
    return found


def part_by_part(m: nn.Module, a: torch.Tensor, b: torch.Tensor) -> Grads:
    """Parts of the graph, in another order than it has."""
    last, first = [*m.trunk[2].parameters()], [*m.trunk[0].parameters()]
    found = [*torch.autograd.grad(a, last, retain_graph=True)]
    found += torch.autograd.grad(b, first, retain_graph=True)
    a.backward(retain_graph=True)
    found += torch.autograd.grad(b, last)
    return found


def twice_differentiated(m: nn.Module, a: torch.Tensor, b: torch.Tensor) -> Grads:
    """A penalty on gradients, between two backwards that keep the graph."""
    shared = [*m.trunk.parameters()]
    found = [*torch.autograd.grad(a, shared, retain_graph=True)]
    penalty = torch.autograd.grad(a + b, shared, create_graph=True)
    found += torch.autograd.grad(b, shared, retain_graph=True)
    torch.stack([one.square().sum() for one in penalty]).sum().backward()
    return found


WAYS = [one_after_the_other, not_needed, projected, part_by_part, twice_differentiated]
MASK = OpName.parse("3/bernoulli_")
PLANS = {
    "program": [PlannedRegion(f"trunk.{n}") for n in range(3)],
    "whole": [PlannedRegion("trunk")],
    "rerun": [PlannedRegion(f"trunk.{n}", by="rerun") for n in range(3)],
    "encoded": [
        PlannedRegion(f"trunk.{n}", encode=((MASK, "bits"),)) for n in range(3)
    ],
}


def gradients(model: nn.Module, way: Ways, seed: int = 0) -> Grads:
    model.zero_grad()
    torch.manual_seed(seed)
    a, b = model(torch.randn(ROWS, WIDTH))
    found = way(model, a, b)
    return found + [p.grad for p in model.parameters() if p.grad is not None]


def assert_same(found: Grads, expected: Grads) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def planned(plain: nn.Module, plan: Plan) -> nn.Module:
    return ckplan.apply(copy.deepcopy(plain), plan)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", PLANS)
def test_each_backward_has_the_same_bits(kind: str, way: Ways) -> None:
    torch.manual_seed(0)
    plain = TwoHeads()
    model = planned(plain, Plan(regions=tuple(PLANS[kind])))
    for step in range(3):
        pairs = zip(
            gradients(plain, way, step), gradients(model, way, step), strict=True
        )
        assert all(torch.equal(*pair) for pair in pairs)


class ReadsTwice(torch.autograd.Function):
    """Takes what it saved twice, and lets the first go before."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = x.sigmoid()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        first = ctx.saved_tensors[0] * 1
        return grad * first * (1 - ctx.saved_tensors[0])


class Sigmoid(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ReadsTwice.apply(x)


@pytest.mark.parametrize("way", WAYS[:4])
def test_what_is_taken_twice_by_a_node_is_the_same(way: Ways) -> None:
    torch.manual_seed(0)
    plain = TwoHeads(Sigmoid)
    model = planned(plain, Plan(regions=tuple(PLANS["program"])))
    for step in range(2):
        pairs = zip(
            gradients(plain, way, step), gradients(model, way, step), strict=True
        )
        assert all(torch.equal(*pair) for pair in pairs)


def recorded(model: nn.Module, way: Ways) -> Graph:
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with ckplan.record(model, optimizer) as recorder:
        for step in range(3):
            gradients(model, way, step)
            optimizer.step()
    return recorder.graph


@pytest.mark.parametrize("way", [one_after_the_other, not_needed, projected])
@pytest.mark.parametrize("kind", PLANS)
def test_peaks_are_those_that_are_measured(kind: str, way: Ways) -> None:
    torch.manual_seed(0)
    plain = TwoHeads()
    graph = recorded(copy.deepcopy(plain), way)
    read = trace_file.loads(trace_file.dumps(graph), "trace")
    assert (read.saved, read.kept_backwards) == (graph.saved, graph.kept_backwards)
    plan = Plan(regions=tuple(PLANS[kind]))
    simulator = Simulator(graph)
    expected = [simulator.run(found).peak_bytes for found in ((), resolve(plan, graph))]
    if kind != "whole":
        assert expected[1] < 0.75 * expected[0]  # nothing stays for the next backward
    measured = []
    for model in (plain, planned(plain, plan)):
        gradients(model, way)  # a first forward is recorded
        gradients(model, way)
        model.zero_grad()
        gc.collect()
        held = [*model.parameters()]
        measured.append(peak_bytes_of(lambda m=model: gradients(m, way) and None, held))
    assert measured == pytest.approx(expected, rel=2e-3)
