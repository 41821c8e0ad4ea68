"""What `compare` shows are candidates; what is saved takes few bytes.

Convolutions are saved where that pays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from ckplan.compiling import nodes, proposing
from ckplan.compiling.handing import before_gradients
from ckplan.compiling.lowering import DynamoGraph
from ckplan.compiling.replay import replay
from ckplan.compiling.search import CompiledPlanner
from ckplan.plan.region import Region
from ckplan.plan.resolve import resolve


class Wide(nn.Module):
    """A residual block whose hidden values are most of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 128), nn.Linear(128, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        return x + self.down(h * h.exp())


class FewPixels(nn.Module):
    """A depthwise convolution of 2 x 2 pixels, whose backward has two kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 512), nn.Linear(512, 16)
        self.mixes = nn.Conv2d(512, 512, 3, padding=1, groups=512)
        self.blocks = nn.Sequential(Wide(), Wide())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).transpose(1, 2).view(len(x), -1, 2, 2)
        h = self.mixes(h).flatten(2).transpose(1, 2)
        x = x + self.down(nn.functional.gelu(h))
        return self.blocks(x.repeat(64, 1, 1)).square().mean()


class Blocks(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Wide(), Wide()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


class Normed(nn.Module):
    """Blocks, each normed after its residual, as BERT's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.norm = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            made = nn.functional.dropout(down(torch.tanh(up(x))), 0.1)
            x = self.norm(x + made)
        return x.square().mean()


def planned(model: nn.Module, x: torch.Tensor) -> CompiledPlanner:
    found: list[CompiledPlanner] = []

    def only_trace(graph: fx.GraphModule, inputs: Any) -> Any:
        traced = DynamoGraph(graph, inputs, {})
        joint, lowered = traced.lower(None, quick=True)
        assert joint is not None
        assert lowered is not None
        unplanned = replay(lowered, joint.num_outputs)
        found.append(CompiledPlanner(traced, joint, quick=True, unplanned=unplanned))
        return graph.forward

    torch.compile(model, backend=only_trace, fullgraph=True)(x)
    return found[0]


def few_pixels() -> tuple[nn.Module, torch.Tensor]:
    return FewPixels(), torch.randn(2, 4, 16)


def test_no_proposal_gives_convolutions_a_kernel_with_more_scratch_memory() -> None:
    planner = planned(*few_pixels())
    peak_bytes = planner.unplanned.peak_bytes
    ways = {one.saved for one in planner.proposer.ways.values()}
    proposed = [c for c in planner.candidates if c.saved and c.saved not in ways]
    assert proposed
    # On most processors, to compute it again takes more than the step without a plan.
    grows = planner.replayed(frozenset()).peak_bytes > peak_bytes + 2**21
    is_saved = {"convolution" in one.saved for one in proposed if one.saved}
    assert is_saved == ({True} if grows else {False, True})
    smallest = min(planner.replayed(one.saved).peak_bytes for one in proposed)
    assert smallest < (0.9 if grows else 1.0) * peak_bytes


def test_what_torch_saves_is_a_plan_that_reads_back() -> None:
    planner = planned(Blocks(), torch.randn(256, 16))
    for name in proposing.WAYS[1:]:
        one = planner.proposer.ways[name]
        plan = planner.chosen(one).plan
        assert (
            planner.proposer.candidate(resolve(plan, planner.step.graph)).saved
            == one.saved
        )


def test_the_same_contractions_are_spared_with_fewer_bytes() -> None:
    """The sum of a residual is saved, not both of what is added."""
    planner = planned(Normed(), torch.randn(2048, 32))
    proposer, step = planner.proposer, planner.step
    graph = planner.joint.module.graph
    ops = [*before_gradients(graph)]
    products = [node for node in ops if nodes.is_alone(node)]
    inputs = [nodes.base_of(one.all_input_nodes[1]) for one in products[2::2]]
    saved = frozenset(one.name for one in (*products[1::2], *inputs))
    fewer = proposing.narrowed(step, proposer._cuts, saved)
    one, other = (
        proposer.candidate(proposing.saving_nodes(step, planner.joint, some, Region(0)))
        for some in (saved, fewer)
    )
    assert other.saved_bytes < 0.7 * one.saved_bytes
    taken = [planner.replayed(some.saved).peak_bytes for some in (other, one)]
    assert taken[0] < taken[1]
    plan = planner.chosen(other).plan
    again = proposer.candidate(resolve(plan, step.graph))
    assert again.saved == other.saved


def test_candidates_with_fewer_bytes_are_beside_those_of_the_solver() -> None:
    planner = planned(Normed(), torch.randn(2048, 32))
    own = [*planner.proposer._proposed()]
    fewer = [*planner.proposer._with_fewer_bytes(own)]
    saved = {one.saved for one in planner.candidates}
    assert saved & {one.saved for one in fewer}
    assert saved & {one.saved for one in own if one.regions}
    assert all(one.saved_bytes < max(some.saved_bytes for some in own) for one in fewer)
