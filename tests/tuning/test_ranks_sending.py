"""Shards in ``tune``: what ranks send counts where the rate between cards is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import graphs
import pytest

from ckplan import gpus
from ckplan.graph.graph import Graph
from ckplan.graph.sharding import (
    Sharding,
    Traffic,
    communication,
    sharded,
    traffic_of,
)
from ckplan.report.tables import render
from ckplan.report.tuning import tuned_json, tuned_report
from ckplan.simulating.peers import peer_rate
from ckplan.simulating.simulate import Simulator
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.tuning.ranks import Ranks
from ckplan.tuning.settings import Way
from ckplan.tuning.tune import Tuning
from ckplan.tuning.tuned import Tuned
from ckplan.units import GIB, MIB

WEIGHT = 64 * MIB
LIMIT = MemoryLimit(6 * GIB)
ROWS, COLUMNS = 2**12, 2**12


def step_at(rows: int, gpu: str | None) -> Graph:
    """Two blocks whose three weights each are far larger than what they make."""
    graph = graphs.chain(
        2,
        width_bytes=MIB * rows,
        hidden_bytes=4 * MIB * rows,
        weight_bytes=WEIGHT,
        seconds=1e-3 * (1 + rows),
    )
    names = [f"h.{i}.{name}" for i in range(2) for name in ("norm", "mlp.a", "mlp.b")]
    shapes = {f"{name}.weight": f"float32[{ROWS},{COLUMNS}]" for name in names}
    return replace(
        graph,
        fingerprint={**graph.fingerprint, "parameters": shapes},
        options={} if gpu is None else {"gpu": gpu},
    )


def tuned(scheme: str, gpu: str | None, **how: Any) -> Tuned:
    def record(way: Way, rows: int, accumulate: int) -> Graph:
        graph = step_at(rows, gpu)
        if accumulate == 1:
            return graph
        return replace(graph, options={**graph.options, "accumulate": accumulate})

    options = {"allow": [scheme], "ranks": 8, **how}
    return Tuning(record, LIMIT, way=Way(), rows=8, **options).run()


@pytest.mark.parametrize("scheme", ["ddp", "zero2", "fsdp2"])
def test_a_step_takes_what_communication_exposes(scheme: str) -> None:
    best = tuned(scheme, "A100 40GB", total=8 * 16).best
    assert best.way.shard == scheme and best.communication is not None
    one = step_at(best.batch, "A100 40GB")
    one = replace(one, options={**one.options, "accumulate": best.accumulate})
    sharding = Sharding(scheme, 8)
    rank = sharded(one, sharding)
    timeline = Simulator(rank).run(best.regions)
    sent = communication(
        rank, traffic_of(one, sharding), 300 * 10**9, timeline.recompute_seconds
    )
    assert best.communication == sent
    alone = rank.step_seconds + timeline.recompute_seconds
    assert best.step_seconds == pytest.approx(alone + sent.exposed_seconds)


def test_slower_links_give_fewer_samples_and_other_cards_their_own_rate() -> None:
    names = "H100", "A100 40GB", "RTX 4090"
    found = {name: tuned("zero1", name, total=8 * 16) for name in names}
    speeds = [one.best.samples_per_second for one in found.values()]
    assert speeds[0] > speeds[1] > speeds[2]
    rates = [one.best.communication.rate for one in found.values()]  # type: ignore[union-attr]
    assert rates == [450 * 10**9, 300 * 10**9, 27.5 * 10**9]
    assert [gpus.find(name).peer for name in found] == rates


def test_the_answer_says_what_is_hidden_and_what_is_assumed() -> None:
    found = tuned("zero1", "RTX 4090", total=8 * 16)
    sent = found.best.communication
    assert sent is not None and 0 < sent.exposed_seconds < sent.seconds
    shown = " ".join(render(tuned_report(found)).split())
    assert "of it sending" in shown and "are hidden by forward and backward" in shown
    assert "rings at 27.5 GB/s each way, beside forward and backward" in shown
    assert "without communication" not in shown
    plain = tuned_json(found)["best"]
    assert plain["communication_seconds"] == sent.seconds
    assert plain["exposed_communication_seconds"] == sent.exposed_seconds
    assert plain["gather_seconds"] == plain["reduce_seconds"] == sent.reduce_seconds


def test_without_a_rate_the_answer_says_that_nothing_is_counted() -> None:
    found = tuned("ddp", None, total=8 * 16)
    assert found.best.communication is None
    assert any("without communication: the rate between" in n for n in found.notes)
    plain = tuned_json(found)["best"]
    assert plain["communication_seconds"] is None
    assert peer_rate(step_at(1, "no such card")) is None


def test_seconds_of_tiles_count_once() -> None:
    """Those of a step in tiles are in its graph, and in what its plan adds."""
    timeline = replace(Simulator(step_at(4, None)).run(), added_seconds=0.25)
    step = timeline.graph.step_seconds
    assert Ranks().seconds(timeline) == pytest.approx(step)
    assert timeline.queues == (pytest.approx(step), 0.0)
    whole = (1 + timeline.overhead) * timeline.unplanned_seconds
    assert Ranks().seconds(timeline) == pytest.approx(whole)
    traffic = Traffic(backward_bytes=2 * 10**9)
    slow = step_at(4, "L4")
    timeline = replace(Simulator(slow).run(), added_seconds=0.01)
    sent = Ranks(lambda: traffic).communication(timeline)
    assert sent == communication(slow, traffic, gpus.find("L4").peer)


def test_no_setting_that_was_passed_over_is_faster() -> None:
    """The bound that leaves batches out holds with communication, too."""
    gpu, sharding = "RTX 4090", Sharding("zero1", 8)
    best = tuned("zero1", gpu, total=8 * 64).best
    rate, speeds = gpus.find(gpu).peer, []
    for rows in (n for n in range(1, 65) if 64 % n == 0):
        one = step_at(rows, gpu)
        one = replace(one, options={**one.options, "accumulate": 64 // rows})
        rank = sharded(one, sharding)
        if not LIMIT.allows(Simulator(rank).run()):
            continue
        sent = communication(rank, traffic_of(one, sharding), rate)
        speeds.append(8 * 64 / (rank.step_seconds + sent.exposed_seconds))
    assert best.samples_per_second >= max(speeds) * (1 - 1e-3)
