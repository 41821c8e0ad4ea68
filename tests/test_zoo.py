"""Models of many families: exact peaks, and the same bits under a plan.

The whole table is ``scripts/accuracy.py``; here some families stay on its line.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from ckplan.solving.planner import Planner
from ckplan.solving.solve import to_plan
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec
from ckplan.training.step import Training
from ckplan.verifying.worker import FIRST_STEPS, FirstSteps, Job, Worker

ZOO = Path(__file__).parents[1] / "configs" / "workloads" / "zoo.py"
SMALL: dict[str, dict[str, int]] = {
    "bloom": {"layers": 2, "batch": 2, "length": 64},
    "graphs": {"layers": 2, "nodes": 256, "edges": 1024},
    "gru": {"batch": 32, "length": 8, "width": 64},
    "lstm": {"batch": 8, "length": 32, "width": 128},
    "mixtral": {"layers": 1, "batch": 2, "length": 32},
    "policy": {"steps": 8, "batch": 64},
    "timeseries": {"layers": 1, "batch": 8},
}
FEW = ("graphs", "lstm", "mixtral")
FAMILIES = [
    node.name
    for node in ast.parse(ZOO.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.args.kwonlyargs
]


def first_steps(spec: WorkloadSpec, plan: Any = None) -> FirstSteps:
    found = Worker(Job(spec, plan, Training(), seed=0)).answer(FIRST_STEPS)
    assert isinstance(found, FirstSteps), found
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        name if name in FEW else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_peaks_are_predicted_and_bits_are_the_same(name: str) -> None:
    spec = WorkloadSpec(f"{ZOO}:{name}", SMALL.get(name, {}))
    planner = Planner(profile_workload(spec))
    unplanned = first_steps(spec)
    peak_bytes = planner.unplanned.peak_bytes
    assert peak_bytes == pytest.approx(unplanned.peak_bytes, rel=0.003)
    budget_bytes = (peak_bytes + planner.floor.peak_bytes) // 2
    solution = planner.solve(budget_bytes)
    planned = first_steps(spec, to_plan(planner.graph, solution))
    assert solution.timeline.peak_bytes == pytest.approx(planned.peak_bytes, rel=0.003)
    assert planned.peak_bytes <= budget_bytes
    if planned.digests != unplanned.digests:
        # Some kernels are never the same twice, as those that add by index in threads.
        assert planned.digests.keys() == unplanned.digests.keys()
        assert first_steps(spec).digests != unplanned.digests, "not by chance"


def test_the_zoo_is_large_and_every_model_says_what_it_is() -> None:
    assert len(FAMILIES) >= 30
    tree = ast.parse(ZOO.read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in FAMILIES:
            assert ast.get_docstring(node)
