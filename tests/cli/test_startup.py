"""What must not wake torch does not: it takes seconds to import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn, randn

import ckplan
from ckplan.graph import file as trace_file

ROOT = Path(__file__).parents[2]
SLOW = {"torch", "numpy", "networkx", "transformers"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("startup")
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    found = ckplan.profile(nn.Sequential(*layers), randn(4, 8))
    trace_file.save(found, folder / "trace.json.gz")
    (folder / "plan.yaml").write_text("ckplan: 1\nregions:\n  - calls: '0'\n")
    return folder


def woken(code: str, folder: Path) -> set[str]:
    """Top-level modules that are there after some code ran in a new process."""
    found = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('\\n', *sys.modules)"],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.partition(".")[0] for name in found.stdout.splitlines()[-1].split()}


def after_command(*argv: str, folder: Path) -> set[str]:
    code = f"""
import sys
from ckplan.cli import main
sys.argv[1:] = {argv!r}
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
"""
    return woken(code, folder)


def test_import_wakes_nothing(folder: Path) -> None:
    found = woken("import ckplan", folder)
    assert not found & {*SLOW, "typer", "rich", "yaml"}


@pytest.mark.parametrize(
    "command",
    ["", "profile", "solve", "frontier", "compare", "show", "gpus", "verify", "eject"],
)
def test_help_wakes_nothing_slow(command: str, folder: Path) -> None:
    found = after_command(*command.split(), "--help", folder=folder)
    assert not found & {*SLOW, "rich", "yaml"}


def test_version_wakes_nothing_slow(folder: Path) -> None:
    assert not after_command("--version", folder=folder) & {*SLOW, "rich", "yaml"}


@pytest.mark.parametrize("file", ["trace.json.gz", "plan.yaml"])
def test_show_wakes_nothing_slow(file: str, folder: Path) -> None:
    assert not after_command("show", file, folder=folder) & SLOW


def test_gpus_wakes_nothing_slow(folder: Path) -> None:
    assert not after_command("gpus", "L4", folder=folder) & SLOW


def test_solve_wakes_no_torch(folder: Path) -> None:
    argv = ("solve", "trace.json.gz", "--budget", "1GiB", "--force")
    assert not after_command(*argv, folder=folder) & {"torch", "transformers"}


@pytest.mark.parametrize("command", ["frontier", "compare"])
def test_frontier_and_compare_wake_no_torch(command: str, folder: Path) -> None:
    found = after_command(command, "trace.json.gz", folder=folder)
    assert not found & {"torch", "transformers", "matplotlib"}


def test_fit_of_a_trace_wakes_no_torch(folder: Path) -> None:
    found = after_command("fit", "trace.json.gz", "--budget", "1GiB", folder=folder)
    assert not found & {"torch", "transformers"}


def test_eject_of_a_trace_wakes_no_torch(folder: Path) -> None:
    argv = ("eject", "plan.yaml", "trace.json.gz")
    assert not after_command(*argv, folder=folder) & {"torch", "transformers"}


@pytest.mark.parametrize("name", ckplan.__all__)
def test_public_names_are_there(name: str) -> None:
    assert getattr(ckplan, name)
    assert name in dir(ckplan)


@pytest.mark.parametrize(
    "name",
    [
        "CkplanError",
        "Graph",
        "Plan",
        "fit",
        "frontier",
        "load_graph",
        "load_plan",
        "solve",
    ],
)
def test_names_of_the_core_wake_no_torch(name: str, folder: Path) -> None:
    assert "torch" not in woken(f"import ckplan; ckplan.{name}", folder)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'ckplan' has no attribute 'nonsense'"):
        ckplan.nonsense  # noqa: B018


def test_python_solves_for_a_budget_as_people_write_it(folder: Path) -> None:
    plan = ckplan.solve(ckplan.load_graph(folder / "trace.json.gz"), budget="1GiB")
    assert plan.budget_bytes == 2**30
    assert plan.regions == ()
