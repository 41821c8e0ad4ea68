"""`ckplan verify` of a script's plan: the script trains without it and with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, Run

import ckplan
from ckplan.errors import WorkloadError
from ckplan.plan import file as plan_file
from ckplan.verifying.verify import verify

TRAIN = """
import os
import sys
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))).tanh())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.drop(x)

def late(number):  # once planned, batches of the second worker wait for the first's
    time.sleep((1 - number) * os.path.exists("plan.yaml"))

kind = sys.argv[1] if sys.argv[1:] else "plain"
steps = int(sys.argv[2]) if sys.argv[2:] else 6
net, critic = Net(), nn.Linear(64, 1)
aside = torch.zeros(1 << 18)  # which no step uses
made = torch.compile(net, backend="eager") if kind == "compiled" else net
optimizers = [torch.optim.AdamW([*net.parameters(), *critic.parameters()])]
if kind == "several":
    optimizers = [torch.optim.AdamW(one.parameters()) for one in (critic, net)]
data = TensorDataset(torch.randn(512 * steps, 64))
if kind == "chance":
    torch.seed()
if kind == "other":
    net = nn.Sequential(net)
workers = {"num_workers": 2, "worker_init_fn": late} if kind == "workers" else {}
for x, in DataLoader(data, 512, shuffle=True, **workers):
    steps -= 1
    if kind == "longest" and steps != 2:
        x = x[:256]
    for rows in x.chunk(2 if kind == "accumulated" else 1):
        if kind == "raises":
            raise KeyError("label")
        loss = critic(made(rows)).square().mean()
        loss.backward()
        if kind == "sees" and len(net._forward_pre_hooks) > 1:  # it has a plan
            net.blocks[0].wide.weight.grad.mul_(2)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    for one in optimizers:
        one.step()
        one.zero_grad()
    print("a line of the script")
"""
_EXACT = 0.001  # of a peak


def _planned(folder: Path, *arguments: str) -> Path:
    """A plan for a step of the script, which lies beside it.

    It is recorded in a process of its own: what other scripts leave is no part of it.
    """
    (folder / "train.py").write_text(TRAIN)
    many = ["--steps", "4"] * ("longest" in arguments)
    record = ["record", *many, "-o", "t.json.gz", "train.py", *arguments]
    solve = ["solve", "t.json.gz", "--budget", "75%", "-o", "plan.yaml"]
    for command in (record, solve):
        subprocess.run(
            [sys.executable, "-m", "ckplan", *command],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
        )
    return folder / "plan.yaml"


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _planned(tmp_path_factory.mktemp("planned"), "plain")


@pytest.fixture
def plan(folder: Path, planned: Path) -> Path:
    """A plan, its script and its trace in the current folder."""
    for name in ("train.py", "t.json.gz", "plan.yaml"):
        shutil.copy(planned.with_name(name), folder)
    return folder / "plan.yaml"


def _run_as(plan: Path, *arguments: str) -> None:
    """Let a plan be of the script with other arguments."""
    text = plan.read_text()
    assert "script: [train.py, plain]" in text
    now = f"script: [{', '.join(('train.py', *arguments))}]"
    plan.write_text(text.replace("script: [train.py, plain]", now))


def _verified(run: Run, *arguments: str) -> dict[str, Any]:
    ended = run("verify", "plan.yaml", "--json", *arguments)
    assert ended.out.startswith("{"), ended.err
    return {"code": ended.code, "err": ended.err, **json.loads(ended.out)}


@pytest.mark.parametrize(
    "kind", ["several", "accumulated", "workers", "compiled", "longest"]
)
def test_a_plan_of_a_script_is_verified_in_the_script(
    run: Run, folder: Path, kind: str
) -> None:
    plan = plan_file.load(_planned(folder, kind))
    assert plan.workload["beside_bytes"] >= 4 << 18
    found = _verified(run, "--steps", "0")
    assert (found["code"], found["passed"]) == (0, True), found
    assert found["gradients_equal"] and found["loss_equal"]
    assert found["buffers_equal"] and found["random_state_equal"]
    assert (found["other"], found["regions_idle"]) == ([], [])
    assert plan.predicted is not None and found["regions_ran"]
    pairs = (
        (plan.predicted.peak_bytes, found["measured_peak_bytes"]),
        (plan.predicted.unplanned_peak_bytes, found["unplanned_measured_peak_bytes"]),
    )
    for predicted, measured in pairs:
        assert abs(predicted - measured) <= _EXACT * predicted
    assert ("op by op" in str(found["notes"])) == (kind == "compiled")


def test_the_report_has_steps_of_the_scripts_loop(run: Run, plan: Path) -> None:
    ended = run("verify", "plan.yaml", "--steps", "3", "--trace", "t.json.gz")
    assert ended.code == 0, ended.err
    assert "runs train.py plain, without the plan and with it" in ended.err
    assert "a line of the script" not in ended.out
    shown = " ".join(ended.out.split())
    assert "gradients bitwise equal" in shown and "unplanned, measured" in shown
    found = _verified(run, "--steps", "3")
    assert found["step_seconds"] > 0 and found["unplanned_step_seconds"] > 0
    assert found["phases"]["measured"] is None  # a loop does more than train
    both = found["timeline"]["planned"]
    assert set(both) == {"predicted", "measured"}


def test_steps_are_timed_until_the_script_ends(run: Run, plan: Path) -> None:
    _run_as(plan, "plain", "3")
    found = _verified(run, "--steps", "5")
    assert found["passed"]
    assert "the script ended after 1 of 5 timed steps" in str(found["notes"])


def test_a_script_may_apply_the_plan_itself(run: Run, plan: Path) -> None:
    script = plan.with_name("train.py")
    applied = "import ckplan; ckplan.apply(net, 'plan.yaml')\nmade = "
    script.write_text(TRAIN.replace("made = ", applied, 1))
    found = _verified(run, "--steps", "0")
    assert found["passed"]
    unplanned, planned = found["unplanned_measured_peak_bytes"], found["budget_bytes"]
    assert unplanned > planned > found["measured_peak_bytes"]


def test_a_difference_is_found(run: Run, plan: Path) -> None:
    _run_as(plan, "sees")
    ended = run("verify", "plan.yaml", "--steps", "0")
    assert ended.code == 4
    assert (
        "from the unplanned one: gradient of blocks.0.wide.weight, step 1" in ended.err
    )


def test_chance_in_a_script_is_no_fault_of_the_plan(run: Run, plan: Path) -> None:
    _run_as(plan, "chance")
    found = _verified(run, "--steps", "0")
    assert (found["code"], found["passed"]) == (4, False)
    assert found["different"][0] == "loss, step 1"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("other",), "train.py called no Net with the parameters of the plan"),
        (("plain", "1"), "train.py ended before its step 2 was over"),
        (("raises",), "the unplanned step raised KeyError: 'label'"),
    ],
)
def test_a_script_that_trains_something_else_is_told(
    run: Run, plan: Path, arguments: tuple[str, ...], what: str
) -> None:
    _run_as(plan, *arguments)
    if arguments == ("other",):
        script = plan.with_name("train.py")
        script.write_text(TRAIN.replace("range(4)", "range(3)"))
    ended = run("verify", "plan.yaml")
    assert ended.code == 1
    lines = [line for line in ended.err.splitlines() if line.strip()][-3:]
    assert what in lines[0]
    assert [line.split()[0] for line in lines] == ["error:", "needed:", "try:"]


def test_a_script_that_is_gone_is_told(run: Run, plan: Path) -> None:
    plan.with_name("train.py").unlink()
    ended = run("verify", "plan.yaml")
    assert ended.code == 1
    assert "cannot run the script: train.py is not there" in ended.err


@pytest.mark.parametrize(
    "option",
    [
        ("--fake",),
        ("--calibrate",),
        ("--optimizer", "sgd"),
        ("--amp", "bf16"),
        ("--set", "a=1"),
        ("--micro-batch", "2"),
        ("--energy",),
    ],
)
def test_options_of_workloads_are_refused(
    run: Run, plan: Path, option: tuple[str, ...]
) -> None:
    ended = run("verify", "plan.yaml", *option)
    assert ended.code == 1
    assert "the script trains as it does" in ended.err


def test_a_workload_file_may_be_given_instead(run: Run, plan: Path) -> None:
    ended = run("verify", "train.py", "plan.yaml", "--steps", "0")
    assert ended.code == 0, ended.err  # the script itself
    plan.with_name("model.py").write_text("import torch\n")
    ended = run("verify", "model.py", "plan.yaml", "--steps", "0")
    assert "model.py has no factory 'build'" in ended.err


def test_scripts_are_verified_from_python(plan: Path) -> None:
    found = ckplan.verify(plan=plan, steps=0)
    assert found.passed and found.gradients_equal
    with pytest.raises(WorkloadError, match="choose optimizer, amp"):
        verify(plan=plan, optimizer="sgd")
    with pytest.raises(WorkloadError, match="measure energy"):
        verify(plan=plan, energy=True)
