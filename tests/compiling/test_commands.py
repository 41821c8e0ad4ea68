"""The commands for compiled steps: ``profile --compile`` and ``verify --compile``."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import Run
from graphs import chain

import ckplan
from ckplan.compiling.step import parts_of, profile_compiled
from ckplan.errors import CkplanError, InfeasibleError
from ckplan.graph.file import load as load_graph
from ckplan.graph.file import save as save_graph
from ckplan.plan.file import load as load_plan
from ckplan.training.loading import WorkloadSpec
from ckplan.verifying import compiled_comparison

EAGER = """
import torch

class Eager(torch.nn.Linear):
    @torch._dynamo.disable
    def forward(self, x):
        return super().forward(x).sum()

def build():
    return Eager(3, 3), torch.randn(2, 3)
"""

PART = """
import torch
from torch import nn

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.drop = nn.Dropout(0.1)

    def inside(self, x):
        h = torch.tanh(self.up(x))
        return self.down(self.drop(h * h.exp()))
"""

PARTS = f"""{PART}
    def forward(self, x):
        return x + self.inside(x)

class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Part(), Part()

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().mean()

def build():
    return Parts(), torch.randn(512, 16)
"""

DROPS = f"""{PART}
    def forward(self, x):
        return self.inside(x).square().mean()

def build():
    return Part(), torch.randn(512, 16)
"""


def test_a_compiled_step_is_profiled_and_solved(run: Run, folder: Path) -> None:
    (folder / "drops.py").write_text(DROPS)
    ended = run("profile", "drops.py", "--compile", "--generate", "-o", "t.json")
    assert ended.code == 0, ended.err
    assert "replay of the generated code" in ended.out
    graph = load_graph(folder / "t.json")
    assert {call.fqn for call in graph.calls} >= {"", "up", "drop"}
    peaks = [one.peak_bytes for one in graph.generated]
    solved = run("solve", "t.json", "--min-memory", "-o", "p.yaml", "--json")
    assert solved.code == 0, solved.err
    assert "simulated" not in solved.err
    assert json.loads(solved.out)["peak_bytes"] == min(peaks)
    plan = load_plan(folder / "p.yaml")
    assert plan.predicted is not None
    assert plan.predicted.peak_bytes == plan.budget_bytes == min(peaks) < max(peaks)
    assert plan.fingerprint["compiled"] == graph.fingerprint["compiled"]
    with pytest.raises(ckplan.CkplanError, match="it is for compiled code"):
        ckplan.apply(torch.nn.Linear(8, 8), plan)


def test_what_solve_finds_is_what_code_takes(run: Run, folder: Path) -> None:
    (folder / "drops.py").write_text(DROPS)
    words = ("profile", "drops.py", "--compile", "--generate", "-o", "t.json")
    assert run(*words).code == 0
    graph = load_graph(folder / "t.json")
    torch._dynamo.reset()
    parts = parts_of(WorkloadSpec("drops.py").build())
    floor = min(one.peak_bytes for one in graph.generated)
    whole = graph.generated[0].peak_bytes
    for budget_bytes in range(floor, whole, (whole - floor) // 5):
        plan = ckplan.solve(graph, budget_bytes)
        (followed,) = parts.follow(plan).values()
        (solved,) = parts.share(budget_bytes).values()
        assert followed.saved == solved.saved
        assert plan.predicted is not None
        assert plan.predicted.peak_bytes == followed.replayed.peak_bytes
    with pytest.raises(InfeasibleError, match="the floor of"):
        ckplan.solve(graph, floor - 1)


def test_a_step_under_autocast_is_planned_and_verified_by_its_plan(
    run: Run, folder: Path
) -> None:
    (folder / "drops.py").write_text(DROPS)
    words = ("--compile", "--amp", "bf16")
    ended = run("profile", "drops.py", *words, "--generate", "-o", "t.json")
    assert ended.code == 0, ended.err
    graph = load_graph(folder / "t.json")
    assert graph.options["amp"] == "bf16"
    made = {graph.storages[one].bytes for op in graph.ops for one in op.outputs}
    assert 512 * 64 * 2 in made  # the hidden values, in 16 bits
    assert run("solve", "t.json", "--budget", "90%", "-o", "p.yaml").code == 0
    torch._dynamo.reset()
    verified = run("verify", "p.yaml", "--steps", "0", "--json")  # of compiled code
    assert verified.code == 0, verified.err
    assert "drops.py --amp bf16" in " ".join(verified.err.split())
    found = json.loads(verified.out)
    assert found["passed"]
    assert found["measured_peak_bytes"] == found["replayed_peak_bytes"]
    assert found["gradients_equal"]
    torch._dynamo.reset()
    other = run("verify", "drops.py", "p.yaml", "--compile", "--amp", "fp16")
    assert other.code != 0
    words_of_error = " ".join(other.err.split())
    assert "it is for the compiled graph" in words_of_error
    assert "compiled; its own: step.0 float32[512,16], torch" in words_of_error


def test_types_of_autocast_are_checked(folder: Path) -> None:
    (folder / "drops.py").write_text(DROPS)
    with pytest.raises(CkplanError, match="autocast to 'fp8'") as refused:
        profile_compiled("drops.py", amp="fp8")
    assert refused.value.hint == "--amp bf16"


AVERAGES = """
import torch

class Averages(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("mean", torch.ones(8, 8))

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.99).add_(x.t() @ x, alpha=0.01)
        return (super().forward(x) @ self.mean).square().mean()

def build():
    return Averages(), torch.randn(64, 8)
"""


def test_what_torch_itself_compiles_wrongly_is_said(run: Run, folder: Path) -> None:
    (folder / "averages.py").write_text(AVERAGES)
    model, x = (made := WorkloadSpec("averages.py").build()).model, made.batch
    torch._dynamo.reset()
    before = model.mean.clone()
    right = model(x)
    model.mean.copy_(before)
    compiled = torch.compile(model)(x)
    is_wrong = bool((compiled - right).abs() > 0.1 * right.abs())
    torch._dynamo.reset()
    words = ("averages.py", "--compile", "--budget", "100%", "--steps", "0")
    verified = run("verify", *words)
    assert verified.code == 0, verified.err
    said = "torch.compile itself computes another step" in " ".join(
        verified.out.split()
    )
    assert said == is_wrong


def test_a_trace_without_code_says_that_peaks_are_simulated(
    run: Run, folder: Path
) -> None:
    graph = replace(chain(2), fingerprint={"compiled": "0" * 16})
    save_graph(graph, folder / "t.json")
    solved = run("solve", "t.json", "--min-memory", "-o", "p.yaml")
    assert solved.code == 0, solved.err
    budget_bytes = load_plan(folder / "p.yaml").budget_bytes
    said = f"verify TARGET --compile --budget {budget_bytes}"
    assert said in " ".join(solved.err.split())


def test_a_plan_is_compared_with_torch_s_own_choices(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_comparison, "TORCH_BUDGETS", (0.0,))
    (folder / "drops.py").write_text(DROPS)
    ended = run("compare", "drops.py", "--compile", "--budget", "85%", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    steps = {one["name"]: one for one in found["steps"]}
    assert [*steps] == [
        "torch",
        "torch, 0",
        "every layer",
        "everything",
        "this plan",
    ]
    own, plan = steps["torch"], steps["this plan"]
    assert own["overhead"] == 0
    assert not own["fits"]
    assert plan["fits"]
    assert plan["peak_bytes"] <= found["budget_bytes"] < own["peak_bytes"]
    assert found["budget_bytes"] == int(0.85 * own["peak_bytes"])
    assert plan["step_seconds"] > own["step_seconds"]
    # what saves less runs no less again
    by_bytes = sorted(found["steps"], key=lambda one: -one["saved_bytes"])
    least = [one["least_overhead"] for one in by_bytes]
    assert least == sorted(least)
    assert own["least_overhead"] == 0 < steps["everything"]["least_overhead"]
    # torch draws dropout masks anew in backward, where it recomputes them
    assert steps["torch, 0"]["draws_again"]
    assert not any(
        steps[n]["draws_again"] for n in ("torch", "everything", "this plan")
    )


def test_a_compared_plan_is_made_again_where_its_code_takes_more() -> None:
    known = {"a": (False, False), "b": (True, False), "c": (True, True)}
    names = iter(known)
    chosen = [SimpleNamespace(saved=frozenset()) for _ in range(2)]

    def share(_: int) -> dict[str, SimpleNamespace]:
        name = next(names)
        for one in chosen:
            one.saved = frozenset({name})
        return {"first": chosen[0], "second": chosen[1]}

    def checks(place: int) -> SimpleNamespace:
        return SimpleNamespace(check=lambda one, _: known[min(one.saved)][place])

    planners = {"first": checks(0), "second": checks(1)}
    parts: Any = SimpleNamespace(planners=planners, share=share)
    found = compiled_comparison._plan(parts, 1)
    assert found == dict.fromkeys(planners, frozenset({"c"}))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--compile",), "--compile takes a target"),
        (("model.py", "--compile", "--gpu", "T4"), "--compile takes --set"),
        (("model.py", "--compile", "--reserve", "1GiB"), "--compile takes --set"),
        (("model.py", "--compile", "--spill-rate", "1GB"), "--compile takes --set"),
        (("--set", "layers=2"), "go with --compile alone"),
    ],
)
def test_comparisons_refuse_what_does_not_go_together(
    run: Run, words: tuple[str, ...], said: str
) -> None:
    ended = run("compare", *words)
    assert ended.code == 2
    assert said in " ".join(ended.err.split())


@pytest.mark.slow
def test_a_compiled_step_is_verified_within_a_budget(run: Run, folder: Path) -> None:
    how = ("--compile", "--steps", "2", "--json")
    words = ("verify", "model.py", "--set", "batch=512", *how)
    ended = run(*words, "--budget", "90%", "--save", "p.yaml")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["passed"]
    assert found["gradients_equal"]
    assert found["measured_peak_bytes"] == found["replayed_peak_bytes"]
    assert found["measured_peak_bytes"] <= found["budget_bytes"]
    assert "model: Sequential\n" in (folder / "p.yaml").read_text()
    torch._dynamo.reset()
    again = run(words[0], words[1], "p.yaml", *words[2:])
    assert again.code == 0, again.err
    repeated = json.loads(again.out)
    assert repeated["replayed_peak_bytes"] == found["replayed_peak_bytes"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_step_that_breaks_is_verified_within_one_budget(
    run: Run, folder: Path
) -> None:
    (folder / "parts.py").write_text(PARTS)
    words = ("verify", "parts.py", "--compile", "--steps", "0", "--json")
    ended = run(*words, "--budget", "85%", "--save", "p.yaml")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["passed"]
    assert found["graphs"] == 2
    assert found["loss_equal"]
    assert found["gradients_equal"]
    assert found["random_state_equal"]
    assert found["measured_peak_bytes"] <= found["replayed_peak_bytes"]
    assert found["replayed_peak_bytes"] <= found["budget_bytes"]
    assert found["measured_peak_bytes"] < found["unplanned_measured_peak_bytes"]
    assert found["predicted_overhead"] > 0
    torch._dynamo.reset()
    again = run(*words[:2], "p.yaml", *words[2:])
    assert again.code == 0, again.err
    repeated = json.loads(again.out)
    for name in ("graphs", "replayed_peak_bytes", "predicted_overhead"):
        assert repeated[name] == found[name]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_step_that_breaks_is_profiled_and_solved(run: Run, folder: Path) -> None:
    (folder / "parts.py").write_text(PARTS)
    ended = run("profile", "parts.py", "--compile", "-o", "t.json")
    assert ended.code == 0, ended.err
    assert "2 compiled graphs" in ended.out
    solved = run("solve", "t.json", "--min-memory", "-o", "p.yaml")
    assert solved.code == 0, solved.err
    assert "in 2 graphs" in load_plan(folder / "p.yaml").fingerprint["compiled"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_what_runs_uncompiled_is_named_with_its_bytes(run: Run, folder: Path) -> None:
    calls = "x = torch.compiler.disable(self.odd)(self.first(x))"
    odd = "nn.Sequential(nn.Linear(16, 32), nn.Tanh())"
    text = PARTS.replace("x = self.first(x)", calls)
    text = text.replace(
        "Part(), Part()", f"Part(), nn.Linear(32, 1)\n        self.odd = {odd}"
    )
    (folder / "odd.py").write_text(text)
    ended = run("profile", "odd.py", "--compile")
    assert ended.code == 0, ended.err
    assert (folder / "traces/odd-compiled.json.gz").is_file()
    notes = " ".join(ended.out.split())
    assert "odd.1 (64.00 KiB), odd.0 (0 B); ckplan.apply(model, plan)" in notes
    torch._dynamo.reset()
    words = ("--compile", "--budget", "1GiB", "--steps", "0", "--json")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*graphs of the step")  # the report says it
        ended = run("verify", "odd.py", *words)
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["uncompiled_bytes"] == {"odd.1": 512 * 32 * 4, "odd.0": 0}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_step_that_breaks_is_compared(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_comparison, "TORCH_BUDGETS", ())
    (folder / "parts.py").write_text(PARTS)
    ended = run("compare", "parts.py", "--compile", "--budget", "85%", "--json")
    assert ended.code == 0, ended.err
    own, *_, plan = json.loads(ended.out)["steps"]
    assert plan["fits"]
    assert plan["peak_bytes"] <= 0.85 * own["peak_bytes"]
    assert plan["overhead"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--compile",), "a plan is missing, or --budget"),
        (("--compile", "--budget", "80%", "--clip", "1"), "--compile takes --set"),
        (("plan.yaml", "--budget", "80%"), "a plan has a budget already"),
        (("plan.yaml", "--save", "other.yaml"), "--save goes with --budget"),
    ],
)
def test_words_that_do_not_go_together(
    run: Run, words: tuple[str, ...], said: str
) -> None:
    ended = run("verify", "model.py", *words)
    assert ended.code == 2
    assert said in " ".join(ended.err.split())


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_model_of_which_nothing_compiles_is_said(run: Run, folder: Path) -> None:
    (folder / "eager.py").write_text(EAGER)
    ended = run("profile", "eager.py", "--compile")
    assert ended.code == 1
    assert "no graph of it requires a gradient" in ended.err
    assert len(ended.err.strip().splitlines()) == 3


def test_code_is_generated_for_compiled_steps_alone(run: Run) -> None:
    ended = run("profile", "model.py", "--generate")
    assert ended.code == 2
    assert "--generate goes with --compile alone" in " ".join(ended.err.split())
