"""Messages for what a newcomer types: each names what is wrong, and nothing else."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Run
from small_models import build
from torch import nn

import ckplan
from ckplan.errors import CkplanError, UnitError, WorkloadError
from ckplan.plan.plan import Plan, plan_fingerprint
from ckplan.training.fingerprint import parameter_shapes, torch_version
from ckplan.training.loading import WorkloadSpec
from ckplan.units import parse_budget

STEPS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.inner, self.how = nn.Linear(8, 8), how

    def forward(self, x):
        y = self.inner(x)
        if self.how == "type":
            return torch.relu(y, 3)
        if self.how == "shape":
            return y @ torch.randn(3, 3)
        if self.how == "gpu":
            return y * torch.cuda.get_device_properties(0).nothing
        return y * 2 if y.sum().item() > 0 else y

def make(how):
    return Net(how), torch.randn(4, 8), lambda out, _: out.square().mean()

def of_type(): return make("type")
def of_shape(): return make("shape")
def of_item(): return make("item")
def of_key(): return Net("item"), {"y": torch.randn(4, 8)}
def switch(bf16=False): return make("type")
"""


@pytest.fixture
def steps(folder: Path) -> Path:
    path = folder / "steps.py"
    path.write_text(STEPS)
    return path


@pytest.mark.parametrize(
    ("factory", "said", "hint"),
    [
        ("of_type", "the first step raised TypeError in forward: relu() takes", "13"),
        ("of_shape", "the first step raised RuntimeError in forward: a and b", "15"),
        ("of_key", "the batch (y) does not fit Net.forward: missing", "target"),
    ],
)
def test_cuda_is_not_blamed_for_what_fails_on_a_cpu(
    run: Run, steps: Path, factory: str, said: str, hint: str
) -> None:
    ended = run("profile", f"steps.py:{factory}", "--device", "cuda")
    assert ended.code == 1
    assert said in ended.err
    assert hint in ended.err.splitlines()[-1]
    assert "CUDA" not in ended.err
    assert "fake" not in ended.err


def test_a_value_on_cuda_has_the_hint_of_the_readme(run: Run, steps: Path) -> None:
    ended = run("profile", "steps.py:of_item", "--device", "cuda")
    assert ended.code == 1
    assert "asks for the value of a tensor (.item(), if, numpy)" in ended.err
    hint = ended.err.splitlines()[-1]
    assert "--device cpu, where such a step runs on real tensors" in hint
    assert "a build of torch" not in hint  # it has no values either


@pytest.mark.parametrize("budget", ["80", "12", "1", "80.5", "4096"])
def test_a_budget_without_a_unit_is_asked_about(budget: str) -> None:
    with pytest.raises(UnitError, match=f"'{budget}': {budget} of what") as raised:
        parse_budget(budget, 10**9)
    assert f"'{budget}GB'" in raised.value.hint
    assert ("%" in raised.value.hint) == (float(budget) <= 100)


def test_numbers_of_bytes_stay_bytes() -> None:
    assert parse_budget(80, 10**9) == 80
    assert parse_budget("80B", 10**9) == 80
    assert parse_budget("80%", 1000) == 800
    assert parse_budget("1102814341", 10**9) == 1102814341


@pytest.mark.parametrize("value", ["maybe", "", "1e-3", "yes please", "2"])
def test_a_switch_is_true_or_false(run: Run, steps: Path, value: str) -> None:
    ended = run("profile", "steps.py:switch", "--set", f"bf16={value}")
    assert ended.code == 1
    assert "cannot use the option bf16=" in ended.err
    assert "needed: true or false" in ended.err


@pytest.mark.parametrize("value", [True, False, 0, 1, None])
def test_what_a_switch_takes(steps: Path, value: object) -> None:
    assert WorkloadSpec(f"{steps}:switch", {"bf16": value}).build().model


def test_a_class_that_needs_arguments_is_no_factory() -> None:
    with pytest.raises(WorkloadError, match="is a class, and its argument d_model, n"):
        WorkloadSpec("torch.nn:TransformerEncoderLayer").build()
    with pytest.raises(WorkloadError, match="has no batch"):
        WorkloadSpec("torch.nn:Flatten").build()
    wanted = {"in_features": 8, "out_features": 4}
    inputs = ("2x8:float32",)
    made = WorkloadSpec("torch.nn:Linear", wanted, inputs).build()
    assert made.batch[0].shape == (2, 8)


def test_another_version_of_torch_is_not_another_model() -> None:
    model = nn.Linear(4, 4)
    here = plan_fingerprint({"parameters": parameter_shapes(model)})
    old = Plan(fingerprint={"torch": "2.11.0", **here})
    with pytest.warns(UserWarning, match=r"made with torch 2\.11\.0") as caught:
        ckplan.apply(model, old)
    assert torch_version() in str(caught[0].message)
    assert "another model" not in str(caught[0].message)
    same = Plan(fingerprint={"torch": torch_version(), **here})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckplan.apply(nn.Linear(4, 4), same)


def test_auto_takes_a_card_alone_or_asks() -> None:
    workload, twin = build("residual"), build("residual")
    how = {"loss_fn": workload.loss, "gpu": "T4"}
    ckplan.auto(workload.model, workload.batch, **how)
    graph = ckplan.profile(twin.model, twin.batch, **how)
    assert ckplan.status(workload.model).plan == ckplan.solve(graph)
    with pytest.raises(CkplanError, match="neither a budget nor a card"):
        ckplan.auto(twin.model, torch.zeros(1))
    how = {"loss_fn": workload.loss, "budget": "90%"}
    with pytest.raises(CkplanError, match=r"tune=True, total_batch="):
        ckplan.auto(twin.model, twin.batch, **how, total_batch=8)
    with pytest.raises(CkplanError, match="tilings"):
        ckplan.auto(twin.model, twin.batch, **how, allow="tilings")


EVALUATED = """
import torch
from torch import nn

def build(train=False):
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 1))
    return model.train(train), torch.randn(4, 8)
"""


def test_a_model_in_evaluation_mode_is_noted(run: Run, folder: Path) -> None:
    (folder / "evaluated.py").write_text(EVALUATED)
    how = ("profile", "evaluated.py", "-o", "t.json.gz", "--force")
    said = "the model is in evaluation mode"
    assert said in " ".join(run(*how).out.split())
    assert said not in " ".join(run(*how, "--set", "train=true").out.split())


def test_verify_finds_the_trace_beside_a_plan_or_says_what_it_lacks(
    run: Run, folder: Path
) -> None:
    for batch, name in ((64, "other.json.gz"), (512, "mine.json.gz")):
        how = ("--set", f"batch={batch}", "-o", name)
        assert run("profile", "model.py", *how).code == 0
    assert run("solve", "mine.json.gz", "--budget", "90%", "-o", "plan.yaml").code == 0
    verify, said = ("verify", "plan.yaml", "--steps", "0", "--json"), "no trace of it"
    ended = run(*verify)
    assert (ended.code, said in ended.err) == (0, False)
    assert json.loads(ended.out)["phases"]["predicted"]
    (folder / "mine.json.gz").unlink()
    (folder / "cut.json.gz").write_bytes(b"\x1f\x8b")
    ended = run(*verify)
    assert (ended.code, said in ended.err) == (0, True)
    assert not json.loads(ended.out)["phases"]["predicted"]


def test_traces_that_are_called_otherwise_are_found_where_traces_are(
    run: Run, folder: Path
) -> None:
    assert run("profile", "model.py", "--device", "cuda").code == 0
    (trace,) = (folder / "traces").glob("*.json.gz")
    assert trace.name == "model-cuda.json.gz"  # the card is assumed
    assert run("solve", str(trace), "--budget", "100%", "-o", "plan.yaml").code == 0
    ended = run("verify", "plan.yaml", "--fake", "--report", "page.html")
    assert (ended.code, "no trace of" in ended.err) == (0, False)
    assert (folder / "page.html").is_file()


def test_steps_and_plans_of_python_are_saved_and_loaded(folder: Path) -> None:
    workload = build("residual")
    graph = ckplan.profile(workload.model, workload.batch)
    ckplan.save_graph(graph, "t.json.gz")
    assert ckplan.load_graph("t.json.gz").saved == graph.saved
    plan = ckplan.solve("t.json.gz", goal="min-memory")
    ckplan.save_plan(plan, "plan.yaml")
    assert ckplan.load_plan("plan.yaml") == plan
    with pytest.raises(CkplanError, match="exists"):
        ckplan.save_plan(plan, "plan.yaml")
    ckplan.save_plan(plan, "plan.yaml", force=True)
    with pytest.raises(ckplan.InfeasibleError):
        ckplan.solve(graph, budget=1)


def test_what_is_no_step_is_not_solved() -> None:
    wrong: Any = nn.Linear(8, 8)
    with pytest.raises(CkplanError, match="cannot solve a Linear") as refused:
        ckplan.solve(wrong, "60%")
    assert refused.value.hint.startswith("ckplan.solve(ckplan.profile(model, batch)")
