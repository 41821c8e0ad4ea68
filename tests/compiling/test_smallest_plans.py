"""What `compare` shows are candidates; convolutions are saved where that pays."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from ckplan.compiling import proposing
from ckplan.compiling.lowering import DynamoGraph
from ckplan.compiling.replay import replay
from ckplan.compiling.search import CompiledPlanner
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
    assert all("convolution" in one.saved for one in proposed if one.saved)
    smallest = min(planner.replayed(one.saved).peak_bytes for one in proposed)
    assert smallest < 0.9 * peak_bytes
    # to compute it again takes more than the whole step without a plan
    assert planner.replayed(frozenset()).peak_bytes > peak_bytes + 2**21


def test_what_torch_saves_is_a_plan_that_reads_back() -> None:
    planner = planned(Blocks(), torch.randn(256, 16))
    for name in proposing.WAYS[1:]:
        one = planner.proposer.ways[name]
        plan = planner.chosen(one).plan
        assert (
            planner.proposer.candidate(resolve(plan, planner.step.graph)).saved
            == one.saved
        )
