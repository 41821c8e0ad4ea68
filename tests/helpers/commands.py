"""Commands as a user runs them: fixtures for all tests, see conftest.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from ckplan import cli

ROOT = Path(__file__).parents[2]


MODEL = """
import sys
import torch
from torch import nn

print("a line that is not the product")

def build(width=8, layers=4, batch=4):
    block = lambda: nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, width))
    blocks = [block() for _ in range(layers)]
    return nn.Sequential(*blocks), torch.randn(batch, width)

def two():
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 32)), torch.randn(1, 8)

def raises():
    raise OSError("no data\\nhere")

def nonsense():
    return "a model"

def elsewhere():
    return nn.Linear(8, 8), torch.randn(4, 8, device="meta")

def frozen():
    return nn.Linear(8, 8).requires_grad_(False), torch.randn(4, 8)

def quits():
    sys.exit("usage: model.py DATA")
"""


class Ended(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


@pytest.fixture
def run(folder: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process, in the folder."""

    def run(*argv: str) -> Ended:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.app(list(argv), prog_name="ckplan")
        return Ended(int(ended.value.code or 0), *capfd.readouterr())

    return run


def profiled(folder: Path, *options: str) -> bytes:
    (folder / "model.py").write_text(MODEL)
    argv = [sys.executable, "-m", "ckplan", "profile", "model.py", "-o", "t.json.gz"]
    subprocess.run(
        [*argv, *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
    )
    return (folder / "t.json.gz").read_bytes()


@pytest.fixture(scope="session")
def traced(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A trace of the model."""
    return profiled(tmp_path_factory.mktemp("traced"))


@pytest.fixture
def trace(folder: Path, traced: bytes) -> Path:
    """That trace in traces/."""
    return in_traces(folder, traced)


def in_traces(folder: Path, content: bytes) -> Path:
    path = folder / "traces" / "step.json.gz"
    path.parent.mkdir()
    path.write_bytes(content)
    return path
