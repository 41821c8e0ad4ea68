"""The reports of ``verify --compile`` and ``compare --compile``."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from ckplan.report.compiled import compared_report, compiled_error, compiled_report
from ckplan.verifying.compiled_comparison import ComparedStep, CompiledComparison
from ckplan.verifying.compiled_differences import rounding_of
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
    odd = replace(FOUND, uncompiled_bytes={"odd": 1024})
    assert "runs uncompiled odd, keeps 1.00 KiB" in " ".join(shown(odd).split())
    names = " ".join(shown(replace(FOUND, graphs=2, rounding_alone=("b",))).split())
    assert "graphs 2" in names
    assert "rounding alone b" in names


def test_rounding_passes_and_more_does_not() -> None:
    rounded = replace(FOUND, gradients_equal=False, different=("gradient a",))
    little = replace(rounded, largest_difference=1e-5)
    assert little.passed
    assert "gradients equal but for rounding" in " ".join(shown(little).split())
    cast = replace(rounded, largest_difference=1e-2, rounding=rounding_of("bf16"))
    assert cast.passed
    assert not replace(cast, rounding=rounding_of("fp16")).passed
    wrong = replace(rounded, largest_difference=0.9)
    assert not wrong.passed
    assert "gradients different" in " ".join(shown(wrong).split())
    assert "differs from the unplanned one: gradient a" in str(compiled_error(wrong))
    drawn = replace(FOUND, random_state_equal=False)
    assert not drawn.passed
    assert "random state different" in " ".join(shown(drawn).split())


def test_what_differs_without_a_plan_too_is_said() -> None:
    assert "unplanned steps differ" not in shown(FOUND)
    by_chance = replace(FOUND, unplanned_differences={"gradient a": 9e-8})
    said = " ".join(shown(by_chance).split())
    assert "unplanned steps differ by 9.0e-08 in gradient a" in said
    assert by_chance.as_json()["unplanned_differences"] == {"gradient a": 9e-8}


def test_a_step_that_torch_compiles_wrongly_is_said() -> None:
    assert "torch.compile itself" not in shown(
        replace(FOUND, largest_difference_from_eager=1e-3)
    )
    wrongly = replace(FOUND, largest_difference_from_eager=0.5)
    assert wrongly.passed  # with the plan it is no other than without
    assert wrongly.as_json()["compiled_wrongly"] is True
    assert "torch.compile itself computes another step" in " ".join(
        shown(wrongly).split()
    )


def test_a_peak_over_the_budget_is_an_error() -> None:
    over = replace(FOUND, fits=False, measured_peak_bytes=4 * 2**20)
    assert not over.passed
    said = str(compiled_error(over))
    assert "exceeds its budget: measured peak 4.00 MiB" in said
    assert "report it" in said
    odd = replace(over, uncompiled_bytes={"odd": 1024})
    assert "a smaller budget: temporary memory" in str(compiled_error(odd))


def test_divisions_with_wrong_gradients_are_marked_and_the_reason_is_said() -> None:
    right = ComparedStep(
        name="torch",
        peak_bytes=2**20,
        saved_bytes=2**19,
        step_seconds=0.1,
        overhead=0.0,
        least_overhead=0.125,
        fits=True,
        draws_again=False,
        reads_changed=False,
    )

    def text(*steps: ComparedStep) -> str:
        console = Console(file=io.StringIO(), width=80)
        found = CompiledComparison("Model", 2**21, steps)
        console.print(compared_report(found))
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    assert "right" in text(right)
    assert "+12.5 %" in text(right) and "least: contractions" in text(right)
    assert "wrong" not in text(right)
    drawn = text(right, replace(right, draws_again=True))
    assert "wrong: backward draws other random numbers than forward" in drawn
    assert "changed it" not in drawn
    changed = text(right, replace(right, reads_changed=True))
    assert "wrong: backward reads a buffer after forward changed it" in changed
    assert "draws" not in changed
