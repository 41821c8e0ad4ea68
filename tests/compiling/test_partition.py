"""A joint graph, divided: both halves run as they are, without Inductor's kernels."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import fx, nn

from ckplan.compiling import nodes
from ckplan.compiling.lowering import DynamoGraph
from ckplan.compiling.partition import JointGraph


class Normed(nn.Module):
    """Scaled by a buffer that every forward changes, as spectral norms do."""

    u: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 13.0).view(3, 4))
        self.register_buffer("u", torch.tensor([[1.0, 2.0, 3.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = (torch.sigmoid(self.u).t() * self.weight).sum(0)
        with torch.no_grad():
            self.u.mul_(2.0)
        return (x * v * self.weight).sum()


def joint_of(model: nn.Module, x: torch.Tensor) -> tuple[JointGraph, list[Any]]:
    found: list[tuple[JointGraph, list[Any]]] = []

    def only_trace(graph: fx.GraphModule, inputs: Any) -> Any:
        joint, _ = DynamoGraph(graph, inputs, {}).lower(None, quick=True)
        assert joint is not None
        found.append((joint, [one.detach().clone() for one in inputs]))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(model, backend=only_trace, fullgraph=True)(x)
    return found[0]


def gradients(
    joint: JointGraph, saved: Collection[str], inputs: list[Any]
) -> list[torch.Tensor]:
    """Of one step, by the graphs of forward and backward; inputs stay as they are."""
    parts = joint.divided(saved)
    given = [one.detach().clone() for one in inputs]
    (output,) = parts.forward.graph.find_nodes(op="output")
    with torch.no_grad():
        made = parts.forward(*given)
        names = [getattr(one, "name", "") for one in output.args[0]]
        values = dict(zip(names, made, strict=True))
        wanted = parts.backward.graph.find_nodes(op="placeholder")
        primals = parts.forward.graph.find_nodes(op="placeholder")
        values |= {one.name: t for one, t in zip(primals, given, strict=True)}
        back = [values.get(one.name, torch.tensor(1.0)) for one in wanted]
        return [one for one in parts.backward(*back) if one is not None]


@pytest.mark.filterwarnings("ignore")
def test_what_forward_makes_of_a_buffer_before_it_changes_it_is_saved() -> None:
    x = torch.ones(3, 4)
    joint, inputs = joint_of(Normed(), x)
    (changed,) = nodes.changed_inputs(joint.module.graph)
    reads = joint.divided([]).backward.graph.find_nodes(op="placeholder")
    assert changed.name not in [one.name for one in reads]
    (found,) = gradients(joint, [], inputs)
    expected = Normed()
    expected(x).backward()
    assert torch.equal(found, expected.weight.grad)


def test_modules_that_dynamo_finds_in_a_dictionary_have_their_path() -> None:
    graph = fx.Graph()
    node = graph.call_function(torch.relu)
    paths = ("L['m'].__dict__['_modules']['encoder'].blocks.0", "L['m'].head")
    node.meta["nn_module_stack"] = {path: (path, "Linear") for path in paths}
    found = nodes.modules_around(node)
    assert found == (("encoder.blocks.0", "Linear"), ("head", "Linear"))
