"""`tune` on input that it cannot take, or takes with an assumption, which it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Run

MODEL = """
import torch
from torch import nn
from torch.nn.functional import mse_loss

class Gram(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        y = self.inner(x)
        return (y @ y.T).softmax(-1) @ y

def make(model, rows=8):
    batch, target = torch.randn(8, 16), torch.randn(rows, 16)
    return {"model": model, "batch": batch, "target": target, "loss_fn": mse_loss}

def mlp():
    return make(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)))

def gram():
    return make(Gram())

def apart():
    return make(nn.Linear(16, 16), rows=3)

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.rnn(x)[0]).square().mean()

def tagger():
    return Tagger(), torch.randn(6, 8, 16)
"""
HOW = "--optimizer", "sgd:single"
CARD = "--gpu", "RTX 4090", "--total-batch", "16"
LARGER = "--micro-batch", "64", "--total-batch", "128"  # more than blocks hide


@pytest.fixture
def model(folder: Path) -> Path:
    (folder / "m.py").write_text(MODEL)
    return folder


@pytest.mark.parametrize(
    ("argv", "code", "what"),
    [
        (("mlp", *CARD, "--allow", "loraa"), 1, "cannot allow 'loraa': there is no"),
        (("apart", *CARD), 1, "cannot find the rows of the batch: its tensors are"),
        (("tagger", *CARD), 1, "cannot take dimension 0 of the batch as its samples"),
        (("mlp", *CARD, "--batch-dim", "2"), 1, "cannot find the rows of the batch"),
        (
            ("mlp", "--budget", "1kB"),
            3,
            "no batch fits 1000 B: the floor of Sequential",
        ),
        (("mlp", *CARD[:2], "--total-batch", "0"), 1, "cannot keep a total batch of 0"),
    ],
)
def test_what_cannot_be_tuned_is_an_error_of_three_lines(
    run: Run, model: Path, argv: tuple[str, ...], code: int, what: str
) -> None:
    ended = run("tune", f"m.py:{argv[0]}", *argv[1:], *HOW)
    assert ended.code == code
    assert ended.out == ""
    error, needed, hint = ended.err.splitlines()[-3:]
    assert error.startswith(f"error: {what}")
    assert needed.startswith("  needed: ")
    assert hint.startswith("  try:    ")


@pytest.mark.parametrize(
    ("name", "how", "note"),
    [
        ("mlp", ("--amp", "fp16"), "assumed --scaler"),
        ("gram", LARGER, "every batch is profiled: cannot extrapolate"),
        ("gram", LARGER, "FLOPs per sample grow by"),
    ],
)
def test_what_is_assumed_or_not_linear_is_a_note(
    run: Run, model: Path, name: str, how: tuple[str, ...], note: str
) -> None:
    ended = run("tune", f"m.py:{name}", *CARD, *HOW, *how, "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["best"]["scaler"] == (name == "mlp")
    assert [one for one in found["notes"] if one.startswith(note)]


def test_lora_of_a_factory_without_it_is_refused_in_its_row(
    run: Run, model: Path
) -> None:
    ended = run("tune", "m.py:mlp", *CARD, *HOW, "--allow", "lora", "--json")
    assert ended.code == 0, ended.err
    (row,) = (x for x in json.loads(ended.out)["levers"] if x["name"] == "lora")
    assert "the factory takes no option 'lora'" in row["refused"]


def test_the_dimension_of_samples_is_shown_and_can_be_another(
    run: Run, model: Path
) -> None:
    how = *CARD, *HOW, "--batch-dim", "1"
    ended = run("tune", "m.py:tagger", *how, "--json", "-o", "plan.yaml")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["batch_dims"] == {"0": 1}
    assert found["best"]["batch"] * found["best"]["accumulate"] == 16
    assert "batch_dim: 1" in Path("plan.yaml").read_text()
    shown = run("tune", "m.py:tagger", *how).out
    assert "samples dimension 1 of input 0; another: --batch-dim" in " ".join(
        shown.split()
    )


@pytest.mark.parametrize("option", [("--micro-batch", "2"), ("--batch-dim", "1")])
@pytest.mark.parametrize("command", [("fit",), ("tune", "--budget", "1GiB")])
def test_traces_take_no_option_of_a_workload(
    run: Run, folder: Path, command: tuple[str, ...], option: tuple[str, str]
) -> None:
    ended = run(command[0], "a.json.gz", "b.json.gz", *command[1:], *option)
    assert ended.code == 2
    assert "options of the step are for a workload" in " ".join(ended.err.split())


@pytest.mark.parametrize("command", ["compare", "solve"])
def test_a_workload_in_place_of_its_trace_is_named(
    run: Run, model: Path, command: str
) -> None:
    ended = run(command, "m.py", "--budget", "80%")
    assert ended.code == 1
    assert "m.py is a workload, not a trace" in ended.err
    assert "try:    ckplan profile m.py, or name its trace" in ended.err
