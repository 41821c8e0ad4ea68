"""The workloads of this repository from end to end, with nothing measured before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import ROOT, Run

from ckplan.tracing.costs.cost_cache import FOLDER_VARIABLE

TEXT = ("layers=2", "width=32", "heads=2", "batch=4", "length=16", "vocab=64")
SMALL = {
    "mlp": ("layers=3", "width=32", "batch=64"),
    "gpt2": TEXT,
    "bert": TEXT,
    "llama": (*TEXT, "groups=1"),
    "vit": ("layers=2", "width=32", "heads=2", "batch=4", "size=32"),
    "resnet50": ("batch=4", "size=32", "stages=2"),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_workload_is_profiled_planned_and_fits(
    name: str, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder / "costs"))
    target = str(ROOT / "configs" / "workloads" / f"{name}.py")
    settings = [word for one in SMALL[name] for word in ("--set", one)]
    more = "--optimizer", "sgd", "-o", "trace.json.gz"
    ended = run("profile", target, *settings, *more)
    assert ended.code == 0, ended.err
    asked = "--min-memory", "-o", "plan.yaml", "--json"
    ended = run("solve", "trace.json.gz", *asked)
    assert ended.code == 0, ended.err
    solved = json.loads(ended.out)
    assert solved["peak_bytes"] <= solved["unplanned_peak_bytes"]
    ended = run("verify", "plan.yaml", "--fake", "--json")
    assert (ended.code, json.loads(ended.out)["fits"]) == (0, True)
