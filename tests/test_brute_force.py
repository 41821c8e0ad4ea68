"""The planner against every plan of small steps; thousands: scripts/brute_force.py."""

from __future__ import annotations

from random import Random

import every_mix
import pytest
from every_plan import Outcome, TooManyError, compare
from small_steps import KINDS, small_step

STEPS = {"nesting": 6}
LEAST_EQUAL = 0.5  # of the budgets; see the table in scripts/results


def outcomes(kind: str, count: int) -> list[Outcome]:
    """The first so many steps that are small enough."""
    found: list[Outcome] = []
    number = 0
    while len(found) < count:
        rng = Random(f"0 {kind} {number}")
        number += 1
        try:
            graph = small_step(rng, kind)
            found.append(compare(graph, rng, nesting=kind == "nesting"))
        except TooManyError:
            continue
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_plans_are_what_every_plan_there_is_says(kind: str) -> None:
    found = outcomes(kind, STEPS.get(kind, 40))
    assert [wrong for one in found for wrong in one.wrong] == []
    fine = sum(one.equal + one.cheaper for one in found)
    assert fine >= LEAST_EQUAL * sum(one.num_budgets for one in found)
    assert any(one.num_budgets > 1 for one in found)


def test_the_recurrence_is_as_good_as_every_combination() -> None:
    assert all(every_mix.is_best(Random(seed)) for seed in range(400))
