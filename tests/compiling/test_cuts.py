"""Divisions by minimum cuts, against every choice of what is saved."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from itertools import chain, combinations

import pytest
import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop

from ckplan.compiling import nodes
from ckplan.compiling.cuts import Cuts
from ckplan.compiling.partition import JointGraph, Partitioner

Kept = tuple[fx.Node, ...]


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


class Summed(nn.Module):
    """Two products, of which only the sum counts."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(4, 6)
        self.out = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.one(x) + self.two(x))).sum()


def values_of(joint: JointGraph) -> tuple[list[fx.Node], set[fx.Node]]:
    """What forward makes, and what backward needs of it; no views."""
    graph = joint.module.graph
    late: set[fx.Node] = set()
    for node in graph.nodes:
        if node.name.startswith("tangents") or late & {*node.all_input_nodes}:
            late.add(node)
    ops = [n for n in nodes.ops_of(graph) if not nodes.is_view(n)]
    values = [n for n in ops if n not in late]
    wanted = {
        nodes.base_of(one)
        for node in nodes.ops_of(graph)
        if node in late
        for one in node.all_input_nodes
    }
    return values, wanted & {*values}


def run_again(joint: JointGraph, kept: Collection[fx.Node]) -> set[fx.Node]:
    """What runs again if some values are kept."""
    values, wanted = values_of(joint)
    again: set[fx.Node] = set()
    todo = [one for one in wanted if one not in kept]
    while todo:
        node = todo.pop()
        again.add(node)
        inputs = {nodes.base_of(one) for one in node.all_input_nodes} & {*values}
        todo += [one for one in inputs if one not in kept and one not in again]
    return again


def size_of(joint: JointGraph, kept: Collection[fx.Node]) -> int:
    """Bytes that are saved; what forward returns is there anyway."""
    returned = {
        nodes.base_of(n).name
        for n in nodes.outputs(joint.forward.graph)[: joint.num_outputs]
    }
    return sum(nodes.num_bytes(n) for n in kept if n.name not in returned)


def every_division(joint: JointGraph) -> Iterator[tuple[Kept, set[fx.Node]]]:
    """All choices of what is kept that are possible, and what runs again."""
    tensors = [n for n in values_of(joint)[0] if nodes.is_tensor(n)]
    sets = (combinations(tensors, n) for n in range(len(tensors) + 1))
    for kept in chain.from_iterable(sets):
        again = run_again(joint, kept)
        if not any(map(nodes.is_draw, again)):
            yield kept, again


def every_choice(joint: JointGraph, seconds: dict[str, int]) -> list[tuple[int, int]]:
    """Bytes saved, and seconds of what runs again, of all choices that are possible."""
    return [
        (size_of(joint, kept), sum(seconds[n.name] for n in again))
        for kept, again in every_division(joint)
    ]


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


@pytest.mark.parametrize("kind", [Gated, Dropped, Summed])
def test_no_choice_that_spares_the_same_products_saves_less(
    kind: type[nn.Module],
) -> None:
    joint = joint_of(kind())
    cuts = Cuts(joint, lambda node: 0.0)
    named = {node.name: node for node in values_of(joint)[0]}
    every = [
        (kept, {*filter(nodes.is_alone, again)})
        for kept, again in every_division(joint)
    ]
    for kept, products in every:
        least = min(size_of(joint, some) for some, more in every if more <= products)
        names = cuts.narrowed({node.name for node in kept}, named)
        found = [named[name] for name in names]
        assert size_of(joint, found) == least
        again = run_again(joint, found)
        assert {*filter(nodes.is_alone, again)} <= products
        assert not any(map(nodes.is_draw, again))


def test_of_equal_choices_the_values_are_nearest_to_backward() -> None:
    joint = joint_of(Summed())
    products = [n for n in values_of(joint)[0] if nodes.is_alone(n)][:2]
    names = {node.name for node in products}
    cuts = Cuts(joint, lambda node: 0.0)
    nameable = {node.name for node in values_of(joint)[0]}
    assert cuts.narrowed(names, nameable) == {"tanh"}
    assert cuts.narrowed(names, names | {"add"}) == {"add"}
    assert cuts.narrowed(names, names) == names
