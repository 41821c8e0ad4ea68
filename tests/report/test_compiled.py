"""The report of ``verify --compile``."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from ckplan.report.compiled import compiled_error, compiled_report
from ckplan.verifying.compiled_steps import CompiledVerification

FOUND = CompiledVerification(
    budget_bytes=3 * 2**20,
    fits=True,
    replayed_peak_bytes=2 * 2**20,
    measured_peak_bytes=2 * 2**20,
    unplanned_replayed_peak_bytes=4 * 2**20,
    unplanned_measured_peak_bytes=4 * 2**20,
    loss_equal=True,
    gradients_equal=True,
    buffers_equal=True,
    random_state_equal=True,
    different=(),
    largest_difference=0.0,
    largest_difference_from_eager=None,
    predicted_overhead=0.05,
    overhead=0.021,
    step_seconds=0.2,
    unplanned_step_seconds=None,
)


def shown(found: CompiledVerification) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(compiled_report(found))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_peaks_seconds_and_bits_are_shown() -> None:
    assert FOUND.passed
    text = shown(FOUND)
    assert "peak unplanned  4.00 MiB  4.00 MiB" in text
    assert "+2.1 %" in text
    assert text.count("bitwise equal") == 4
    assert "not compared: other random numbers" in text
    assert "n/a" in text  # the unplanned step was not timed


def test_several_graphs_and_what_float64_decided_are_shown() -> None:
    assert "graphs" not in shown(FOUND)
    assert "rounding alone" not in shown(FOUND)
    names = " ".join(shown(replace(FOUND, graphs=2, rounding_alone=("b",))).split())
    assert "graphs 2" in names
    assert "rounding alone b" in names


def test_rounding_passes_and_more_does_not() -> None:
    rounded = replace(FOUND, gradients_equal=False, different=("gradient a",))
    assert replace(rounded, largest_difference=1e-5).passed
    wrong = replace(rounded, largest_difference=0.9)
    assert not wrong.passed
    assert "differs" in shown(wrong)
    assert "differs from the unplanned one: gradient a" in str(compiled_error(wrong))
    assert not replace(FOUND, random_state_equal=False).passed


def test_a_peak_over_the_budget_is_an_error() -> None:
    over = replace(FOUND, fits=False, measured_peak_bytes=4 * 2**20)
    assert not over.passed
    assert "exceeds its budget: measured peak 4.00 MiB" in str(compiled_error(over))
