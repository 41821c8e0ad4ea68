"""Plans that several budgets share are simulated once, and change no answer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import graphs
import pytest

from ckplan.plan.region import Region
from ckplan.simulating.simulate import Simulator
from ckplan.solving.planner import Planner

MIB = 2**20


def budgets(planner: Planner, count: int) -> list[int]:
    least, most = planner.floor.peak_bytes, planner.unplanned.peak_bytes
    return [least + (most - least) * place // count for place in range(-1, count)]


def test_answers_do_not_depend_on_what_was_asked_before() -> None:
    graph = graphs.chain(20)
    planner = Planner(graph)
    asked = budgets(planner, 9)
    forward = [planner.within(one) for one in asked]
    again = [planner.within(one) for one in asked]
    other = Planner(graph)
    backward = [other.within(one) for one in reversed(asked)]
    fresh = [Planner(graph).within(one) for one in asked[::4]]
    assert forward[0] is None and any(one and one[1] for one in forward)
    assert forward == again == backward[::-1]
    assert forward[::4] == fresh


def test_a_plan_of_many_budgets_is_simulated_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulated = Counter[tuple[Region, ...]]()
    original = Simulator._simulate

    def counted(self: Simulator, regions: Any) -> Any:
        simulated[tuple(regions)] += 1
        return original(self, regions)

    planner = Planner(graphs.chain(20))
    asked = budgets(planner, 30)
    for one in asked:
        planner.within(one)
    monkeypatch.setattr(Simulator, "_simulate", counted)
    for one in asked:
        planner.within(one)
        planner.within(one)
    assert max(simulated.values()) == 1
    assert simulated.total() <= len(asked)
