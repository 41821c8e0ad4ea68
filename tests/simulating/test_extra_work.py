"""What a plan adds to the work of a step, against its ops counted by hand."""

from __future__ import annotations

from dataclasses import replace

import graphs

from ckplan.graph.graph import Graph
from ckplan.plan.region import RERUN, Region
from ckplan.simulating.extra_work import NO_EXTRA_WORK, ExtraWork, extra_work
from ckplan.simulating.moving import Link
from ckplan.simulating.simulate import Simulator


def step() -> Graph:
    graph = graphs.chain(
        3, width_bytes=100, hidden_bytes=400, stats_bytes=10, weight_bytes=50
    )
    ops = (replace(op, flops=10 + n, moved_bytes=n) for n, op in enumerate(graph.ops))
    return replace(graph, ops=tuple(ops))


def test_an_unplanned_step_has_none() -> None:
    assert extra_work(Simulator(step()).run()) == NO_EXTRA_WORK


def test_a_module_that_runs_again_adds_its_ops_once() -> None:
    graph = step()
    call = next(n for n, one in enumerate(graph.calls) if one.parent == 0)
    # Backward does not read the last one, a sum: the rerun ends before it.
    places = range(graph.calls[call].start, graph.calls[call].stop - 1)
    timeline = Simulator(graph).run([Region(call, by=RERUN)])
    flops, moved = sum(10 + n for n in places), sum(places)
    assert extra_work(timeline) == ExtraWork(flops, moved, 0)
    assert extra_work(timeline, 2) == ExtraWork(flops // 2, moved // 2, 0)


def test_values_that_move_do_so_twice() -> None:
    graph = step()
    simulator = Simulator(graph, Link(1e9))
    for call, one in enumerate(graph.calls):
        if one.parent != 0:
            continue
        for op in range(one.start, one.stop):
            region = Region(call, offload=frozenset({(op, 0)}))
            timeline = simulator.run([region])
            moved = timeline.moves.moved_bytes
            assert extra_work(timeline).link_bytes == 2 * moved
            if moved:
                return
    raise AssertionError("nothing moved")
