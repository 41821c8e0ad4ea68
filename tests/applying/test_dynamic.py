"""Dynamic models, whose ops vary: right for 20 steps, and ``status`` says why."""

from __future__ import annotations

import copy

import pytest
import torch
from blocks import Block, Branching, Numbered, same_gradients
from torch import nn

from ckplan import applying
from ckplan.plan.names import OpName
from ckplan.plan.plan import Plan, PlannedRegion

STEPS = 20
SAVES = tuple(map(OpName.parse, ("qkv/addmm", "./gelu", "./mul")))
PLANS = {
    "program": PlannedRegion("."),
    "saves": PlannedRegion(".", save=SAVES),
    "rerun": PlannedRegion(".", "rerun"),
}
EVERY_WAY = pytest.mark.parametrize("way", PLANS)


def batch(step: int, rows: int = 5) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(2, rows, 16, generator=generator) + 0.1 * (step % 2),)


def longer(step: int) -> tuple[torch.Tensor, ...]:
    return batch(step, 2 + step)


def status_of(model: nn.Module, way: str, made: object) -> applying.RegionStatus:
    torch.manual_seed(0)
    planned = copy.deepcopy(model)
    applying.apply(planned, Plan(regions=(PLANS[way],)))
    same_gradients(model, planned, made, STEPS)  # type: ignore[arg-type]
    status = applying.status(planned)
    (region,) = status.regions
    assert region.runs == STEPS
    said = f"ran {STEPS} times, recorded {region.recorded}, kept {region.kept}"
    assert said in str(status)
    return region


@EVERY_WAY
def test_a_number_that_changes_every_step(way: str) -> None:
    region = status_of(Numbered(), way, batch)
    # The second step differs from the first, and is recorded from there on.
    expected = (0, 0) if way == "rerun" else (STEPS, 0)
    assert expected == (region.recorded, region.kept)


@EVERY_WAY
def test_shapes_that_change_every_step(way: str) -> None:
    region = status_of(Block(), way, longer)
    expected = (0, 0) if way == "rerun" else (STEPS, 0)  # no shape was seen before
    assert expected == (region.recorded, region.kept)


@EVERY_WAY
def test_branches_on_data(way: str) -> None:
    branches = {bool(batch(step)[0].mean() > 0) for step in range(STEPS)}
    assert branches == {True, False}
    region = status_of(Branching(), way, batch)
    if way == "rerun":
        assert (region.recorded, region.kept) == (0, 0)
    else:  # those before the first other branch are replayed
        assert region.kept == 0
        assert 1 < region.recorded < STEPS


@EVERY_WAY
def test_one_that_rests_is_recorded_once(way: str) -> None:
    region = status_of(Block(), way, batch)
    expected = (0, 0) if way == "rerun" else (1, 0)
    assert expected == (region.recorded, region.kept)
