"""Which cards a step fits on: verdicts, batches, remedies, estimates, the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import graphs
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import ckplan
from ckplan import gpus
from ckplan.cli import app
from ckplan.errors import CkplanError, InfeasibleError
from ckplan.fitting.fit import AT_NO_BATCH, fit_batches
from ckplan.fitting.other_card import estimated, on_card
from ckplan.graph.caches import held_caches, with_storages
from ckplan.graph.file import save
from ckplan.graph.graph import Graph
from ckplan.graph.records import BEFORE_STEP, Storage, TensorType
from ckplan.report.step import step_report
from ckplan.report.tables import render
from ckplan.simulating.allocations import has_room, reserved_bytes
from ckplan.simulating.simulate import Simulator, simulate
from ckplan.solving.alternatives import alternatives
from ckplan.solving.planner import Planner
from ckplan.solving.remedies import (
    CHANGES,
    CLOSE,
    SAME,
    SMALLER,
    Remedy,
    remedies,
)
from ckplan.tuning.known_batches import KnownBatches, batches_of
from ckplan.units import format_bytes

MIB = 2**20
NAMES = [*gpus.load()]


def of_batch(rows: int, num_blocks: int = 8, gpu: str | None = "T4") -> Graph:
    """A step of so many rows, 20 MiB each between blocks."""
    graph = graphs.chain(
        num_blocks,
        width_bytes=20 * MIB * rows,
        hidden_bytes=80 * MIB * rows,
        weight_bytes=8 * MIB,
    )
    batch = {"batch": {"input_ids": f"int64[{rows},256]"}}
    device = {"device": "cuda" if gpu else "cpu"}
    return replace(
        graph,
        fingerprint={**graph.fingerprint, **batch, **device},
        options={"gpu": gpu} if gpu else {},
    )


SMALL, LARGE = of_batch(2), of_batch(4)


def test_verdicts_are_those_of_the_allocator_and_of_solve() -> None:
    found = ckplan.fit(SMALL, gpu=["T4", "H200"])
    t4, h200 = found.cards
    assert (t4.how, h200.how, t4.planned_overhead) == ("as it is", "as it is", 0.0)
    assert found.fits and found.cheapest == "T4"
    assert t4.needed_bytes == reserved_bytes(simulate(SMALL))
    large = of_batch(16)
    found = ckplan.fit(large, gpu="T4")
    (card,) = found.cards
    plan = ckplan.solve(large, gpu="T4")
    assert plan.predicted is not None
    assert (card.how, card.fits) == ("with a plan", True)
    assert card.planned_overhead == pytest.approx(plan.predicted.overhead, abs=1e-4)
    found = ckplan.fit(of_batch(200), gpu=["T4", "MI300X"])
    assert [card.fits for card in found.cards] == [False, True]
    assert not found.fits  # every card that is named must
    assert replace(found, all_named=False).fits  # one of all


def test_a_plan_whose_gaps_take_more_than_it_frees_is_not_the_least() -> None:
    sizes = {"width_bytes": 12 * MIB, "hidden_bytes": 77 * MIB}
    graph = graphs.chain(3, **sizes, weight_bytes=40 * MIB)
    fingerprint = {**graph.fingerprint, "device": "cuda"}
    graph = replace(graph, options={"gpu": "T4"}, fingerprint=fingerprint)
    planner = Planner(graph)
    found = planner.within(planner.floor.peak_bytes)
    assert found is not None
    smallest = found[0]
    (card,) = ckplan.fit(graph, gpu="T4").cards
    assert smallest.peak_bytes < simulate(graph).peak_bytes
    assert card.needed_bytes < reserved_bytes(smallest)
    assert card.least_bytes == card.needed_bytes


def test_the_largest_batches_fit_and_the_next_ones_do_not() -> None:
    found = ckplan.fit(SMALL, LARGE, gpu="T4")
    (card,) = found.cards
    usable = gpus.find("T4").usable_bytes
    floor = Planner(SMALL).within(Planner(SMALL).floor.peak_bytes)
    assert floor is not None
    for rows, regions in (
        (card.largest_unplanned, ()),
        (card.largest_planned, floor[1]),
    ):
        assert rows
        timelines = [Simulator(of_batch(n)).run(regions) for n in (rows, rows + 1)]
        fit, over = (has_room(t, usable, expandable=False) for t in timelines)
        assert (fit, over) == (True, False), rows
    assert card.largest_planned > card.largest_unplanned  # type: ignore[operator]
    swapped = ckplan.fit(LARGE, SMALL, gpu="T4")
    assert swapped.cards[0].largest_planned == card.largest_planned
    assert swapped.rows == 4
    single = ckplan.fit(SMALL, gpu="T4")
    assert "not known from one trace" in single.notes[0]
    (alone,) = single.cards
    assert alone.largest_planned is alone.largest_unplanned is None


def test_cards_that_need_no_plan_search_none_by_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[int] = []
    at = KnownBatches.at

    def counted(batches: KnownBatches, rows: int) -> Graph:
        drawn.append(rows)
        return at(batches, rows)

    def searched(planner: Planner, budget_bytes: int) -> None:
        raise AssertionError("a search by seconds")

    monkeypatch.setattr(KnownBatches, "at", counted)
    monkeypatch.setattr(Planner, "within", searched)
    found = ckplan.fit(SMALL, LARGE)
    assert {card.how for card in found.cards} == {"as it is"}
    assert all(
        (c.largest_planned or 0) > (c.largest_unplanned or 0) for c in found.cards
    )
    assert len(drawn) - 1 == len({*drawn})  # one to see that both are of one step


def test_a_batch_that_does_not_fit_says_which_does() -> None:
    found = fit_batches(batches_of((of_batch(200), LARGE)), gpu="T4")
    (card,) = found.cards
    assert card.how == "at a smaller batch"
    smaller = card.remedies[0]
    assert smaller.how.startswith(f"a batch of {card.largest_planned} in place of 200")
    assert smaller.fits and smaller.overhead is not None
    assert smaller.peak_bytes <= card.limit_bytes
    weights = simulate(of_batch(1)).peak_by_kind
    (card,) = ckplan.fit(
        SMALL, LARGE, budget=weights["parameter"] + weights["optimizer"]
    ).cards
    assert (card.how, card.largest_planned) == (AT_NO_BATCH, 0)
    assert all(one.how[:7] != "a batch" for one in card.remedies)


def test_other_batches_need_two_traces_of_one_step() -> None:
    for other in (of_batch(2), of_batch(4, num_blocks=9)):
        with pytest.raises(CkplanError):
            ckplan.fit(SMALL, other)
    with pytest.raises(CkplanError, match="cannot fit 0 traces"):
        ckplan.fit()
    with pytest.raises(CkplanError, match="a budget and cards at once"):
        ckplan.fit(SMALL, gpu="T4", budget="1GiB")


def test_a_trace_of_the_cpu_is_for_budgets_alone() -> None:
    graph = of_batch(2, gpu=None)
    with pytest.raises(CkplanError, match="cannot plan for L4: this trace has the by"):
        ckplan.fit(graph, gpu="L4")
    with pytest.raises(CkplanError, match="cannot plan for a GPU"):
        ckplan.fit(graph)
    (card,) = ckplan.fit(graph, budget="100%").cards
    assert (card.how, card.uncertain) == ("as it is", ())


def test_seconds_of_another_card_are_those_of_its_own_trace() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 16))
    x = torch.randn(64, 3, 8, 8)
    for amp in (None, "bf16"):
        here, there = (
            ckplan.profile(model, x, gpu=name, amp=amp, replay=False)
            for name in ("RTX 4090", "L4")
        )
        moved = on_card(here, gpus.find("L4"))
        assert [op.name for op in moved.ops] == [op.name for op in there.ops]
        for one, other in zip(moved.ops, there.ops, strict=True):
            assert one.seconds == pytest.approx(other.seconds, abs=1e-9), one.name
        assert moved.step_seconds == pytest.approx(there.step_seconds, rel=0.01)
        assert on_card(here, gpus.find("RTX 4090")) is here
        assert not [*estimated(here, gpus.find("RTX 4090"))]
        said = " ".join(estimated(here, gpus.find("A100 40GB")))
        assert "bytes: kernels as on RTX 4090" in said
        assert "seconds: of the ops traced for RTX 4090" in said
        assert "rocm" in " ".join(estimated(here, gpus.find("MI300X")))


def test_expandable_segments_have_a_row_where_they_are_cheaper() -> None:
    graph = of_batch(4)
    priced = 0
    for share in (0.7, 0.9, 1.0):
        size = round(share * simulate(graph).peak_bytes)
        batches = KnownBatches(graph, 4)
        with pytest.MonkeyPatch.context() as patch:
            card = replace(gpus.find("T4"), capacity_bytes=size, context_bytes=0)
            patch.setattr(gpus, "find", lambda name, card=card: card)
            (found,) = fit_batches(batches, gpu="T4").cards
        rows = [one for one in found.remedies if "expandable" in one.how]
        for row in rows:
            priced += 1
            assert row.overhead is not None
            assert row.peak_bytes <= size
            assert found.planned_overhead is None or (
                row.overhead < found.planned_overhead
            )
    assert priced


def with_logits(graph: Graph, words: int) -> Graph:
    """The same step, whose last op of forward is a softmax of so many words."""
    number = graph.num_forward - 1
    ops = list(graph.ops)
    ops[number] = replace(ops[number], name="_log_softmax")
    storages = list(graph.storages)
    for storage in (*ops[number].outputs, *ops[number].reads):
        one = storages[storage]
        storages[storage] = replace(
            one, tensor=TensorType("float32", (one.bytes // 4 // words, words))
        )
    return replace(graph, ops=tuple(ops), storages=tuple(storages))


def test_remedies_are_replayed_and_come_in_order_of_cost() -> None:
    state = Storage(99 * MIB, "optimizer", BEFORE_STEP, len(of_batch(4).ops))
    graph = replace(of_batch(4), storages=(*of_batch(4).storages, state))
    regions = Planner(graph).within(Planner(graph).floor.peak_bytes)
    assert regions is not None
    found = remedies(graph, regions[1])
    assert [one.bits for one in found] == sorted(
        (one.bits for one in found), key=[SAME, CLOSE, CHANGES].index
    )
    (smaller,) = (one for one in found if one.how.startswith("a batch of 2 in"))
    half = Simulator(of_batch(2)).run(regions[1]).peak_bytes + state.bytes
    assert smaller.peak_bytes == pytest.approx(half, rel=0.02)
    (sgd,) = (one for one in found if "sgd" in one.how)
    assert sgd.peak_bytes == regions[0].peak_bytes - state.bytes
    assert sgd.about  # its step allocates other tensors
    seven = [one.how for one in remedies(of_batch(7), (), limit_bytes=1 << 40)]
    assert any(one.startswith("a batch of 1 in place of 7") for one in seven)
    assert [one.fits for one in remedies(graph, regions[1], 1)] == [False] * (
        len(found) - 1
    )  # no batch is that small
    assert {one.fits for one in remedies(graph, regions[1], half)} == {True, False}


def test_a_smaller_batch_is_no_promise_of_bits_and_leaves_a_data_set_as_it_is() -> None:
    def smaller(graph: Graph) -> Remedy:
        (found,) = (one for one in remedies(graph, ()) if one.name == SMALLER)
        return found

    graph = of_batch(4)
    held = Storage(999 * MIB, "input", BEFORE_STEP, len(graph.ops))
    typed = [
        replace(
            graph,
            storages=(
                *graph.storages,
                replace(held, tensor=TensorType("int64", shape)),
            ),
        )
        for shape in ((4, 9), (4096, 9))
    ]
    whole, half = smaller(typed[1]).peak_bytes, smaller(typed[0]).peak_bytes
    assert whole - half == held.bytes // 2
    assert smaller(graph).bits == CLOSE
    normed = replace(graph.ops[0], name="native_batch_norm")
    for name, bits in (("BatchNorm2d", CHANGES), ("InstanceNorm2d", CLOSE)):
        calls = tuple(replace(one, module=name) for one in graph.calls)
        with_norm = replace(graph, ops=(normed, *graph.ops[1:]), calls=calls)
        assert smaller(with_norm).bits == bits
    assert smaller(graph).how == "a batch of 2 in place of 4, with --accumulate 2"
    scripted = replace(graph, options={"workload": {"script": ["train.py"]}})
    assert smaller(scripted).how.endswith("accumulated 2 times as often, in the script")


def without_type(kind: str, number: int, one: Storage) -> Storage:
    """As a part of a tensor, which one of several ranks has."""
    del number
    return replace(one, tensor=None) if one.kind == kind else one


def test_a_model_in_16_bits_is_not_told_to_halve_its_parameters() -> None:
    graph = of_batch(1)

    def typed(dtype: str) -> Graph:
        return replace(
            graph,
            storages=tuple(
                replace(one, tensor=TensorType(dtype, (one.bytes // 2,)))
                if one.kind == "parameter"
                else one
                for one in graph.storages
            ),
        )

    for dtype, told in (("float32", True), ("bfloat16", False)):
        one = typed(dtype)
        named = {"p": f"{dtype}[1000]"}
        rank = replace(one, fingerprint={**one.fingerprint, "parameters": named})
        parts = partial(without_type, "parameter")
        for graph in (one, with_storages(rank, parts)):
            hints = [row.how for row in remedies(graph, ())]
            assert ("a model in bf16" in hints) is told


def test_caches_that_outlive_forward_are_found_and_priced() -> None:
    graph = of_batch(4)
    assert not held_caches(graph)
    makers = [
        op.outputs[0] for op in graph.ops[: graph.num_forward] if op.name == "gelu"
    ]
    keeps = tuple(
        replace(
            one,
            tensor=TensorType("float32", (4, 8, one.bytes // 128)),
            last=graph.backward_stop,
        )
        if number in makers
        else one
        for number, one in enumerate(graph.storages)
    )
    cached = replace(graph, storages=keeps)
    assert held_caches(cached) == frozenset(makers)
    first = remedies(cached, ())[0]
    assert "use_cache=False" in first.how
    assert (first.bits, first.overhead) == (SAME, 0.0)
    assert first.peak_bytes == simulate(graph).peak_bytes
    assert first.peak_bytes < simulate(cached).peak_bytes
    planner = Planner(cached)
    limit = (3 * planner.floor.peak_bytes + planner.unplanned.peak_bytes) // 4
    planned = planner.solve(limit)
    row = next(one for one in alternatives(planner, planned) if "cache" in one.how)
    without = Planner(graph).solve(limit)
    assert row.overhead == pytest.approx(without.timeline.overhead)
    assert row.overhead < planned.timeline.overhead
    assert row.peak_bytes == without.timeline.peak_bytes
    floor = planner.floor.peak_bytes
    with pytest.raises(InfeasibleError) as caught:
        planner.solve(floor - 1)
    less = Planner(graph).floor.peak_bytes
    assert less < 0.95 * floor
    assert f"use_cache=False in the model's configuration ({format_bytes(less)})" in (
        caught.value.hint
    )
    shown = render(step_report(cached, simulate(cached)))
    assert "advice" in shown and "use_cache=False" in shown
    assert "advice" not in render(step_report(graph, simulate(graph)))


def test_an_infeasible_budget_names_tensors_and_gives_the_cheapest_ways() -> None:
    graph = with_logits(of_batch(4), 1000)
    floor = Planner(graph).floor.peak_bytes
    with pytest.raises(InfeasibleError) as caught:
        ckplan.solve(graph, floor - MIB)
    error = caught.value
    assert "MiB" in error.needed and "bytes" not in error.needed
    assert "320.00 MiB h.*.mlp/addmm, rebuilt; " in error.needed
    assert error.hint.startswith("a batch of 2 in place of 4, with --accumulate 2")
    with pytest.raises(InfeasibleError) as caught:
        ckplan.solve(graph, 1000)
    assert caught.value.hint.startswith("several changes together")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    monkeypatch.chdir(tmp_path)
    save(SMALL, tmp_path / "small.json.gz")
    save(LARGE, tmp_path / "large.json.gz")
    return lambda *argv: CliRunner().invoke(app, ["fit", *argv], env={"COLUMNS": "80"})


def test_the_command_prints_a_row_for_every_card(run: Callable[..., object]) -> None:
    ended = run("small.json.gz", "large.json.gz")
    assert ended.exit_code == 0
    lines = ended.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "Where Chain fits, batch 2"
    assert sum(line.startswith("  ") for line in lines) >= len(NAMES)
    assert "UNCERTAIN" in ended.stdout
    found = json.loads(run("small.json.gz", "large.json.gz", "--json").stdout)
    assert [card["name"] for card in found["cards"]] == NAMES
    keys = {
        *("name", "fits", "planned_overhead"),
        *("largest_batch_unplanned", "largest_batch_planned"),
    }
    assert all(keys <= card.keys() for card in found["cards"])
    assert found["cheapest"] == "A100 40GB MIG 1g.5gb"
    assert {"what", "cards"} == found["uncertain"][0].keys()


def test_the_command_gates(run: Callable[..., object]) -> None:
    assert run("small.json.gz", "--gpu", "T4").exit_code == 0
    ended = run("small.json.gz", "--budget", "200MiB")
    assert ended.exit_code == 3
    assert "short under the smallest plan; what would make it fit" in ended.stdout
    sarif = json.loads(run("small.json.gz", "--budget", "200MiB", "--sarif").stdout)
    assert sarif["version"] == "2.1.0"
    (result,) = sarif["runs"][0]["results"]
    assert (result["ruleId"], result["level"]) == ("does-not-fit", "error")
    place = result["locations"][0]["physicalLocation"]["artifactLocation"]
    assert place == {"uri": "small.json.gz"}
    fine = json.loads(run("small.json.gz", "--gpu", "T4", "--sarif").stdout)
    assert fine["runs"][0]["results"] == []
    assert run("small.json.gz", "--gpu", "T4", "--budget", "1GB").exit_code == 2
    assert run("small.json.gz", "--set", "a=1").exit_code == 2
    assert run("nope.json.gz").exit_code == 1


MODEL = """
import torch
from torch import nn

def build(batch: int = 64):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(),
                                          nn.Linear(256, 64)) for _ in range(4)))
    return model, torch.randn(batch, 64)

def alone():
    return build(1)

class Two(nn.Linear):
    def forward(self, x, y):
        return super().forward(x).mean() + super().forward(y).mean()

def two():
    return Two(8, 8), (torch.randn(4, 8), torch.randn(6, 8))

def twice():  # one tensor as inputs and labels, as language models have it
    model, x = build()
    return {"model": model, "batch": x, "target": x,
            "loss_fn": nn.functional.mse_loss}
"""


def test_the_command_profiles_a_workload_at_two_batches(
    run: Callable[..., object], tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    found = json.loads(run("model.py", "--gpu", "T4", "--gpu", "L4", "--json").stdout)
    assert (found["batch"], found["fits"], found["uncertain"]) == (64, True, [])
    assert found["cheapest"] == "T4"
    for card in found["cards"]:
        assert card["largest_batch_planned"] >= card["largest_batch_unplanned"] > 64
    twice = json.loads(run("model.py:twice", "--budget", "1GB", "--json").stdout)
    assert twice["cards"][0]["largest_batch_planned"] > 64
    alone = json.loads(run("model.py:alone", "--budget", "1GB", "--json").stdout)
    assert (alone["batch"], alone["notes"]) == (1, [])
    assert alone["cards"][0]["largest_batch_planned"] > 64
    two = json.loads(run("model.py:two", "--budget", "1GB", "--json").stdout)
    assert two["cards"][0]["largest_batch_planned"] is None
    assert "other batches: cannot find the rows of the batch" in two["notes"][0]
