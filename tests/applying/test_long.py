"""A thousand steps: the loss curve with a plan is the curve without, and no leak."""

from __future__ import annotations

import gc
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny_gpt2 import gpt2, ids

import ckplan
from ckplan.plan.names import OpName
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.region import TILES
from ckplan.plan.tiles import Tiles
from ckplan.training.allocator import log_allocations
from ckplan.training.step import Training, make_step
from ckplan.training.workload import Workload

STEPS = 1000
pytest.importorskip("transformers")


def curve(plan: Plan | None, spill: Path | None = None) -> tuple[list[float], int]:
    """Losses of all steps, and bytes that the last hundred left behind."""
    workload = Workload(gpt2(), ids())
    workload.model.config.use_cache = False  # a rerun would fill a cache twice
    if plan is not None:
        ckplan.apply(workload.model, plan, spill=spill)
    step = make_step(workload, Training("adamw"))
    torch.manual_seed(1)
    losses = [float(step.run()) for _ in range(100)]
    on_disk = ckplan.status(workload.model).spilled_bytes if spill else 0
    losses += [float(step.run()) for _ in range(STEPS - 200)]
    with log_allocations() as log:
        losses += [float(step.run()) for _ in range(100)]
        step.zero_grad()
        gc.collect()
    if spill:
        assert on_disk
        assert ckplan.status(workload.model).spilled_bytes == on_disk
        assert not list(spill.iterdir())
    return losses, log.held_bytes


@cache
def unplanned_losses() -> list[float]:
    return curve(None)[0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("by", ["program", "rerun"])
def test_a_thousand_steps_of_gpt2_are_bitwise_the_same_and_leave_nothing(
    by: str,
) -> None:
    region = PlannedRegion("transformer.h.[0..1]", by)
    losses, left_bytes = curve(Plan(regions=(region,)))
    assert losses == unplanned_losses()
    assert losses[-1] < losses[0] / 2
    assert abs(left_bytes) < 1024


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_steps_that_move_and_run_the_head_in_tiles(tmp_path: Path) -> None:
    moved = ("ln_1/native_layer_norm@0", "mlp.c_fc/addmm", "mlp.act/tanh")
    layers = PlannedRegion(
        "transformer.h.[0..1]", offload=tuple(map(OpName.parse, moved))
    )
    head = PlannedRegion("lm_head", TILES, tiles=Tiles(4, 1))
    losses, left_bytes = curve(Plan(regions=(layers, head)), tmp_path)
    assert losses == unplanned_losses()
    assert abs(left_bytes) < 1024
