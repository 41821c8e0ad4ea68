"""What the measuring programs share: options, the machine, and files of results.

It wakes no torch: in ``speed.py``, the memory of a child counts from its parent's.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from ckplan import files
from ckplan.errors import CkplanError
from ckplan.units import format_bytes, format_percent

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "scripts" / "results"
HARDWARE = "cpu"
SEED = 0
MOST_ERROR = 0.02  # of a predicted peak against the measured one

GPT2_XL = (
    "layers=48",
    "width=1600",
    "heads=25",
    "batch=1",
    "length=1024",
    "vocab=50257",
)

LLAMA_3_8B = (
    *("layers=32", "width=4096", "heads=32", "groups=8", "inner=14336"),
    *("vocab=128256", "batch=1", "length=8192", "dtype=bfloat16"),
)

_KEEP_MEMORY = {  # of glibc: no block of its own for a tensor, nothing given back
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}
_ORDER = ("mlp", "gpt2", "bert", "llama", "vit", "resnet50", "unet")
_ZOO = "zoo"
_PACKAGES = ("torch", "transformers", "timm", "diffusers", "ckplan")
_VERIFICATION_FAILED = 4  # exit code: there is a result, which does not pass


@dataclass(frozen=True)
class Report:
    """What a program found."""

    name: str  # of the file of results
    title: str
    doc: str | None  # of the program: what it proves, then how to run it
    parts: Sequence[str]  # tables and paragraphs of Markdown
    broken: Sequence[str]  # where the claim does not hold; none: it does


# -- the command line --------------------------------------------------------------


def make_parser(
    doc: str | None,
    *,
    settings: bool = False,
    only: bool = False,
    gpu: str | None = None,
    output: bool = True,
) -> argparse.ArgumentParser:
    """A parser with options that most programs have.

    Args:
        doc: The program's docstring.
        settings: With ``--set``.
        only: With ``--only``.
        gpu: With ``--gpu``, of which this is the default.
        output: With ``-o``, the file of results.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    many: dict[str, Any] = {"action": "append", "default": []}
    if settings:
        parser.add_argument(
            "--set",
            dest="settings",
            metavar="NAME=VALUE",
            help="an option of the workload, to try this program on a small one; "
            "repeatable",
            **many,
        )
    if output:
        parser.add_argument(
            "-o",
            "--output",
            type=Path,
            help="the file of results  [default: scripts/results/NAME_cpu_YYYYMM.md, "
            "or none if only a part is measured]",
        )
    if only:
        parser.add_argument(
            "--only",
            metavar="NAME",
            help="this one alone; repeatable  [default: all]",
            **many,
        )
    if gpu:
        parser.add_argument(
            "--gpu", metavar="NAME", default=gpu, help=f"the card  [default: {gpu}]"
        )
    return parser


def add_rounds(
    parser: argparse.ArgumentParser, *, rounds: int, repeats: int, dropped: int
) -> None:
    """The options for programs that time steps in turns, with their defaults."""
    parser.add_argument(
        "--rounds",
        metavar="N",
        type=int,
        default=rounds,
        help=f"steps of each, the first {dropped} dropped  [default: {rounds}]",
    )
    parser.add_argument(
        "--repeats",
        metavar="N",
        type=int,
        default=repeats,
        help=f"how often all of it, in fresh processes  [default: {repeats}]",
    )


def run(main: Callable[[], int]) -> NoReturn:
    """End with the exit code of a program, or with an error in three lines."""
    try:
        sys.exit(main())
    except CkplanError as error:
        say(str(error))
        sys.exit(error.exit_code)


def say(text: str) -> None:
    """Write what is no result: how far the work has come."""
    print(text, file=sys.stderr, flush=True)


# -- workloads ---------------------------------------------------------------------


def keep_memory() -> None:
    """Let this process, which measures ops, and those started here keep memory.

    The C library looks when a process begins, so this one begins again.
    """
    environment = {**os.environ, **_KEEP_MEMORY}
    if environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def workloads(only: Iterable[str] = ()) -> list[str]:
    """Names of all workloads, or of some, in the order in which results list them.

    Those of the zoo are not among them.
    """
    folder = ROOT / "configs" / "workloads"
    there = sorted(path.stem for path in folder.glob("[!_]*.py") if path.stem != _ZOO)
    return chosen([name for name in (*_ORDER, *there) if name in there], only)


def chosen(names: Iterable[str], only: Iterable[str]) -> list[str]:
    """The names that ``--only`` asks for, in order; without any, all of them.

    Raises:
        CkplanError: There is no such name.
    """
    there, wanted = dict.fromkeys(names), set(only)
    for name in wanted - set(there):
        raise CkplanError(
            f"cannot find {name!r}",
            needed=f"one of {', '.join(there)}",
            hint="leave --only out for all of them",
        )
    return [name for name in there if name in wanted or not wanted]


def zoo() -> list[str]:
    """Names of the zoo's models: its public factories."""
    tree = ast.parse((ROOT / workload_path(_ZOO)).read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return [function.name for function in functions if function.args.kwonlyargs]


def everything() -> list[str]:
    """Names of all workloads, then those of the zoo."""
    return [*workloads(), *zoo()]


def location_of(name: str) -> str:
    """Where a workload is, or a model of the zoo."""
    plain = name in workloads()
    return str(
        ROOT / (workload_path(name) if plain else f"{workload_path(_ZOO)}:{name}")
    )


def workload_path(name: str) -> str:
    """A workload's file, from the root of the repository."""
    return f"configs/workloads/{name}.py"


def with_settings(settings: Iterable[str]) -> list[str]:
    """Options of a workload, as the command line takes them."""
    return [word for setting in settings for word in ("--set", setting)]


def run_ckplan(*argv: str) -> dict[str, Any]:
    """Run a command in a process of its own; returns its JSON.

    Raises:
        CkplanError: It failed without a result.
    """
    done = subprocess.run(
        [sys.executable, "-m", "ckplan", *argv, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode in (0, _VERIFICATION_FAILED) and done.stdout:
        found: dict[str, Any] = json.loads(done.stdout)
        return found
    raise CkplanError(
        f"`{shlex.join(['ckplan', *argv])}` failed: {error_line(done.stderr)}",
        needed="a command that ends with exit code 0",
        hint="run it alone, from the root of the repository",
    )


def error_line(stderr: str) -> str:
    """The last error that a program said, or else its last line."""
    lines = stderr.strip().splitlines() or ["it said nothing"]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines)[-1].removeprefix("error: ")


def from_root(path: Path) -> Path:
    """A path from the root of the repository, if it is within."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def recorded() -> dict[str, Path]:
    """The files of ``traces/``, by the names of their workloads."""
    paths = sorted((ROOT / "traces").glob("*.json.gz"))
    return {path.name.removesuffix(".json.gz"): path for path in paths}


# -- results -----------------------------------------------------------------------


def finish(
    report: Report, args: argparse.Namespace, *, whole: bool | None = None
) -> int:
    """Print a report and write its file; returns the exit code.

    Args:
        report: What was found.
        args: Of a parser of ``make_parser``.
        whole: Whether all was measured; a part replaces no file that is not asked for.
            By default, whether ``--only`` and ``--set`` were not given.
    """
    if whole is None:
        whole = not any(vars(args).get(part) for part in ("only", "settings"))
    claim = (report.doc or "").partition("\n\n    ")[0]
    parts = [*report.parts, _verdict(report.broken)]
    print("\n\n".join(parts))
    path = args.output or (results_path(report.name) if whole else None)
    if path is None:
        say("wrote nothing: only a part was measured; -o FILE keeps it")
    else:
        write_page(path, report.title, [claim, *parts])
    return 1 if report.broken else 0


def results_path(name: str, suffix: str = ".md", hardware: str = HARDWARE) -> Path:
    """The usual file of results: of this month, or of the rows kept so far."""
    kept = sorted(RESULTS.glob(f"{name}_{hardware}_??????.jsonl"))
    month = kept[-1].stem[-6:] if kept else _now().strftime("%Y%m")
    return RESULTS / f"{name}_{hardware}_{month}{suffix}"


def write_page(path: Path, title: str, parts: Iterable[str]) -> None:
    """Write a page of Markdown, with how it was made at its end."""
    files.write_text(path, format_page(title, parts), force=True)
    say(f"wrote {path}")


def format_page(title: str, parts: Iterable[str], device: str = "no GPU used") -> str:
    """A page of Markdown, with how it was made at its end."""
    page = [f"# {title}", *(part.strip() for part in parts), _how_it_was_made(device)]
    return "\n\n".join(page) + "\n"


def make_table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int = 1
) -> str:
    """A table in Markdown: ``texts`` columns at the left, then numbers at the right.

    >>> print(make_table(["model", "peak"], [["mlp", "1.50 GiB"]]))
    | model |     peak |
    | :---- | -------: |
    | mlp   | 1.50 GiB |
    """
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (headers, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = [
        ":" + "-" * (width - 1) if place < texts else "-" * (width - 1) + ":"
        for place, width in enumerate(widths)
    ]
    return "\n".join(
        "| " + " | ".join(_pad(cell, widths[i], i < texts) for i, cell in line) + " |"
        for line in map(enumerate, (lines[0], rule, *lines[1:]))
    )


def format_error(predicted_bytes: int, measured_bytes: int) -> str:
    """How far a prediction is from what was measured, as in a table."""
    percent = round(100 * relative_error(predicted_bytes, measured_bytes), 2) + 0.0
    return f"{percent:+.2f} %"  # never "-0.00"


def format_overhead(overhead: float | None) -> str:
    """An overhead, as in a table."""
    return "n/a" if overhead is None else format_percent(overhead, sign=True)


def relative_error(predicted_bytes: int, measured_bytes: int) -> float:
    """The same as a fraction."""
    return predicted_bytes / measured_bytes - 1


def _pad(cell: str, width: int, left: bool) -> str:
    return cell.ljust(width) if left else cell.rjust(width)


def _verdict(broken: Sequence[str]) -> str:
    if not broken:
        return "**Kept.**"
    return "\n".join(["**Broken:**", "", *(f"- {line}" for line in broken)])


def _how_it_was_made(device: str) -> str:
    python = f"{platform.python_implementation()} {platform.python_version()}"
    name = str(from_root(Path(sys.argv[0]).resolve()))
    rows = [
        ("date", _now().date().isoformat()),
        ("command", f"`{shlex.join(['python', name, *sys.argv[1:]])}`"),
        ("machine", f"{_machine()}, {device}"),
        ("system", platform.platform()),
        ("Python", python),
        *((package, _version(package)) for package in _PACKAGES),
    ]
    return make_table(["made", "with"], rows, texts=2)


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _machine() -> str:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cores = os.cpu_count()
    return f"{_cpu_model()}, {cores} cores, {format_bytes(memory_bytes)}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine()).strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
