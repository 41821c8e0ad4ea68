"""The replay equals a walk, event by event, that shares no code with it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import graphs
import oracles
import pytest
from oracles import span_of, walk_plan

from ckplan.errors import PlanError
from ckplan.graph.records import BEFORE_STEP, EngineCosts, Hazard, Workspace
from ckplan.plan.region import PROGRAM, RERUN, Region
from ckplan.simulating.simulate import simulate


def drawing(graph: graphs.Graph, rng: Random) -> graphs.Graph:
    """The same step with ops that draw random numbers, on one device or another.

    Some of what it is given are buffers, of modules that read them or of others, some
    ops are norms that go by statistics that they are given, and the engine takes time
    of its own.
    """
    norms = [
        index
        for index, op in enumerate(graph.ops[: graph.num_forward])
        if len(op.outputs) > 1 and len(op.reads) > 1 and rng.random() < 0.8
    ]
    empty = {graph.ops[index].outputs[1] for index in norms}
    storages = [
        replace(storage, kind="buffer")
        if storage.kind == "parameter" and rng.random() < 0.5
        else replace(storage, bytes=0 if number in empty else storage.bytes)
        for number, storage in enumerate(graph.storages)
    ]
    ops = [replace(op, random=rng.random() < 0.15) for op in graph.ops]
    for index in norms:
        ops[index] = replace(ops[index], name="native_batch_norm")
    buffers = [s for s, storage in enumerate(storages) if storage.kind == "buffer"]
    calls = [
        replace(
            call,
            state=tuple(
                s
                for s in buffers
                if graph.is_changed(s, call.start, call.stop) or rng.random() < 0.3
            ),
        )
        for call in graph.calls
    ]
    device = rng.choice(["cpu", "cpu", "cuda"])
    fingerprint = {**graph.fingerprint, "device": device}
    return replace(
        graph,
        ops=tuple(ops),
        storages=tuple(storages),
        calls=tuple(calls),
        fingerprint=fingerprint,
        engine=EngineCosts(rng.random(), rng.random()),
    )


@pytest.mark.parametrize("nest", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("seed", range(400))
def test_replay_of_a_random_step_equals_the_walk(seed: int, nest: bool) -> None:
    rng = Random(seed)
    graph = drawing(graphs.random_step(rng), rng)
    regions = graphs.random_regions(graph, rng)
    if nest:
        regions = graphs.nested(graph, regions, rng)
    try:
        expected = walk_plan(graph, regions)
    except oracles.CannotRebuildError:
        with pytest.raises(PlanError, match="cannot rebuild"):
            simulate(graph, regions)
        return
    actual = simulate(graph, regions)
    assert expected.live_bytes == actual.live_bytes
    assert expected.peak_bytes == actual.peak_bytes
    assert expected.seconds == pytest.approx(actual.recompute_seconds)
    again = sorted(op for effect in actual.effects for op in effect.steps)
    assert sorted(op for ops in expected.again.values() for op in ops) == again


@pytest.mark.parametrize("seed", range(60))
def test_recomputation_counts_on_the_longer_side_of_the_step(seed: int) -> None:
    rng = Random(seed)
    graph = graphs.random_step(rng)
    regions = graphs.random_regions(graph, rng)
    ops = [replace(op, launch_seconds=rng.randint(1, 12)) for op in graph.ops]
    graph = replace(graph, ops=tuple(ops), encodings=())
    regions = [replace(region, encode=frozenset()) for region in regions]
    try:
        walk = walk_plan(graph, regions)
    except oracles.CannotRebuildError:
        return
    again = [op for found in walk.again.values() for op in found]
    device = sum(op.seconds for op in ops), sum(ops[i].seconds for i in again)
    launch = (
        sum(op.launch_seconds for op in ops),
        sum(ops[i].launch_seconds for i in again),
    )
    longer = max(sum(device), sum(launch)) - max(device[0], launch[0])
    assert simulate(graph, regions).recompute_seconds == pytest.approx(longer)


@pytest.mark.parametrize("cpu", ["runs the ops", "is busier", "has time"])
@pytest.mark.parametrize("seed", range(30))
def test_the_engine_takes_time_of_the_cpu(seed: int, cpu: str) -> None:
    rng = Random(seed)
    graph = graphs.random_step(rng)
    regions = graphs.random_regions(graph, rng)
    launch = {"runs the ops": 0.0, "is busier": 10.0, "has time": 1e-9}[cpu]
    ops = tuple(replace(op, launch_seconds=launch) for op in graph.ops)
    varying = rng.sample(range(len(graph.calls)), k=min(2, len(graph.calls)))
    shapes = (Hazard(call, "shapes", "", (PROGRAM, RERUN)) for call in sorted(varying))
    graph = replace(graph, ops=ops, hazards=tuple(shapes))
    try:
        before = simulate(graph, regions)
    except PlanError:
        return
    record = 0.0 if cpu == "has time" else 4.0  # at first, when the device has no work
    costs = EngineCosts(watch_seconds=0.25, rerun_seconds=2.0, record_seconds=record)
    after = simulate(replace(graph, engine=costs), regions)
    watched = sum(len(graph.saved_in(*span_of(region))) for region in regions)
    again = sum(len(effect.steps) for effect in before.effects)
    recorded = 0  # and written, each step anew
    for region, effect in zip(regions, before.effects, strict=True):
        first, last = region.call, region.call if region.last is None else region.last
        if region.by == PROGRAM and any(
            graph.is_inside(call, first, last) for call in varying
        ):
            recorded += graph.calls[last].stop - graph.calls[first].start
            recorded += len(effect.steps)
    more = 0.25 * watched + 2.0 * again + record * recorded
    if cpu == "has time":  # it launches next to nothing while the device works
        device = before.recompute_seconds
        more = max(0.0, more - graph.step_seconds - device)
        assert after.recompute_seconds == pytest.approx(device + more, abs=1e-6)
        assert after.engine_overhead == 0.0
    else:
        assert after.recompute_seconds == pytest.approx(before.recompute_seconds + more)
        assert after.engine_overhead == pytest.approx(more / graph.step_seconds)
    assert after.live_bytes == before.live_bytes


def test_what_one_region_lets_go_another_may_hold() -> None:
    forward = graphs.Forward()
    x, weight = forward.given(1), forward.given(1, "parameter")
    (shared,) = forward.op("expand", [x, weight], makes=[100])
    for name in ("first", "second"):
        with forward.call(name):
            (read,) = forward.op("neg", [shared], makes=[10])
            (made,) = forward.op(
                "exp", [read], makes=[10], workspace=Workspace((400,), (600,))
            )
            forward.save(made)
            (x,) = forward.op("add", [made, x], makes=[1])
    graph = forward.graph()
    regions = [Region(0), Region(1)]
    first, second = simulate(graph, regions).effects
    (let_go,) = second.freed_in_gap.values()
    assert [storage for storage, _ in let_go] == [shared]
    assert min(first.freed_in_gap) > min(second.freed_in_gap)
    seen = walk_plan(graph, regions)
    assert simulate(graph, regions).live_bytes == seen.live_bytes


def test_a_region_holds_its_input_to_the_end_of_its_forward() -> None:
    """Even where the only tensor that it saved is freed earlier in forward."""
    forward = graphs.Forward()
    x, weight = forward.given(1), forward.given(1, "parameter")
    (read,) = forward.op("expand", [x, weight], makes=[100])
    with forward.call("block"):
        (y,) = forward.op("neg", [read], makes=[10])
        forward.save(y)
        (y,) = forward.op("exp", [y], makes=[10])
        (y,) = forward.op("log", [y], makes=[10])
    forward.op("sum", [y], makes=[1])
    graph = forward.graph()
    (saved,) = graph.saved
    freed = replace(
        saved, unpacked_at=-1, last_used=saved.packed_at, last_held=saved.packed_at
    )
    graph = replace(graph, saved=(freed,))
    last = 2 * graph.calls[0].stop - 1  # half moment of the region's last op
    unplanned, planned = simulate(graph), simulate(graph, [Region(0)])
    held = [
        a - b for a, b in zip(planned.live_bytes, unplanned.live_bytes, strict=True)
    ]
    assert graph.storages[read].last < graph.calls[0].stop - 1
    assert held[last - 1 : last + 2] == [100, 100, 0]
    assert planned.live_bytes[last] == 1 + 1 + 100 + 10 + 10


def test_without_regions_a_storage_lives_from_its_maker_to_its_last_holder() -> None:
    graph = graphs.chain(3)
    live = [0] * (2 * len(graph.ops) + 1)
    for number, storage in enumerate(graph.storages):
        start = 0 if storage.maker == BEFORE_STEP else 2 * storage.maker + 1
        done = [saved.last_held for saved in graph.saved if saved.storage == number]
        stop = max(storage.last, *done, -1)
        for moment in range(start, min(2 * stop + 1, len(live) - 1) + 1):
            live[moment] += storage.bytes
    assert live == simulate(graph).live_bytes


def test_bytes_by_kind_sum_to_the_peak() -> None:
    graph = graphs.chain(4, workspace_bytes=7)
    blocks = [i for i, call in enumerate(graph.calls) if call.fqn.count(".") == 1]
    for regions in ([], [Region(block) for block in blocks]):
        timeline = simulate(graph, regions)
        assert timeline.peak_bytes == sum(timeline.peak_by_kind.values())


def test_keeping_nothing_runs_every_wanted_op_once_and_saves_memory() -> None:
    graph = graphs.chain(6, width_bytes=10**5, hidden_bytes=4 * 10**5)
    blocks = [i for i, call in enumerate(graph.calls) if call.fqn.count(".") == 1]
    unplanned = simulate(graph)
    planned = simulate(graph, [Region(block) for block in blocks])
    assert planned.peak_bytes < unplanned.peak_bytes
    for effect in planned.effects:
        assert len(effect.steps) == len(set(effect.steps))


def test_a_rerun_stops_after_its_last_saved_tensor() -> None:
    graph = graphs.chain(1)
    block = next(i for i, call in enumerate(graph.calls) if call.fqn == "h.0")
    (effect,) = simulate(graph, [Region(block, RERUN)]).effects
    last_saved = max(graph.saved[i].packed_at for i in graph.saved_in(block))
    assert list(range(graph.calls[block].start, last_saved)) == effect.steps


@pytest.mark.parametrize("functions", [None, 0, 1, 40])
def test_a_rerun_compares_functions_of_torch(functions: int | None) -> None:
    """An LSTM of C++ runs hundreds of ops in one function, others two for each op."""
    graph = graphs.chain(3)
    calls = tuple(replace(call, functions=functions) for call in graph.calls)
    costs = EngineCosts(rerun_seconds=0.1, module_seconds=0.5)
    graph = replace(graph, calls=calls, engine=costs)
    regions = [Region(call, RERUN) for call in graph.children[-1][:2]]
    found = simulate(graph, regions)
    assert found.recompute_seconds == pytest.approx(walk_plan(graph, regions).seconds)
    plain = simulate(replace(graph, engine=EngineCosts(rerun_seconds=0.1)), regions)
    steps = sum(len(effect.steps) for effect in found.effects)
    share = (found.recompute_seconds - plain.recompute_seconds) / (0.5 * steps)
    assert (share < 1) == (functions == 1)


def test_regions_inside_one_another_are_refused() -> None:
    graph = graphs.random_step(Random(3))
    with pytest.raises(PlanError, match="regions overlap"):
        simulate(graph, [Region(0), Region(1)])
