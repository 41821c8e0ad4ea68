"""The command line as its user sees it: exit codes, streams, files."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from test_report import verification

import ckplan
from ckplan import cli, terminal
from ckplan.training.step import OPTIMIZERS
from ckplan.verifying import verify as verifying

ROOT = Path(__file__).parent.parent

MODEL = """
import sys
import torch
from torch import nn

print("a line that is not the product")

def build(width=8, layers=4):
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(*blocks), torch.randn(4, width)

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

def interrupted():
    raise KeyboardInterrupt
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


@pytest.fixture(scope="session")
def traced(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A trace of the model."""
    folder = tmp_path_factory.mktemp("traced")
    (folder / "model.py").write_text(MODEL)
    argv = [sys.executable, "-m", "ckplan", "profile", "model.py", "-o", "t.json.gz"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(argv, cwd=folder, env=environment, check=True, capture_output=True)
    return (folder / "t.json.gz").read_bytes()


@pytest.fixture
def trace(folder: Path, traced: bytes) -> Path:
    """That trace in traces/."""
    path = folder / "traces" / "step.json.gz"
    path.parent.mkdir()
    path.write_bytes(traced)
    return path


# -- what goes well ----------------------------------------------------------------


def test_profile_writes_a_trace_and_shows_it(run: Run, folder: Path) -> None:
    ended = run("profile", "model.py")
    assert ended.code == 0
    assert ended.err.splitlines()[-1] == "wrote traces/model.json.gz"
    assert ended.out.startswith("Memory of one training step of Sequential\n")
    assert "[0..3]" in ended.out and "x4" in ended.out
    assert max(map(len, ended.out.splitlines())) <= 80
    assert "not the product" not in ended.out
    graph = ckplan.load_graph(folder / "traces/model.json.gz")
    assert graph.model == "Sequential"


def test_profile_json_is_all_of_stdout(run: Run) -> None:
    ended = run(
        "profile", "model.py:two", "--optimizer", "sgd", "--json", "-o", "t.json"
    )
    content = json.loads(ended.out)
    assert content["trace"] == "t.json"
    assert content["activation_bytes"] == 192
    found = {layer["call"]: layer["activation_bytes"] for layer in content["layers"]}
    assert found == {"0": 64, "1": 128}


def test_profile_passes_options_to_the_factory(run: Run) -> None:
    ended = run(
        "profile", "model.py", "--set", "layers=2", "--set", "width=16", "--json"
    )
    content = json.loads(ended.out)
    assert [layer["call"] for layer in content["layers"]] == [
        "0.0",
        "0.1",
        "1.0",
        "1.1",
    ]
    assert content["input_bytes"] == 4 * 16 * 4


def test_solve_takes_the_newest_trace_and_writes_a_plan(run: Run, trace: Path) -> None:
    older = trace.with_name("older.json")
    older.write_text("{}")
    os.utime(older, (0, 0))
    ended = run("solve", "--budget", "1GiB")
    assert ended.code == 0
    lines = ended.err.splitlines()
    assert (lines[0], lines[-1]) == ("reading traces/step.json.gz", "wrote plan.yaml")
    assert ended.out.startswith("Plan for Sequential within 1.00 GiB\n")
    assert max(map(len, ended.out.splitlines())) <= 80
    assert ckplan.load_plan("plan.yaml").budget_bytes == 2**30


def test_solve_takes_the_reserve_off_the_budget(run: Run, trace: Path) -> None:
    argv = ("solve", str(trace), "--budget", "3MB", "--reserve", "1MB", "--json")
    content = json.loads(run(*argv).out)
    assert (content["budget_bytes"], content["reserve_bytes"]) == (3_000_000, 1_000_000)
    assert content["peak_bytes"] == content["unplanned_peak_bytes"]
    assert content["plan"] == "plan.yaml"
    assert ckplan.load_plan("plan.yaml").budget_bytes == 2_000_000


def test_solve_overwrites_by_force(run: Run, trace: Path, folder: Path) -> None:
    (folder / "plan.yaml").write_text("mine")
    assert run("solve", str(trace), "--budget", "80GB", "--force").code == 0
    assert (folder / "plan.yaml").read_text().startswith("ckplan: 1\n")


def test_show_tells_traces_from_plans_by_content(
    run: Run, folder: Path, traced: bytes
) -> None:
    (folder / "a").write_bytes(traced)
    (folder / "b").write_bytes(gzip.decompress(traced))
    (folder / "c").write_text("ckplan: 1\nregions: [{calls: h.0}]\n")
    assert run("show", "a").out == run("show", "b").out
    assert run("show", "a").out.startswith("Memory of one training step")
    assert run("show", "c").out.startswith("Plan for any model")
    assert json.loads(run("show", "a", "--json").out)["model"] == "Sequential"
    shown = json.loads(run("show", "c", "--json").out)
    region = {"calls": "h.0", "by": "program", "save": [], "encode": {}}
    assert shown["regions"] == [region]


def test_verify_compares_and_passes(run: Run, folder: Path) -> None:
    (folder / "plan.yaml").write_text("ckplan: 1\nregions: [{calls: '0'}]\n")
    ended = run("verify", "model.py", "plan.yaml", "--steps", "1", "--json")
    content = json.loads(ended.out)
    assert (ended.code, content["passed"], content["regions_ran"]) == (0, True, 1)


# -- what does not -----------------------------------------------------------------

NOT_PYTHON = "this is no Python\n"
PLAN = "ckplan: 1\nregions: []\n"

BAD_INPUT = [
    ("profile nope.py", "cannot read the workload: nope.py is not there"),
    ("profile nope.module:build", "cannot import the workload: nope.module"),
    ("profile notes.txt", "cannot read the workload: notes.txt is no Python file"),
    ("profile words.py", "cannot read the workload: words.py is no Python"),
    ("profile empty.py", "cannot build a workload: empty.py has no factory 'build'"),
    ("profile model.py:biuld", "cannot build the workload: model.py has no function"),
    (
        "profile model.py:raises",
        "cannot build the workload: model.py:raises raised OSError: no data",
    ),
    (
        "profile model.py:nonsense",
        "cannot build the workload: what model.py:nonsense returned is of type str",
    ),
    ("profile model.py:elsewhere", "the batch is on another device: a tensor of shape"),
    ("profile model.py:frozen", "the loss needs no gradient"),
    ("profile model.py:quits", "cannot use the workload: it called sys.exit("),
    ("profile model.py --set depth=3", "model.py: the factory takes no option 'depth'"),
    ("profile model.py --set 3", "cannot read the option: --set '3'"),
    ("profile model.py --optimizer own", "the workload has no optimizer of its own"),
    ("profile model.py --device tpu", "cannot profile on the device 'tpu'"),
    ("profile model.py -o traces", "cannot write 'traces': it is a folder"),
    (
        "solve nope.json.gz --budget 1GB",
        "cannot read the trace 'nope.json.gz': no such",
    ),
    ("solve cut.json.gz --budget 1GB", "cannot read the trace: cut.json.gz is cut or"),
    ("solve odd.json --budget 1GB", "cannot read the trace: odd.json has unknown key"),
    ("solve empty.py --budget 1GB", "cannot read the trace: empty.py is not complete"),
    ("solve --budget 12bananas", "cannot read the budget '12bananas': unknown unit"),
    ("solve --budget -1", "cannot read the budget '-1': not a number with a unit"),
    ("solve --budget 0", "cannot plan for the budget '0': it is 0 bytes"),
    ("solve --budget 1GB --reserve much", "cannot read the size 'much'"),
    ("solve --budget 1GB --reserve 1GB", "cannot plan for the budget 953.67 MiB: all"),
    ("show nope.yaml", "cannot read the trace or plan 'nope.yaml': no such file"),
    ("show cut.json.gz", "cannot read the trace: cut.json.gz is cut or damaged"),
    ("show cut.json", "cannot read the trace: cut.json is not complete JSON"),
    ("show odd.json", "cannot read the trace: odd.json has unknown key 'colour'"),
    ("show odd.yaml", "odd.yaml, line 2: unknown key 'colour'"),
    ("verify model.py nope.yaml", "cannot read the plan 'nope.yaml': no such file"),
    ("verify model.py odd.yaml", "odd.yaml, line 2: unknown key 'colour'"),
    ("verify nope.py plan.yaml", "cannot read the workload: nope.py is not there"),
]


@pytest.mark.parametrize(("command", "message"), BAD_INPUT)
def test_bad_input_ends_with_one_and_three_lines(
    command: str, message: str, run: Run, trace: Path, folder: Path
) -> None:
    content = json.loads(gzip.decompress(trace.read_bytes()))
    for name, text in {
        "notes.txt": NOT_PYTHON,
        "words.py": NOT_PYTHON,
        "empty.py": "",
        "odd.json": json.dumps({**content, "colour": "red"}),
        "odd.yaml": PLAN.replace("\n", "\ncolour: red\n", 1),
        "cut.json": json.dumps(content)[:1000],
        "plan.yaml": PLAN,
    }.items():
        (folder / name).write_text(text)
    (folder / "cut.json.gz").write_bytes(trace.read_bytes()[:1000])
    before = snapshot(folder)
    ended = run(*command.split(), *(["-o", "new.yaml"] if "solve" in command else []))
    error = ended.err[ended.err.index("error: ") :].splitlines()
    assert (ended.code, ended.out) == (1, "")
    assert error[0].startswith(f"error: {message}")
    assert [line[:10] for line in error[1:]] == ["  needed: ", "  try:    "]
    assert snapshot(folder) == before


def snapshot(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(p): p.read_bytes() for p in files if "__pycache__" not in p.parts}


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("profile model.py", "traces/model.json.gz"),
        ("profile model.py -o mine.json", "mine.json"),
        ("solve traces/step.json.gz --budget 1GB", "plan.yaml"),
        ("solve nope.json.gz --budget 1GB -o mine.yaml", "mine.yaml"),
    ],
)
def test_existing_output_asks_for_force_before_any_work(
    command: str, path: str, run: Run, folder: Path
) -> None:
    (folder / path).parent.mkdir(exist_ok=True)
    (folder / path).write_text("mine")
    ended = run(*command.split())
    assert ended.code == 1
    assert ended.err.splitlines()[0] == (
        f"error: cannot write '{path}': it already exists"
    )
    assert "--force" in ended.err
    assert (folder / path).read_text() == "mine"


def test_solve_without_any_trace_says_how_to_get_one(run: Run) -> None:
    ended = run("solve", "--budget", "1GB")
    assert ended.code == 1
    assert ended.err.splitlines()[0] == (
        "error: cannot find a trace: there is none in traces/"
    )


def test_budget_below_the_floor_exits_with_three(
    run: Run, trace: Path, folder: Path
) -> None:
    ended = run("solve", str(trace), "--budget", "1kB")
    assert (ended.code, ended.out) == (3, "")
    assert ended.err.startswith(
        "error: no plan fits 1000 B: the floor of Sequential is"
    )
    assert "needed: at least" in ended.err
    assert not (folder / "plan.yaml").exists()


def test_difference_exits_with_four(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "plan.yaml").write_text(PLAN)
    different = ("gradient of 0.weight, step 1",)
    found = verification(gradients_equal=False, different=different)
    monkeypatch.setattr(verifying, "verify", lambda *args, **kwargs: found)
    ended = run("verify", "model.py", "plan.yaml")
    assert ended.code == 4
    assert "differs       gradient of 0.weight, step 1" in ended.out
    assert ended.err.startswith("error: the planned step computes something else")


@pytest.mark.parametrize(
    "command",
    [
        "",
        "nope",
        "solve",
        "profile",
        "profile model.py --optimizer adam",
        "verify model.py",
        "verify model.py plan.yaml --steps -1",
        "show plan.yaml --nope",
    ],
)
def test_wrong_usage_exits_with_two(command: str, run: Run) -> None:
    ended = run(*command.split())
    assert ended.code == 2
    assert "Usage: ckplan" in ended.out + ended.err


@pytest.mark.parametrize("argv", ["--traceback show nope", "show nope --traceback"])
def test_traceback_is_shown_if_asked_for(argv: str, run: Run) -> None:
    ended = run(*argv.split())
    assert ended.code == 1
    assert ended.err.startswith("Traceback (most recent call last)")
    assert "Traceback" not in run("show", "nope").err


def test_bug_says_so_without_a_traceback(
    run: Run, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckplan.simulate.simulate", lambda graph: 1 / 0)
    ended = run("show", str(trace))
    assert ended.code == 1
    assert ended.err.splitlines() == [
        "error: ckplan failed: ZeroDivisionError: division by zero",
        "  needed: nothing of you: this is a bug in ckplan",
        "  try:    the same command with --traceback, and report what it prints",
    ]


def test_interrupt_is_one_line(run: Run) -> None:
    ended = run("profile", "model.py:interrupted")
    assert ended.code == terminal.INTERRUPTED == 130
    assert ended.err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in ended.err


def test_reader_that_has_had_enough_is_no_error(trace: Path) -> None:
    shell = f"'{sys.executable}' -m ckplan show {trace} --json | true; exec >&2"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        ["/bin/bash", "-c", f"{shell}; exit ${{PIPESTATUS[0]}}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in ended.stderr
    assert "Broken pipe" not in ended.stderr


def test_optimizers_are_those_of_the_training_step() -> None:
    assert tuple(optimizer.value for optimizer in cli.Optimizer) == OPTIMIZERS


def test_module_runs_as_the_program(folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "ckplan", "--version"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == f"ckplan {ckplan.__version__}\n"
