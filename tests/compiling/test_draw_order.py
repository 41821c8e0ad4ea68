"""Random numbers are drawn in the order of the program, whatever a plan saves."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import fx, nn

from ckplan.compiling import nodes
from ckplan.compiling.lowering import DynamoGraph, Lowered, in_order
from ckplan.compiling.partition import cached_partitioner
from ckplan.compiling.search import CompiledPlanner
from ckplan.compiling.step import parts_of
from ckplan.training.workload import Workload

KEPT = [0.9, 0.8, 0.7, 0.6]
"""The probabilities that draws of a step keep a value, in the order of the program."""


class Branches(nn.Module):
    """Two branches, of which the second has larger values, and two draws in each.

    It takes less memory to begin with the second. What draws are ops of torch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(3, 48, 3)
        self.drops = nn.ModuleList(nn.Dropout2d(1 - kept) for kept in KEPT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two, three, four = self.drops
        large = two(one(self.first(x)).sigmoid()).tanh()
        larger = four(three(self.second(x)).sigmoid()).tanh().mean((2, 3))
        return large.square().mean() + larger.mean()


@pytest.fixture(name="model", scope="module")
def _model() -> nn.Module:
    torch.manual_seed(0)
    return Branches()


@pytest.fixture(name="planner", scope="module")
def _planner(model: nn.Module) -> CompiledPlanner:
    (planner,) = parts_of(Workload(model, (batch(),))).planners.values()
    return planner


def batch() -> torch.Tensor:
    return torch.randn(4, 3, 18, 18, generator=torch.Generator().manual_seed(1))


def drawn(lowered: Lowered | None) -> list[float]:
    """The probabilities of draws in the order of generated code."""
    assert lowered is not None
    found = re.findall(r"bernoulli_\S*\(\w+, (0\.\d+)", lowered.forward.source)
    return [round(float(one), 2) for one in found]


def test_draws_keep_their_order_whatever_is_saved(planner: CompiledPlanner) -> None:
    ops = nodes.ops_of(planner.joint.forward.graph)
    names = [node.name for node in ops if nodes.is_tensor(node)]
    random = Random(0)
    choices = [random.sample(names, random.randrange(len(names))) for _ in range(12)]
    for saved in (None, *choices):
        assert drawn(planner.traced.lower(saved, quick=True)[1]) == KEPT


def test_numbers_are_those_of_code_that_is_not_compiled(
    model: nn.Module, planner: CompiledPlanner
) -> None:
    def planned(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        saved = planner.proposer.ways["everything"].saved
        return DynamoGraph(graph, inputs, {}).compile(cached_partitioner(saved))[0]

    expected = gradients(model, model)
    for backend in (in_order, planned):
        found = gradients(model, torch.compile(model, backend=backend))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def gradients(model: nn.Module, call: Any) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(2)
    call(batch()).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@torch.library.custom_op("ckplan_tests::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    """Draws inside, and no tag of it says so."""
    return x + torch.randn_like(x)


def test_custom_ops_count_as_ones_that_draw() -> None:
    assert nodes.draws(torch.ops.ckplan_tests.noise.default)
    assert nodes.draws(torch.ops.aten.bernoulli.default)
    assert not nodes.draws(torch.ops.aten.mul.Tensor)
    assert not nodes.draws(torch.add)
