"""The tests marked ``gpu`` that matter most, in an order and a time of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from _card_results import FAILED, PASSED, SKIPPED, TestRow
from _measuring import ROOT

FILE = "tests/tracing/cuda/test_on_gpu.py"
TESTS = (
    "test_a_planned_step_keeps_its_word_and_its_bits",
    "test_verify_takes_its_steps_on_the_gpu",
    "test_a_compiled_plan_keeps_its_word_and_its_bits",
    "test_a_budget_is_proven_on_a_larger_card",
    "test_costs_are_measured_on_the_device",
    "test_a_profile_leaves_the_gpu_as_it_was",
    "test_predicted_is_measured_within_one_percent",
)
ALL = tuple(f"{FILE}::{name}" for name in TESTS)
_OUTCOMES = {"PASSED": PASSED, "FAILED": FAILED, "ERROR": FAILED, "SKIPPED": SKIPPED}
_LINE = re.compile(r"^(\S+::\S.*?) (PASSED|FAILED|ERROR|SKIPPED)\b(?: \((.*)\))?")
_REASON = re.compile(r"^(?:FAILED|ERROR) (\S+::\S.*?) - (.*)")
# Neither plugins nor warnings of the packages there are a reason to fail.
_OPTIONS = ("-o", "addopts=", "-o", "filterwarnings=", "-p", "no:cacheprovider")


def run_tests(seconds: float, tests: Sequence[str] = ALL) -> list[TestRow]:
    """Run tests in a process of their own for so many seconds, and not longer."""
    if find_spec("pytest") is None:
        return [TestRow(FILE, SKIPPED, "needs pytest, and there is none")]
    paths = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    # one line for each test at once, so that a cut run leaves what it had
    with tempfile.TemporaryFile("w+") as output:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-v", "-rfE", *_OPTIONS, *tests],
                cwd=ROOT,
                env={**os.environ, "COLUMNS": "1000", "PYTHONPATH": ":".join(paths)},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=max(seconds, 1.0),
                check=False,
            )
            ended = "" if done.returncode in (0, 1) else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"not reached within {seconds:.0f} s"
        output.seek(0)
        text = output.read()
    return outcomes(text, ended)


def outcomes(text: str, ended: str) -> list[TestRow]:
    """The outcomes in what pytest printed.

    Args:
        text: Lines of ``pytest -v``, perhaps cut.
        ended: Why there are no more; "" if all ran.
    """
    lines = text.splitlines()
    reasons = {m[1]: m[2] for line in lines if (m := _REASON.match(line))}
    found = [
        TestRow(_short(m[1]), _OUTCOMES[m[2]], m[3] or reasons.get(m[1], ""))
        for line in lines
        if (m := _LINE.match(line))
    ]
    if ended.startswith("exit"):
        said = next((line for line in reversed(lines) if line.strip()), "")
        found.append(TestRow(_short(FILE), FAILED, f"{ended}: {said}"))
    elif ended:
        found.append(TestRow("the rest", SKIPPED, ended))
    return found


def _short(name: str) -> str:
    path, colons, test = name.partition("::")
    return f"{Path(path).name}{colons}{test}"
