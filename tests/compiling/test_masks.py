"""Masks that a plan saves are bits, and nothing that is computed differs."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from ckplan.compiling import costs, nodes
from ckplan.compiling.kernels import Kernels
from ckplan.compiling.masks import becomes_bits, num_packed, pack_masks, saved_bytes
from ckplan.compiling.outlines import outlined
from ckplan.compiling.partition import cached_partitioner
from ckplan.compiling.proposing import Proposer
from ckplan.compiling.search import CompiledPlanner
from ckplan.compiling.step import parts_of
from ckplan.compiling.torch_names import FakeTensorMode
from ckplan.tracing.costs.mask_seconds import MaskSeconds
from ckplan.training.workload import Workload

HEADS, ROWS, WIDTH = 6, 32, 48


class Attends(nn.Module):
    """Masks of dropout in attention, after it, and of a relu."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).transpose(-2, -3)
        q, k, v = parts.chunk(3, -3)
        weights = self.drop((q @ k.transpose(-1, -2)).softmax(-1))
        mixed = (weights @ v).transpose(-2, -3).flatten(-2)
        return x + self.drop(self.out(mixed)).relu()


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Attends(), Attends())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def planned(batch: int) -> CompiledPlanner:
    torch.manual_seed(0)
    x = torch.randn(batch, ROWS, WIDTH)
    (planner,) = parts_of(Workload(Mean(), (x,))).planners.values()
    return planner


@pytest.fixture(name="planner", scope="module")
def _planner() -> CompiledPlanner:
    return planned(4)


def saved_by_torch(planner: CompiledPlanner) -> frozenset[str]:
    graph = planner.joint.forward.graph
    every = {*nodes.outputs(graph)[planner.joint.num_outputs :]}
    return frozenset(one.name for one in every if one.op == "call_function")


def gradients(saved: frozenset[str] | None) -> list[object]:
    """Loss and gradients of the model, compiled anew."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    model, x = Mean(), torch.randn(4, ROWS, WIDTH)
    partitioner = cached_partitioner(saved)
    compiled = torch.compile(model, options={"custom_partitioner_fn": partitioner})
    torch.manual_seed(2)
    loss = compiled(x)
    loss.backward()
    return [loss.item(), *(one.grad.tolist() for one in model.parameters())]


def test_what_is_computed_from_bits_is_what_is_computed_from_masks(
    planner: CompiledPlanner,
) -> None:
    assert gradients(saved_by_torch(planner)) == gradients(None)


@pytest.mark.parametrize("batch", [1, 4])
def test_masks_that_are_saved_take_an_eighth(batch: int) -> None:
    planner = planned(batch)
    names = saved_by_torch(planner)
    saved = [one for one in planner.joint.forward.graph.nodes if one.name in names]
    masks = [one for one in saved if one.meta["val"].dtype == torch.bool]
    num_bytes = sum(map(nodes.num_bytes, masks))
    assert num_bytes >= 2 * batch * HEADS * ROWS * ROWS
    bits = planner.replayed(names).saved_bytes
    assert planner.unplanned.saved_bytes - bits == num_bytes * 7 // 8
    assert sum(map(saved_bytes, masks)) == num_bytes // 8


def test_forward_draws_no_number_twice_and_writes_no_mask(
    planner: CompiledPlanner,
) -> None:
    drawn, written = {}, {}
    for saved in (None, saved_by_torch(planner)):
        _, lowered = planner.traced.lower(saved)
        assert lowered is not None
        source = lowered.forward.source
        drawn[saved] = len(re.findall(r"normalized_rand_cpu\(", source))
        written[saved] = len(re.findall(r"\bbool\* ", source))
    own, bits = drawn
    assert drawn[own] == drawn[bits]
    assert written[own]
    assert not written[bits]


def test_only_masks_with_rows_of_eight_planes_become_bits() -> None:
    with FakeTensorMode():
        shapes = ((), (3,), (0, 8), (7, 8), (2, 8, 3), (8, 1))
        fakes = [torch.empty(shape, dtype=torch.bool) for shape in shapes]
        turned = torch.empty(8, 16, dtype=torch.bool).t()
        numbers = torch.empty(8, 4)
    graph = fx.Graph()
    for fake in (*fakes, turned, numbers):
        node = graph.call_function(torch.ops.aten.gt.Scalar, (graph.placeholder("x"),))
        node.meta["val"] = fake
    found = [becomes_bits(node) for node in nodes.ops_of(graph)]
    assert found == [False, False, False, False, True, True, False, False]


def targets(graph: fx.Graph) -> Counter[object]:
    return Counter(node.target for node in nodes.ops_of(graph))


@pytest.mark.parametrize("num_outputs", [0, 1])
def test_a_mask_that_forward_returns_stays_a_mask(num_outputs: int) -> None:
    with FakeTensorMode():
        fake = torch.empty(8, 16)
    forward, backward = fx.Graph(), fx.Graph()
    x = forward.placeholder("primals_1")
    mask = forward.call_function(torch.ops.aten.gt.Scalar, (x, 0.0))
    forward.output((mask,) * (num_outputs + 1))
    known, given = (backward.placeholder(one) for one in (mask.name, "tangents_1"))
    backward.output((backward.call_function(torch.ops.aten.mul, (given, known)),))
    for node in (x, given):
        node.meta["val"] = fake
    for node in (mask, known):
        node.meta["val"] = fake > 0
    parts = [fx.GraphModule({}, graph) for graph in (forward, backward)]
    pack_masks((parts[0], parts[1]), num_outputs)
    (saved,) = parts[1].graph.find_nodes(op="placeholder")[:1]
    kinds = [one.meta["val"].dtype for one in nodes.outputs(parts[0].graph)]
    if num_outputs:
        assert kinds == [torch.bool, torch.bool]
        assert saved.meta["val"].dtype == torch.bool
    else:
        assert kinds == [torch.uint8]
        assert (saved.meta["val"].dtype, saved.meta["val"].numel()) == (*kinds, 16)


def test_an_outline_has_bits_as_what_is_compiled(planner: CompiledPlanner) -> None:
    for saved in (saved_by_torch(planner), planner.proposer.ways["everything"].saved):
        assert saved is not None
        divided, _ = planner.traced.lower(saved)
        assert divided is not None
        outline = outlined(planner.joint, saved, as_bits=True)
        for one, other in (
            (outline.forward, divided.forward),
            (outline.backward, divided.backward),
        ):
            found, compiled = one.graph, other.graph
            found.lint()
            assert targets(found) == targets(compiled)
            bits = [sum(map(num_packed, graph.nodes)) for graph in (found, compiled)]
            assert bits[0] == bits[1]
        seconds = planner.proposer.estimates.seconds_in(divided)
        assert planner.proposer.estimates.seconds_in(outline) == pytest.approx(
            seconds, rel=1e-3
        )


def test_backward_reads_as_many_bits_as_forward_packs(planner: CompiledPlanner) -> None:
    outline = outlined(planner.joint, saved_by_torch(planner), as_bits=True)
    forward, backward = (one.graph for one in (outline.forward, outline.backward))
    packed = sum(map(num_packed, nodes.ops_of(forward)))
    assert packed >= 2 * 4 * HEADS * ROWS * ROWS
    assert Kernels(backward).bits_read(nodes.ops_of(backward)) == packed
    assert Kernels(backward).truths_read(nodes.ops_of(backward)) == 0


def test_bits_that_spare_seconds_are_promised_and_chosen(
    planner: CompiledPlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = MaskSeconds(draw=1e-6, write=1e-6, read=0.0, pack=0.0, unpack=0.0)
    monkeypatch.setattr(costs, "mask_seconds", lambda: slow)
    proposer = Proposer(planner.joint, planner.step)
    first = proposer.candidates[0]
    assert first.saved is not None
    assert first.overhead < -0.1
    own = proposer.candidate(())
    assert own in proposer.candidates
    assert first.saved_bytes <= own.saved_bytes
    assert proposer.least_overhead(own.saved_bytes) == pytest.approx(
        first.overhead, abs=1e-3
    )


def test_plans_of_fewer_bytes_draw_no_mask_again(planner: CompiledPlanner) -> None:
    saved, drawn = planner.proposer.ways["everything"].saved, {}
    for draws_again in (False, True):
        names = planner.proposer._narrowed(saved, draws_again)
        backward = outlined(planner.joint, names).backward.graph
        drawn[draws_again] = sum(map(nodes.num_drawn, nodes.ops_of(backward)))
    assert drawn[False] == 0
    assert drawn[True] >= 2 * 4 * HEADS * ROWS * ROWS


def test_a_small_gain_is_not_promised(
    planner: CompiledPlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = planner.proposer.estimates.seconds_in(planner.joint)
    for share, said in ((0.9, -0.1), (0.99, 0.0), (1.01, 0.01)):
        seconds = share * own
        proposer = Proposer(planner.joint, planner.step)
        assert proposer.estimates.own_seconds == own
        monkeypatch.setattr(proposer.estimates, "seconds_in", lambda _, s=seconds: s)
        assert proposer.estimates.overhead_in(replace(planner.joint)) == pytest.approx(
            said
        )
