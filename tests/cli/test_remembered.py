"""A plan remembers its workload; a trace's name tells it from others."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import graphs
import pytest
import typer
from commands import Run
from small_models import build

import ckplan
from ckplan.cli import inputs
from ckplan.errors import CkplanError, PlanError, WorkloadError
from ckplan.graph import file as trace_file
from ckplan.plan import file as plan_file
from ckplan.plan.plan import Plan, Prediction
from ckplan.plan.workload import as_arguments, plan_workload
from ckplan.solving.planner import Planner
from ckplan.training.loading import WorkloadSpec
from ckplan.training.remembered import complete, describe_workload
from ckplan.training.step import Training
from ckplan.units import format_percent

WORKLOAD = {
    "target": "model.py:two",
    "set": ["layers=2", "name=a b"],
    "seed": 3,
    "optimizer": "sgd",
    "amp": "bf16",
    "accumulate": 2,
    "clip": 0.5,
    "scaler": True,
}
ARGUMENTS = (
    "model.py:two --set layers=2 --set 'name=a b' --seed 3 --optimizer sgd --amp bf16 "
    "--accumulate 2 --clip 0.5 --scaler"
)


DEEP = """
from torch import nn, ones

def build():
    block = lambda: nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    return nn.Sequential(*(block() for _ in range(4))), ones(256, 8)
"""


def overheads(text: str) -> list[str]:
    """The overheads in a text, without the unit."""
    return re.findall(r"overhead\W*([+-][\d.]+) ?%", text)


def test_solve_show_and_eject_print_one_overhead(run: Run, folder: Path) -> None:
    """Also where seconds measured again would give another one."""
    (folder / "deep.py").write_text(DEEP)
    assert run("profile", "deep.py").code == 0
    solved = run("solve", "--min-memory").out
    (said,) = {*overheads(solved)}
    assert overheads(run("show", "plan.yaml").out) == [said]
    assert said in overheads(run("eject", "plan.yaml").out)
    (trace,) = (folder / "traces").iterdir()
    graph = trace_file.load(trace)
    slower = [replace(op, seconds=n * op.seconds) for n, op in enumerate(graph.ops)]
    trace_file.save(replace(graph, ops=tuple(slower)), trace, force=True)
    assert said in overheads(run("eject", "plan.yaml").out)
    for tool in ("torch", "deepspeed"):
        ejected = run("eject", "plan.yaml", "--as", tool)
        assert said in overheads(ejected.out + ejected.err)


@pytest.mark.parametrize("overhead", [0.12949, 0.13051, 0.1305])
def test_an_overhead_is_rounded_once(overhead: float) -> None:
    found = Planner(graphs.chain(4)).solve(10**9)
    timeline = SimpleNamespace(overhead=overhead, peak_bytes=1)
    solution = replace(found, timeline=timeline)  # type: ignore[arg-type]
    predicted = Prediction(1, "", overhead, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(found.limit), "reserved_bytes", lambda *_: None)
        row = solution.as_baseline.overhead
    assert format_percent(row) == format_percent(predicted.overhead)


def test_verify_and_eject_need_the_plan_alone(run: Run, folder: Path) -> None:
    how = ["--set", "width=16", "--optimizer", "sgd", "--accumulate", "2", "--seed=1"]
    assert run("profile", "model.py", *how).code == 0
    (trace,) = (folder / "traces").iterdir()
    assert trace.name == "model-width=16-seed=1-optimizer=sgd-accumulate=2.json.gz"
    assert run("solve", "--min-memory").code == 0
    plan = ckplan.load_plan("plan.yaml")
    settings = {"set": ["width=16"], "optimizer": "sgd", "accumulate": 2, "seed": 1}
    assert plan.workload == {"target": "model.py", **settings}

    done = run("verify", "plan.yaml", "--steps", "0")
    assert done.code == 0
    assert f"the plan was made for {as_arguments(plan.workload)}" in done.err
    assert "planned, predicted" in done.out  # the trace of that name, with all options
    same = run("verify", "plan.yaml", "--fake", "model.py")  # a target may be given
    assert same.code == 0
    assert "not the plan's" not in same.out
    assert run("eject", "plan.yaml").out == run("eject", str(trace), "plan.yaml").out
    shown = run("show", "plan.yaml").out
    assert "model.py --set width=16 --seed 1 --optimizer sgd" in shown

    other = run("verify", "plan.yaml", "--set", "width=24", "--fake")
    assert other.code == 1
    assert "model.py builds another model than the plan's: a Sequential" in other.err
    with pytest.raises(WorkloadError, match="another model than the plan's"):
        ckplan.verify("model.py:two", plan, steps=0)
    assert ckplan.verify(plan="plan.yaml", steps=0).passed
    assert ckplan.verify("plan.yaml", steps=0).passed
    assert ckplan.dry_run(plan="plan.yaml").passed


def test_a_plan_without_a_workload_asks_for_one(run: Run, folder: Path) -> None:
    (folder / "plan.yaml").write_text("ckplan: 1\nregions: []\n")
    ended = run("verify", "plan.yaml")
    assert ended.code == 1
    assert "the plan does not say which workload it was made for" in ended.err


def test_a_misspelled_factory_comes_before_a_trace_that_exists(
    run: Run, folder: Path
) -> None:
    (folder / "traces").mkdir()
    for name in ("model-tow", "model-two"):
        (folder / f"traces/{name}.json.gz").write_bytes(b"")
    assert "did you mean 'two'?" in run("profile", "model.py:tow").err
    named = run("profile", "model.py:tow", "-o", "traces/model-two.json.gz")
    assert "did you mean 'two'?" in named.err
    assert "already exists" in run("profile", "model.py:two").err


def test_a_workload_survives_both_files() -> None:
    plan = Plan(workload=WORKLOAD)
    text = plan_file.dumps(plan)
    assert plan_file.loads(text, "x") == plan
    assert as_arguments(WORKLOAD) == ARGUMENTS
    workload = build("residual")
    graph = ckplan.profile(workload.model, workload.batch, loss_fn=workload.loss)
    known = {key: WORKLOAD[key] for key in ("target", "set", "seed")}
    training = Training("sgd", "bf16", 2, 0.5, scaler=True)
    graph = replace(graph, options={"workload": known, **training.as_options()})
    again = trace_file.loads(trace_file.dumps(graph), "x")
    assert plan_workload(again.options) == WORKLOAD
    for bad in (5, {"argets": ""}, {"set": "a=1"}, {"set": [1]}, {"seed": "1"}):
        with pytest.raises(CkplanError, match="is not a name"):
            replace(graph, options={"workload": bad})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("targets: a.py", "did you mean 'target'?"),
        ("set: layers=2", "'set' is a single value"),
        ("seed: one", "cannot read the option 'one'"),
        ("clip: 0", "a number above zero"),
        ("scaler: yes", "true or false"),
    ],
)
def test_a_bad_workload_is_refused_with_its_line(line: str, said: str) -> None:
    text = f"ckplan: 1\nregions: []\nworkload:\n  {line}\n"
    with pytest.raises(PlanError, match="x, line 4") as raised:
        plan_file.loads(text, "x")
    assert said in str(raised.value)


def test_what_is_given_comes_before_what_is_remembered() -> None:
    plan = Plan(workload=WORKLOAD, fingerprint={"parameters": "0123"})
    spec, training, seed = complete(None, Training(), 0, plan)
    assert spec.options == {"layers": 2, "name": "a b"}
    assert spec.parameters == "0123"
    assert training == Training("sgd", "bf16", 2, 0.5, scaler=True)
    assert seed == 3

    given = WorkloadSpec("model.py:two", {"layers": 4})
    spec, training, seed = complete(given, Training("adam", clip=1.0), 7, plan)
    assert spec.options == {"layers": 4, "name": "a b"}
    assert training == Training("adam", "bf16", 2, 1.0, scaler=True)
    assert seed == 7

    spec, _, _ = complete("other.py", Training(), 0, plan)
    assert (spec.target, spec.options) == ("other.py", {})


@pytest.mark.parametrize(
    "value", [2, -1, 1e-5, True, None, "a b", "true", "1e-3", "", [1, 2], {"a": "b"}]
)
def test_options_of_python_are_written_as_on_the_command_line(value: Any) -> None:
    known = describe_workload(WorkloadSpec("model.py", {"option": value}), 0)
    spec, _, _ = complete(None, Training(), 0, Plan(workload=known))
    assert spec.options == {"option": value}
    assert type(spec.options["option"]) is type(value)


def test_an_option_that_cannot_be_written_is_not_half_remembered() -> None:
    for value in (float("inf"), (1, 2), object()):
        assert describe_workload(WorkloadSpec("model.py", {"option": value}), 0) == {}
    assert describe_workload(WorkloadSpec("m.py", {"day": date(2026, 1, 2)}), 0)


@pytest.mark.parametrize(
    ("target", "workload", "device", "name"),
    [
        ("model.py", {}, "cpu", "model"),
        ("a/model.py:build", {}, None, "model"),
        ("a/model.py:moe", {"set": ["n=4"]}, None, "model-moe-n=4"),
        ("pack.mod:early", {}, "cuda", "mod-early-cuda"),
        ("m.py", {"gpu": "RTX 4090"}, "cuda", "m-gpu=RTX_4090"),
        ("m.py", {"set": ["path=../x"]}, None, "m-path=.._x"),
    ],
)
def test_names_of_traces(
    target: str, workload: dict[str, Any], device: str | None, name: str
) -> None:
    found = inputs.default_trace(WorkloadSpec(target).name, workload, device)
    assert found == Path("traces") / f"{name}.json.gz"


def test_long_names_of_traces_are_cut_and_stay_apart() -> None:
    one, two = (inputs.default_trace("m", {"set": ["x" * 300 + y]}, "") for y in "ab")
    assert one != two
    assert len(one.name) < 160


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["plan.yaml"], (None, "plan.yaml")),
        (["bare"], (None, "bare")),
        (["model.py", "plan.yaml"], ("model.py", "plan.yaml")),
        (["plan.yml", "model.py:small"], ("model.py:small", "plan.yml")),
        (["bare", "pack.mod:f"], ("pack.mod:f", "bare")),
        (["bare", "t.json.gz"], ("t.json.gz", "bare")),
        (["model.py", "bare"], ("model.py", "bare")),
        (["model.py", "missing"], ("model.py", "missing")),
        (["a.yaml", "b.yaml"], ("a.yaml", "b.yaml")),
    ],
)
def test_target_and_plan_in_either_order(
    folder: Path, given: Sequence[str], expected: tuple[str | None, str]
) -> None:
    (folder / "bare").write_text("ckplan: 1\nregions: []\n")
    target, plan = inputs.target_and_plan(given)
    assert (target, str(plan)) == expected


def test_a_model_is_verified_within_a_budget_without_a_plan(
    run: Run, folder: Path
) -> None:
    (folder / "deep.py").write_text(DEEP)
    how = ("--budget", "80%", "--optimizer", "sgd", "--json")
    done = run("verify", "deep.py", *how, "--steps", "0", "--save", "made.yaml")
    assert done.code == 0, done.err
    found, plan = json.loads(done.out), plan_file.load(folder / "made.yaml")
    assert plan.regions
    assert plan.predicted is not None
    assert found["measured_peak_bytes"] == plan.predicted.peak_bytes
    assert plan.budget_bytes == int(0.8 * found["unplanned_measured_peak_bytes"])
    dry = run("verify", "made.yaml", "--fake", "--json")  # it remembers the rest
    assert json.loads(dry.out)["dry_run_peak_bytes"] == plan.predicted.peak_bytes
    assert "80 furlongs" in run("verify", "deep.py", "--budget", "80 furlongs").err
    again = run("verify", "deep.py", *how, "--save", "made.yaml")
    assert "made.yaml" in again.err
    assert "exists" in again.err


def test_too_few_and_too_many_arguments_are_usage_errors(
    run: Run, folder: Path
) -> None:
    assert run("verify", "model.py").code == 2
    assert "a plan is missing" in run("eject", "model.py").err
    assert run("verify", "model.py", "plan.yaml", "more").code == 2
    with pytest.raises(typer.BadParameter):
        inputs.target_and_plan(["a.py", "b.yaml", "c"])


@pytest.mark.parametrize(
    ("path", "said"), [("model.py", "a Python file"), ("t.json.gz", "a trace")]
)
def test_what_is_no_plan_is_named_without_a_word_on_yaml(
    run: Run, folder: Path, path: str, said: str
) -> None:
    (folder / "t.json.gz").write_bytes(b"\x1f\x8b")
    ended = run("verify", "model.py", path)
    assert ended.code == 1
    assert f"cannot read the plan '{path}': it is {said}" in ended.err
    assert "YAML" not in ended.err


@pytest.mark.parametrize("command", ["report", "eject"])
def test_a_plan_of_another_model_is_refused(
    command: str, run: Run, folder: Path
) -> None:
    graph = graphs.chain()
    parameters = {"h.0.mlp.fc.weight": "float32[8,8]"}
    other = replace(graph, fingerprint={**graph.fingerprint, "parameters": parameters})
    trace_file.save(other, folder / "other.json.gz")
    plan_file.save(ckplan.solve(graph, goal="min-memory"), folder / "plan.yaml")
    ended = run(command, "other.json.gz", "plan.yaml", "-o", "out.html")
    assert ended.code == 1
    assert "is not of this trace: names and shapes of its parameters" in ended.err
    assert not (folder / "out.html").exists()


def test_a_seed_that_torch_cannot_take_is_refused(run: Run, folder: Path) -> None:
    (folder / "model.py").write_text(DEEP)
    ended = run("profile", "model.py", "--seed", str(2**64))
    assert ended.code == 2
    assert str(2**64 - 1) in ended.err
