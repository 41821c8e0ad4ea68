"""A joint graph, divided: both halves run as they are, without Inductor's kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from changed_buffer import Normed
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop

import ckplan
from ckplan.compiling import nodes
from ckplan.compiling.partition import JointGraph, Partitioner, read_changed
from ckplan.compiling.replay import Replayed
from ckplan.compiling.search import CompiledPlanner
from ckplan.compiling.step import parts_of
from ckplan.compiling.torch_names import default_parts
from ckplan.training.workload import Workload
from ckplan.verifying import compiled_comparison


class Kept(Normed):
    """The gradient itself is computed from the buffer as it was."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.u.t().clone()
        with torch.no_grad():
            self.u.mul_(2.0)
        return (before * self.weight * x).sum()


class Renormed(nn.Module):
    """Its forward writes to a parameter: AOTAutograd does so after the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.div_(self.weight.data.norm())
        return (x * self.weight).sin().sum()


def gradient(model: nn.Module, partition: Callable[..., Any] | None) -> torch.Tensor:
    """Of one step, divided so; AOTAutograd runs both halves as they are."""
    how = {} if partition is None else {"partition_fn": partition}
    as_it_is = aot_autograd(
        fw_compiler=nop, bw_compiler=nop, keep_inference_input_mutations=True, **how
    )
    torch.compile(model, backend=as_it_is, fullgraph=True)(torch.ones(3, 4)).backward()
    found = model.get_parameter("weight").grad
    assert found is not None
    return found


def exact(model: nn.Module) -> torch.Tensor:
    """The gradient of an uncompiled step, in float64."""
    model = model.double()
    model(torch.ones(3, 4, dtype=torch.float64)).backward()
    found = model.get_parameter("weight").grad
    assert found is not None
    return found.float()


@pytest.mark.filterwarnings("ignore")
def test_what_forward_makes_of_a_buffer_before_it_changes_it_is_saved() -> None:
    found = gradient(Normed(), Partitioner([]))
    torch.testing.assert_close(found, exact(Normed()))


@pytest.mark.filterwarnings("ignore")
def test_what_forward_makes_of_a_parameter_before_it_writes_to_it_is_saved() -> None:
    found = gradient(Renormed(), Partitioner([]))
    torch.testing.assert_close(found, exact(Renormed()))


def test_the_conjugate_of_a_number_is_no_view() -> None:
    conj = torch.ops.aten._conj.default
    graph = fx.Graph()
    number = graph.call_function(conj, (1 + 1j,))
    given = graph.placeholder("x")
    tensor = graph.call_function(conj, (given,))
    assert nodes.base_of(number) is number
    assert nodes.base_of(tensor) is given


@pytest.mark.filterwarnings("ignore")
def test_torch_own_division_is_replaced_where_backward_reads_a_changed_buffer() -> None:
    def as_torch_does(joint: fx.GraphModule, inputs: Any, **how: Any) -> Any:
        parts = default_parts(joint, inputs, how)
        wrong.extend(read_changed(parts))
        return parts

    wrong: list[str] = []
    off = gradient(Normed(), as_torch_does)
    own = Partitioner(None)
    torch._dynamo.reset()
    found = gradient(Normed(), own)
    torch.testing.assert_close(found, exact(Normed()))
    assert own.seen is not None
    # torch may mend its own division; then nothing is to be replaced.
    assert (own.seen.instead is not None) == bool(wrong)
    assert torch.allclose(off, found) == (not wrong)


@pytest.mark.filterwarnings("ignore")
def test_a_division_that_reads_a_changed_buffer_is_told_from_one_that_does_not() -> (
    None
):
    own, frugal = Partitioner(None), Partitioner(None, share=0.0)
    found = gradient(Normed(), own)
    torch._dynamo.reset()
    off = gradient(Normed(), frugal)
    assert own.seen is not None
    assert frugal.seen is not None
    assert not compiled_comparison.reads_changed(own.seen)
    # torch may mend it; then nothing is marked.
    is_wrong = not torch.allclose(off, found)
    assert compiled_comparison.reads_changed(frugal.seen) == is_wrong


@pytest.mark.filterwarnings("ignore")
def test_a_plan_without_regions_is_torch_own_choice_or_what_replaces_it() -> None:
    own = Partitioner(None)
    gradient(Normed(), own)
    assert own.seen is not None
    joint = replace(own.seen, instead=frozenset({"sigmoid"}))
    planner = CompiledPlanner(Mock(inputs=()), joint, unplanned=Replayed(1, 1, 1, 1, 1))
    one = planner.proposer.candidate(())
    assert (one.saved, one.overhead) == (None, 0.0)  # the partitioner replaces it
    assert planner.replayed(one.saved) is planner.unplanned


@pytest.mark.filterwarnings("ignore")
def test_a_gradient_computed_from_the_buffer_as_it_was_is_refused() -> None:
    def without_clone(joint: fx.GraphModule, inputs: Any, **how: Any) -> Any:
        """As Inductor may leave it out."""
        for node in joint.graph.find_nodes(
            op="call_function", target=torch.ops.aten.clone.default
        ):
            node.replace_all_uses_with(node.args[0])
        return Partitioner(None)(joint, inputs, **how)

    torch.testing.assert_close(gradient(Kept(), Partitioner(None)), exact(Kept()))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"backward reads .*, an input that forward"):
        gradient(Kept(), without_clone)


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["100%", "200%"])
def test_what_fits_without_a_plan_has_right_gradients(budget: str) -> None:
    model = Normed()
    ckplan.compile(model, budget)(torch.ones(3, 4)).backward()
    torch.testing.assert_close(model.weight.grad, exact(Normed()))


def test_modules_that_dynamo_finds_in_a_dictionary_have_their_path() -> None:
    graph = fx.Graph()
    node = graph.call_function(torch.relu)
    paths = ("L['m'].__dict__['_modules']['encoder'].blocks.0", "L['m'].head")
    node.meta["nn_module_stack"] = {path: (path, "Linear") for path in paths}
    found = nodes.modules_around(node)
    assert found == (("encoder.blocks.0", "Linear"), ("head", "Linear"))


class Norms(nn.Module):
    """Backward of a norm makes a value of forward's alone, which torch saves."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x.square().mean()


def test_all_that_torch_saves_can_be_saved() -> None:
    model, x = Norms(), torch.randn(16, 32)
    parts = parts_of(Workload(model, (x,)))
    (planner,) = parts.planners.values()
    own = planner.joint

    def read(joint: JointGraph) -> set[str]:
        inputs = joint.backward.graph.find_nodes(op="placeholder")
        return {one.name for one in inputs}

    made = {one.name: one for one in own.module.graph.nodes}
    wanted = {nodes.base_of(made[name]).name for name in read(own)}
    saved = {name for name in wanted if made[name].op == "call_function"}
    assert any("div" in name for name in saved)
    divided = own.divided(saved)
    assert read(divided) >= saved
    here, there = (
        sum(len([*nodes.ops_of(half.graph)]) for half in (one.forward, one.backward))
        for one in (own, divided)
    )
    assert there <= here  # nothing else is computed again
