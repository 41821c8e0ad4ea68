"""Which nodes are taken for one kernel, beside the kernels that Inductor generates."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch import nn

from ckplan.compiling import costs, nodes
from ckplan.compiling.costs import CpuCosts
from ckplan.compiling.kernels import Kernels, stores_mask
from ckplan.compiling.lowering import Code
from ckplan.compiling.partition import JointGraph
from ckplan.compiling.search import CompiledPlanner
from ckplan.compiling.step import parts_of
from ckplan.tracing.costs.mask_seconds import MaskSeconds
from ckplan.training.workload import Workload

ROWS, WIDTH = 256, 16


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(self.drop(hidden))


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(Part(), Part())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(x).square().mean()


@pytest.fixture(name="planner", scope="module")
def _planner() -> CompiledPlanner:
    torch.manual_seed(0)
    parts = parts_of(Workload(Parts(), (torch.randn(ROWS, WIDTH),)))
    (planner,) = parts.planners.values()
    return planner


def generated(planner: CompiledPlanner, way: str) -> tuple[JointGraph, Code, Code]:
    saved = planner.proposer.ways[way].saved if way else None
    joint, lowered = planner.traced.lower(saved)
    assert joint is not None
    assert lowered is not None
    return joint, lowered.forward, lowered.backward


@pytest.mark.parametrize("way", ["", "every layer"])
def test_forward_has_as_many_kernels_as_inductor_generates(
    planner: CompiledPlanner, way: str
) -> None:
    joint, code, _ = generated(planner, way)
    graph = joint.forward.graph
    kernels = Kernels(graph)
    fused = [one for one in nodes.ops_of(graph) if not nodes.is_alone(one)]
    calls = re.findall(r"^\s+cpp_fused\w*\(", code.source, re.MULTILINE)
    assert kernels.launches(fused) == len(calls)
    alone = [one for one in nodes.ops_of(graph) if nodes.is_alone(one)]
    assert kernels.launches(alone) == len(alone) == code.source.count("extern_kernels.")


def test_what_stays_within_a_kernel_moves_no_bytes(planner: CompiledPlanner) -> None:
    graph = generated(planner, "")[0].forward.graph
    kernels = Kernels(graph)
    (first, _) = (one for one in nodes.ops_of(graph) if one.name.startswith("erf"))
    assert kernels.crossing_bytes([first]) == 0
    # In all: every input and output of a kernel once, which its code declares.
    everything = kernels.crossing_bytes(
        one for one in nodes.ops_of(graph) if not nodes.is_alone(one)
    )
    rows, wide, seeds = 4 * ROWS * WIDTH, 4 * ROWS * 64, 2 * 8
    norm = 2 * rows + 2 * 4 * WIDTH + 2 * 4 * ROWS  # and weight, bias; mean, deviation
    gelu = 2 * wide + ROWS * 64 + 8  # in, out, its mask, a seed
    adds = 3 * rows  # two parts' sums
    assert everything == pytest.approx(2 * (norm + gelu) + adds + seeds, rel=0.1)


def test_masks_are_written_where_they_are_kept(planner: CompiledPlanner) -> None:
    counts = {}
    for way in ("", "everything"):
        joint, code, _ = generated(planner, way)
        graph = joint.forward.graph
        counts[way] = sum(map(stores_mask, nodes.ops_of(graph)))
        written = set(re.findall(r"(\bbool\* \w+)", code.source))
        assert counts[way] <= 2 * len(written)
        assert bool(counts[way]) == bool(written)
    assert counts == {"": 2, "everything": 0}


def costs_at(monkeypatch: pytest.MonkeyPatch, masks: MaskSeconds) -> CpuCosts:
    monkeypatch.setattr(costs, "mask_seconds", lambda: masks)
    return CpuCosts({})


def test_a_dropped_mask_is_drawn_again_and_neither_written_nor_read(
    planner: CompiledPlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = 2 * ROWS * 64
    masks = MaskSeconds(draw=4e-6, write=1e-6, read=2e-6, pack=5e-7, unpack=5e-7)
    of_cpu = costs_at(monkeypatch, masks)
    joint = generated(planner, "")[0]
    forward, backward = joint.forward.graph, joint.backward.graph
    of_cpu.measure(forward, backward)
    run = [
        one for one in nodes.ops_of(forward) if "random" in one.name or stores_mask(one)
    ]
    kernels = Kernels(forward)
    whole, rebuilt = of_cpu.seconds(run, kernels)[0], of_cpu.rebuilt(run, kernels)[0]
    threads = torch.get_num_threads()
    assert whole * threads == pytest.approx(numbers * 5e-6)
    assert rebuilt * threads == pytest.approx(numbers * 3e-6)  # of its bits
    fused = [one for one in nodes.ops_of(backward) if not nodes.is_alone(one)]
    reading = of_cpu.seconds(fused, Kernels(backward))[0]
    assert reading * threads == pytest.approx(numbers * 2e-6, rel=0.01)
    assert Kernels(backward).truths_read(fused) == numbers


def test_a_mask_that_costs_more_to_keep_makes_plans_without_it_cheaper(
    planner: CompiledPlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropping = planner.joint.divided(planner.proposer.ways["everything"].saved or ())
    draw, added = 10e-9, {}
    for more in (0.0, 5e-9):
        costs_at(monkeypatch, MaskSeconds(draw, draw + more, more, 0.0, 0.0))
        own, other = map(
            planner.proposer.estimates.seconds_in, (planner.joint, dropping)
        )
        added[more] = other - own
    numbers, threads = 2 * ROWS * 64, torch.get_num_threads()
    gained = (added[0.0] - added[5e-9]) * threads
    assert gained == pytest.approx(numbers * 2 * 5e-9, rel=0.1)


def test_moves_cost_what_a_byte_takes_on_this_machine(
    planner: CompiledPlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = planner.joint.forward.graph
    run = [one for one in nodes.ops_of(forward) if not nodes.is_alone(one)]
    kernels, found = Kernels(forward), []
    for seconds in (1e-3, 2e-3):
        monkeypatch.setattr(costs, "byte_seconds", partial(float, seconds))
        of_cpu = CpuCosts({})
        found.append(of_cpu.seconds(run, kernels)[0])
        assert found[-1] == pytest.approx(seconds * kernels.crossing_bytes(run))
        assert of_cpu.rebuilt(run, kernels)[0] == pytest.approx(found[-1] / 2)
    assert found[1] == 2 * found[0]


def test_contractions_are_measured(planner: CompiledPlanner) -> None:
    torch.manual_seed(0)
    seconds = {}
    for rows in (ROWS, 64 * ROWS):
        parts = parts_of(Workload(Parts(), (torch.randn(rows, WIDTH),)))
        (one,) = parts.planners.values()
        ops = [op for op in one.step.graph.ops if op.flops]
        seconds[rows] = sum(op.seconds for op in ops)
        assert all(op.seconds > 0 for op in ops)
    assert seconds[64 * ROWS] > 4 * seconds[ROWS]  # 64 times the work
    again = [op.seconds for op in planner.step.graph.ops if op.flops]
    assert sum(again) == pytest.approx(seconds[ROWS])  # measured once
