"""Solving against oracles: enumeration, networkx, and replays of everything."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import graphs
import networkx
import pytest

from ckplan.errors import InfeasibleError, PlanError
from ckplan.graph import Encoding
from ckplan.plan import dumps
from ckplan.program import Flow
from ckplan.simulate import Simulator
from ckplan.solving.bound import LowerBound
from ckplan.solving.closure import Closure
from ckplan.solving.covers import find_covers
from ckplan.solving.menu import Menus
from ckplan.solving.mincut import INFINITE, SINK, SOURCE, Network
from ckplan.solving.solve import solve, to_plan


@pytest.mark.parametrize("seed", range(60))
def test_the_cut_is_as_small_as_networkx_says(seed: int) -> None:
    rng = Random(seed)
    nodes = rng.randint(4, 12)
    network, reference = Network(), networkx.DiGraph()
    reference.add_nodes_from(range(nodes))
    for _ in range(nodes - 2):
        network.add_node()
    capacities: dict[tuple[int, int], int] = {}
    for _ in range(3 * nodes):
        tail, head = rng.sample(range(nodes), 2)
        if (tail, head) not in capacities:
            unlimited = rng.random() < 0.1 and (tail, head) != (SOURCE, SINK)
            capacities[tail, head] = INFINITE if unlimited else rng.randint(0, 20)
    for (tail, head), capacity in capacities.items():
        network.add_edge(tail, head)
        limit = {} if capacity == INFINITE else {"capacity": capacity}
        reference.add_edge(tail, head, **limit)
    try:
        expected = networkx.minimum_cut_value(reference, SOURCE, SINK)
    except networkx.NetworkXUnbounded:
        return
    side = network.source_side(list(capacities.values()))
    cut = [c for (t, h), c in capacities.items() if side[t] and not side[h]]
    assert expected == sum(cut)
    assert INFINITE not in cut


class Step:
    def __init__(self, reads: list[int], outputs: list[int]) -> None:
        self.reads, self.writes, self.outputs = reads, list[int](), outputs


@pytest.mark.parametrize("seed", range(40))
def test_the_hull_holds_the_best_closure_at_every_price(seed: int) -> None:
    rng = Random(seed)
    flow, times = Flow(), [rng.randint(1, 9) for _ in range(6)]
    for number in range(6):
        reads = rng.sample(range(number + 1), min(number + 1, rng.randint(1, 2)))
        flow.add(Step(reads, [number + 1]))
    sizes = {value: rng.randint(1, 9) for value in range(len(flow.storage_of))}
    inside = [v for v in sizes if flow.maker_of[v] >= 0]
    for given in set(sizes) - set(inside):
        sizes[given] = 0
    wanted = rng.sample(inside, 4)
    coded = {
        v: Encoding(
            0, 0, "bits", rng.randint(0, sizes[v]), 0, 0, 1e-9, rng.choice((0, 1e-9))
        )
        for v in rng.sample(inside, rng.randint(0, 3))
    }
    closure = Closure(flow, wanted, sizes, times.__getitem__, encodings=coded)
    points = list(all_closures(flow, wanted, sizes, times, inside, coded))
    hull = [(choice.kept_bytes, choice.nanoseconds) for choice in closure.hull(99)]
    for price in (0.01, 0.2, 0.5, 1.0, 2.0, 7.0, 99.0):
        best = min(time + price * size for size, time in points)
        assert best == pytest.approx(min(t + price * b for b, t in hull))


def all_closures(flow, wanted, sizes, times, inside, coded):
    """(bytes, time) of every set of values to keep, some of them encoded."""
    ways = [
        ("drop", "keep", "encode") if v in coded else ("drop", "keep") for v in inside
    ]
    for chosen in product(*ways):
        way = dict(zip(inside, chosen, strict=True))
        again, stack = set(), [v for v in wanted if way.get(v) == "drop"]
        while stack:
            maker = flow.maker_of[stack.pop()]
            if maker >= 0 and maker not in again:
                again.add(maker)
                stack += [v for v in flow.inputs[maker] if way.get(v) == "drop"]
        forms = [coded[v] for v in inside if way[v] == "encode"]
        size = sum(sizes[v] for v in inside if way[v] == "keep")
        time = sum(times[step] for step in again) + sum(f.seconds * 1e9 for f in forms)
        yield size + sum(f.bytes for f in forms), time


def budgets(graph: graphs.Graph, count: int) -> list[int]:
    peak = Simulator(graph).run().peak_bytes
    with pytest.raises(InfeasibleError) as caught:
        solve(graph, 1)
    floor = int(caught.value.needed.split()[2])
    return [floor + (peak - floor) * i // count for i in range(count + 1)]


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_no_plan_exceeds_its_budget_and_more_budget_never_costs_more(
    blocks: int,
) -> None:
    graph = graphs.chain(blocks, workspace_bytes=11)
    before = float("inf")
    for budget in budgets(graph, 12):
        solution = solve(graph, budget)
        assert solution.timeline.peak_bytes <= budget
        assert solution.timeline.overhead <= before + 1e-12
        assert solution.bound_overhead <= solution.timeline.overhead + 1e-9
        before = solution.timeline.overhead
    assert solution.regions == ()


def test_one_byte_below_the_floor_nothing_fits_and_the_error_names_the_floor() -> None:
    graph = graphs.chain(3)
    floor = budgets(graph, 1)[0]
    assert solve(graph, floor).timeline.peak_bytes == floor
    with pytest.raises(InfeasibleError, match="no plan fits") as caught:
        solve(graph, floor - 1)
    assert str(floor) in caught.value.needed


def test_the_chain_finds_the_best_mix_of_its_menus() -> None:
    graph = graphs.chain(3)
    simulator = Simulator(graph)
    menus = Menus(simulator)
    tried = []
    for cover in find_covers(graph, menus):
        options = [[o.region for o in menus.options(call)] for call in cover]
        for mix in product(*options):
            chosen = [region for region in mix if region is not None]
            timeline = simulator.run(chosen)
            tried.append((timeline.peak_bytes, timeline.recompute_seconds))
    for budget in budgets(graph, 9):
        expected = min(seconds for peak, seconds in tried if peak <= budget)
        assert expected == pytest.approx(
            solve(graph, budget).timeline.recompute_seconds
        )


@pytest.mark.parametrize("seed", range(150))
def test_no_plan_of_a_random_step_beats_the_bound(seed: int) -> None:
    rng = Random(seed)
    graph = graphs.random_step(rng)
    simulator = Simulator(graph)
    for _ in range(6):
        regions = [r for r in graphs.random_regions(graph, rng) if r.by == "program"]
        try:
            timeline = simulator.run(regions)
        except PlanError:
            continue
        bound = LowerBound(simulator).overhead(timeline.peak_bytes)
        assert bound <= timeline.overhead + 1e-9


def test_scaling_all_bytes_changes_no_decision() -> None:
    graph = graphs.chain(4)
    larger = replace(
        graph,
        storages=tuple(replace(s, bytes=7 * s.bytes) for s in graph.storages),
        encodings=tuple(replace(e, bytes=7 * e.bytes) for e in graph.encodings),
        ops=tuple(replace(o, workspace_bytes=7 * o.workspace_bytes) for o in graph.ops),
    )
    for budget in budgets(graph, 5):
        assert solve(graph, budget).regions == solve(larger, 7 * budget).regions


def test_the_same_budget_gives_the_same_bytes_of_yaml() -> None:
    graph = graphs.chain(4)
    budget = budgets(graph, 2)[1]
    first, second = (dumps(to_plan(graph, solve(graph, budget))) for _ in range(2))
    assert first == second


def test_baselines_stand_beside_the_plan_and_cost_no_less() -> None:
    graph = graphs.chain(8)
    budget = budgets(graph, 2)[1]
    solution = solve(graph, budget)
    assert [b.name for b in solution.baselines] == ["none", "every call", "chen"]
    assert solution.unplanned.peak_bytes == solution.baselines[0].peak_bytes
    for baseline in solution.baselines:
        if baseline.fits:
            assert solution.timeline.overhead <= baseline.overhead


def test_like_calls_get_their_choices_in_order() -> None:
    graph = graphs.chain(6)
    menus = Menus(Simulator(graph))
    cover = next(c for c in find_covers(graph, menus) if len(c) > 4)
    like = [c for c in cover if graph.signature(c) == graph.signature(cover[3])]
    dropping = [o.region for o in menus.options(like[-1]) if o.region is not None]
    assert [like[0]] == [region.call for region in menus.tidy([dropping[-1]], cover)]
