"""Tiles of MLPs as the solver chooses them: floors, break-even, bits, words."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from commands import Run
from gated import Gated
from measured import peak_bytes_of
from normed_mlps import flat, norm_first
from torch import Tensor, nn

import ckplan
from ckplan.ejecting.code import as_code, plain_form
from ckplan.ejecting.settings import TOOLS, setting_for
from ckplan.errors import InfeasibleError, PlanError
from ckplan.graph import file as graph_file
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.resolve import resolve
from ckplan.plan.tiles import CLOSE_BITS, RowTiles
from ckplan.simulating.simulate import simulate
from ckplan.solving import tiled_plans
from ckplan.solving.alternatives import alternatives
from ckplan.solving.levers import frontier_of, lever_baselines, search_with
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.solving.remedies import SAME, TILED
from ckplan.solving.tiled_plans import TilingPlanner
from ckplan.solving.tiled_rows import find_tileable_rows, row_wise_calls
from ckplan.tracing.steps import tiled_row_bits
from ckplan.units import format_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, HIDDEN, ROWS, LAYERS = 32, 1024, 256, 2
TRACES = Path(__file__).parents[2] / "traces"


class Layer(nn.Module):
    """An MLP beside a residual."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), mlp

    def forward(self, rows: Tensor) -> Tensor:
        made: Tensor = rows + self.mlp(self.norm(rows))
        return made


class Softmax(nn.Module):
    """Columns of its hidden values are not apart."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        made: Tensor = self.down(self.up(rows).softmax(-1))
        return made


def model_of(make: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [Layer(make()) for _ in range(LAYERS)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers)


wide = partial(Gated, WIDTH, HIDDEN)


def batch() -> Tensor:
    return torch.randn(2, ROWS // 2, WIDTH, generator=torch.Generator().manual_seed(0))


def loss_of(made: Tensor, _: object = None) -> Tensor:
    return made.square().mean()


def recorded(make: Callable[[], nn.Module]) -> Graph:
    given = model_of(make), (batch(),)
    return ckplan.profile(*given, loss_fn=loss_of, optimizer="none", replay=False)


@cache
def step() -> Graph:
    return recorded(wide)


def timed(share: float) -> Graph:
    """The step, in which MLPs in tiles take a share of the seconds of whole ones."""
    graph = step()
    return replace(graph, tiled=tuple(replace(t, share=share) for t in graph.tiled))


def tiled(plan: Plan) -> list[tuple[str, object]]:
    return [(one.calls, one.tiles) for one in plan.regions if one.tiles]


def measured(plan: Plan | None) -> tuple[int, list[Tensor]]:
    """Peak of the second step, and its gradients."""
    model, rows = model_of(wide), batch()
    if plan is not None:
        ckplan.apply(model, plan)

    def run() -> None:
        made = model(rows)
        loss_of(made).backward()

    run()
    model.zero_grad()
    peak = peak_bytes_of(run, [*model.parameters(), rows])
    return peak, [one.grad for one in model.parameters() if one.grad is not None]


def test_a_wide_mlp_in_tiles_lowers_the_floor_with_the_same_bits() -> None:
    least = ckplan.solve(step(), goal="min-memory").predicted
    plan = ckplan.solve(step(), goal="min-memory", allow=["tiles"])
    assert tiled(plan) == [("[1..2].mlp", RowTiles(8, 8))]
    assert least is not None and plan.predicted is not None
    hidden = ROWS * HIDDEN * 4
    assert plan.predicted.peak_bytes < least.peak_bytes - hidden
    peak, gradients = measured(plan)
    plain, expected = measured(None)
    assert plan.predicted.peak_bytes == peak < plain
    assert len(gradients) == len(expected) == 12
    assert all(map(torch.equal, gradients, expected))


def test_plans_with_tiles_are_ejected_without_and_say_so() -> None:
    plan = ckplan.solve(step(), goal="min-memory", allow=["tiles"])
    plain = plain_form(step(), plan)
    assert "It also runs in tiles: [1..2].mlp." in as_code(plain, "0")
    assert not plain.fits
    for tool in TOOLS:
        lines = setting_for(step(), plan, tool).about()
        assert "left out: the plan runs [1..2].mlp in tiles" in lines
    alone = ckplan.solve(step(), goal="min-memory")
    assert "in tiles" not in as_code(plain_form(step(), alone), "0")
    for tool in TOOLS:
        assert not any(
            "in tiles" in one for one in setting_for(step(), alone, tool).about()
        )


def test_tiles_are_chosen_past_break_even_only() -> None:
    graph = timed(2.0)
    solve = partial(ckplan.solve, graph, allow=["tiles"])
    assert tiled(solve(budget="95%")) == []
    without = ckplan.solve(graph, goal="min-memory").predicted
    assert without is not None
    at_floor = solve(budget=without.peak_bytes).predicted
    below = solve(budget=without.peak_bytes - ROWS * HIDDEN * 4)
    assert at_floor is not None and below.predicted is not None
    assert at_floor.overhead <= without.overhead
    assert tiled(below)
    assert below.predicted.overhead >= at_floor.overhead
    assert below.bound["any_schedule"] <= below.predicted.overhead


def test_a_trade_off_goes_from_the_floor_in_tiles_to_the_unplanned_step() -> None:
    planner = Planner(step())
    search = search_with(planner, allow=["tiles"], link=None)
    points = frontier_of(planner, search, 4)
    assert points[0].peak_bytes == search.floor_bytes < planner.floor.peak_bytes
    assert any(region.tiles for region in points[0].regions)
    assert points[-1].regions == ()
    for point in points:
        found = search.within(point.peak_bytes)
        assert found is not None and found[0].peak_bytes <= point.peak_bytes
        assert point.bound_overhead <= point.overhead + 1e-9
    limit = MemoryLimit(planner.unplanned.peak_bytes)
    rows = {
        row.name: row
        for row in lever_baselines(planner, limit, allow=["tiles"], link=None)
    }
    assert list(rows) == ["tiled MLPs"]
    assert rows["tiled MLPs"].peak_bytes < planner.unplanned.peak_bytes


def test_a_profile_tests_the_bits_of_each_mlp_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = step()
    rows = [(graph.calls[one.call].fqn, one.rows, one.threads) for one in graph.tiled]
    assert rows == [("1.mlp", 8, 1), ("2.mlp", 8, 1)]
    assert all(one.difference == 0 for one in graph.tiled)
    assert all(0.3 < one.share < 30 for one in graph.tiled)
    graph_file.save(graph, tmp_path / "trace.json")
    assert graph_file.load(tmp_path / "trace.json").tiled == graph.tiled
    monkeypatch.setattr(tiled_row_bits, "check_row_bits", None)  # not asked again
    assert recorded(wide).tiled == graph.tiled
    monkeypatch.setattr(tiled_row_bits, "LONGEST_SECONDS", 0.0)
    other = recorded(partial(Gated, WIDTH, HIDDEN // 2))
    assert not other.tiled
    assert sum("1.mlp#0: bits not tested: it would take" in n for n in other.notes) == 1


@pytest.mark.parametrize("share", [0.25, 4.0])
def test_tiles_take_the_seconds_that_were_measured(share: float) -> None:
    region = PlannedRegion("1.mlp", "tiles", tiles=RowTiles(8, 8))
    plan = Plan(regions=(region,))
    graph = timed(share)
    own = sum(
        op.seconds
        for op in graph.ops
        if op.call >= 0 and graph.calls[op.call].fqn.startswith("1.mlp")
    )
    line = simulate(graph, resolve(plan, graph))
    noting = 0.003
    assert line.recompute_seconds == pytest.approx((share - 1) * own + noting, rel=0.05)
    other = RowTiles(4, 4)  # not tested
    plan = Plan(regions=(replace(region, tiles=other),))
    seconds = simulate(graph, resolve(plan, graph)).recompute_seconds
    assert seconds == simulate(step(), resolve(plan, step())).recompute_seconds


def test_tiles_that_are_faster_are_taken_before_anything_is_rebuilt() -> None:
    graph = timed(0.05)
    plan = ckplan.solve(graph, "95%", allow=["tiles"])
    plain = ckplan.solve(graph, "95%").predicted
    assert tiled(plan) and plan.predicted and plain
    assert plan.predicted.overhead < 0 < plain.overhead
    assert plan.bound["any_schedule"] <= plan.predicted.overhead
    planner = Planner(graph)
    search = search_with(planner, allow=["tiles"], link=None)
    found = search.solve(MemoryLimit(int(0.95 * planner.unplanned.peak_bytes)))
    assert found.without_tiles is not None
    assert found.without_tiles.overhead == pytest.approx(plain.overhead, abs=1e-4)
    *points, last = frontier_of(planner, search, 4)
    assert (last.peak_bytes, last.overhead) == (planner.unplanned.peak_bytes, 0.0)
    assert last.regions == () and all(one.regions for one in points)


@pytest.mark.parametrize(("share", "is_tiled"), [(0.05, True), (4.0, False)])
def test_away_from_the_peak_only_faster_tiles_are_tried(
    share: float, is_tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled_plans._Try, "around_peak", frozenset())
    plan = ckplan.solve(timed(share), "60%", allow=["tiles"])
    assert bool(tiled(plan)) == is_tiled


def test_close_tiles_need_to_be_allowed_and_state_their_difference() -> None:
    graph = step()
    far = replace(graph, tiled=tuple(replace(t, difference=2e-6) for t in graph.tiled))
    with pytest.raises(PlanError, match="cannot tile") as refused:
        ckplan.solve(far, goal="min-memory", allow=["tiles"])
    assert "tiles of rows give other bits in 2 MLPs" in refused.value.what
    assert "by up to 2.0e-06 of the largest value" in refused.value.what
    assert refused.value.hint == "--allow tiles,close"
    plan = ckplan.solve(far, goal="min-memory", allow=["tiles", "close"])
    assert tiled(plan) == [("[1..2].mlp", RowTiles(8, 8, CLOSE_BITS, 2e-6))]
    promised = replace(
        plan,
        regions=tuple(replace(one, tiles=RowTiles(8, 8)) for one in plan.regions[-1:]),
    )
    with pytest.raises(PlanError, match="with the same bits: profile found") as error:
        simulate(far, resolve(promised, far))
    assert str(error.value).count("\n") == 2


def test_calls_whose_rows_are_not_apart_are_not_offered() -> None:
    graph = recorded(Softmax)
    assert find_tileable_rows(graph) == ()
    with pytest.raises(PlanError, match=r"cannot tile 2\.mlp\.down#0") as error:
        ckplan.solve(graph, goal="min-memory", allow=["tiles"])
    assert "no MLP, norm or attention can run in tiles of rows" in error.value.what
    assert str(error.value).count("\n") == 2


def test_sets_of_equal_mlps_are_each_part_and_all() -> None:
    first, last, both = find_tileable_rows(step())
    assert (len(first), len(last)) == (1, 1)
    assert both == (*first, *last)


def test_the_part_around_the_peak_is_searched() -> None:
    search = TilingPlanner(Planner(step()))
    around = next(one for one in search._tries if not one.tiled).around_peak
    searched = [one.tiled for one in search._tries if one.tiled and one.is_needed]
    assert len(searched) == 2  # one of both parts, and all
    assert all(around & {region.call for region in tiled} for tiled in searched)


def test_solve_says_what_is_in_tiles_and_why(run: Run, folder: Path) -> None:
    graph_file.save(step(), folder / "step.json.gz")
    argv = ["solve", "step.json.gz", "--min-memory", "--allow", "tiles", "--force"]
    told = " ".join(run(*argv).out.split())
    assert "[1..2].mlp in tiles, rows in 8 tiles" in told
    assert "tested with 1 thread; with another number, `ckplan verify` tells" in told
    assert "without tiles, no plan fits: the smallest peak found is" in told
    content = json.loads(run(*argv, "--json").out)
    (one,) = content["tiles"]
    assert (one["call"], one["bits"], one["threads"]) == ("[1..2].mlp", "same", 1)
    assert content["without_tiles"]["overhead"] is None
    assert content["without_tiles"]["floor_bytes"] > content["peak_bytes"]
    whole = run("solve", "step.json.gz", "--budget", "99%", *argv[3:], "--json")
    assert json.loads(whole.out)["tiles"] == []


def test_a_norm_and_an_mlp_in_one_call_run_in_tiles() -> None:
    graph = recorded(lambda: flat(nn.LayerNorm(WIDTH), WIDTH, HIDDEN))
    assert [(graph.calls[t.call].fqn, t.difference) for t in graph.tiled] == [
        ("1.mlp", 0),
        ("2.mlp", 0),
    ]
    least = ckplan.solve(graph, goal="min-memory").predicted
    plan = ckplan.solve(graph, goal="min-memory", allow=["tiles"])
    assert tiled(plan) == [("[1..2].mlp", RowTiles(8, 8))]
    assert least is not None and plan.predicted is not None
    assert plan.predicted.peak_bytes < least.peak_bytes - ROWS * HIDDEN * 4


@pytest.mark.parametrize("shape", [(96, WIDTH), (192, 4, WIDTH // 4)])
def test_calls_that_begin_with_a_norm_of_the_batch_are_tested(
    shape: tuple[int, ...],
) -> None:
    blocks = (flat(nn.LayerNorm(WIDTH), WIDTH, HIDDEN) for _ in range(LAYERS))
    model = nn.Sequential(*[nn.Flatten()][: len(shape) - 2], *blocks)
    given = model, (torch.randn(shape),)
    graph = ckplan.profile(*given, loss_fn=loss_of, optimizer="none", replay=False)
    assert [t.difference for t in graph.tiled] == [0, 0]
    assert {graph.calls[t.call].module for t in graph.tiled} == {"Sequential"}


class Shifted(nn.Module):
    """An MLP that begins with an op of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        made: Tensor = self.down(nn.functional.gelu(self.up(rows + 1.0)))
        return made


def test_a_batch_that_is_a_part_of_a_tensor_is_tested_too() -> None:
    rows = torch.randn(2, ROWS, WIDTH)[1]
    step = ckplan.profile(nn.Sequential(Shifted()), rows, loss=loss_of, replay=False)
    assert [one.difference for one in step.tiled] == [0]


def test_an_mlp_beside_its_norm_is_taken_without_it() -> None:
    graph = recorded(lambda: norm_first(nn.LayerNorm(WIDTH), wide()))
    calls = [graph.calls[call].fqn for call in row_wise_calls(graph)]
    assert calls == ["1.mlp.1", "2.mlp.1"]


@pytest.mark.parametrize(("budget", "searches"), [("80%", 1), ("50%", 3)])
def test_sets_of_tiles_are_searched_only_when_no_cheaper_plan_fits(
    monkeypatch: pytest.MonkeyPatch, budget: str, searches: int
) -> None:
    graph = graph_file.load(TRACES / "llama.json.gz")
    made: list[object] = []
    first = Planner.__init__

    def counted(self: Planner, *args: object, **kwargs: object) -> None:
        made.append(self)
        first(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Planner, "__init__", counted)
    ckplan.solve(graph, budget, allow=["tiles"])
    assert len(made) == searches


def test_plans_are_those_of_a_search_of_every_set() -> None:
    planner = Planner(step())
    lazy, search = TilingPlanner(planner), TilingPlanner(planner)
    every = [one for one in search._tries if one.is_needed]
    assert len(every) == 3
    unplanned = planner.unplanned.peak_bytes
    for peak in (95 * unplanned // 100, 45 * unplanned // 100, search.floor_bytes):
        plans = [(one.search.within(peak), one.tiled) for one in every]
        reached = [
            simulate(step(), sorted((*plan[1], *tiled), key=lambda r: r.call))
            for plan, tiled in plans
            if plan is not None
        ]
        best = min((t.overhead, t.peak_bytes) for t in reached if t.peak_bytes <= peak)
        found = lazy.within(peak)
        assert found is not None
        assert (found[0].overhead, found[0].peak_bytes) == best


def test_where_no_plan_fits_tiles_of_the_head_are_the_first_thing_to_try() -> None:
    graph = graph_file.load(Path(__file__).parents[2] / "traces" / "llama.json.gz")
    floor = Planner(graph).floor.peak_bytes
    with pytest.raises(InfeasibleError) as error:
        ckplan.solve(graph, floor - 1)
    first = str(error.value.hint).partition("; or ")[0]
    (row,) = (
        one
        for one in Planner(graph).remedies(floor - 1)
        if one.fits and one.bits == SAME
    )
    assert first == f"--allow tiles ({format_bytes(row.peak_bytes)})"
    plan = ckplan.solve(graph, row.peak_bytes, allow="tiles")
    assert plan.predicted is not None
    assert plan.predicted.peak_bytes <= row.peak_bytes


def test_tiles_that_are_cheaper_than_a_plan_have_a_row_beside_it() -> None:
    graph = graph_file.load(Path(__file__).parents[2] / "traces" / "bert.json.gz")
    planner = Planner(graph)
    for limit, is_cheaper in ((planner.floor.peak_bytes, True), (10**9, False)):
        solution = planner.solve(limit)
        rows = [one for one in alternatives(planner, solution) if one.how == TILED]
        assert bool(rows) == is_cheaper
        for row in rows:
            assert row.overhead is not None
            assert row.overhead < solution.timeline.overhead
            found = ckplan.solve(graph, limit, allow="tiles").predicted
            assert found is not None
            assert found.overhead <= row.overhead + 1e-3
            assert row.peak_bytes <= limit
    tiled = search_with(planner, allow=["tiles"], link=None)
    at_floor = tiled.solve(MemoryLimit(planner.floor.peak_bytes))
    assert not [one for one in alternatives(planner, at_floor) if one.how == TILED]
