"""A ``step`` that runs its model several times, planned and verified."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckplan
from ckplan.graph.records import EngineCosts
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec

SIAMESE = """
import torch
from torch import nn


def step(model, batch):
    return nn.functional.triplet_margin_loss(*(model(one) for one in batch))


def build():
    widths = (8, 64, 64, 64, 4)
    layers = [
        nn.Sequential(nn.Linear(one, other), nn.GELU())
        for one, other in zip(widths, widths[1:])
    ]
    batch = tuple(torch.randn(512, 8) for _ in range(3))
    return {"model": nn.Sequential(*layers), "batch": batch, "step": step}
"""


def test_calls_of_a_step_with_several_forwards_are_numbered_over_all(tmp_path: Path):
    path = tmp_path / "siamese.py"
    path.write_text(SIAMESE)
    graph = profile_workload(WorkloadSpec(str(path)), replay=False, in_step=False)
    # Seconds that do not differ from run to run: of others, another plan may be best.
    timed = [replace(op, seconds=op.moved_bytes * 1e-9) for op in graph.ops]
    graph = replace(graph, ops=tuple(timed), engine=EngineCosts())
    plan = ckplan.solve(graph, budget="60%")
    assert graph.fingerprint["forwards"] == plan.fingerprint["forwards"] == 3
    build: dict[str, Any] = {}
    exec(SIAMESE, build)
    parts = build["build"]()
    ckplan.apply(parts["model"], plan)
    parts["step"](parts["model"], parts["batch"]).backward()
    said = str(ckplan.status(parts["model"]))
    assert "#2" in said and "ran 0 times" not in said and "never" not in said
    assert any(number in str(plan.regions) for number in ("#1", "#2"))


def test_a_step_that_is_given_up_does_not_shift_the_numbers_of_those_after() -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    plan = Plan(regions=(PlannedRegion("0#1"),), fingerprint={"forwards": 2})
    ckplan.apply(model, plan)

    def ran() -> list[int]:
        """Whether each of two forwards was a region."""
        before = ckplan.status(model).regions[0].runs
        found = []
        for _ in range(2):
            model(torch.randn(4, 8)).sum().backward()
            found.append(ckplan.status(model).regions[0].runs - before)
        return found

    assert ran() == [0, 1]
    handle = model[2].register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(torch.randn(4, 8))
    handle.remove()
    assert ran() == [0, 1]
