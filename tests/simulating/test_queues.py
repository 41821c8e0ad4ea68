"""The queues of a GPU's step, against events one by one and closed forms."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import pairwise
from random import Random

import pytest
from graphs import chain, random_regions, random_step, with_engine

from ckplan.errors import InfeasibleError, PlanError
from ckplan.graph.graph import Graph
from ckplan.graph.queues import NOTHING, Span, span, spans
from ckplan.graph.records import EngineCosts
from ckplan.plan.region import RERUN, Region
from ckplan.simulating.effect import Effect
from ckplan.simulating.simulate import Simulator, Timeline, simulate
from ckplan.solving.planner import Planner
from ckplan.verifying.phases import predicted_seconds


def events(works: Sequence[tuple[float, float]]) -> float:
    """When both are done: a processor and a device, each told what ended when.

    The processor launches one after the other; the device takes the oldest launched
    kernel whenever it is idle. It is a simulation by events in order of time.
    """
    waiting, launched = deque(works), deque[float]()
    heap: list[tuple[float, int, str]] = []
    numbers = iter(range(4 * len(works) + 4))
    running, now = False, 0.0

    def begin_launch() -> None:
        if waiting:
            heappush(heap, (now + waiting[0][0], next(numbers), "launched"))

    begin_launch()
    while heap:
        now, _, what = heappop(heap)
        if what == "launched":
            launched.append(waiting.popleft()[1])
            begin_launch()
        else:
            running = False
        if launched and not running:
            running = True
            heappush(heap, (now + launched.popleft(), next(numbers), "done"))
    return now


def random_works(rng: Random) -> list[tuple[float, float]]:
    return [
        (rng.choice((0.0, rng.uniform(0, 3))), rng.choice((0.0, rng.uniform(0, 3))))
        for _ in range(rng.randint(1, 12))
    ]


def span_of(works: Sequence[tuple[float, float]]) -> Span:
    launches, kernels = zip(*works, strict=True)
    return span(launches, kernels)


def test_a_span_is_what_events_one_by_one_give() -> None:
    rng = Random(0)
    for _ in range(500):
        works = random_works(rng)
        assert span_of(works).seconds == pytest.approx(events(works))


def test_spans_join_and_repeat_as_their_works_do() -> None:
    rng = Random(1)
    for _ in range(300):
        one, other, count = random_works(rng), random_works(rng), rng.randint(1, 5)
        joined = spans([span_of(one), span_of(other)])
        assert joined == pytest.approx(span_of(one + other))
        assert span_of(one).times(count) == pytest.approx(span_of(one * count))
        assert joined.seconds == pytest.approx(events(one + other))
    assert span([], []) == NOTHING


def test_closed_forms() -> None:
    rng = Random(2)
    for _ in range(100):
        shorter = [rng.uniform(0.0, 1.0) for _ in range(rng.randint(1, 9))]
        longer = [rng.uniform(1.0, 2.0) for _ in shorter]
        assert span(longer, shorter).seconds == pytest.approx(sum(longer) + shorter[-1])
        assert span(shorter, longer).seconds == pytest.approx(shorter[0] + sum(longer))


# -- plans -------------------------------------------------------------------------


def launched(graph: Graph, rng: Random) -> Graph:
    """A step of a GPU: launches of random length, by phase longer or shorter."""
    most = [rng.choice((0.2, 1.0, 4.0)) for _ in range(3)]
    phases = ("forward", "backward", "optimizer")
    ops = [
        replace(op, launch_seconds=most[phases.index(graph.phase(n))] * rng.random())
        for n, op in enumerate(graph.ops)
    ]
    options = {"accumulate": rng.choice((1, 1, 3))}
    return replace(with_engine(graph, rng), ops=tuple(ops), options=options)


def works_of(
    timeline: Timeline, regions: Sequence[Region], *, engine: bool = True
) -> list[tuple[float, float]]:
    """Every launch and kernel of a planned step in order, half moment by half moment.

    Built from what reruns when, and from the engine's costs themselves.
    """
    graph = timeline.graph
    pairs = list(zip(timeline.effects, regions, strict=True))
    batch: list[tuple[float, float]] = []
    for moment in range(2 * graph.backward_stop + 1):
        if moment % 2:
            op = graph.ops[moment // 2]
            batch.append((op.launch_seconds, op.seconds))
        for effect, region in pairs:
            if engine:
                batch += watched(graph, region, moment)
            batch += [(taken, taken) for when, taken in effect.coded if when == moment]
            batch += reran(graph, effect, region, moment, engine)
    rest = [(op.launch_seconds, op.seconds) for op in graph.ops[graph.backward_stop :]]
    return batch * graph.num_batches + rest


def watched(graph: Graph, region: Region, moment: int) -> list[tuple[float, float]]:
    view, costs = Simulator(graph).view(region.call, region.last), graph.engine
    begun = [costs.region_seconds] if moment == 2 * view.start else []
    saved = [costs.watch_seconds for one in view.saves if 2 * one.packed_at == moment]
    return [(taken, 0.0) for taken in (*begun, *saved)]


def reran(
    graph: Graph, effect: Effect, region: Region, moment: int, engine: bool
) -> list[tuple[float, float]]:
    costs = graph.engine
    more = costs.rerun_seconds
    more += costs.module_seconds if region.by == RERUN else 0.0
    return [
        (
            graph.ops[op].launch_seconds + engine * more,
            costs.again * graph.ops[op].seconds,
        )
        for gap, op in zip(effect.gaps, effect.steps, strict=True)
        if gap == moment
    ]


def random_plans(num: int) -> list[tuple[Timeline, list[Region]]]:
    rng, found = Random(3), []
    while len(found) < num:
        graph = launched(random_step(rng), rng)
        regions = sorted(random_regions(graph, rng), key=lambda one: one.call)
        try:
            found.append((simulate(graph, regions), regions))
        except PlanError:
            continue
    return found


def test_a_planned_step_takes_what_events_one_by_one_give() -> None:
    hidden = 0
    for timeline, regions in random_plans(120):
        graph = timeline.graph
        unplanned = [(op.launch_seconds, op.seconds) for op in graph.ops]
        stop = graph.backward_stop
        unplanned = unplanned[:stop] * graph.num_batches + unplanned[stop:]
        assert graph.step_seconds == pytest.approx(events(unplanned))
        planned = events(works_of(timeline, regions))
        step = graph.step_seconds + timeline.recompute_seconds
        assert step == pytest.approx(planned)
        without = events(works_of(timeline, regions, engine=False))
        share = (planned - without) / graph.step_seconds
        assert timeline.engine_overhead == pytest.approx(share, abs=1e-12)
        phases = predicted_seconds(timeline, graph)
        assert phases.total_seconds == pytest.approx(planned)
        most = timeline.engine_seconds
        assert planned - without <= most + 1e-9
        hidden += planned - without < most - 1e-9
    assert hidden > 20  # often, some of the engine is beside the device


def test_nothing_is_hidden_where_all_is_launched_first() -> None:
    """Launch after launch: all that is added to the CPU adds to the step."""
    graph = chain(4, seconds=0.01)
    ops = tuple(replace(op, launch_seconds=1.0) for op in graph.ops)
    graph = replace(with_engine(graph, Random(0)), ops=ops)
    timeline = simulate(graph, [Region(1)])
    launches = sum(len(effect.steps) for effect in timeline.effects)
    added = launches * 1.0 + timeline.engine_seconds
    assert timeline.recompute_seconds == pytest.approx(added)
    assert timeline.engine_overhead * graph.step_seconds == pytest.approx(
        timeline.engine_seconds
    )


def test_the_engine_is_hidden_where_kernels_are_long() -> None:
    graph = chain(4, seconds=100.0)
    ops = tuple(replace(op, launch_seconds=0.5) for op in graph.ops)
    graph = replace(with_engine(graph, Random(0)), ops=ops)
    timeline = simulate(graph, [Region(call) for call in graph.children[0][1:]])
    assert timeline.engine_seconds > 0
    assert timeline.engine_overhead == 0.0
    device, launching = timeline.queues
    assert device > launching


def test_where_launches_are_short_only_what_the_engine_adds_beyond_kernels_counts() -> (
    None
):
    """Solvers then take fewer regions, as each delays the launches of forward."""
    graph = chain(6, seconds=1.0)
    ops = tuple(replace(op, launch_seconds=0.75) for op in graph.ops)
    graph = replace(graph, ops=ops)
    shares = []
    for watch in (0.001, 0.5, 50.0):
        dearer = replace(graph, engine=EngineCosts(watch, 0.0))
        assert not dearer.engine_is_critical
        shares.append(dearer.engine_share)
        effect = Simulator(dearer).effect(Region(1))
        plain = Simulator(graph).effect(Region(1))
        more = dearer.engine_share * effect.engine_seconds
        assert effect.seconds == pytest.approx(plain.seconds + more)
    assert shares[0] < 0.1 < shares[1] < shares[2]
    assert shares[2] > 0.9
    budget = Planner(graph).floor.peak_bytes + 1500
    free, dear = (
        Planner(replace(graph, engine=EngineCosts(watch))).solve(budget)
        for watch in (0.0, 5.0)
    )
    assert dear.timeline.overhead < simulate(dearer, free.regions).overhead
    saves = [
        sum(len(Simulator(graph).view(one.call, one.last).saves) for one in regions)
        for regions in (free.regions, dear.regions)
    ]
    assert saves[1] < saves[0]


def test_no_plan_of_a_launched_step_is_cheaper_than_the_bound() -> None:
    rng = Random(4)
    solved = 0
    for _ in range(12):
        planner = Planner(launched(random_step(rng), rng))
        floor, whole = planner.floor.peak_bytes, planner.unplanned.peak_bytes
        for share in (0.0, 0.5, 0.9):
            try:
                found = planner.solve(round(floor + share * (whole - floor)))
            except InfeasibleError:
                continue
            solved += 1
            assert found.bound_overhead <= found.timeline.overhead + 1e-9
    assert solved > 20


def test_all_plans_that_a_solver_saw_cost_at_least_nothing() -> None:
    for timeline, _ in random_plans(40):
        assert timeline.recompute_seconds >= -1e-9
        ends = [effect.gaps for effect in timeline.effects]
        assert all(a <= b for gaps in ends for a, b in pairwise(gaps))
