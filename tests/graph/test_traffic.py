"""Bytes and seconds of collectives against closed forms of rings."""

from __future__ import annotations

from dataclasses import replace

import graphs
import pytest
from graphs import Forward

from ckplan.errors import GraphError
from ckplan.graph.graph import Graph
from ckplan.graph.sharding import SCHEMES, Sharding, Traffic, communication, traffic_of
from ckplan.graph.sharding.schemes import sharded

BLOCKS, WEIGHT, HEAD = 4, 4800, 2400  # bytes
ALL = BLOCKS * WEIGHT + HEAD


def blocks(rows: int = WEIGHT // 8) -> Graph:
    """Layers of one 32-bit weight each, and a head of the whole model's."""
    forward = Forward()
    x = forward.given(10)
    shapes = {f"h.{i}.weight": f"float32[{rows},2]" for i in range(BLOCKS)}
    weights = [forward.given(8 * rows, "parameter") for _ in shapes]
    head = forward.given(HEAD, "parameter")
    shapes["head.weight"] = f"float32[{HEAD // 4},1]"
    with forward.call("", module="Model"):
        for i, weight in enumerate(weights):
            with forward.call(f"h.{i}", module="Block"):
                (x,) = forward.op("mm", [x, weight], makes=[10], saves=[x, weight])
        with forward.call("head", module="Linear"):
            (x,) = forward.op("mm", [x, head], makes=[10], saves=[x, head])
    graph = forward.graph()
    return replace(graph, fingerprint={**graph.fingerprint, "parameters": shapes})


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_sends_as_much_as_in_rings(ranks: int) -> None:
    share = (ranks - 1) / ranks
    of_all, of_units = share * ALL, share * BLOCKS * WEIGHT
    expected = {
        "ddp": Traffic(0, 0, round(2 * of_all), 0),
        "zero1": Traffic(0, 0, round(of_all), round(of_all)),
        "zero2": Traffic(0, round(of_all), 0, round(of_all)),
        "zero3": Traffic(round(of_all), round(of_units + of_all)),
        "fsdp2": Traffic(round(of_all), round(of_units + of_all)),
    }
    reduced = round(of_all)  # of every scheme
    expected = {k: replace(v, reduced_bytes=reduced) for k, v in expected.items()}
    assert {*expected} == {*SCHEMES}
    for scheme, traffic in expected.items():
        assert traffic_of(blocks(), Sharding(scheme, ranks)) == traffic, scheme
    # "ZeRO", section 7: stages 1 and 2 send as much as plain data parallelism, stage 3
    # half as much again; a head that stays from forward to backward is gathered once.
    sent = {scheme: traffic.step_bytes(1) for scheme, traffic in expected.items()}
    assert sent["zero1"] == sent["zero2"] == sent["ddp"]
    assert 2 * sent["zero3"] == 3 * sent["ddp"] - 2 * round(share * HEAD)


def test_micro_batches_are_reduced_each_where_gradients_are_divided() -> None:
    one, three = (
        {
            scheme: traffic_of(blocks(), Sharding(scheme, 4)).step_bytes(many)
            for scheme in SCHEMES
        }
        for many in (1, 3)
    )
    share = round(0.75 * ALL)
    for scheme in SCHEMES:
        traffic = traffic_of(blocks(), Sharding(scheme, 4))
        times = 1 if scheme in ("ddp", "zero1") else 3
        assert traffic.step_reduced_bytes(3) == times * share, scheme
    more = {scheme: three[scheme] - one[scheme] for scheme in SCHEMES}
    assert more["ddp"] == more["zero1"] == 0
    assert more["zero2"] == 2 * share
    assert more["zero3"] == more["fsdp2"] == 2 * one["zero3"]


def test_rows_that_ranks_do_not_divide_are_padded_under_fsdp2() -> None:
    graph = blocks(rows=6)  # of 8 bytes: two rows on every one of 4 ranks
    traffic = traffic_of(graph, Sharding("fsdp2", 4))
    whole = BLOCKS * 2 * 8 + HEAD // 4
    assert traffic.forward_bytes == 3 * whole
    assert traffic.backward_bytes == 3 * (whole + BLOCKS * 2 * 8)
    flat = traffic_of(graph, Sharding("zero3", 4))
    assert flat.forward_bytes == 3 * (BLOCKS * 12 + HEAD // 4)


def test_one_rank_sends_nothing() -> None:
    for scheme in SCHEMES:
        assert traffic_of(blocks(), Sharding(scheme, 1)) == Traffic()


def test_only_what_is_longer_than_its_phase_takes_time() -> None:
    graph = blocks()  # of one second an op
    forward, stop = graph.num_forward, graph.backward_stop
    backward = float(stop - forward)
    traffic = Traffic(100, 400, 600, 50, reduced_bytes=300)

    def exposed(rate: int, many: int = 1, added: float = 0.0) -> float:
        options = {"accumulate": many} if many > 1 else {}
        step = replace(graph, options=options)
        found = communication(step, traffic, rate, added)
        assert found.rate == rate
        assert found.seconds == traffic.step_bytes(many) / rate
        assert found.reduce_seconds == many * 300 / rate
        return found.exposed_seconds

    assert exposed(10**6) == 50 / 10**6  # nothing hides what follows the optimizer
    assert exposed(10) == (10 - forward) + (100 - backward) + 5
    assert exposed(50) == (20 - backward) + 1  # forward hides its 2 seconds
    assert (
        exposed(10, many=3)
        == 3 * (10 - forward) + 2 * (40 - backward) + (100 - backward) + 5
    )
    # Recomputation is in backward, and hides as much as it takes.
    assert exposed(10, added=30.0) == (10 - forward) + (100 - backward - 30) + 5
    assert (
        exposed(10, many=2, added=40.0)
        == 2 * (10 - forward) + max(40 - backward - 20, 0) + (100 - backward - 20) + 5
    )


def test_a_rank_notes_what_its_seconds_are_without() -> None:
    sharding = Sharding("zero1", 8)
    assert "without communication: " not in sharded(blocks(), sharding).notes[-1]
    note = sharded(blocks(), sharding, 10**4).notes[-1]  # 2 * 18900 bytes in 3.78 s
    assert note.endswith(
        "seconds are without communication: rings at 1e-05 GB/s take 3.78 s a step, of "
        "which forward and backward hide 1.89 s"
    )


def test_launches_count_as_the_phase_does() -> None:
    graph = blocks()
    ops = tuple(replace(op, launch_seconds=4.0, seconds=1.0) for op in graph.ops)
    found = communication(replace(graph, ops=ops), Traffic(forward_bytes=30), 1)
    assert found.exposed_seconds == 30 - (4 * graph.num_forward + 1)


def test_a_step_without_names_of_its_parameters_cannot_say_what_is_sent() -> None:
    with pytest.raises(GraphError, match="does not say which parameters it has"):
        traffic_of(graphs.chain(2), Sharding("ddp", 2))


def test_the_gathers_are_those_of_the_step_of_a_rank() -> None:
    """The same passes as the ops that are inserted, from which bytes are replayed."""
    for scheme, copies in (("zero3", 1), ("fsdp2", 2)):  # fsdp2 copies out of a buffer
        rank = sharded(blocks(), Sharding(scheme, 8))
        gathered = sum(op.moved_bytes for op in rank.ops if op.name == "all_gather")
        traffic = traffic_of(blocks(), Sharding(scheme, 8))
        reduced = round(7 / 8 * ALL)
        sent = traffic.forward_bytes + traffic.backward_bytes - reduced
        assert sent == 7 * gathered / copies / 8, scheme
