"""One rank's step against closed forms; against real ranks in test_ranks.py."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import graphs
import pytest
import torch
from commands import Run
from graphs import Forward
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ckplan
from ckplan.errors import CkplanError
from ckplan.graph import file as trace_file
from ckplan.graph.graph import Graph
from ckplan.graph.records import BEFORE_STEP, Storage
from ckplan.graph.sharding import SCHEMES
from ckplan.graph.sharding.editing import Insert, insert
from ckplan.graph.sharding.state import Parameter, flat_shares
from ckplan.plan.region import Region
from ckplan.simulating.simulate import Timeline, simulate

BLOCKS, WEIGHT, HEAD, X = 4, 4800, 2400, 10  # bytes
RANKS = 8


def blocks(*, optimizer_bytes_each: int = 2) -> Graph:
    """Layers of one 16-bit weight each and a head, with optimizer state per weight."""
    forward = Forward()
    x = forward.given(X)
    shapes = {f"h.{i}.weight": f"float16[{WEIGHT // 4},2]" for i in range(BLOCKS)}
    weights = [forward.given(WEIGHT, "parameter") for _ in shapes]
    head = forward.given(HEAD, "parameter")
    shapes["head.weight"] = f"float16[{HEAD // 2},1]"
    with forward.call("", module="Model"):
        for i, weight in enumerate(weights):
            with forward.call(f"h.{i}", module="Block"):
                (x,) = forward.op("mm", [x, weight], makes=[X], saves=[x])
        with forward.call("head", module="Linear"):
            (x,) = forward.op("mm", [x, head], makes=[X], saves=[x])
    graph = forward.graph()
    each = optimizer_bytes_each // 2
    state = [
        Storage(each * s.bytes, "optimizer", BEFORE_STEP, len(graph.ops))
        for s in graph.storages
        if s.kind == "parameter"
    ]
    return replace(
        graph,
        storages=(*graph.storages, *state),
        fingerprint={**graph.fingerprint, "parameters": shapes},
    )


def alive(graph: Graph, moment: int) -> int:
    return simulate(graph).live_bytes[moment]


@pytest.mark.parametrize(
    ("scheme", "whole", "part"),  # bytes per parameter, and of what N ranks divide
    [("zero1", 4, 12), ("zero2", 2, 14), ("zero3", 0, 16)],
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_model_states_are_as_in_the_paper_of_zero(
    scheme: str, whole: int, part: int, ranks: int
) -> None:
    """Table 1 of Rajbhandari et al.: mixed precision Adam, 2 + 2 + 12 bytes."""
    graph = ckplan.shard(blocks(optimizer_bytes_each=12), scheme, ranks)
    psi = (BLOCKS * WEIGHT + HEAD) // 2
    inputs = X
    states = alive(graph, 2 * graph.backward_stop + 1) - inputs
    assert states == whole * psi + part * psi // ranks


def test_ddp_holds_the_gradients_twice() -> None:
    one = blocks()
    two = ckplan.shard(one, "ddp", RANKS)
    more = [b - a for a, b in zip(live(one), live(two), strict=True)]
    assert set(more) == {BLOCKS * WEIGHT + HEAD}


def live(graph: Graph, regions: Iterable[Region] = ()) -> list[int]:
    return simulate(graph, regions).live_bytes


def test_fsdp2_holds_a_unit_and_what_is_on_its_way() -> None:
    graph = ckplan.shard(blocks(), "fsdp2", RANKS)
    whole = BLOCKS * WEIGHT + HEAD
    state = 2 * whole // RANKS + X  # parameters and optimizer
    units = {graph.calls[op.call].fqn for op in graph.ops if op.name == "all_gather"}
    assert units == {"", *(f"h.{i}" for i in range(BLOCKS))}
    for place in range(1, BLOCKS):  # forward: the unit, and the buffer it came in
        op = next(i for i, o in enumerate(graph.ops) if owner(graph, i) == f"h.{place}")
        assert graph.ops[op + 2].name == "mm"
        expected = state + HEAD + 2 * WEIGHT + (place + 1) * X
        assert alive(graph, 2 * (op + 2) + 1) == expected
    op = next(
        number
        for number, found in enumerate(graph.ops)
        if found.name == "mm_backward" and owner(graph, number) == "h.1"
    )
    # The unit, the next one's buffer, the one that gradients were reduced from; the
    # gradients of the head and of this unit, and a part of those of two others; and
    # of activations what was saved and two gradients.
    gradients = HEAD + WEIGHT + 2 * WEIGHT // RANKS
    assert alive(graph, 2 * op + 1) == state + HEAD + 3 * WEIGHT + gradients + 3 * X


def owner(graph: Graph, op: int) -> str:
    call = graph.ops[op].call
    return graph.calls[call].fqn if call >= 0 else "loss"


@given(st.integers(1, 50), st.integers(1, 9), st.integers(1, 64))
def test_rank_0_has_the_rows_that_torch_gives_it(
    rows: int, columns: int, ranks: int
) -> None:
    import torch

    chunks = torch.empty(rows, columns, device="meta").chunk(ranks)
    parameter = Parameter("x", 4 * rows * columns, (rows, columns))
    assert parameter.share_bytes(ranks) == 4 * chunks[0].numel()


@given(st.lists(st.integers(0, 10**6), max_size=9), st.integers(1, 64))
def test_flat_parts_are_together_the_padded_whole(sizes: list[int], ranks: int) -> None:
    assert sum(flat_shares(sizes, ranks)) == -(-sum(sizes) // ranks)


@given(st.data())
def test_an_op_of_no_bytes_changes_nothing_wherever_it_is_put(
    data: st.DataObject,
) -> None:
    graph = graphs.chain()
    chosen = data.draw(st.sets(st.integers(0, 2)))
    names = [f"h.{i}" for i in chosen]
    place = data.draw(st.integers(0, graph.backward_stop))
    one = Insert(place, "nothing", -1)
    one.make(0)
    other = insert(graph, [one], {})

    def told(found: Graph) -> Timeline:
        calls = [i for i, call in enumerate(found.calls) if call.fqn in names]
        return simulate(found, map(Region, calls))

    before, after = told(graph), told(other)
    assert after.peak_bytes == before.peak_bytes
    assert after.recompute_seconds == before.recompute_seconds
    without = [m for m in range(len(after.live_bytes)) if m // 2 != place]
    assert [after.live_bytes[m] for m in without] == before.live_bytes


@pytest.mark.parametrize("scheme", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
def test_plans_of_a_rank_fit_and_keep_to_its_units(scheme: str) -> None:
    found = graphs.chain(6, weight_bytes=40)
    shapes = [s for s in found.storages if s.kind == "parameter"]
    names = {f"p{i}": "float32[10]" for i in range(len(shapes))}
    graph = replace(found, fingerprint={**found.fingerprint, "parameters": names})
    rank = ckplan.shard(graph, scheme, RANKS)
    for budget in ("90%", "75%", "60%"):
        plan = ckplan.solve(rank, budget=budget)
        assert plan.predicted is not None
        assert plan.predicted.peak_bytes <= (plan.budget_bytes or 0)
        assert plan.predicted.overhead >= plan.bound["any_schedule"] - 1e-4


def test_what_cannot_be_sharded_is_said() -> None:
    graph = blocks()
    rank = ckplan.shard(graph, "zero1", 2)
    nameless = replace(graph, fingerprint={})
    for make, found in [
        (lambda: ckplan.shard(graph, "fsdp", 2), "unknown way to shard 'fsdp'"),
        (lambda: ckplan.shard(graph, "ddp", 0), "cannot shard over 0 ranks"),
        (lambda: ckplan.shard(graph, "ddp", 2.5), "cannot shard over 2.5 ranks"),
        (lambda: ckplan.shard(graph, "ddp", 2, units=["h.0"]), "cannot gather 'h.0'"),
        (lambda: ckplan.shard(graph, "fsdp2", 2, units=["x"]), "'x'"),
        (lambda: ckplan.shard(graph, "fsdp2", 2, units=["h.0#0"]), "single calls"),
        (lambda: ckplan.shard(rank, "ddp", 2), "one rank under zero1 already"),
        (lambda: ckplan.shard(nameless, "ddp", 2), "which parameters it has"),
    ]:
        with pytest.raises(CkplanError, match=found) as caught:
            make()
        assert len(str(caught.value).splitlines()) == 3


def test_units_can_be_chosen_and_regions_must_be_inside_of_one() -> None:
    graph = ckplan.shard(blocks(), "zero3", 2, units=["h.[0..1]"])
    assert ckplan.shard(blocks(), "zero3", 2, units="h.[0..1]") == graph
    assert "h.[0..1], the rest of the model" in graph.notes[-1]
    calls = {call.fqn: i for i, call in enumerate(graph.calls)}
    assert simulate(graph, [Region(calls["h.1"])]).peak_bytes
    for region in (Region(calls[""]), Region(calls["h.0"], last=calls["h.1"])):
        with pytest.raises(CkplanError, match="for that call alone"):
            simulate(graph, [region])
    graph = ckplan.shard(blocks(), "zero3", 2, units=["h.0"])
    with pytest.raises(CkplanError, match="for that call alone"):
        simulate(graph, [Region(calls["h.0"], last=calls["h.1"])])


def test_the_command_line_shards(run: Run, trace: Path) -> None:
    ways = ("--shard", "fsdp2", "--world-size", "4")
    alone, rank = (
        json.loads(run("show", str(trace), "--json", *more).out) for more in ((), ways)
    )
    for kind in ("parameter", "gradient", "optimizer"):
        whole, part = alone[f"{kind}_bytes"], rank[f"{kind}_bytes"]
        assert whole / 4 <= part < whole / 3
    assert run("solve", str(trace), "--min-memory", *ways).code == 0
    assert run("frontier", str(trace), "--points", "3", *ways).code == 0
    assert run("compare", str(trace), *ways).code == 0
    assert run("show", str(trace), "--shard", "ddp").code == 2
    assert run("profile", "model.py", "-o", "rank.json", *ways).code == 0
    assert trace_file.load(Path("rank.json")).options["world_size"] == 4
    again = run("show", "rank.json", *ways)
    assert again.err.startswith("error: cannot shard the trace: it is that of one rank")
    wrong = run("show", "plan.yaml", *ways)
    assert (wrong.code, wrong.out) == (2, "")
    assert "--shard needs a trace" in wrong.err


def test_a_plan_of_one_rank_says_so_and_is_not_compared_by_bytes(
    run: Run, trace: Path
) -> None:
    ways = ("--shard", "fsdp2", "--world-size", "4", "--unit", "0")
    assert run("solve", str(trace), "--min-memory", *ways).code == 0
    plan = ckplan.load_plan("plan.yaml")
    assert plan.workload["unit"] == ["0"]
    assert " ".join(ways) in " ".join(run("show", "plan.yaml").out.split())
    for how in (("--fake",), ("--steps", "0")):
        verified = run("verify", "plan.yaml", *how, "--json")
        assert verified.code == 0, verified.err
        found = json.loads(verified.out)
        assert found["budget_bytes"] is found["predicted_peak_bytes"] is None
        assert found["notes"][0].startswith("the plan is for one of 4 ranks under")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_parameters_smaller_than_a_block_of_a_gpu_are_known(scheme: str) -> None:
    """There, a head of two labels takes 512 bytes, before and after it is divided."""
    model = nn.Sequential(nn.Linear(96, 100), nn.GELU(), nn.Linear(100, 2))
    graph = ckplan.profile(
        model,
        torch.randn(8, 96),
        loss=lambda output, _: output.sum(),
        device="cuda",
        optimizer="adamw",
    )

    def held(one: Graph, kind: str) -> list[int]:
        found = (s for s in one.storages if s.kind == kind and s.maker == BEFORE_STEP)
        return sorted(storage.bytes for storage in found if storage.bytes > 512)

    rank = ckplan.shard(graph, scheme, 4)
    assert not any(storage.bytes % 512 for storage in rank.storages)
    weights, part = [1024, 38400], [9728]  # others are a block each
    assert held(graph, "parameter") == weights
    divided = part if scheme in ("zero3", "fsdp2") else weights
    assert held(rank, "parameter") == divided
    divided = weights if scheme == "ddp" else part
    assert held(rank, "optimizer") == sorted([*divided, *divided])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_tensor_is_named_only_where_a_rank_has_the_whole_of_it(scheme: str) -> None:
    graph = trace_file.load(Path(__file__).parents[2] / "traces" / "mlp.json.gz")
    whole = {(one.tensor, one.bytes) for one in graph.storages if one.tensor}
    rank = ckplan.shard(graph, scheme, 2)
    named = [one for one in rank.storages if one.tensor]
    assert {(one.tensor, one.bytes) for one in named} <= whole
    unnamed = len(rank.storages) - len(named)
    assert (unnamed > 10) == (scheme != "ddp")
    assert [op.line for op in rank.ops if op.line] == [
        op.line for op in graph.ops if op.line
    ]


def test_ranks_without_a_scheme_are_not_profiled() -> None:
    with pytest.raises(CkplanError, match="a rank of 4 without a scheme"):
        ckplan.profile(nn.Linear(2, 2), torch.randn(2, 2), world_size=4)
