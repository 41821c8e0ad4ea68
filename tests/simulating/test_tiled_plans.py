"""Plans with a head in tiles: written, read, simulated, solved, and as they run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ckplan
from ckplan.errors import CkplanError, GraphError, InfeasibleError, PlanError
from ckplan.graph import file as graph_file
from ckplan.graph.graph import Graph
from ckplan.plan import file as plan_file
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.resolve import describe, resolve
from ckplan.plan.tiles import CLOSE_BITS, SAME_BITS, Tiles
from ckplan.simulating import heads, tiling
from ckplan.simulating.simulate import simulate
from ckplan.tracing.steps import tiled_bits
from tests.helpers.measured import peak_bytes_of

WORDS, TOKENS, WIDTH = 1200, 96, 16


class Model(nn.Module):
    """An embedding, a layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [B, S, V]."""
        logits: Tensor = self.head(torch.tanh(self.layer(self.embedding(ids))))
        return logits


def batch() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, WORDS, (3, TOKENS), generator=generator)


def plain_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, WORDS), ids.view(-1))


def shifted_loss(logits: Tensor, ids: Tensor) -> Tensor:
    flat = logits[:, :-1].float().reshape(-1, WORDS)
    return F.cross_entropy(flat, ids[:, 1:].reshape(-1))


def capped_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return plain_loss(torch.tanh(logits / 5.0) * 5.0, ids)


def smoothed_loss(logits: Tensor, ids: Tensor) -> Tensor:
    flat = logits.view(-1, WORDS)
    return F.cross_entropy(flat, ids.view(-1), label_smoothing=0.1)


def smoothed_and_capped_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return smoothed_loss(torch.tanh(logits / 5.0) * 5.0, ids)


def weighted_loss(logits: Tensor, ids: Tensor) -> Tensor:
    of_class = torch.linspace(0.5, 2.0, WORDS)
    return F.cross_entropy(logits.view(-1, WORDS), ids.view(-1), weight=of_class)


LOSSES = {"plain": plain_loss, "shifted": shifted_loss}
OTHERS = {
    "capped": capped_loss,
    "smoothed": smoothed_loss,
    "both": smoothed_and_capped_loss,
    "weighted": weighted_loss,
}
NUMBERS = {"smoothed": 16, "both": 16}  # bytes of numbers that the loss drops earlier


def recorded(name: str, dtype: torch.dtype = torch.float32) -> Graph:
    loss = (LOSSES | OTHERS)[name]
    return ckplan.profile(
        Model().to(dtype),
        (batch(),),
        loss_fn=lambda out, given: loss(out, given[0]),
        optimizer="none",
        replay=name in LOSSES,
    )


@pytest.fixture(scope="module", params=LOSSES)
def step(request: pytest.FixtureRequest) -> tuple[str, Graph]:
    return request.param, recorded(request.param)


def plan_of(tokens: int, vocabulary: int, calls: str = "head") -> Plan:
    region = PlannedRegion(calls, "tiles", tiles=Tiles(tokens, vocabulary))
    return Plan(regions=(region,))


def measured(
    name: str, plan: Plan | None, dtype: torch.dtype = torch.float32
) -> tuple[int, list[Tensor]]:
    """Peak of the second step, and its gradients."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, ids = Model().to(dtype), batch()
    if plan is not None:
        ckplan.apply(model, plan)

    def run() -> None:
        output = model(ids)  # stays until backward ends
        (LOSSES | OTHERS)[name](output, ids).backward()

    run()
    model.zero_grad()
    held = [*model.parameters(), ids]
    try:
        peak = peak_bytes_of(run, held)
    finally:
        torch.set_num_threads(threads)
    if plan is not None:
        (region,) = ckplan.status(model).regions
        assert (region.by, region.runs, region.kept) == ("tiles", 2, 0)
    return peak, [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("tiles", [(1, 1), (1, 4), (3, 1), (4, 8)])
def test_the_peak_is_predicted_to_the_byte_and_gradients_are_the_same(
    step: tuple[str, Graph], tiles: tuple[int, int]
) -> None:
    name, graph = step
    plan = plan_of(*tiles)
    peak, gradients = measured(name, plan)
    plain, expected = measured(name, None)
    assert simulate(graph).peak_bytes == plain
    assert simulate(graph, resolve(plan, graph)).peak_bytes == peak
    assert all(map(torch.equal, gradients, expected))
    assert len(gradients) == 5


@pytest.mark.parametrize("name", OTHERS)
def test_soft_caps_smoothing_and_weights_of_classes_run_in_tiles_by_a_plan(
    name: str,
) -> None:
    graph = recorded(name)
    plain, expected = measured(name, None)
    assert simulate(graph).peak_bytes == pytest.approx(plain, rel=1e-4)
    for counts in ((1, 4), (3, 1), (3, 8)):
        plan = plan_of(*counts)
        peak, gradients = measured(name, plan)
        predicted = simulate(graph, resolve(plan, graph)).peak_bytes
        assert 0 <= predicted - peak <= NUMBERS.get(name, 0), counts
        assert all(map(torch.equal, gradients, expected))


class CapsItself(Model):
    """Returns capped logits, as Gemma 2; its peak is in a wide call before its head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4096), nn.Linear(4096, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        wide = torch.tanh(self.up(self.embedding(ids)))
        logits = self.head(torch.tanh(self.layer(self.down(wide))))
        logits = logits / 5.0
        logits = torch.tanh(logits)
        return logits * 5.0


def test_logits_that_a_model_caps_hold_the_hidden_state_as_long_as_its_output() -> None:
    model, ids = CapsItself(), batch()
    graph = ckplan.profile(
        model,
        (ids,),
        loss_fn=lambda out, given: plain_loss(out, given[0]),
        optimizer="none",
        replay=False,
    )
    plan = plan_of(8, 8)
    ckplan.apply(model, plan)

    def run() -> None:
        output = model(ids)
        plain_loss(output, ids).backward()

    run()
    model.zero_grad()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        peak = peak_bytes_of(run, [*model.parameters(), ids])
    finally:
        torch.set_num_threads(threads)
    assert simulate(graph, resolve(plan, graph)).peak_bytes == peak


@pytest.mark.parametrize("name", ["plain", "capped", "both"])
def test_heads_of_16_bits_without_a_cast_are_close_and_told(name: str) -> None:
    graph = recorded(name, torch.bfloat16)
    tiles = Tiles(3, 8, CLOSE_BITS)
    plan = Plan(regions=(PlannedRegion("head", "tiles", tiles=tiles),))
    peak, gradients = measured(name, plan, torch.bfloat16)
    _, expected = measured(name, None, torch.bfloat16)
    predicted = simulate(graph, resolve(plan, graph)).peak_bytes
    assert 0 <= predicted - peak <= NUMBERS.get(name, 0)
    assert not all(map(torch.equal, gradients, expected))
    with pytest.raises(PlanError, match="its logits have 16 bits") as error:
        ckplan.solve(graph, goal="min-memory", allow=["tiles"])
    assert str(error.value).count("\n") == 2
    same = Plan(regions=(PlannedRegion("head", "tiles", tiles=Tiles(3, 8)),))
    with pytest.raises(PlanError, match="with the same bits") as error:
        simulate(graph, resolve(same, graph))
    assert str(error.value).count("\n") == 2
    solved = ckplan.solve(graph, goal="min-memory", allow=["tiles", "close"])
    (chosen,) = (one.tiles for one in solved.regions if one.tiles)
    assert chosen.bits == CLOSE_BITS
    assert 1e-3 < chosen.difference < 0.1
    for one, other in zip(gradients, expected, strict=True):
        assert (one - other).abs().max() <= 0.01 * other.abs().max()


def test_close_bits_are_offered_only_where_tiles_change_bits(
    step: tuple[str, Graph],
) -> None:
    found = ckplan.solve(step[1], goal="min-memory", allow=["tiles", "close"])
    assert [one.tiles.bits for one in found.regions if one.tiles] == [SAME_BITS]
    with pytest.raises(CkplanError, match="cannot allow close bits alone") as error:
        ckplan.solve(step[1], goal="min-memory", allow=["close"])
    assert str(error.value).count("\n") == 2


def test_a_profile_tests_the_bits_of_the_tiles_that_are_solved_for(
    step: tuple[str, Graph], tmp_path: Path
) -> None:
    _, graph = step
    threads = torch.get_num_threads()
    counts = [(one.rows, one.columns, one.threads) for one in graph.tiled]
    assert counts == [(8, 8, threads), (32, 32, threads)]
    assert all(0.2 < one.share < 30 for one in graph.tiled)
    graph_file.save(graph, tmp_path / "trace.json")
    assert graph_file.load(tmp_path / "trace.json").tiled == graph.tiled
    assert '"tiled"' not in graph_file.dumps(replace(graph, tiled=()))
    worse = replace(graph.tiled[1], call=len(graph.calls))
    for wrong in (worse, replace(graph.tiled[1], share=-0.5)):
        with pytest.raises(GraphError, match="a test of tiles of call"):
            replace(graph, tiled=(wrong,))


def test_a_head_in_tiles_takes_the_seconds_that_were_measured(
    step: tuple[str, Graph],
) -> None:
    def seconds(share: float) -> float:
        tiled = tuple(replace(one, share=share) for one in step[1].tiled)
        graph = replace(step[1], tiled=tiled)
        return simulate(graph, resolve(plan_of(8, 8), graph)).recompute_seconds

    once, twice, four = seconds(1.0), seconds(2.0), seconds(4.0)
    assert once == pytest.approx(0.0, abs=twice / 100)
    assert four == pytest.approx(3 * twice, rel=0.01)
    untimed = seconds(0.0)  # by the ops that run in tiles
    assert once < untimed


def test_tiles_that_a_test_found_close_need_to_be_allowed(
    step: tuple[str, Graph],
) -> None:
    _, graph = step
    few, many = (replace(one, difference=0.0) for one in graph.tiled)
    far = replace(many, difference=1.5e-3)
    solve = partial(ckplan.solve, goal="min-memory")
    found = solve(replace(graph, tiled=(few, far)), allow=["tiles"])
    assert [one.tiles for one in found.regions if one.tiles] == [Tiles(8, 8)]
    both = replace(graph, tiled=(replace(few, difference=1.2e-7), far))
    with pytest.raises(
        PlanError, match=r"profile found other bits, by up to 1\.2e-07"
    ) as error:
        solve(both, allow=["tiles"])
    assert str(error.value).count("\n") == 2
    found = solve(both, allow=["tiles", "close"])
    close = Tiles(32, 32, CLOSE_BITS, 1.5e-3)
    assert [one.tiles for one in found.regions if one.tiles] == [close]
    with pytest.raises(PlanError, match="with the same bits: profile found") as error:
        simulate(both, resolve(plan_of(8, 8), both))
    assert str(error.value).count("\n") == 2


def test_a_head_too_large_to_test_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_bits, "LONGEST_SECONDS", 0.0)
    graph = recorded("capped", torch.float16)
    assert not graph.tiled
    assert any(
        "tiles of head#0: bits not tested: it would take" in n for n in graph.notes
    )


@pytest.mark.parametrize("tokens", [256, 4096])
def test_on_a_card_the_bias_of_a_tile_puts_aside_what_its_own_sum_does(
    tokens: int,
) -> None:
    words, count = 4096, 8
    model = nn.Linear(32, words)
    batch = torch.randint(words, (tokens,))
    options: dict[str, Any] = {"optimizer": "none", "replay": False, "gpu": "T4"}

    hidden = torch.randn(tokens, 32)

    def loss(logits: Tensor, _: Tensor) -> Tensor:
        return F.cross_entropy(logits, batch)

    graph = ckplan.profile(model, hidden, loss=loss, **options)
    tile = nn.Linear(32, words // count)
    alone = ckplan.profile(tile, hidden, loss=lambda x, _: x.exp().mean(), **options)
    (whole_sum,), (own_sum,) = (
        [op for op in one.ops[one.num_forward :] if op.name == "sum"]
        for one in (graph, alone)
    )
    found = heads.find_head(graph, 0)
    scratch = tiling._scratch(graph, found, Tiles(count, count))
    assert scratch.bias == own_sum.workspace.bytes
    assert (scratch.bias > 0) == (tokens == 4096)
    assert scratch.bias != whole_sum.workspace.bytes or tokens == 256


def test_tiles_cost_time_and_other_ops_stay(step: tuple[str, Graph]) -> None:
    _, graph = step
    timeline = simulate(graph, resolve(plan_of(4, 8), graph))
    assert timeline.overhead > 0
    assert timeline.unplanned_seconds == pytest.approx(graph.step_seconds)
    assert len(timeline.graph.ops) == len(graph.ops)
    assert timeline.graph.calls == graph.calls


def test_plans_with_tiles_are_written_and_read(
    step: tuple[str, Graph], tmp_path: Path
) -> None:
    _, graph = step
    plan = replace(plan_of(3, 5), model="Model")
    plan_file.save(plan, tmp_path / "plan.yaml", force=False)
    text = (tmp_path / "plan.yaml").read_text()
    assert "tiles: {tokens: 3, vocabulary: 5}" in text
    assert "bits: same" in text
    assert plan_file.load(tmp_path / "plan.yaml") == plan
    regions = resolve(plan, graph)
    assert describe(graph, regions) == plan.regions
    short = plan_file.loads("ckplan: 1\nregions: [{calls: head, by: tiles}]", "x")
    assert short.regions[0].tiles == Tiles(16, 16)


@pytest.mark.parametrize(
    ("region", "message"),
    [
        ("{calls: head, tiles: {tokens: 4}}", "tiles need by: tiles"),
        ("{calls: head, by: tiles, tiles: {row: 4}}", "unknown key 'row'"),
        ("{calls: head, by: tiles, tiles: {tokens: 0}}", "the number '0'"),
        ("{calls: head, by: tiles, tiles: {tokens: x}}", "the number 'x'"),
        ("{calls: head, by: tiles, bits: near}", "cannot promise bits 'near'"),
        ("{calls: head, by: tiles, difference: 0.1}", "with the same bits"),
        ("{calls: head, by: tiles, bits: close, difference: -1}", "difference -1"),
        ("{calls: head, bits: close}", "tiles need by: tiles"),
        ("{calls: head, by: tiles, save: [./addmm]}", "save needs by: program"),
    ],
)
def test_bad_tiles_are_refused_with_their_line(region: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as error:
        plan_file.loads(f"ckplan: 1\nregions:\n  - {region}\n", "plan.yaml")
    assert "plan.yaml, line 3" in str(error.value)


def test_calls_that_are_no_heads_are_refused(step: tuple[str, Graph]) -> None:
    _, graph = step
    for calls, why in (("layer", "tanh reads its logits"), ("embedding", "no linear")):
        with pytest.raises(PlanError, match=why):
            simulate(graph, resolve(plan_of(2, 2, calls), graph))
    with pytest.raises(PlanError, match="it is a Embedding"):
        ckplan.apply(Model(), plan_of(2, 2, "embedding"))
    with pytest.raises(PlanError, match="cannot tile single calls"):
        ckplan.apply(Model(), plan_of(2, 2, "head#0"))


def test_removing_a_plan_takes_its_tiles_off() -> None:
    model = ckplan.apply(Model(), plan_of(2, 2))
    ckplan.apply(model, plan_of(3, 3))
    assert type(model(batch())) is not Tensor
    ckplan.remove(model)
    assert type(model(batch())) is Tensor
    assert "forward" not in vars(model.head)


def test_solve_takes_tiles_where_the_budget_needs_them(step: tuple[str, Graph]) -> None:
    name, graph = step
    least = ckplan.solve(graph, goal="min-memory").predicted
    assert least is not None
    with pytest.raises(InfeasibleError):
        ckplan.solve(graph, budget=least.peak_bytes // 2)
    plan = ckplan.solve(graph, budget=least.peak_bytes // 2, allow=["tiles"])
    assert [one.by for one in plan.regions if one.tiles] == ["tiles"]
    assert plan.predicted is not None
    peak, gradients = measured(name, plan_of_head(plan))
    assert peak <= least.peak_bytes // 2
    assert all(map(torch.equal, gradients, measured(name, None)[1]))
    whole = ckplan.solve(graph, budget="100%", allow=["tiles"])
    assert not whole.regions
    smallest = ckplan.solve(graph, goal="min-memory", allow=["tiles"]).predicted
    assert smallest is not None
    assert smallest.peak_bytes <= plan.predicted.peak_bytes
    assert ckplan.solve(graph, goal="min-memory", allow="tiles").predicted == smallest
    with pytest.raises(ckplan.CkplanError, match="cannot allow 'tile'") as error:
        ckplan.solve(graph, budget="50%", allow=["tile"])
    assert error.value.hint == "--allow tiles"
    with pytest.raises(ckplan.CkplanError, match="cannot choose tiles"):
        ckplan.solve(graph, max_overhead=0.5, allow=["tiles"])


def plan_of_head(plan: Plan) -> Plan:
    """Its tiles alone."""
    return replace(plan, regions=tuple(one for one in plan.regions if one.tiles))
