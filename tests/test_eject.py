"""Ejected code: runs without ckplan, computes the same, needs what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_applying import build, measured_peak, train
from test_cli import Run, folder, run, trace, traced  # noqa: F401 - fixtures

import ckplan
from ckplan.eject import as_code, plain_form
from ckplan.graph import Graph
from ckplan.plan import Plan, PlannedRegion, loads
from ckplan.training.workload import Workload


def graph_of(name: str) -> Graph:
    workload = build(name)
    return ckplan.profile(workload.model, workload.batch, loss=workload.loss)


def ejected(name: str, code: str) -> Workload:
    """A workload with the code run on its model."""
    assert "ckplan" not in code.partition('"""\n\nfrom')[2]
    workload = build(name)
    content: dict[str, object] = {}
    exec(compile(code, "ejected.py", "exec"), content)
    apply = content["checkpoint_calls"]
    assert callable(apply)
    assert apply(workload.model) is workload.model
    return workload


@pytest.mark.parametrize("name", ["residual", "attention", "unrolled"])
def test_the_code_computes_the_same_and_needs_what_it_says(name: str) -> None:
    graph = graph_of(name)
    plain = plain_form(graph, ckplan.solve(graph, budget="95%"))
    assert plain.calls
    assert plain.fits
    code = as_code(plain, "0")
    expected = train(build(name))
    assert all(map(torch.equal, expected, train(ejected(name, code))))
    measured = measured_peak(ejected(name, code))
    assert plain.timeline.peak_bytes == pytest.approx(measured, rel=0.01)


def test_a_plan_of_reruns_is_ejected_as_it_is() -> None:
    plan = Plan(regions=(PlannedRegion("cell#[1..2]", "rerun"),))
    plain = plain_form(graph_of("unrolled"), plan)
    code = as_code(plain, "0")
    assert plain.same
    assert "'cell': {1, 2}," in code
    assert "no plain form" not in code
    expected = train(build("unrolled"))
    assert all(map(torch.equal, expected, train(ejected("unrolled", code))))


def test_every_layer_has_a_name_elsewhere() -> None:
    graph = graph_of("residual")
    every, first = (
        as_code(
            plain_form(graph, loads(f"{head}[{{calls: '{calls}', by: rerun}}]", "p")),
            "0",
        )
        for head in ["ckplan: 1\nregions: "]
        for calls in ("[0..2]", "[0..1]")
    )
    assert "gradient_checkpointing_enable()" in every
    assert "--recompute-method block --recompute-num-layers 2" in first


def test_what_does_not_fit_says_so() -> None:
    graph = graph_of("residual")
    plan = ckplan.solve(graph, goal="min-memory")
    assert plan.predicted is not None
    plain = plain_form(graph, plan)
    code = as_code(plain, "0")
    assert plain.fits == (plain.timeline.peak_bytes <= plan.predicted.peak_bytes)
    assert ("does NOT fit" in code) == (not plain.fits)


def test_the_command_prints_or_writes(run: Run, trace: Path) -> None:  # noqa: F811
    assert run("solve", str(trace), "--max-overhead", "50%").code == 0
    printed = run("eject", "plan.yaml", str(trace))
    assert printed.code == 0
    assert "def checkpoint_calls" in printed.out
    written = run("eject", "plan.yaml", "model.py", "-o", "plain.py")
    assert (written.code, written.out) == (0, "")
    compile(Path("plain.py").read_text(), "plain.py", "exec")
    again = run("eject", "plan.yaml", str(trace), "-o", "plain.py")
    assert again.err.startswith("error: cannot write 'plain.py': it already exists")
    assert run("eject", "nope.yaml", str(trace)).code == 1
    assert run("eject", "plan.yaml", "nope.json").code == 1
