"""A thousand steps: the loss curve with a plan is the curve without, and no leak."""

from __future__ import annotations

import gc
from functools import cache

import pytest
import torch
from tiny_gpt2 import gpt2, ids

import ckplan
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.training.allocator import log_allocations
from ckplan.training.step import Training, make_step
from ckplan.training.workload import Workload

STEPS = 1000
pytest.importorskip("transformers")


def curve(plan: Plan | None) -> tuple[list[float], int]:
    """Losses of all steps, and bytes that the last hundred left behind."""
    workload = Workload(gpt2(), ids())
    if plan is not None:
        ckplan.apply(workload.model, plan)
    step = make_step(workload, Training("adamw"))
    torch.manual_seed(1)
    losses = [float(step.run()) for _ in range(STEPS - 100)]
    with log_allocations() as log:
        losses += [float(step.run()) for _ in range(100)]
        step.zero_grad()
        gc.collect()
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
