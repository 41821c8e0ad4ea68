"""What planning has found is kept for the next start, and counts for nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from compiled import count_lowered, deep
from torch import nn
from torch._inductor import config

from ckplan.compiling import plan_cache, replays
from ckplan.compiling.lowering import DynamoGraph
from ckplan.compiling.search import Chosen, CompiledPlanner, plan_graph
from ckplan.tracing.costs.cost_cache import LONGEST_SECONDS


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CKPLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(replays, "most_at_once", lambda: 1)
    return tmp_path / "cache" / "compiled"


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return count_lowered(monkeypatch)


def start(model: nn.Module, x: torch.Tensor, **options: Any) -> CompiledPlanner:
    """The planner of a model, as another process would make it."""
    found: list[CompiledPlanner | None] = []

    def only_plan(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        found.append(plan_graph(DynamoGraph(graph, inputs, options), quick=True))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(model, backend=only_plan, fullgraph=True, dynamic=False)(x)
    (planner,) = found
    assert planner is not None
    return planner


def budget_of(planner: CompiledPlanner) -> int:
    """A budget that needs a plan, and has one."""
    return planner.unplanned.peak_bytes * 4 // 5


class First(NamedTuple):
    """A planner that has solved and replayed for one budget, and the file of that."""

    planner: CompiledPlanner
    path: Path
    chosen: Chosen


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> First:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPLAN_CACHE", str(folder))
        planner = start(*deep())
        chosen = planner.solve(budget_of(planner))
    assert chosen.saved is not None
    (path,) = folder.glob("compiled/*")
    return First(planner, path, chosen)


@pytest.fixture
def first(solved: First, folder: Path) -> First:
    """The same, its file copied."""
    folder.mkdir(parents=True)
    path = Path(shutil.copy(solved.path, folder))
    return solved._replace(path=path)


def test_the_next_start_finds_the_same_and_generates_no_code(
    first: First, lowered: list[Any]
) -> None:
    before, expected = first.planner, first.chosen
    second = start(*deep())
    chosen = second.solve(budget_of(before))
    assert not lowered
    assert (chosen.saved, chosen.replayed) == (expected.saved, expected.replayed)
    assert second.candidates == before.candidates
    assert second.unplanned == before.unplanned
    assert second.unplanned.kernel_bytes == before.unplanned.kernel_bytes
    assert chosen.plan == expected.plan
    assert second.named(chosen.plan).saved == chosen.saved


def test_code_that_never_ran_is_generated_as_it_would_run_before_it_counts(
    first: First, lowered: list[Any]
) -> None:
    second = start(*deep())
    chosen = second.solve(budget_of(first.planner))
    assert not lowered
    assert second.check(chosen, None)
    assert lowered == [(chosen.saved,)]
    third = start(*deep())
    assert third.check(third.solve(budget_of(third)), None)
    assert len(lowered) == 1  # the second start has found it


def test_code_that_is_compiled_is_compared_with_what_is_kept(first: First) -> None:
    content = json.loads(first.path.read_text())
    for row in content["replayed"]:
        row["backward_peak_bytes"] -= 64
        row["forward_peak_bytes"] -= 64
    content["real"] = [*range(len(content["replayed"]))]
    first.path.write_text(json.dumps(content))
    second = start(*deep())
    wrong = second.solve(budget_of(first.planner))
    assert second.check(wrong, None)  # torch says that it is the code of before
    _, code = second.traced.lower(wrong.saved)
    assert wrong.replayed != first.chosen.replayed
    assert not second.check(wrong, code)
    assert second.unplanned == first.planner.unplanned
    again = second.solve(budget_of(first.planner))
    assert (again.saved, again.replayed) == (first.chosen.saved, first.chosen.replayed)
    assert start(*deep()).unplanned == first.planner.unplanned  # the file is mended


@pytest.mark.parametrize("spoil", ["half", "format", "old", "another graph", "list"])
def test_a_file_that_cannot_count_is_made_anew(
    first: First, lowered: list[Any], spoil: str
) -> None:
    path = first.path
    text = path.read_text()
    content = json.loads(text)
    spoilt = {
        "half": text[: len(text) // 2],
        "format": json.dumps({**content, "ckplan_compiled": 0}),
        "old": json.dumps({**content, "made": time.time() - LONGEST_SECONDS - 1}),
        "another graph": json.dumps({**content, "joint": "0" * 64}),
        "list": "[]",
    }
    path.write_text(spoilt[spoil])
    second = start(*deep())
    assert lowered == [(None,)]
    second.replayed(None)
    assert second.unplanned == first.planner.unplanned


class Renamed(nn.Module):
    """The same ops as of ``deep``, by other modules."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inside = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inside(x)
        return found


def test_other_models_shapes_and_settings_have_files_of_their_own(
    first: First, lowered: list[Any]
) -> None:
    model, x = deep()
    count = torch.get_num_threads()
    start(model, x[:512])
    start(Renamed(model), x)
    start(model, x, epilogue_fusion=False)
    with config.patch(epilogue_fusion=False):
        start(model, x)
    try:
        torch.set_num_threads(count + 1)
        start(model, x)
    finally:
        torch.set_num_threads(count)
    assert lowered == 5 * [(None,)]
    start(model, x)
    assert len(lowered) == 5


def test_a_folder_that_cannot_be_written_loses_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CKPLAN_CACHE", str(tmp_path / "file"))
    planner = start(*deep())
    assert planner.replayed(frozenset()) != planner.unplanned


def test_files_that_are_not_read_any_more_are_removed(
    first: First, folder: Path
) -> None:
    old, young = folder / "old.json", folder / "young.json"
    for path in (old, young):
        path.write_text("{}")
    long_ago = time.time() - LONGEST_SECONDS - 60
    os.utime(old, (long_ago, long_ago))
    known = plan_cache.read(first.path, first.planner.joint)
    assert known is not None
    plan_cache.write(folder / "new.json", known)
    assert not old.exists()
    assert young.exists()


def test_what_is_kept_is_read_as_it_was(first: First, folder: Path) -> None:
    path = folder / "again.json"
    joint = first.planner.joint
    known = plan_cache.read(first.path, joint)
    assert known is not None
    assert {None, first.chosen.saved} <= {*known.replayed}
    assert frozenset() in {one.saved for one in known.candidates or ()}
    for one in (known, replace(known, candidates=None, fuses_more=None)):
        plan_cache.write(path, one)
        assert plan_cache.read(path, joint) == one


PROGRAM = """
import torch, ckplan
from compiled import deep
from ckplan.compiling.lowering import DynamoGraph

lowered, lower = [], DynamoGraph.lower
DynamoGraph.lower = lambda self, *args, **how: (
    lowered.append(args), lower(self, *args, **how)
)[1]
model, x = deep()
compiled = ckplan.compile(model, "70%")
torch.manual_seed(0)
loss = compiled(x)
loss.backward()
sums = [loss.item(), *(one.grad.double().sum().item() for one in model.parameters())]
found = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
print(len(lowered), found, sums)
"""


@pytest.fixture
def programs(tmp_path: Path) -> list[str]:
    """What the same program prints in two processes."""
    helpers = Path(__file__).parents[1] / "helpers"
    inductor = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    known = {"PYTHONPATH": os.pathsep.join([*map(str, [helpers, *sys.path])])}
    return [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **inductor, **known, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]


def test_another_process_plans_nothing_and_compiles_nothing(
    programs: list[str],
) -> None:
    (made, missed, *first), (none, hit, *second) = map(str.split, programs)
    assert (int(made) > 0, missed) == (True, "0")
    assert (none, hit) == ("0", "1")
    assert second == first
