"""READMEs: commands run, code compiles, plans load, links resolve, tests exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from ckplan.cli import app
from ckplan.plan.file import loads
from ckplan.training.step import Training, make_step
from ckplan.training.workload import as_workload

ROOT = Path(__file__).parent.parent
READMES = [
    ROOT / "README.md",
    *(
        path
        for folder in ("ckplan", "configs", "scripts", "tests", "traces")
        for path in sorted((ROOT / folder).rglob("*.md"))
        if path.name in ("README.md", "CHANGELOG.md")
    ),
]
MOST_LINES = 200
# Rooms whose README is a document of its own:
LONG = {"", "applying", "compiling", "applying/moving", "applying/tiling"} | {
    "tracing/cuda"
}
PACKAGES = {
    "transformers": "transformers",
    "Lightning": "lightning",
    "Accelerate": "accelerate",
    "peft": "peft",
}
KNOWN = get_command(app).commands  # type: ignore[attr-defined]
SMALL = ["--set", "batch=2048"]  # for the model of the README, if not on a card
TINY_LLAMA = {  # the model of hf:FOLDER
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
TRAIN = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""
WHOLE = {  # what prose names in short
    "show FILE": "show model.json.gz",
    "gpus NAME": "gpus T4",
    "show traces/NAME.json.gz": "show traces/mlp.json.gz",
    "profile hf:FOLDER": "profile hf:FOLDER --batch 8x16 -o folder.json.gz",
    "profile --device cuda": "profile model.py --device cuda",
    "eject --as deepspeed": "eject plan.yaml model.json.gz --as deepspeed",
    "verify --compile": "verify model.py --compile --budget 80%",
    "verify --report": "verify model.py plan.yaml --fake --trace model.json.gz "
    "--report verified.html",
}
NOT_RUN = {  # how it begins, and why
    "verify model.py --compile": "a C++ compiler; tests/compiling runs it",
    "compare model.py --compile": "a minute of planning; tests/compiling runs one",
    "tune ": "a minute each; tests/test_tune.py and tests/tuning search",
    "profile configs/workloads/": "minutes: large models; scripts/make_traces runs it",
}
IDS = [str(path.relative_to(ROOT)) for path in READMES]


def blocks(path: Path, *languages: str) -> list[str]:
    found = re.findall(
        r"^```(\w*)\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE
    )
    assert all(language for language, _ in found), f"{path}: a block names no language"
    return [text for language, text in found if language in languages]


def commands(path: Path) -> list[list[str]]:
    """Uses of ckplan: lines of shell blocks, and code between backticks."""
    lines = [
        line for text in blocks(path, "sh", "console") for line in text.splitlines()
    ]
    lines += re.findall(r"`(ckplan [a-z]+ [^`]*)`", path.read_text())
    found = (shlex.split(line.removeprefix("$ "), comments=True) for line in lines)
    return [words[1:] for words in found if words[:1] == ["ckplan"]]


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model of the README, its trace and a plan."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "model.py").write_text(blocks(ROOT / "README.md", "python")[0])
    shutil.copytree(ROOT / "traces", folder / "traces")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "train.py").write_text(TRAIN)
    (folder / "FOLDER").mkdir()
    (folder / "FOLDER" / "config.json").write_text(json.dumps(TINY_LLAMA))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("profile model.py -o model.json.gz")
        run("solve model.json.gz --budget 60% -o plan.yaml")
    return folder


def run(line: str) -> None:
    """Run a command with a smaller model, over files that are there."""
    words = shlex.split(line)
    options = {option for one in KNOWN[words[0]].params for option in one.opts}
    more = SMALL if "model.py" in words and "--gpu" not in words else []
    more = more + ["--force"] * ("--force" in options - {*words})
    more = more + ["--steps", "1"] * ("--steps" in options)
    ended = CliRunner().invoke(app, [*words, *more])
    assert ended.exit_code == 0, f"{line}\n{ended.output}"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # libraries about themselves
@pytest.mark.parametrize("path", READMES, ids=IDS)
def test_every_command_runs_or_parses(
    path: Path, ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [shlex.join(words) for words in commands(path)]
    lines = dict.fromkeys(WHOLE.get(line, line) for line in found)
    if not lines:
        return
    folder = shutil.copytree(ready, tmp_path / "folder", symlinks=True)
    monkeypatch.chdir(folder)
    for line in lines:
        name, *words = shlex.split(line)
        KNOWN[name].make_context(name, words)  # raises if there is no such option
        if not any(line.startswith(start) for start in NOT_RUN):
            run(line)


@pytest.mark.parametrize("path", READMES, ids=IDS)
def test_shell_blocks_parse(path: Path) -> None:
    for text in blocks(path, "sh"):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize("path", READMES, ids=IDS)
def test_python_compiles_and_plans_load(path: Path) -> None:
    for text in blocks(path, "python"):
        compile(text, str(path), "exec")
    for text in blocks(path, "yaml"):
        if text.startswith("ckplan:"):
            assert loads(text, str(path)).regions


def test_the_first_model_of_the_readme_trains() -> None:
    """What people copy: a classifier whose labels stay outside the model."""
    (text, *_) = blocks(ROOT / "README.md", "python")
    namespace: dict[str, object] = {}
    exec(compile(text, "README.md", "exec"), namespace)
    build = namespace["build"]
    workload = as_workload(build(layers=1, batch=4), "x")  # type: ignore[operator]
    make_step(workload, Training("none")).run()
    assert all(one.grad is not None for one in workload.model.parameters())


@pytest.mark.parametrize("path", READMES, ids=IDS)
def test_links_resolve(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{path}: {link}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = [
                re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles
            ]
            assert anchor in anchors, f"{path}: {link}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES


def test_every_large_room_says_what_it_is() -> None:
    package = ROOT / "ckplan"
    rooms = [p.parent for p in package.rglob("__init__.py")]
    for room in rooms:
        files = [p for p in room.glob("*.py") if p.name != "__init__.py"]
        if len(files) <= 5:
            continue
        name = str(room.relative_to(package)).strip(".")
        lines = (room / "README.md").read_text().splitlines()
        assert len(lines) >= 10, name
        assert len(lines) <= 40 or name in LONG, name


def test_files_that_readmes_of_rooms_name_are_there() -> None:
    package = ROOT / "ckplan"
    for path in package.rglob("README.md"):
        for name in re.findall(
            r"`((?!test_|model\.py)[\w/]+\.(?:py|yaml))`", path.read_text()
        ):
            places = (path.parent, package, package / "cli", package / "applying", ROOT)
            below = (room for room in path.parent.rglob("*") if room.is_dir())
            assert any(
                (place / name).exists() for place in (*places, ROOT / "configs", *below)
            ), f"{path}: {name}"


def rows() -> list[list[str]]:
    """Cells of the table of what plans work in."""
    text = (ROOT / "ckplan" / "applying" / "README.md").read_text()
    section = text.partition("## In existing training loops")[2]
    lines = (x for x in section.partition("\n##")[0].splitlines() if x[:1] == "|")
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_row_names_a_test_that_is_there() -> None:
    header, _, *table = rows()
    assert header == ["what", "version", "line", "test", "result"]
    assert len(table) > 20
    tests = ROOT / "tests"
    files = ("integrations/test_integrations.py", "compiling/test_compiling.py")
    source = "".join((tests / file).read_text() for file in files)
    there = set(re.findall(r"def (test_\w+)", source))
    for row in table:
        names = re.findall(r"`(test_\w+(?:\.py)?)`", row[3])
        assert names, row
        for name in names:
            assert name in there or [*tests.rglob(name)], name


def test_versions_are_those_that_the_tests_run_with() -> None:
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    pins = dict(line.partition(";")[0].split("==") for line in lines if "==" in line)
    pins = {name: version.strip() for name, version in pins.items()}
    for what, version, *_ in rows()[2:]:
        found = next((PACKAGES[key] for key in PACKAGES if key in what), None)
        if version.startswith("torch "):
            assert version.removeprefix("torch ") == pins["torch"].partition("+")[0]
        elif found is not None:
            assert version == pins[found]
        else:  # DeepSpeed is no extra
            assert version == "0.19.8"
