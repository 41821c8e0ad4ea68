"""Which nodes are taken for one kernel, beside the kernels that Inductor generates."""

from __future__ import annotations

import re
from pathlib import Path

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
from ckplan.tracing.costs.cost_cache import FOLDER_VARIABLE
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
    saved = planner.ways[way].saved if way else None
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


def test_a_dropped_mask_costs_what_it_saves(planner: CompiledPlanner) -> None:
    of_cpu = CpuCosts({})
    graph = generated(planner, "")[0].forward.graph
    kernels = Kernels(graph)
    run = [
        one for one in nodes.ops_of(graph) if "random" in one.name or stores_mask(one)
    ]
    whole, rebuilt = of_cpu.seconds(run, kernels)[0], of_cpu.rebuilt(run, kernels)[0]
    numbers = 2 * ROWS * 64  # each is drawn, and whether it is kept is written
    assert whole * torch.get_num_threads() == pytest.approx(numbers * 16e-9)
    assert rebuilt < whole / 100


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


def test_memory_that_the_system_gives_takes_time_beyond_what_a_process_keeps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert 0.0 <= costs._seconds_per_fresh_byte() < 1e-7
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(costs, "_seconds_per_fresh_byte", lambda: 1e-9)
    kept = 1 << 26
    assert costs.touching_seconds(0) == costs.touching_seconds(kept) == 0.0
    assert costs.touching_seconds(3 * kept) == pytest.approx(2e-9 * kept)
    monkeypatch.setattr(costs, "_seconds_per_fresh_byte", lambda: 1.0)
    assert costs.touching_seconds(2 * kept) == pytest.approx(1e-9 * kept)  # as kept
