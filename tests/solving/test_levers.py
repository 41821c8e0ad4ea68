"""Tiles and moves together: floors, trade-offs, and what frameworks do with them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from commands import Run
from measured import peak_bytes_of
from torch import nn
from torch.nn import functional

import ckplan
from ckplan.errors import PlanError
from ckplan.graph import file as trace_file
from ckplan.graph.graph import Graph
from ckplan.graph.records import Op
from ckplan.simulating.fused_loss import fused_graph
from ckplan.simulating.moving import Link
from ckplan.simulating.simulate import Simulator, Timeline
from ckplan.solving.levers import frontier_of, lever_baselines, search_with
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.solving.search import Search
from ckplan.solving.solve import to_plan

WORDS, ROWS = 1200, 256
LINK = Link(1e12)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 256), nn.GELU())
    return nn.Sequential(nn.Embedding(WORDS, 64), layer, nn.Linear(256, WORDS))


def ids() -> torch.Tensor:
    return torch.randint(WORDS, (ROWS,), generator=torch.Generator().manual_seed(0))


def loss_of(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits, batch)


@cache
def planner() -> Planner:
    given = build(), ids()
    return Planner(ckplan.profile(*given, loss=loss_of, optimizer="none", replay=False))


@cache
def search(tiles: bool, moves: bool) -> Search:
    return search_with(planner(), allow=["tiles"] * tiles, link=LINK if moves else None)


def test_each_lever_lowers_the_floor_and_both_lower_it_most() -> None:
    floors = {
        (tiles, moves): search(tiles, moves).floor_bytes
        for tiles, moves in product((False, True), repeat=2)
        if tiles or moves
    }
    today = planner().floor.peak_bytes
    assert floors[True, False] < today
    assert floors[False, True] <= today
    assert floors[True, True] <= min(floors.values())


@pytest.mark.parametrize(("tiles", "moves"), [(True, False), (False, True)])
def test_trade_offs_reach_the_floor_and_lie_above_their_bound(
    tiles: bool, moves: bool
) -> None:
    points = frontier_of(planner(), search(tiles, moves), 5)
    assert points[0].peak_bytes == search(tiles, moves).floor_bytes
    assert len(points) > 2
    overheads = [point.overhead for point in points]
    assert overheads == sorted(overheads, reverse=True)
    for point in points:
        assert point.bound_overhead <= point.overhead + 1e-9
        found = Simulator(planner().graph, LINK).run(point.regions)
        assert found.peak_bytes == point.peak_bytes


def test_what_frameworks_do_is_dearer() -> None:
    limit = MemoryLimit(planner().unplanned.peak_bytes)
    found = lever_baselines(planner(), limit, allow=["tiles"], link=LINK)
    rows = {row.name: row for row in found}
    assert list(rows) == ["offload all", "save_on_cpu", "chunked loss", "fused loss"]
    assert rows["save_on_cpu"].overhead > rows["offload all"].overhead > 0
    assert rows["chunked loss"].peak_bytes < planner().unplanned.peak_bytes
    assert rows.pop("fused loss").overhead == 0.0  # with other bits, no more products
    for row in rows.values():
        tight = MemoryLimit(max(row.peak_bytes, search(True, True).floor_bytes))
        best = search(True, True).solve(tight)
        assert best.timeline.overhead <= row.overhead


def fused(graph: Graph) -> Timeline:
    """The step with torch's fused loss."""
    linear = [n for n, call in enumerate(graph.calls) if call.module == "Linear"]
    return Simulator(fused_graph(graph, linear[-1])).run()


@pytest.mark.parametrize(
    ("dtype", "bias"), [(torch.float32, True), (torch.bfloat16, False)]
)
def test_the_fused_loss_of_torch_has_the_bytes_of_its_row(
    dtype: torch.dtype, bias: bool
) -> None:
    batch = torch.arange(ROWS)

    def small() -> nn.Sequential:
        layers = nn.Linear(64, 128), nn.Linear(128, WORDS, bias=bias)
        return nn.Sequential(nn.Embedding(WORDS, 64), *layers).to(dtype)

    def loss(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return loss_of(logits.float(), batch)

    step = ckplan.profile(small(), batch, loss=loss, optimizer="none", replay=False)
    embed, layer, head = model = small()

    def run() -> None:
        functional.linear_cross_entropy(
            layer(embed(batch)),
            head.weight,
            batch,
            linear_bias=head.bias,
            options=nn.LinearCrossEntropyOptions(),
        ).backward()

    run()
    model.zero_grad()
    peak_bytes = peak_bytes_of(run, [*model.parameters(), batch])
    assert fused(step).peak_bytes == pytest.approx(peak_bytes, rel=1e-3)
    assert fused(step).graph.step_seconds == pytest.approx(step.step_seconds)


def test_a_loss_that_torch_does_not_fuse_has_no_such_row() -> None:
    def smooth(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits, batch, label_smoothing=0.1)

    given = build(), ids()
    step = ckplan.profile(*given, loss=smooth, optimizer="none", replay=False)
    with pytest.raises(PlanError, match="torch's fused loss has no label smoothing"):
        fused(step)
    limit = MemoryLimit(planner().unplanned.peak_bytes)
    found = lever_baselines(Planner(step), limit, allow=["tiles"], link=None)
    assert [row.name for row in found] == ["chunked loss"]


class Card(MemoryLimit):
    """A card that has no room for plans with tiles."""

    def allows(self, timeline: Timeline) -> bool:
        return timeline.peak_bytes <= self.bytes and not timeline.added_seconds


@pytest.mark.parametrize("rate", [None, 1e6])
def test_a_plan_that_fits_a_card_goes_before_tiles_that_do_not(
    rate: float | None,
) -> None:
    limit = MemoryLimit(planner().floor.peak_bytes * 102 // 100)
    plain = replace(planner().graph, ops=tuple(map(slow, planner().graph.ops)))
    link = None if rate is None else Link(rate)
    both = search_with(Planner(plain), allow=["tiles"], link=link)
    assert both.solve(limit).timeline.added_seconds
    found = both.solve(Card(limit.bytes, of_reserved=True)).timeline
    assert not found.added_seconds
    assert found.peak_bytes <= limit.bytes


def slow(op: Op) -> Op:
    """The op, if it is in the layer before the head, so slow that tiles are cheaper."""
    in_layer = planner().graph.calls[op.call].fqn[:1] == "1"
    return replace(op, seconds=op.seconds * (1000 if in_layer else 1))


def test_a_plan_with_both_is_carried_out_to_the_byte(tmp_path: Path) -> None:
    found = search(True, True)
    plan = to_plan(planner().graph, found.solve(MemoryLimit(found.floor_bytes)))
    assert plan.predicted and plan.predicted.moved_bytes
    assert any(region.tiles for region in plan.regions)
    plain, planned, batch = build(), build(), ids()
    ckplan.apply(planned, plan, spill=tmp_path)

    def step(model: nn.Module = planned) -> None:
        out = model(batch)
        loss_of(out, batch).backward()

    step(plain)
    step()
    for one, other in zip(plain.parameters(), planned.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)
    planned.zero_grad()
    peak_bytes = peak_bytes_of(step, [*planned.parameters(), batch])
    assert peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=3e-3)


def saved(folder: Path, graph: Graph) -> str:
    path = folder / "step.json.gz"
    trace_file.save(graph, path, force=False)
    return str(path)


def test_commands_take_the_levers(run: Run, folder: Path) -> None:
    trace = saved(folder, planner().graph)
    moves = ("--offload", str(folder), "--spill-rate", "1000GB")
    ended = run("frontier", trace, "--points", "2", "--json", *moves)
    assert ended.code == 0, ended.err
    points = json.loads(ended.out)["points"]
    assert points[0]["peak_bytes"] == search(False, True).floor_bytes
    wish = ("--budget", "100%", "--json", "--allow", "tiles")
    ended = run("compare", trace, *wish)
    assert ended.code == 0, ended.err
    rows = {row["name"]: row for row in json.loads(ended.out)["baselines"]}
    assert {"chunked loss", "fused loss", "with levers"} <= rows.keys()
    assert rows["with levers"]["overhead"] <= rows["this plan"]["overhead"]
    for command in ("frontier", "compare"):
        assert run(command, trace, "--spill-rate", "1GB").code == 2
        assert run(command, trace, "--offload", "host").code == 1
        ended = run(command, trace, "--allow", "close")
        assert ended.code == 1 and "close bits alone" in ended.err
    joined = run("frontier", trace, "--points", "2", "--allow", "tiles,close", "--json")
    twice = ("--allow", "close", "--allow", "tiles")
    assert run("frontier", trace, "--points", "2", *twice, "--json").out == joined.out
    ended = run("frontier", trace, "--allow", "tiels,close")
    assert ended.code == 1 and "--allow tiles" in ended.err
