"""The planner against every plan of small steps; thousands: scripts/brute_force.py."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import every_mix
import pytest
from every_plan import Outcome, TooManyError, compare, search_alone
from graphs import with_engine
from small_steps import KINDS, small_step

from ckplan.graph.graph import Graph
from ckplan.solving.planner import Planner

STEPS, FEWER = 6, {"nesting": 3}
LEAST_EQUAL = 1.0  # of the budgets; see the table in scripts/results
LEAST_ALONE = 0.95


def outcomes(
    kind: str,
    planner_of: Callable[[Graph], Planner] = Planner,
    *,
    engine: bool = False,
) -> list[Outcome]:
    """The first so many steps that are small enough."""
    found: list[Outcome] = []
    number = 0
    while len(found) < FEWER.get(kind, STEPS):
        rng = Random(f"0 {kind} {number}")
        number += 1
        try:
            graph = small_step(rng, kind)
            if engine:
                graph = with_engine(graph, rng)
            nesting = kind == "nesting"
            found.append(compare(graph, rng, nesting=nesting, planner_of=planner_of))
        except TooManyError:
            continue
    return found


def is_right(found: list[Outcome], least_equal: float) -> None:
    assert [wrong for one in found for wrong in one.wrong] == []
    fine = sum(one.equal + one.cheaper for one in found)
    assert fine >= least_equal * sum(one.num_budgets for one in found)
    assert any(one.num_budgets > 1 for one in found)


@pytest.mark.parametrize("engine", [False, True], ids=["ops", "engine"])
@pytest.mark.parametrize("kind", KINDS)
def test_plans_are_the_best_of_every_plan_there_is(kind: str, *, engine: bool) -> None:
    is_right(outcomes(kind, engine=engine), LEAST_EQUAL)


def test_parts_that_seem_to_free_more_do_not_hide_a_plan_for_the_whole() -> None:
    # Too many plans to try them all, and two calls that hold the same tensor.
    rng = Random("0 in place 695")
    found = compare(small_step(rng, "in place"), rng)
    assert found.is_best
    assert found.num_budgets == 2


@pytest.mark.parametrize("kind", KINDS)
def test_plans_of_the_search_alone_fit_and_are_what_the_walk_sees(kind: str) -> None:
    is_right(outcomes(kind, search_alone), LEAST_ALONE)


def test_the_recurrence_is_as_good_as_every_combination() -> None:
    assert all(every_mix.is_best(Random(seed)) for seed in range(400))


def test_parts_whose_backward_ends_after_that_of_the_region_are_planned() -> None:
    graph = small_step(Random("0 in place 63"), "in place")
    assert Planner(graph)._spaces._tree.least_bytes > 0
