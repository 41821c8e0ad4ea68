"""Deep chains are planned with regions inside regions, and truly so."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import graphs
import pytest
from oracles import walk_plan
from revolve import LEAST, UNIT, extra_steps, uniform

from ckplan.plan.file import dumps, loads
from ckplan.plan.plan import Plan
from ckplan.plan.region import Region
from ckplan.plan.resolve import describe, resolve
from ckplan.simulating.simulate import simulate
from ckplan.solving.chain import regions_of
from ckplan.solving.floor_search import FloorSearch
from ckplan.solving.nesting import Nesting
from ckplan.solving.planner import Planner
from ckplan.solving.segmentation import segmentation_frontier

MEGABYTE = 10**6


def deep(num_blocks: int, **sizes: int) -> graphs.Graph:
    widths = {"width_bytes": MEGABYTE, "hidden_bytes": 4 * MEGABYTE, "weight_bytes": 1}
    graph = graphs.chain(num_blocks, **{**widths, **sizes})
    # The walk knows no random states.
    return replace(graph, ops=tuple(replace(op, random=False) for op in graph.ops))


def depth(region: Region) -> int:
    return 1 + max(map(depth, region.inner), default=0)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 0.5])
def test_plans_with_regions_inside_are_what_the_walk_sees(share: float) -> None:
    graph = deep(24)
    planner = Planner(graph)
    floor, most = planner.floor.peak_bytes, planner.unplanned.peak_bytes
    solution = planner.solve(int(floor + share * (most - floor)))
    seen = walk_plan(graph, solution.regions)
    assert seen.peak_bytes == solution.timeline.peak_bytes <= solution.budget_bytes
    assert seen.seconds == pytest.approx(solution.timeline.recompute_seconds)
    assert solution.bound_overhead <= solution.timeline.overhead + 1e-9
    if share == 0.0:
        assert max(map(depth, solution.regions)) > 1
    text = dumps(Plan(regions=describe(graph, solution.regions)))
    assert resolve(loads(text, "plan"), graph) == solution.regions


def test_without_nesting_the_floor_is_higher(monkeypatch: pytest.MonkeyPatch) -> None:
    nested = Planner(deep(24)).floor.peak_bytes
    monkeypatch.setattr(FloorSearch, "nesting_pays", False)
    assert nested < 0.8 * Planner(deep(24)).floor.peak_bytes


def test_a_larger_budget_never_costs_more() -> None:
    planner = Planner(deep(20))
    points = planner.frontier(16)
    assert len(points) > 8
    for smaller, larger in pairwise(points):
        assert smaller.peak_bytes < larger.peak_bytes
        assert smaller.overhead > larger.overhead
    low = planner.floor.peak_bytes
    costs = []
    for budget in range(low, planner.unplanned.peak_bytes, MEGABYTE):
        found = planner.within(budget)
        assert found
        costs.append(found[0].recompute_seconds)
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("seed", range(40))
def test_every_option_with_regions_inside_is_what_the_walk_sees(seed: int) -> None:
    rng = Random(seed)
    graph = graphs.random_step(rng, num_blocks=6, num_ops=4)
    planner = Planner(graph)
    nesting = Nesting(planner.simulator, planner.menus)
    for unit in [(0, None), *((call, None) for call in graph.children[0])]:
        for option in nesting.options(unit):
            if option.region is not None:
                timeline = planner.simulator.run([option.region])
                seen = walk_plan(graph, (option.region,))
                assert seen.live_bytes == timeline.live_bytes
                assert option.seconds == pytest.approx(seen.seconds)


def test_what_a_chain_with_nesting_thinks_is_what_it_costs() -> None:
    graph = deep(12)
    planner = Planner(graph)
    blocks = [c for c in graph.children[0] if graph.saved_in(c)]
    segmentation = [(blocks[at], blocks[at + 3]) for at in range(0, 12, 4)]
    options = Nesting(planner.simulator, planner.menus).options
    chain = segmentation_frontier(planner.simulator, segmentation, options)
    for plan in map(regions_of, chain.evenly_spaced(12)):
        assert planner.simulator.run(plan).peak_bytes <= planner.unplanned.peak_bytes
    smallest = regions_of(next(chain.evenly_spaced(1)))
    assert planner.simulator.run(smallest).peak_bytes == chain.least_bytes


@pytest.mark.slow
def test_memory_grows_far_slower_than_depth() -> None:
    """Keeping every boundary grows linearly: four times as many blocks, four times."""
    floors = [Planner(deep(num_blocks)).floor.peak_bytes for num_blocks in (16, 64)]
    assert floors[1] < 1.6 * floors[0]


@pytest.mark.parametrize(
    "length",
    [*range(2, 10), *(pytest.param(n, marks=pytest.mark.slow) for n in range(10, 13))],
)
def test_uniform_chains_reach_the_binomial_numbers_at_every_memory_size(
    length: int,
) -> None:
    graph = uniform(length)
    planner = Planner(graph)
    assert planner.floor.peak_bytes == LEAST
    for slots in range(1, length):
        timeline, _ = planner.within(LEAST + UNIT * (slots - 1)) or pytest.fail("none")
        assert timeline.recompute_seconds == extra_steps(length, slots), slots


def test_what_backward_drops_without_a_look_is_dropped_at_once() -> None:
    graph = uniform(3)
    saved = list(graph.saved)
    saved[2] = replace(saved[2], unpacked_at=-1, last_held=len(graph.ops) - 1)
    graph = replace(graph, saved=tuple(saved))
    planner = Planner(graph)
    assert planner.unplanned.peak_bytes == 50
    timeline, _ = planner.within(40) or pytest.fail("no plan")
    assert timeline.recompute_seconds == 0


@pytest.mark.parametrize("length", [8, 13, 24])
def test_no_even_segments_reach_below_the_floor(length: int) -> None:
    graph = uniform(length)
    layers = graph.children[0]
    segments = [
        [
            Region(run[0], last=run[-1] if len(run) > 1 else None)
            for run in (layers[at : at + size] for at in range(0, len(layers), size))
        ]
        for size in (2, 3, 4, 5)
    ]
    peaks = [simulate(graph, regions).peak_bytes for regions in segments]
    assert Planner(graph).floor.peak_bytes <= min(peaks)
