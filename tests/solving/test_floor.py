"""The floor depends on bytes alone, and no plan of a small step is below it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from every_plan import EveryPlan, TooManyError, search_alone
from small_steps import KINDS, small_step
from torch import nn
from torch.nn.functional import cross_entropy

import ckplan
from ckplan.errors import InfeasibleError
from ckplan.graph.file import load
from ckplan.graph.graph import Graph
from ckplan.graph.records import EngineCosts
from ckplan.simulating.simulate import simulate
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.solving.reserved_limit import plan_within
from ckplan.solving.spaces import SearchSpaces

TRACES = Path(__file__).parents[2] / "traces"
STEPS, EXHAUSTIVE = 6, 2
SECONDS: dict[str, Callable[[Random, int], float]] = {
    "all 1": lambda rng, number: 1.0,
    "random": lambda rng, number: rng.random() ** 4,
    "growing": lambda rng, number: 1e-3 * number,
}


def with_seconds(graph: Graph, how: str) -> Graph:
    """The same step whose ops, encodings and engine take other times."""
    rng, seconds = Random(how), SECONDS[how]
    return replace(
        graph,
        ops=tuple(
            replace(op, seconds=seconds(rng, number), launch_seconds=rng.random())
            for number, op in enumerate(graph.ops)
        ),
        encodings=tuple(
            replace(one, encode_seconds=seconds(rng, 1), decode_seconds=rng.random())
            for one in graph.encodings
        ),
        engine=EngineCosts(rng.random(), rng.random()),
    )


def reversed_seconds(graph: Graph) -> Graph:
    """The same step where the first op takes as long as the last one did."""
    seconds = [op.seconds for op in reversed(graph.ops)]
    ops = (replace(op, seconds=s) for op, s in zip(graph.ops, seconds, strict=True))
    return replace(graph, ops=tuple(ops))


def enumerated(kind: str, count: int = STEPS) -> list[tuple[Graph, EveryPlan]]:
    """The first steps of a kind that are small enough, with all their plans."""
    found: list[tuple[Graph, EveryPlan]] = []
    number = 0
    while len(found) < count:
        graph = small_step(Random(f"floor {kind} {number}"), kind)
        number += 1
        try:
            found.append((graph, EveryPlan(graph, nesting=kind == "nesting")))
        except TooManyError:
            continue
    return found


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_no_plan_of_a_small_step_is_below_its_floor_whatever_ops_take(
    kind: str,
) -> None:
    for graph, every in enumerated(kind, EXHAUSTIVE):
        floor = Planner(graph).floor.peak_bytes
        assert floor <= int(every.peaks.min())
        assert Planner(with_seconds(graph, "random")).floor.peak_bytes == floor


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_the_floor_of_the_search_alone_is_that_of_its_bytes(kind: str) -> None:
    reached = 0
    for graph, every in enumerated(kind):
        floor = search_alone(graph).floor.peak_bytes
        reached += floor <= int(every.peaks.min())
        others = [with_seconds(graph, how) for how in SECONDS]
        others.append(reversed_seconds(graph))
        assert {search_alone(one).floor.peak_bytes for one in others} == {floor}
    assert reached >= STEPS - 1


@pytest.mark.parametrize("name", ["mlp", "llama", "gpt2", "vit"])
def test_the_floor_of_a_shipped_trace_is_that_of_its_bytes(name: str) -> None:
    graph = load(TRACES / f"{name}.json.gz")
    planner = Planner(graph)
    floor = planner.floor.peak_bytes
    for other in (with_seconds(graph, "random"), reversed_seconds(graph)):
        assert Planner(other).floor.peak_bytes == floor
    assert planner.solve(floor).timeline.peak_bytes <= floor
    with pytest.raises(InfeasibleError):
        planner.solve(floor - 1)


def test_a_plan_below_the_floor_is_offered_as_its_own_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search by seconds may find less than the one by bytes alone, as was seen."""
    graph = load(TRACES / "mlp.json.gz")
    planner = Planner(graph)
    smallest = planner.floor.peak_bytes
    planned = planner.within(smallest + (planner.unplanned.peak_bytes - smallest) // 2)
    assert planned is not None
    monkeypatch.setattr(SearchSpaces, "smallest_plan", planned)
    worse = Planner(graph)
    assert worse.floor.peak_bytes > smallest
    solution = worse.solve(worse.floor.peak_bytes - 1)
    assert solution.timeline.peak_bytes == solution.floor.peak_bytes
    assert solution.floor.peak_bytes < worse.floor.peak_bytes


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_segments_of_common_practice_are_plans_that_a_budget_may_get(name: str) -> None:
    planner = Planner(load(TRACES / f"{name}.json.gz"))
    plans = planner.standard_baselines.plans
    assert any(region.last is not None for _, plan in plans for region in plan)
    for line, regions in plans:
        assert simulate(planner.graph, regions).peak_bytes == line.peak_bytes
        found = planner.within(line.peak_bytes)
        assert found is not None
        assert found[0].recompute_seconds <= line.recompute_seconds
    assert planner.floor.peak_bytes <= min(line.peak_bytes for line, _ in plans)


def test_the_least_plan_is_the_one_below_which_none_is_found() -> None:
    """The search by seconds has other options than that of the floor, by bytes."""
    block = nn.Linear(128, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 128)
    blocks = (nn.Sequential(*copy.deepcopy(block)) for _ in range(4))
    model = nn.Sequential(*blocks, nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    with ckplan.record(model, optimizer) as recorder:
        for _ in range(3):
            rows, target = torch.randn(256, 128), torch.randint(10, (256,))
            optimizer.zero_grad()
            cross_entropy(model(rows), target).backward()
            optimizer.step()
    graph = with_seconds(recorder.graph, "growing")
    plan = ckplan.solve(graph, goal="min-memory")
    assert plan.predicted
    least = plan.predicted.peak_bytes
    assert least < Planner(graph).floor.peak_bytes
    with pytest.raises(InfeasibleError, match=f"at least .*{least} B"):
        ckplan.solve(graph, least - 1)
    assert ckplan.frontier(graph, 4)[0].peak_bytes == least
    found = plan_within(Planner(graph), MemoryLimit(least))
    assert found is not None
    assert found[0].peak_bytes == least
    assert plan_within(Planner(graph), MemoryLimit(least - 1)) is None
