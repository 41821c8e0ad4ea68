"""`profile --lengths`: a plan fits the longest batch; its cost is told at the mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Run

from ckplan.graph import file as trace_file
from ckplan.plan import file as plan_file
from ckplan.plan.resolve import resolve
from ckplan.simulating.simulate import simulate
from ckplan.units import format_bytes

MODEL = """
import torch
from torch import nn

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        block = lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.layers = nn.Sequential(*(block() for _ in range(4)))
        self.head = nn.Linear(16, 50)

    def forward(self, ids, mask):
        hidden = self.embed(ids) * mask[..., None]
        return self.head(self.layers(hidden))

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

def build(length=96):
    ids = torch.randint(50, (4, length))
    batch = {"ids": ids, "mask": torch.ones(4, length)}
    return {"model": Tokens(), "batch": batch, "target": ids, "loss_fn": loss}
"""


@pytest.fixture
def tokens(folder: Path) -> Path:
    (folder / "tokens.py").write_text(MODEL)
    return folder


def test_the_plan_fits_the_longest_batch_and_costs_as_the_mean(
    run: Run, tokens: Path
) -> None:
    (tokens / "lengths.txt").write_text("24,\n24, 96,\n")
    output = "-o", "t.json.gz", "--no-replay"
    ended = run("profile", "tokens.py", "--lengths", "lengths.txt", *output)
    assert ended.code == 0, ended.err
    (tokens / "t.json.gz").rename(tokens / "kept.json.gz")
    ended = run("profile", "tokens.py", "--lengths", "lengths.txt", *output)
    assert (ended.code, "t.mean.json.gz" in ended.err) == (1, True)  # it would be lost
    (tokens / "kept.json.gz").rename(tokens / "t.json.gz")
    assert run("profile", "tokens.py", "-o", "one.json.gz", "--no-replay").code == 0
    whole = "length=48", "-o", "two.json.gz", "--no-replay"
    assert run("profile", "tokens.py", "--set", *whole).code == 0
    longest, mean = (
        trace_file.load(tokens / name) for name in ("t.json.gz", "t.mean.json.gz")
    )
    alone, at_mean = (
        trace_file.load(tokens / name) for name in ("one.json.gz", "two.json.gz")
    )
    assert simulate(longest).peak_bytes == simulate(alone).peak_bytes
    assert simulate(mean).peak_bytes == simulate(at_mean).peak_bytes
    assert mean.fingerprint["batch"] == at_mean.fingerprint["batch"]

    ended = run("solve", "t.json.gz", "--budget", "70%")
    (said,) = (x for x in ended.err.splitlines() if x.startswith("at the mean length"))
    timeline = simulate(mean, resolve(plan_file.load(tokens / "plan.yaml"), mean))
    assert format_bytes(timeline.peak_bytes) in said
    assert f"+{timeline.overhead:.1%}" in said
    ended = run("verify", "plan.yaml", "--fake")
    assert ended.code == 0, ended.err
    assert "planned, predicted" in ended.out  # its timeline, of the longest batch
    again = run("solve", "one.json.gz", "--budget", "70%", "--force")
    assert "at the mean length" not in again.err


def test_a_source_makes_the_longest_batch(run: Run, folder: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 50}))
    for batch, rows in ((), 8), (("--batch", "2"), 2):
        how = "--lengths", "6,10", *batch, "--task", "causal-lm", "--no-replay"
        ended = run("profile", "config.json", *how, "-o", "t.json.gz", "--force")
        assert ended.code == 0, ended.err
        assert f"assumed --batch {rows}x10, the longest of --lengths" in ended.err
        for name, length in ("t.json.gz", 10), ("t.mean.json.gz", 8):
            shapes = trace_file.load(folder / name).fingerprint["batch"]
            assert f"int64[{rows},{length}]" in shapes.values()


TINY = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8}
SOUND = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8}
NO_LENGTHS = {
    "vit": ({**TINY, "num_attention_heads": 2}, "image-classification", "image has 3"),
    "whisper": (
        {**SOUND, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
        "speech-to-text",
        "its batch has shape [2, 80, 3000]",
    ),
}


@pytest.mark.parametrize("kind", NO_LENGTHS)
def test_a_model_whose_batches_have_no_length_is_told_so(
    run: Run, folder: Path, kind: str
) -> None:
    fields, task, why = NO_LENGTHS[kind]
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **fields}))
    how = "--lengths", "6,10", "--batch", "2", "--task", task
    ended = run("profile", "config.json", *how)
    assert ended.code == 1
    assert f"error: cannot use --lengths with this model: {why}" in ended.err
    assert "needed: batches of ROWSxLENGTH" in ended.err
    assert "cannot use --batch" not in ended.err
    assert "assumed" not in ended.err  # what failed was not assumed for anything
    assert not (folder / "traces").exists()


BAD = {
    "96,0": "cannot read the lengths: '0' is none",
    "96;24": "cannot read the lengths: '96;24' is none",
    "24,48": "the batch is 96 long, and the longest of --lengths is 48",
    "96,192": "the batch is 96 long, and the longest of --lengths is 192",
}


@pytest.mark.parametrize("lengths", BAD)
def test_other_lengths_are_refused(run: Run, tokens: Path, lengths: str) -> None:
    ended = run("profile", "tokens.py", "--lengths", lengths)
    assert ended.code == 1
    assert BAD[lengths] in ended.err
    assert "needed:" in ended.err
    assert not (tokens / "traces").exists()
