"""The hourglass: who may import whom, read from the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ckplan"
TORCH_SIDE = {
    "encodings",
    "integrations",
    "training",
    "tracing",
    "applying",
    "verifying",
}
# What each may import of ckplan, beside itself and the files at the root.
FOLDERS = {
    "solving": set(),
    "auto": {"tracing", "solving", "applying"},
    "eject": {"solving"},
    "elsewhere": {"solving", "eject"},
    "integrations": {"applying"},
    "report": {"solving", "verifying"},  # verifying: types only, see below
    "training": set(),
    "sharding": set(),
    "tracing": {"training", "sharding", "applying"},
    "applying": {"training"},
    "verifying": {"training", "tracing", "solving", "applying"},
}
FRONT = {"cli", "__main__", "__init__"}
FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere but under ``if TYPE_CHECKING``."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    here = room(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "torch":
            assert here in TORCH_SIDE | FRONT, f"{path} imports torch"
        if parts[0] != "ckplan" or len(parts) < 2 or here in FRONT:
            continue
        there = parts[1]
        assert there not in FRONT, f"{path} imports {name}"
        if there in FOLDERS and there != here:
            assert there in FOLDERS.get(here, set()), f"{path} imports {name}"


def test_the_report_wakes_nothing_on_the_torch_side() -> None:
    for path in (PACKAGE / "report").glob("*.py"):
        for name in imports(path):
            assert not {*name.split(".")} & {"torch", *TORCH_SIDE}, f"{path}: {name}"


def test_plan_and_simulate_know_no_solver() -> None:
    names = "plan", "plan_file", "simulate", "graph", "program", "resolve"
    for name in (f"{name}.py" for name in names):
        assert not any("solving" in found for found in imports(PACKAGE / name))


def test_the_map_has_every_file_and_imports_go_down_its_rows() -> None:
    table = (PACKAGE / "README.md").read_text().partition("## Folders")[2]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    row_of = {
        name.removesuffix(".py").strip("/"): number
        for number, row in enumerate(rows)
        for name in re.findall(r"`([a-z_]+(?:\.py|/))`", row)
    }
    assert {room(path) for path in FILES} - {"__init__", "__main__"} == {*row_of}
    for path in PACKAGE.glob("*.py"):
        mine = row_of.get(path.stem)
        for name in imports(path) if mine is not None else ():
            parts = name.split(".")
            if parts[0] == "ckplan" and len(parts) > 1:
                assert row_of[parts[1]] <= mine, f"{path.name} imports {name}"
