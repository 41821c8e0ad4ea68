"""Compiled steps whose threads add in any order are compared with several others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckplan.errors import WorkloadError
from ckplan.training.workload import Workload
from ckplan.verifying import compiled_steps
from ckplan.verifying.compiled_runs import (
    CERTAIN,
    Results,
    repeated,
    results_of,
    values_of,
)
from ckplan.verifying.compiled_steps import verify_compiled

Found = dict[str, torch.Tensor]
PLAIN = {"loss": torch.ones(2), "gradient a": torch.ones(2)}
NEAR = torch.tensor([1.0, 1.0 + 2**-20])
FAR = torch.tensor([1.0, 1.5])


def with_gradient(gradient: torch.Tensor) -> Found:
    return {**PLAIN, "gradient a": gradient}


def taking(*steps: Found) -> tuple[Callable[[], Found], Iterable[Found]]:
    """Steps in order, and those that were not taken."""
    rest = iter(steps)
    return lambda: next(rest), rest


def test_nothing_is_repeated_for_equal_steps() -> None:
    take, _ = taking()
    assert repeated(PLAIN, PLAIN, take) == CERTAIN


def test_bits_of_any_unplanned_step_are_equal() -> None:
    take, rest = taking(with_gradient(FAR), with_gradient(NEAR), PLAIN)
    found = repeated(with_gradient(NEAR), PLAIN, take)
    assert found.equal == {"gradient a"}
    assert found.apart == {"gradient a": pytest.approx(0.5)}
    assert len([*rest]) == 1  # no more than it takes


def test_a_difference_no_larger_than_between_unplanned_steps_is_chance() -> None:
    take, _ = taking(*[with_gradient(FAR)] * 5)
    found = repeated(with_gradient(NEAR), PLAIN, take)
    assert not found.equal
    assert found.as_near == {"gradient a"}
    take, _ = taking(*[with_gradient(NEAR)] * 5)
    found = repeated(with_gradient(FAR), PLAIN, take)
    assert not found.equal | found.as_near
    assert found.apart == {"gradient a": pytest.approx(2**-20)}


def test_equal_unplanned_steps_leave_nothing_to_chance() -> None:
    take, _ = taking(*[PLAIN] * 5)
    assert repeated(with_gradient(NEAR), PLAIN, take) == CERTAIN
    take, _ = taking(*[PLAIN] * 5)
    assert repeated({"loss": PLAIN["loss"]}, PLAIN, take) == CERTAIN


MODEL = """
import torch
from torch import nn

def small():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    return model, torch.randn(4, 8), lambda out, _: out.sum()
"""


def test_a_step_that_fails_says_so() -> None:
    model = torch.nn.Linear(4, 4)
    workload = Workload(model, torch.ones(2, 4))

    def raises() -> torch.Tensor:
        found = model(workload.batch)
        found.register_hook(lambda grad: grad @ torch.ones(5))
        return found.sum()

    with pytest.raises(WorkloadError, match="the compiled step raised Runtime") as one:
        results_of(workload, raises, 0)
    assert one.value.hint.startswith(f"look at {__file__}")


@pytest.mark.parametrize("varies", [True, False])
def test_verify_repeats_unplanned_steps_where_bits_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, varies: bool
) -> None:
    """The planned step's first gradient has other last bits; unplanned ones may."""
    (tmp_path / "model.py").write_text(MODEL)
    name = "gradient 0.weight"

    def moved(values: Found) -> Found:
        return {**values, name: values[name] * (1 + 2**-20)}

    taken: list[Results] = []

    def other_when_planned(*given: Any) -> Results:
        taken.append(results_of(*given))
        if len(taken) == 1:  # without the plan
            return taken[0]
        return replace(taken[-1], values=moved(taken[-1].values))

    def again(*given: Any) -> Found:
        values = values_of(*given)
        return moved(values) if varies else values

    monkeypatch.setattr(compiled_steps, "results_of", other_when_planned)
    monkeypatch.setattr(compiled_steps, "values_of", again)
    found, _ = verify_compiled(f"{tmp_path / 'model.py'}:small", "100%", steps=0)
    assert found.passed
    assert found.gradients_equal is varies
    assert found.different == (() if varies else (name,))
    assert bool(found.largest_difference) is not varies
    assert found.unplanned_differences.keys() == ({name} if varies else set())
