"""A ``step`` that runs its model several times, planned and verified."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ckplan
from ckplan.graph.records import EngineCosts
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
