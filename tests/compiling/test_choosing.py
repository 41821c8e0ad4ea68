"""The candidate that a budget gets: few are tried, and more budget is never dearer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckplan.compiling.choosing import (
    cheapest_that_fits,
    cheapest_within,
    try_the_smallest,
)

Case = tuple[list[int], list[int], list[int]]
"""Of each candidate: its cost, its peak, and its simulated peak."""


@st.composite
def cases(draw: st.DrawFn, even: bool) -> Case:
    """Candidates in order of cost; where even, they take what is simulated."""
    costs = sorted(draw(st.lists(st.integers(0, 5), min_size=1, max_size=30)))
    drawn = [(cost, draw(st.integers(0, 100))) for cost in costs]
    simulated = [peak for _, peak in sorted(drawn, key=lambda x: (x[0], -x[1]))]
    others = [draw(st.integers(0, 100)) for _ in costs]
    return costs, simulated if even else others, simulated


def chosen(case: Case, budget: int) -> tuple[int | None, list[int]]:
    """The place that a budget gets, and those that were tried."""
    costs, peaks, simulated = case
    tried: list[int] = []

    def fits(places: Sequence[int]) -> bool:
        assert len({*places}) == len(places)
        tried.append(places[0])
        return peaks[places[0]] <= budget

    return cheapest_that_fits(costs, simulated, fits), tried


@given(cases(even=True), st.integers(-1, 101))
def test_where_simulations_hold_it_is_about_the_first_that_fits(
    case: Case, budget: int
) -> None:
    costs, peaks, _ = case
    found, _ = chosen(case, budget)
    fit = [place for place, peak in enumerate(peaks) if peak <= budget]
    if not fit:
        assert found is None
        return
    assert found in fit and costs[found] == costs[fit[0]]
    assert peaks[fit[0]] <= 1.03 * peaks[found]


@given(cases(even=False))
def test_more_budget_is_never_dearer_and_nothing_is_over(case: Case) -> None:
    before = len(case[0])
    for budget in range(-1, 102):
        found, tried = chosen(case, budget)
        assert len({*tried}) == len(tried)  # each once
        if found is None:
            assert before == len(case[0])  # what was found is not lost
            continue
        assert case[1][found] <= budget and found in tried
        assert found <= before
        before = found


@pytest.mark.parametrize("budget, most", [(15, 6), (99, 6), (-1, 1)])
def test_of_many_equal_ones_few_are_tried(budget: int, most: int) -> None:
    """Of 32, the last, and five to halve them."""
    peaks = [*range(99, 3, -3)]
    found, tried = chosen(([0] * 32, peaks, peaks), budget)
    assert len(tried) <= most
    assert (found is None) == (budget < 6)


def test_what_is_asked_next_comes_after_what_is_asked() -> None:
    asked: list[Sequence[int]] = []

    def fits(places: Sequence[int]) -> bool:
        asked.append(places)
        return places[0] >= 5

    assert cheapest_that_fits([0.0] * 8, [*range(80, 0, -10)], fits) == 5
    for before, after in pairwise(asked):
        assert after[0] in before  # it was made meanwhile, where there are processes


@pytest.mark.parametrize("budget, most", [(80, 8), (95, 40), (101, 40)])
def test_far_below_the_smallest_few_are_tried(budget: int, most: int) -> None:
    some: Any = [
        SimpleNamespace(saved=n, simulated_peak_bytes=140 - n) for n in range(40)
    ]
    tried: list[int] = []

    def of_first(wanted: Sequence[int]) -> SimpleNamespace:
        tried.append(wanted[0])
        return SimpleNamespace(peak_bytes=140 - wanted[0])

    replays: Any = SimpleNamespace(of_first=of_first)
    try_the_smallest(some, replays, budget, lambda done, total: None)
    assert tried == [*range(39, -1, -1)][:most]


def of(overhead: float, simulated: int, peak: int, saved: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        overhead=overhead,
        simulated_peak_bytes=simulated,
        size_bytes=simulated + saved,
        saved_bytes=saved,
        saved=peak,  # stands for its name, too
    )


def test_what_is_simulated_to_take_far_more_is_not_replayed() -> None:
    some: Any = [of(0.0, 121, 90), of(0.1, 119, 105), of(0.2, 110, 99), of(0.3, 1, 1)]
    tried: list[int] = []

    def of_first(wanted: Sequence[int]) -> SimpleNamespace:
        tried.append(wanted[0])
        assert 90 not in wanted  # nor meanwhile
        return SimpleNamespace(peak_bytes=wanted[0])

    known: dict[int, SimpleNamespace] = {}
    replays: Any = SimpleNamespace(of_first=of_first, known=known.get)
    found = cheapest_within(some, replays, 100, 0, lambda done, total: None)
    assert found is some[2] and tried == [105, 99]
    known[90] = SimpleNamespace(peak_bytes=90)  # unless that is known
    assert cheapest_within(some, replays, 100, 0, lambda *_: None) is some[0]
