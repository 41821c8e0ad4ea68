"""Proves that the command line is quick, and that profiling needs little memory.

``ckplan --help`` and ``ckplan solve`` run several times, each in a new process, and
must not wake torch; the medians are shown. ``ckplan profile`` records one step of GPT-2
XL (1.6 billion parameters) once, which would need tens of GiB if it really ran, and one
of a model of 8 billion parameters from nothing but its ``config.json``, with LoRA and
without. CPU seconds, wall seconds and the most resident memory are those the system
counted for the process.

    python scripts/speed.py
    python scripts/speed.py --set layers=2 --set width=400 --repeats 1
    python scripts/speed.py --only "hf:" -o 8b.md

Exit code 1 if any limit is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import _measuring as measuring

from ckplan.errors import CkplanError
from ckplan.units import GIB, KIB, format_bytes, format_seconds

HEADERS = (
    "command",
    "runs",
    "CPU",
    "limit",
    "wall",
    "limit",
    "memory",
    "limit",
    "torch woken",
)
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_TORCH_WOKEN = 77  # exit code of a command that should not have
_RUN = f"""
import sys
from ckplan.cli import main
code = 0
try:
    main()
except SystemExit as ended:
    code = ended.code
sys.exit(code or ({_TORCH_WOKEN} if "torch" in sys.modules else 0))
"""


@dataclass(frozen=True)
class Usage:
    """What one process used."""

    cpu_seconds: float
    wall_seconds: float
    peak_bytes: int  # resident
    torch_woken: bool


@dataclass(frozen=True)
class Contest:
    """A command and its limits; infinite is none."""

    argv: tuple[str, ...]
    shown: str
    repeats: int
    cpu_seconds: float = float("inf")
    wall_seconds: float = float("inf")
    peak_bytes: float = float("inf")
    may_wake_torch: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a command used: medians, the most memory, and torch if ever."""

    contest: Contest
    used: Usage

    def cells(self) -> list[str]:
        """The row of the table."""
        limits, used = self.contest, self.used
        peak_limit = limits.peak_bytes
        return [
            f"`{limits.shown}`",
            str(limits.repeats),
            format_seconds(used.cpu_seconds),
            _limit(limits.cpu_seconds),
            format_seconds(used.wall_seconds),
            _limit(limits.wall_seconds),
            format_bytes(used.peak_bytes),
            "-" if peak_limit == float("inf") else f"< {format_bytes(int(peak_limit))}",
            "yes" if used.torch_woken else "no",
        ]

    def broken(self) -> Iterator[str]:
        """The limits that do not hold."""
        limits, used, shown = self.contest, self.used, f"`{self.contest.shown}`"
        if used.cpu_seconds >= limits.cpu_seconds:
            yield f"{shown}: {format_seconds(used.cpu_seconds)} of CPU"
        if used.wall_seconds >= limits.wall_seconds:
            yield f"{shown}: {format_seconds(used.wall_seconds)}"
        if used.peak_bytes >= limits.peak_bytes:
            yield f"{shown}: {format_bytes(used.peak_bytes)} of memory"
        if used.torch_woken and not limits.may_wake_torch:
            yield f"{shown}: it wakes torch"


def main() -> int:
    """Run all commands, and report."""
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="ckplan-speed-") as folder:
        outcomes = [
            measure(contest)
            for contest in _contests(args, folder)
            if not args.only or args.only in contest.shown
        ]
    report = measuring.Report(
        name="speed",
        title="Speed of the command line",
        doc=__doc__,
        parts=[
            measuring.make_table(HEADERS, [outcome.cells() for outcome in outcomes])
        ],
        broken=[line for outcome in outcomes for line in outcome.broken()],
    )
    return measuring.finish(report, args)


def measure(contest: Contest) -> Outcome:
    """Run a command as often as it says."""
    measuring.say(contest.shown)
    used = [use(contest.argv) for _ in range(contest.repeats)]
    return Outcome(
        contest,
        Usage(
            statistics.median(usage.cpu_seconds for usage in used),
            statistics.median(usage.wall_seconds for usage in used),
            max(usage.peak_bytes for usage in used),
            any(usage.torch_woken for usage in used),
        ),
    )


def _contests(args: argparse.Namespace, folder: str) -> list[Contest]:
    trace: Path = args.trace
    if not trace.is_file():
        raise CkplanError(
            f"cannot measure `ckplan solve`: there is no trace '{trace}'",
            needed="a trace of configs/workloads/gpt2.py",
            hint="python scripts/make_traces --only gpt2, or --trace FILE",
        )
    solve = ("solve", str(measuring.from_root(trace)), "--budget", args.budget)
    workload = measuring.workload_path("gpt2")
    profile = (
        "profile",
        workload,
        *measuring.with_settings([*measuring.GPT2_XL, *args.settings]),
    )
    plan, step = f"{folder}/plan.yaml", f"{folder}/trace.json.gz"
    large, sizes = f"{folder}/8b.json.gz", ("--batch", "1x2048", "--dtype", "bf16")
    source = f"hf:{_folder_of_8b(folder)}"
    return [
        Contest(("--help",), "ckplan --help", args.repeats),
        Contest(
            (*solve, "-o", plan, "--force"),
            _shown(solve),
            args.repeats,
            cpu_seconds=1.0,
        ),
        Contest(
            (*profile, "-o", step, "--force", "--fresh"),
            _shown(profile),
            1,
            wall_seconds=30.0,
            peak_bytes=2 * GIB,
            may_wake_torch=True,
        ),
        *(
            Contest(
                ("profile", source, *more, "-o", large, "--force", "--fresh"),
                _shown(("profile", "hf:LLAMA_8B", *more)),
                1,
                wall_seconds=30.0,
                peak_bytes=2 * GIB,
                may_wake_torch=True,
            )
            for more in (sizes, (*sizes, "--lora", "r=16"))
        ),
    ]


def _folder_of_8b(folder: str) -> Path:
    """A folder with the configuration of a model of 8 billion parameters."""
    path = Path(folder) / "llama-8b" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(LLAMA_8B))
    return path.parent


def use(argv: Sequence[str]) -> Usage:
    """Run a command in a process of its own."""
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-c", _RUN, *argv],
            cwd=measuring.ROOT,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        _, status, used = os.wait4(process.pid, 0)
        wall_seconds = time.perf_counter() - start
        process.returncode = code = os.waitstatus_to_exitcode(status)
        if code not in (0, _TORCH_WOKEN):
            errors.seek(0)
            measuring.say(errors.read().decode(errors="replace").rstrip())
            raise CkplanError(
                f"`{_shown(argv)}` ended with exit code {code}",
                needed="a command that ends with exit code 0",
                hint="run it alone, from the root of the repository",
            )
    peak_bytes = used.ru_maxrss * (1 if sys.platform == "darwin" else KIB)
    cpu_seconds = used.ru_utime + used.ru_stime
    return Usage(cpu_seconds, wall_seconds, peak_bytes, code == _TORCH_WOKEN)


def _shown(argv: Sequence[str]) -> str:
    return shlex.join(["ckplan", *argv])


def _limit(seconds: float) -> str:
    return "-" if seconds == float("inf") else f"< {format_seconds(seconds)}"


def _arguments() -> argparse.Namespace:
    parser = measuring.make_parser(__doc__, settings=True)
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=lambda text: Path(text).resolve(),
        default=measuring.ROOT / "traces" / "gpt2.json.gz",
        help="what to solve  [default: traces/gpt2.json.gz]",
    )
    parser.add_argument(
        "--budget", metavar="SIZE", default="60%", help="for solve  [default: 60%%]"
    )
    parser.add_argument(
        "--repeats",
        metavar="N",
        type=int,
        default=5,
        help="runs of --help and solve  [default: 5]",
    )
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="only commands with this text"
    )
    return parser.parse_args()


if __name__ == "__main__":
    measuring.run(main)
