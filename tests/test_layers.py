"""The hourglass: which room may import which, read from the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import networkx
import pytest

PACKAGE = Path(__file__).parent.parent / "ckplan"
MAX_LINES = 350

BASICS = {"errors", "units", "files", "collector", "available"}
WAISTS = {"graph", "plan"}
CORE = WAISTS | {"simulating", "gpus"}
ENGINE = {"applying.tensors", "applying.moving", "applying.rebuilding"} | {
    "applying.recording"
}
# In import order: each room imports only from rooms above it, and only from these.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "units": BASICS,
    "files": BASICS,
    "collector": set(),
    "available": set(),
    "copies": set(),
    "graph": BASICS,
    "graph.sharding": BASICS | {"graph"},
    "plan": BASICS | {"graph"},
    "gpus": BASICS | {"plan"},
    "simulating": BASICS | WAISTS | {"gpus"},
    "solving": BASICS | CORE,
    "tuning": BASICS | CORE | {"graph.sharding", "solving", "copies"},
    "fitting": BASICS | CORE | {"solving", "tuning"},
    "ejecting": BASICS | CORE | {"solving"},
    "encodings": set(),
    "sources.batches": BASICS,
    "sources": BASICS | {"sources.batches"},
    "training": BASICS | {"sources", "plan"},
    "applying.tensors": BASICS | CORE | {"encodings", "training"},
    "applying.moving": BASICS | {"simulating", "encodings", "applying.tensors"},
    "applying.rebuilding": BASICS
    | CORE
    | {"encodings", "applying.tensors", "applying.moving"},
    "applying.recording": BASICS
    | CORE
    | {"encodings", "training", "applying.tensors", "applying.moving"}
    | {"applying.rebuilding"},
    "applying.guards": BASICS | CORE | ENGINE | {"encodings"},
    "applying.rerunning": BASICS | {"applying.tensors", "applying.rebuilding"},
    "applying.hooks": BASICS
    | WAISTS
    | ENGINE
    | {"training", "applying.guards", "applying.rerunning"},
    "applying.tiling": BASICS | {"encodings", "plan", "training", "applying.hooks"},
    "applying": BASICS
    | WAISTS
    | {"training", "applying.moving", "applying.hooks", "applying.tiling"},
    "tracing.faking": {"collector", "training"},
    "tracing.recording": BASICS
    | WAISTS
    | {"training", "applying.tensors", "applying.rerunning", "tracing.faking"},
    "tracing.costs": BASICS
    | CORE
    | {"encodings", "training", "applying", "applying.moving", "tracing.recording"},
    "tracing.hazards": BASICS
    | CORE
    | {"training", "applying.tensors", "tracing.faking", "tracing.recording"},
    "tracing.cuda": BASICS
    | CORE
    | {"tracing.faking", "tracing.recording", "tracing.costs"},
    "tracing.steps": BASICS
    | CORE
    | {"solving", "training", "applying", "applying.tiling", "tracing.costs"}
    | {"tracing.faking"},
    "tracing": BASICS
    | CORE
    | {"graph.sharding", "encodings", "training", "applying", "applying.tensors"}
    | {"tracing.faking"}
    | {"tracing.recording", "tracing.costs", "tracing.hazards", "tracing.cuda"}
    | {"tracing.steps"},
    "compiling": BASICS
    | CORE
    | {
        "copies",
        "encodings",
        "solving",
        "training",
        "applying",
        "tracing",
        "tracing.faking",
    }
    | {"tracing.recording", "tracing.costs", "tracing.cuda"},
    "verifying": BASICS
    | CORE
    | {"solving", "training", "applying", "applying.tensors", "applying.rerunning"}
    | {"applying.moving"}
    | {"compiling", "applying.hooks", "tracing", "tracing.faking", "tracing.recording"}
    | {"tracing.costs", "tracing.cuda"},
    "integrations": BASICS | WAISTS | {"applying", "solving", "tracing", "training"},
    "autotune": BASICS
    | {"graph", "training", "solving", "tuning", "tracing", "compiling"},
    "auto": BASICS
    | {"training", "solving", "tuning", "applying", "tracing", "autotune"},
    "report": BASICS
    | CORE
    | {"solving", "fitting", "tuning", "verifying"},  # verifying: types alone
}
FRONT = {"cli", "__main__", "__init__"}  # which may import all
ABOVE_TORCH = {*ROOMS} - {
    room
    for room in ROOMS
    if room.partition(".")[0]
    in {"encodings", "sources", "training", "applying", "compiling", "tracing"}
    | {"verifying", "integrations"}
}
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and parts[1:] else parts)


MODULES = {module_of(path): path for path in FILES}


def room_of(module: str) -> str:
    if module in ROOMS or module in FRONT:
        return module
    return module.rpartition(".")[0]


def imports(path: Path, *, types: bool) -> set[str]:
    """Names that a file imports; those under ``if TYPE_CHECKING`` only on demand."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if for_types and not types:
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def modules_imported(path: Path, *, types: bool = True) -> set[str]:
    """Modules of ckplan among them."""
    names = (name.removeprefix("ckplan.") for name in imports(path, types=types))
    return {
        name if name in MODULES else name.rpartition(".")[0]
        for name in names
        if name in MODULES or name.rpartition(".")[0] in MODULES
    }


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    here = room_of(module)
    if here.partition(".")[0] in FRONT:
        return
    for other in modules_imported(MODULES[module]):
        there = room_of(other)
        assert there == here or there in ROOMS[here], f"{module} imports {other}"


def test_rooms_are_listed_in_import_order() -> None:
    seen = set[str]()
    for room, allowed in ROOMS.items():
        assert allowed <= seen | {*BASICS, room}, room
        seen.add(room)
    known = {room_of(module).partition(".")[0] for module in MODULES}
    assert known == {room.partition(".")[0] for room in ROOMS} | FRONT


def test_no_import_goes_in_a_circle_not_even_for_types() -> None:
    graph = networkx.DiGraph(
        (module, other)
        for module, path in MODULES.items()
        for other in modules_imported(path)
    )
    circles = [c for c in networkx.strongly_connected_components(graph) if len(c) > 1]
    assert not circles


@pytest.mark.parametrize("room", sorted(ABOVE_TORCH))
def test_the_core_imports_no_torch(room: str) -> None:
    files = [path for module, path in MODULES.items() if room_of(module) == room]
    assert files
    for path in files:
        found = imports(path, types=False)
        assert not any(name.partition(".")[0] == "torch" for name in found), path
        torch_side = {*ROOMS} - ABOVE_TORCH
        for other in modules_imported(path, types=False):
            allowed = room in ("auto", "autotune") or room_of(other) not in torch_side
            assert allowed, f"{path} imports {other}"


@pytest.mark.parametrize("module", MODULES)
def test_no_file_is_long(module: str) -> None:
    assert len(MODULES[module].read_text().splitlines()) <= MAX_LINES


def test_the_map_has_every_room_and_its_rows_are_in_import_order() -> None:
    table = (PACKAGE / "README.md").read_text().partition("## Folders")[2]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    row_of = {
        name.removesuffix(".py").strip("/"): number
        for number, row in enumerate(rows)
        for name in re.findall(r"`([a-z_]+(?:\.py|/))`", row)
    }
    tops = {room.partition(".")[0] for room in ROOMS}
    assert tops | {"cli"} == {*row_of}
    for room, allowed in ROOMS.items():
        for other in allowed:
            upper, lower = row_of[other.split(".")[0]], row_of[room.split(".")[0]]
            assert upper <= lower, f"{room} imports {other}"


def test_tests_mirror_the_rooms() -> None:
    tests = Path(__file__).parent
    folders = {p.parent.relative_to(tests) for p in tests.rglob("test_*.py")}
    for folder in folders - {Path()}:
        assert (PACKAGE / folder).is_dir(), folder
    rooms = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").is_file()}
    assert rooms == {folder.parts[0] for folder in folders if folder.parts}
