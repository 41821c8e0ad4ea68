"""Errors: three lines, an exit code, and the way across processes."""

import pickle

import pytest

from ckplan.errors import (
    ApplyError,
    CkplanError,
    GraphError,
    InfeasibleError,
    PlanError,
    UnitError,
    VerifyError,
    WorkloadError,
    did_you_mean,
)

SUBCLASSES = (
    WorkloadError,
    GraphError,
    PlanError,
    UnitError,
    InfeasibleError,
    VerifyError,
    ApplyError,
)


def test_an_error_is_three_lines():
    error = CkplanError(
        "no plan fits 4.00 GiB (traces/gpt2.json)",
        needed="at least 5.31 GiB, with every block recomputed",
        hint="ckplan frontier traces/gpt2.json",
    )
    expected = (
        "error: no plan fits 4.00 GiB (traces/gpt2.json)\n"
        "  needed: at least 5.31 GiB, with every block recomputed\n"
        "  try:    ckplan frontier traces/gpt2.json"
    )
    assert expected == str(error)


def test_an_error_stays_three_lines_when_it_quotes_a_longer_one():
    error = CkplanError("cannot load a.py:\nboom", needed="x\r\ny", hint="z\n")
    assert (
        error.what,
        error.needed,
        error.hint,
    ) == ("cannot load a.py: boom", "x y", "z")
    assert len(str(error).splitlines()) == 3


@pytest.mark.parametrize("kind", SUBCLASSES)
def test_the_exit_code_says_what_went_wrong(kind: type[CkplanError]):
    expected = {InfeasibleError: 3, VerifyError: 4}.get(kind, 1)
    assert expected == kind.exit_code == kind("a", needed="b", hint="c").exit_code


@pytest.mark.parametrize("kind", SUBCLASSES)
def test_an_error_crosses_processes_unchanged(kind: type[CkplanError]):
    error = kind("a", needed="b", hint="c")
    copy = pickle.loads(pickle.dumps(error))
    assert (kind, str(error)) == (type(copy), str(copy))


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("budjet_bytes", "budget_bytes"),
        ("regons", "regions"),
        ("bananas", None),
        ("", None),
    ],
)
def test_did_you_mean_names_the_nearest_choice_only_if_it_is_near(
    word: str, expected: str | None
):
    assert expected == did_you_mean(word, iter(["bound", "budget_bytes", "regions"]))


def test_did_you_mean_without_choices_is_none():
    assert did_you_mean("regions", []) is None
