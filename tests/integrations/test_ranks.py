"""One of two real ranks: what its allocator does beside what is predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_model import build, loss_of
from torch import nn
from two_ranks import train_two

import ckplan
from ckplan.errors import CkplanError
from ckplan.plan import file as plan_file
from ckplan.simulating.simulate import simulate

NEAR = 0.003


def ranks(folder: Path, scheme: str, accumulate: int, *plans: Path) -> list[list[int]]:
    """Measured peaks on every rank: with each plan, then without."""
    source = "from rank_model import make, units"
    found = train_two(folder, source, scheme, plans, accumulate=accumulate)
    for rank in found:
        assert len({step.digest for step in rank}) == 1, "other parameters than without"
    return [[step.peak_bytes for step in rank] for rank in found]


@pytest.mark.parametrize(
    ("scheme", "accumulate"),
    [("ddp", 1), ("fsdp2", 1), pytest.param("fsdp2", 2, marks=pytest.mark.slow)],
)
def test_each_rank_needs_what_is_predicted(
    scheme: str, accumulate: int, tmp_path: Path
) -> None:
    graph = profiled(scheme, accumulate)
    files, predicted = [], []
    for budget in ("85%", "75%"):
        plan = ckplan.solve(graph, budget=budget)
        assert plan.regions
        assert plan.predicted is not None
        predicted.append(plan.predicted.peak_bytes)
        files.append(tmp_path / f"{budget}.yaml")
        plan_file.save(plan, files[-1], force=False)
    predicted.append(simulate(graph).peak_bytes)
    first, second = ranks(tmp_path, scheme, accumulate, *files)
    assert first == pytest.approx(predicted, rel=NEAR)
    assert all(other <= 1.001 * one for one, other in zip(first, second, strict=True))


def profiled(scheme: str, accumulate: int = 1) -> Any:
    model, batch = build()
    return ckplan.profile(
        model,
        batch,
        loss=loss_of,
        accumulate=accumulate,
        shard=scheme,
        world_size=2,
    )


def test_a_run_of_blocks_is_refused_under_fsdp2(tmp_path: Path) -> None:
    plan = plan_file.loads("ckplan: 1\nregions: [{run: [h.0, h.1]}]\n", "plan")
    plan_file.save(plan, tmp_path / "run.yaml", force=False)
    with pytest.raises(AssertionError, match="that is not gathered now"):
        ranks(tmp_path, "fsdp2", 1, tmp_path / "run.yaml")


def moved(parameter: nn.Parameter) -> torch.Tensor:
    """The same numbers somewhere inside of a larger buffer."""
    buffer = torch.full((parameter.numel() + 7,), torch.nan)
    part = buffer[7:].view(parameter.shape)
    part.copy_(parameter.data)
    return part


def test_parameters_may_be_gathered_anew_for_backward() -> None:
    found = []
    for planned in (False, True):
        model, batch = build()
        if planned:
            plan = plan_file.loads(
                "ckplan: 1\nregions: [{calls: 'h.[0..3]'}]\n", "plan"
            )
            ckplan.apply(model, plan)
        for step in range(3):
            torch.manual_seed(step)
            loss = loss_of(model(batch), batch)
            for parameter in model.h.parameters():
                parameter.data = moved(parameter)
            loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
    loss = loss_of(model(batch), batch)
    for parameter in model.h.parameters():
        parameter.data = torch.empty(0)
    with pytest.raises(CkplanError, match="that is not gathered now"):
        loss.backward()
