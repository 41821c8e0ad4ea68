"""Contractions that run again at least, against every choice of what is saved."""

from __future__ import annotations

import random
from itertools import chain, combinations

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop

from ckplan.compiling import nodes
from ckplan.compiling.cuts import Cuts
from ckplan.compiling.partition import JointGraph, Partitioner


class Gated(nn.Module):
    """Two branches that share an input, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(4, 6, bias=False)
        self.out = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.out(torch.tanh(self.one(x)) * self.two(x))).square().sum()


class Dropped(nn.Module):
    """A draw, which cannot run again, between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(torch.relu(self.one(x)), 0.5)
        return self.two(hidden.exp()).sum()


def joint_of(model: nn.Module) -> JointGraph:
    torch._dynamo.reset()
    partitioner = Partitioner(None)
    backend = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=partitioner)
    torch.compile(model, backend=backend, fullgraph=True)(torch.randn(3, 4))
    assert partitioner.seen is not None
    return partitioner.seen


def every_choice(joint: JointGraph, seconds: dict[str, int]) -> list[tuple[int, int]]:
    """Bytes saved, and seconds of what runs again, of all choices that are possible."""
    graph = joint.module.graph
    late: set[fx.Node] = set()
    for node in graph.nodes:
        if node.name.startswith("tangents") or late & {*node.all_input_nodes}:
            late.add(node)
    ops = [n for n in nodes.ops_of(graph) if not nodes.is_view(n)]
    values = [n for n in ops if n not in late]
    tensors = [n for n in values if nodes.is_tensor(n)]
    returned = {
        nodes.base_of(n).name
        for n in nodes.outputs(joint.forward.graph)[: joint.num_outputs]
    }
    wanted = {
        nodes.base_of(one)
        for node in nodes.ops_of(graph)
        if node in late
        for one in node.all_input_nodes
    } & {*values}
    found = []
    sets = (combinations(tensors, n) for n in range(len(tensors) + 1))
    for kept in chain.from_iterable(sets):
        again: set[fx.Node] = set()
        todo = [one for one in wanted if one not in kept]
        while todo:
            node = todo.pop()
            again.add(node)
            inputs = {nodes.base_of(one) for one in node.all_input_nodes} & {*values}
            todo += [one for one in inputs if one not in kept and one not in again]
        if not any(map(nodes.is_draw, again)):
            size = sum(nodes.num_bytes(n) for n in kept if n.name not in returned)
            found.append((size, sum(seconds[n.name] for n in again)))
    return found


def below(points: list[tuple[int, int]], size: int) -> float:
    """The lower convex envelope of points at a number of bytes, and left of it."""
    least = [cost for bytes_, cost in points if bytes_ <= size]
    mixed = (
        one + (other - one) * (size - few) / (many - few)
        for few, one in points
        for many, other in points
        if few <= size < many
    )
    return min([*least, *mixed])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", [Gated, Dropped])
def test_no_choice_runs_less_again(kind: type[nn.Module], seed: int) -> None:
    joint = joint_of(kind())
    chance = random.Random(seed)
    ops = nodes.ops_of(joint.module.graph)
    seconds = {node.name: chance.choice([0, 0, 1, 2, 5, 9]) for node in ops}
    points = every_choice(joint, seconds)
    assert len(points) > 8
    cuts = Cuts(joint, lambda node: float(seconds[node.name]))
    sizes = {size for size, _ in points}
    least = min(sizes)
    for size in sorted({size + more for size in sizes for more in (0, 7)}):
        expected = below(points, size)
        assert cuts.seconds_at_least(size) == pytest.approx(expected), size
    assert cuts.seconds_at_least(least - 1) <= below(points, least)
