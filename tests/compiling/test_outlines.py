"""Outlines of divisions beside what torch's own partitioner divides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from ckplan.compiling import estimating, nodes, side_by_side
from ckplan.compiling.estimating import Estimates
from ckplan.compiling.outlines import outlined
from ckplan.compiling.search import CompiledPlanner
from ckplan.compiling.step import parts_of
from ckplan.training.workload import Workload


class Attends(nn.Module):
    """Dropout, norms, attention, and a value that is made of forward's alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(16), nn.Dropout(0.1)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = self.drop((q @ k.transpose(-1, -2)).softmax(-1))
        return x + nn.functional.gelu(self.out(weights @ v))


def attention() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(Attends(), Attends()), torch.randn(4, 8, 16)


def changed_buffers() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)]
    return nn.Sequential(*layers, nn.BatchNorm2d(8), nn.GELU()), torch.randn(2, 3, 8, 8)


def planned(build: Callable[[], tuple[nn.Module, torch.Tensor]]) -> CompiledPlanner:
    torch.manual_seed(0)
    model, x = build()
    (planner,) = parts_of(Workload(Mean(model), (x,))).planners.values()
    return planner


class Mean(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x).square().mean()


def ops(graph: fx.Graph) -> Counter[str]:
    return Counter(node.name for node in nodes.ops_of(graph))


@pytest.mark.parametrize("build", [attention, changed_buffers])
def test_an_outline_has_the_ops_and_the_seconds_of_torch_s_division(
    build: Callable[[], tuple[nn.Module, torch.Tensor]],
) -> None:
    planner = planned(build)
    found = {one.saved for one in planner.candidates if one.saved is not None}
    assert len(found) > 3
    for saved in (*found, frozenset[str]()):
        divided = planner.joint.divided(saved)
        outline = outlined(planner.joint, saved)
        assert ops(outline.forward.graph) == ops(divided.forward.graph)
        assert ops(outline.backward.graph) == ops(divided.backward.graph)
        for graph in (outline.forward.graph, outline.backward.graph):
            graph.lint()
        seconds = planner.proposer.estimates.seconds_in(divided)
        assert planner.proposer.estimates.seconds_in(outline) == pytest.approx(
            seconds, rel=1e-3
        )


def test_what_backward_rebuilds_stands_just_before_its_first_use() -> None:
    planner = planned(attention)
    graph = outlined(planner.joint, frozenset()).backward.graph
    order = {node: number for number, node in enumerate(graph.nodes)}
    forward = ops(planner.joint.forward.graph)
    rebuilt = [node for node in nodes.ops_of(graph) if node.name in forward]
    last = max(rebuilt, key=order.__getitem__)
    made = [node for node in nodes.ops_of(graph) if node.name not in forward]
    assert order[last] > order[made[0]]  # not all at the beginning
    for node in rebuilt:
        assert node.users


def test_estimates_that_are_made_together_are_those_made_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = planned(attention)
    plans = [one for one in planner.candidates if one.saved is not None]
    monkeypatch.setattr(side_by_side, "most_at_once", lambda: 3)
    together = Estimates(planner.joint, planner.step)
    together.learn(one.saved for one in plans)
    monkeypatch.setattr(estimating, "outlined", None)  # nothing is made again
    known = [together.overhead_of(one.saved) for one in plans]
    assert known == [one.overhead for one in plans]
    assert len({*known}) > 1
