"""Shows how long `ckplan tune` takes, imports and profiles included.

Each command runs in a fresh process, several times; the median counts. "Imports" is a
process that imports the workload's file and ends. "Processor" is of all processes:
steps for a card are recorded beside the search where a second processor is free. The
best setting was recorded at its batch, not drawn, and its plan replayed there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import _measuring as measuring

from ckplan.units import format_bytes


class _Case(NamedTuple):
    title: str
    workload: str
    settings: tuple[str, ...]
    gpu: str
    most_seconds: float


CASES = (
    _Case("GPT-2, 12 x 384", "gpt2", (), "RTX 4090", 10.0),
    _Case("GPT-2 XL", "gpt2", measuring.GPT2_XL, "H100", 60.0),
    _Case("Llama-3 8B in bf16", "llama", measuring.LLAMA_3_8B, "H200", 60.0),
)
HEADERS = (
    *("model", "card", "imports", "seconds", "of rounds", "processor", "asked"),
    *("best batch", "recorded", "peak", "largest planned"),
)


def seconds(args: argparse.Namespace) -> tuple[str, Sequence[str]]:
    """The table, and where a search takes longer than it may."""
    rows, broken = [], []
    for case in CASES:
        measuring.say(case.title)
        path = measuring.workload_path(case.workload)
        code = f"import runpy; runpy.run_path({path!r})"
        imports = _run([sys.executable, "-c", code])[0]
        settings = measuring.with_settings(case.settings)
        command = [sys.executable, "-m", "ckplan", "tune", path, *settings]
        runs = [
            _run([*command, "--gpu", case.gpu, "--json"]) for _ in range(args.rounds)
        ]
        walls = sorted(wall for wall, _, _ in runs)
        took = median(walls)
        found = json.loads(runs[-1][2])
        best = found["best"]
        rows.append(
            [
                *(case.title, case.gpu, f"{imports:.1f} s", f"{took:.1f} s"),
                f"{walls[0]:.1f} to {walls[-1]:.1f} s",
                f"{median(cpu for _, cpu, _ in runs):.1f} s",
                f"{case.most_seconds:g} s",
                str(best["batch"]),
                "yes" if best["profiled"] else "no",
                format_bytes(best["peak_bytes"]),
                str(found["largest_batch"]["planned"]),
            ]
        )
        if took > case.most_seconds:
            broken.append(f"{case.title}: {took:.1f} s, asked {case.most_seconds:g}")
        if not best["profiled"]:
            broken.append(f"{case.title}: the best setting was not recorded")
    return measuring.make_table(HEADERS, rows, texts=2), broken


def _run(command: Sequence[str]) -> tuple[float, float, str]:
    """Wall seconds of a command, processor seconds, and what it prints."""
    before, begin = os.times(), time.perf_counter()
    done = subprocess.run(
        command, cwd=measuring.ROOT, capture_output=True, text=True, check=True
    )
    wall, after = time.perf_counter() - begin, os.times()
    user = after.children_user - before.children_user
    return wall, user + after.children_system - before.children_system, done.stdout
