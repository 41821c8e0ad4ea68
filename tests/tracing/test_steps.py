"""Seconds of whole steps: fitted, kept, taken into the graph, refused where busy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import graphs
import pytest
import torch
from torch import nn

import ckplan
from ckplan import units
from ckplan.errors import ApplyError
from ckplan.graph import file as trace_file
from ckplan.graph.graph import Graph
from ckplan.graph.records import EngineCosts
from ckplan.plan.region import Region
from ckplan.simulating.recomputing import num_followed
from ckplan.simulating.simulate import Simulator, simulate
from ckplan.tracing.costs.cost_cache import CostCache
from ckplan.tracing.costs.spread import Load
from ckplan.tracing.other_steps import OtherSteps
from ckplan.tracing.steps import measured
from ckplan.tracing.steps.fitting import (
    FITTED,
    LEAST_SHARE,
    WIDTH_OF_ENGINE,
    WIDTH_OF_OPS,
    Added,
    fit,
)
from ckplan.tracing.steps.in_step import (
    NOTE_IN_STEP,
    StepCosts,
    StepSeconds,
    keep_step_costs,
    known_step_costs,
    with_step_costs,
)
from ckplan.tracing.steps.measured import (
    NOTE_NOT_IN_STEP,
    phases_in_step,
    with_seconds_in_step,
)
from ckplan.tracing.steps.ops_in_step import (
    OpSeconds,
    again_factor,
    factors_of,
    time_ops,
)
from ckplan.tracing.steps.trial_plans import trial_plans
from ckplan.training.step import DEFAULT_TRAINING, TrainingStep, make_step
from ckplan.training.workload import Workload

NOISE = Random(0)
ENGINE = EngineCosts(0.25, 0.5, 0.125, 1.0)
IN_STEPS = EngineCosts(0.1, 0.2, 0.125, 0.3, 0.75, 0.4)
CHAIN = graphs.chain(6)
OF_OPS = {"add": 1.0} | {
    op.name: 0.5 + len(op.name) for op in CHAIN.ops[: CHAIN.num_forward]
}


@pytest.fixture
def graph() -> Graph:
    return replace(CHAIN, engine=ENGINE)


# -- the fit -----------------------------------------------------------------------


def added(
    row: tuple[float, int, int, int, int, int], costs: tuple[float, ...]
) -> Added:
    seconds = sum(a * b for a, b in zip(row, costs, strict=True))
    return Added(seconds, 1e-6, *row)


def engine(costs: Sequence[float]) -> EngineCosts:
    return EngineCosts(module_seconds=9.0, **dict(zip(FITTED, costs, strict=True)))


def fitted(costs: EngineCosts) -> list[float]:
    return [getattr(costs, name) for name in FITTED]


def test_plans_that_say_all_give_their_costs() -> None:
    costs = (1.5, 0.2, 0.75, 1.25, 0.1, 0.3)
    rows = [
        *((3.0, 4, 5, 1, 2, 0), (1.0, 9, 2, 2, 1, 1), (2.0, 1, 1, 3, 0, 2)),
        *((5.0, 3, 3, 7, 1, 0), (1.0, 2, 1, 1, 9, 1), (1.0, 2, 1, 3, 1, 9)),
    ]
    prior = engine((1.0, 0.25, 0.5, 1.0, 0.125, 0.25))
    found = fit(prior, [added(row, costs) for row in rows])
    assert fitted(found) == pytest.approx(costs, rel=1e-4)
    assert found.module_seconds == prior.module_seconds


def test_without_plans_the_prior_stays() -> None:
    prior = engine((1.0, 0.25, 0.5, 0.0, 0.1, 0.2))
    assert fit(prior, []) == prior


def test_the_fit_is_the_least_of_what_it_minimises() -> None:
    """Compared with a search that knows the objective alone."""
    rng = Random(0)
    for _ in range(50):
        prior = [rng.uniform(0.1, 2.0) for _ in FITTED]
        plans = [
            Added(
                rng.uniform(0.0, 9.0),
                rng.uniform(0.1, 2.0),
                rng.uniform(0.0, 4.0),
                *(rng.randint(0, 4) for _ in FITTED[1:]),
            )
            for _ in range(rng.randint(1, 3))
        ]

        def cost(x: list[float], prior: list[float], plans: list[Added]) -> float:
            misses = [
                (one.seconds - sum(map(float.__mul__, map(float, one.row), x)))
                / one.width_seconds
                for one in plans
            ]
            widths = (WIDTH_OF_OPS, *(WIDTH_OF_ENGINE for _ in FITTED[1:]))
            away = [
                (a - b) / (width * b)
                for a, b, width in zip(x, prior, widths, strict=True)
            ]
            return sum(miss**2 for miss in (*misses, *away))

        found = fitted(fit(engine(prior), plans))
        assert all(
            a >= LEAST_SHARE * b - 1e-9 for a, b in zip(found, prior, strict=True)
        )
        clipped = any(
            a <= LEAST_SHARE * b + 1e-9 for a, b in zip(found, prior, strict=True)
        )
        best = cost(found, prior, plans)
        for _ in range(200):
            other = [
                max(a * (1 + rng.gauss(0, 0.05)), LEAST_SHARE * b)
                for a, b in zip(found, prior, strict=True)
            ]
            assert cost(other, prior, plans) >= best * (0.9 if clipped else 1 - 1e-9)


def followed(graph: Graph, region: Region) -> int:
    """Calls below the region that are, or run inside, those of named ops."""
    named = {graph.ops[op].call for op, _ in region.named}
    top = region.call if region.last is None else graph.calls[region.call].parent
    last = region.call if region.last is None else region.last
    return sum(
        any(graph.is_within(call, one) for one in named)
        for call in range(len(graph.calls))
        if call != top and graph.is_inside(call, region.call, last)
    )


def test_calls_are_followed_where_ops_are_named() -> None:
    graph = ckplan.profile(Nested(), torch.ones(2, 4), replay=False, in_step=False)
    simulator, rng = Simulator(graph), Random(1)
    layers = graph.children[0]
    ops = [
        (op, 0)
        for op in range(graph.num_forward)
        if graph.is_inside(graph.ops[op].call, layers[0], layers[-1])
        or graph.ops[op].call == 0
    ]
    found = set()
    for first, last in [(0, None), (layers[0], None), (layers[0], layers[-1])]:
        start = graph.calls[first].start
        stop = graph.calls[first if last is None else last].stop
        mine = [one for one in ops if start <= one[0] < stop]
        for _ in range(20):
            save = frozenset(rng.sample(mine, rng.randint(0, 3)))
            region = Region(first, save=save, last=last)
            count = num_followed(simulator.view(first, last), region)
            assert count == followed(graph, region)
            found.add(count)
    assert len(found) > 4


# -- taken into the graph ----------------------------------------------------------


@pytest.mark.parametrize("batches", [1, 3])
def test_a_graph_with_costs_of_steps_predicts_these_steps(
    graph: Graph, batches: int
) -> None:
    graph = replace(graph, options={"accumulate": batches})
    unplanned = StepSeconds(30.0, 70.0, 5.0)
    costs = StepCosts(unplanned, IN_STEPS, OF_OPS)
    found = with_step_costs(graph, costs)
    assert found.step_seconds == pytest.approx(105.0)
    start = found.num_forward
    forward = batches * sum(op.seconds for op in found.ops[:start])
    assert forward == pytest.approx(30.0)
    norm, linear = (
        next(op.seconds for op in found.ops[:start] if op.name == name)
        for name in ("native_layer_norm", "addmm")
    )
    assert norm / linear == pytest.approx(
        OF_OPS["native_layer_norm"] / OF_OPS["addmm"], rel=1e-6
    )
    (region,) = [Region(1)]
    effect = Simulator(found).effect(region)
    ops = sum(found.ops[op].seconds for op in effect.steps)
    saves = len(Simulator(found).view(1).saves)
    engine = 0.1 * saves + 0.2 * len(effect.steps) + 0.3
    assert effect.seconds == pytest.approx(0.75 * ops + engine)
    named = Region(1, save=frozenset([(effect.steps[0], 0)]))
    inside = Simulator(found).effect(named)
    ops = sum(found.ops[op].seconds for op in inside.steps)
    engine = 0.1 * saves + 0.2 * len(inside.steps) + 0.3 + 0.4 * followed(found, named)
    assert inside.seconds == pytest.approx(0.75 * ops + engine)
    assert NOTE_IN_STEP in found.notes
    again = with_step_costs(found, costs)
    assert again.step_seconds == pytest.approx(105.0)  # not scaled twice


def test_what_a_plan_added_is_what_it_is_predicted_to_add(graph: Graph) -> None:
    nothing, *_ = trial_plans(graph)
    known = StepCosts(StepSeconds(30.0, 70.0, 5.0), graph.engine, OF_OPS)
    parts = measured._parts(Simulator(with_step_costs(graph, known)), nothing)
    plan = parts._replace(seconds=40.0, width_seconds=1e-3)
    costs = replace(known, engine=fit(graph.engine, [plan]))
    step = simulate(with_step_costs(graph, costs), nothing)
    assert step.recompute_seconds == pytest.approx(40.0, rel=1e-3)
    assert step.overhead == pytest.approx(40.0 / 105.0, rel=1e-3)


def test_a_trace_file_keeps_the_costs(graph: Graph, tmp_path: Path) -> None:
    costs = StepCosts(StepSeconds(30.0, 70.0, 5.0), IN_STEPS, OF_OPS)
    found = with_step_costs(graph, costs)
    trace_file.save(found, tmp_path / "a.json.gz")
    assert trace_file.load(tmp_path / "a.json.gz").engine == found.engine
    plain = replace(graph, engine=EngineCosts(0.25, 0.5))
    trace_file.save(plain, tmp_path / "b.json.gz")
    assert trace_file.load(tmp_path / "b.json.gz").engine == plain.engine


def test_costs_are_kept_for_this_step_alone(graph: Graph, tmp_path: Path) -> None:
    cache = CostCache(tmp_path / "costs.json")
    costs = StepCosts(StepSeconds(30.0, 70.0, 5.0), IN_STEPS, OF_OPS)
    assert known_step_costs(graph, cache) is None
    assert keep_step_costs(graph, costs, cache) == costs
    assert known_step_costs(graph, cache) == costs
    scaled = with_step_costs(graph, costs)
    assert known_step_costs(scaled, cache) == costs
    assert known_step_costs(graphs.chain(5), cache) is None
    accumulated = replace(graph, options={"accumulate": 2})
    assert known_step_costs(accumulated, cache) is None
    assert known_step_costs(graph, replace(cache, fresh=True)) is None


# -- ops in a step ----------------------------------------------------------------


def test_ops_are_timed_where_they_run() -> None:
    clock = iter(range(10**6))
    step = make_step(Workload(Blocks(8), torch.ones(4, 8)), DEFAULT_TRAINING)
    step.run()
    found = time_ops(step, lambda: float(next(clock)))
    assert found.num_forward["addmm"] == 4
    assert found.forward["addmm"] == pytest.approx(4.0)  # a tick each
    assert found.per_call("addmm") == pytest.approx(1.0)
    assert found.backward["mm"] == pytest.approx(7.0)  # the first needs no input's
    assert "mm" not in found.forward
    assert found.per_call("mm") == 0.0


def test_ops_have_the_factors_of_their_names(graph: Graph) -> None:
    start, times = graph.num_forward, 3.0
    calls = Counter(op.name for op in graph.ops[:start])
    alone = {name: count * 1.0 for name, count in calls.items()}
    seconds = {name: times * more for name, more in alone.items()}
    seconds["gelu"] /= 6
    assert factors_of(graph, OpSeconds(seconds, {}, calls)) == {
        name: pytest.approx(times if name != "gelu" else times / 6) for name in calls
    }
    other = calls | {"gelu": 99}  # so many do not run: the others' factor
    found = factors_of(graph, OpSeconds(seconds, {}, other))
    assert found["gelu"] == pytest.approx(times)


def test_what_backward_takes_more_tells_how_long_ops_take_again() -> None:
    calls = Counter({"mm": 4, "gelu": 2})
    plain = OpSeconds({"mm": 8.0, "gelu": 1.0}, {"mm": 16.0, "sum": 1.0}, calls)
    planned = OpSeconds(plain.forward, {"mm": 19.0, "gelu": 1.5, "sum": 9.0}, calls)
    factor = again_factor(plain, planned, ["mm", "gelu", "gelu"])
    assert factor == pytest.approx((3.0 + 1.5) / (2.0 + 1.0))
    assert again_factor(plain, plain, ["gelu"]) is None
    assert again_factor(plain, planned, []) is None


# -- other batches and optimizers ----------------------------------------------------


def faster(graph: Graph, factor: float) -> Graph:
    ops = (replace(op, seconds=factor * op.seconds) for op in graph.ops)
    return replace(graph, ops=tuple(ops))


def never() -> Any:
    raise AssertionError("steps were taken again")


def test_other_batches_and_optimizers_take_the_factors_of_the_measured_step(
    graph: Graph,
) -> None:
    steps = OtherSteps()
    costs = StepCosts(StepSeconds(30.0, 70.0, 5.0), IN_STEPS, OF_OPS)
    first = steps.taken_into(graph, None, lambda: with_step_costs(graph, costs), never)
    assert first.step_seconds == pytest.approx(105.0)
    larger = steps.taken_into(faster(graph, 3.0), None, never, no_phases)
    assert larger.step_seconds == pytest.approx(315.0)
    assert larger.engine == first.engine
    assert NOTE_IN_STEP in larger.notes
    accumulated = replace(graph, options={"accumulate": 4})
    found = steps.taken_into(accumulated, None, never, never)
    assert found.step_seconds == pytest.approx(4 * 100.0 + 5.0)

    # Forward and backward of another optimizer stay comparable with the first one's.
    slow = StepCosts(StepSeconds(90.0, 90.0, 10.0), IN_STEPS, OF_OPS)
    other = steps.taken_into(graph, "sgd", lambda: with_step_costs(graph, slow), never)
    assert other.step_seconds == pytest.approx(110.0)
    assert steps.taken_into(graph, "sgd", never, never).ops == other.ops
    assert steps.taken_into(graph, "adam", lambda: graph, never).ops == first.ops


def no_phases() -> None:
    """Steps cannot be taken."""


def test_a_second_batch_is_measured_and_others_are_on_the_line(graph: Graph) -> None:
    steps = OtherSteps(rows=8)
    costs = StepCosts(StepSeconds(30.0, 70.0, 5.0), IN_STEPS, OF_OPS)
    steps.taken_into(graph, None, lambda: with_step_costs(graph, costs), never)

    def at(rows: int, accumulate: int = 1, ask: Callable[[], Any] = never) -> Graph:
        steps.rows = rows
        slower = faster(replace(graph, options={"accumulate": accumulate}), rows)
        return steps.taken_into(slower, None, never, ask)

    assert at(8).step_seconds == pytest.approx(30.0 + 70.0 + 8 * 5.0)
    # A second batch accumulated: both of its micro-batches were measured together.
    second = at(4, 2, lambda: StepSeconds(2 * 20.0, 2 * 30.0, 9.0))
    assert second.step_seconds == pytest.approx(2 * 50.0 + 4 * 5.0)
    assert at(16).step_seconds == pytest.approx(50.0 + 150.0 + 16 * 5.0)
    assert at(6, 3).step_seconds == pytest.approx(3 * (25.0 + 50.0) + 6 * 5.0)
    # Backward of half the rows takes at least half the seconds.
    assert at(2).step_seconds == pytest.approx(15.0 + 15.0 + 2 * 5.0)


def test_where_the_second_batch_is_not_measured_factors_remain(graph: Graph) -> None:
    steps = OtherSteps(rows=8)
    costs = StepCosts(StepSeconds(30.0, 70.0, 5.0), IN_STEPS, OF_OPS)
    steps.taken_into(graph, None, lambda: with_step_costs(graph, costs), never)
    for rows, asked in ((4, no_phases), (2, never)):
        steps.rows = rows
        found = steps.taken_into(faster(graph, rows / 8), None, never, asked)
        assert found.step_seconds == pytest.approx(105.0 * rows / 8)


def test_where_the_first_step_is_not_measured_no_other_is(graph: Graph) -> None:
    steps = OtherSteps()
    noted = replace(graph, notes=(NOTE_NOT_IN_STEP,))
    assert steps.taken_into(graph, None, lambda: noted, never) == noted
    assert steps.taken_into(graph, "sgd", never, never) == graph


# -- measured ----------------------------------------------------------------------


class Nested(nn.Module):
    """Three layers, with an op of their own beside those of modules inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Sigmoid()))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = 2.0 * layer(x)
        return x


class Blocks(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def profiled() -> Graph:
    """Its step, with dear matrix products."""
    graph = ckplan.profile(Blocks(64), torch.ones(32, 64), replay=False, in_step=False)
    assert NOTE_IN_STEP not in graph.notes
    assert graph.engine.again == 1.0
    dear = {"addmm": 1e-3}
    ops = (replace(op, seconds=dear.get(op.name, 1e-6)) for op in graph.ops)
    return replace(graph, ops=tuple(ops))


def workload() -> Workload:
    return Workload(Blocks(64), torch.ones(32, 64))


def in_step(graph: Graph, cache: CostCache, *, asked: bool = True) -> Graph:
    return with_seconds_in_step(graph, workload, DEFAULT_TRAINING, cache, asked=asked)


@pytest.fixture
def cache(tmp_path: Path) -> CostCache:
    return CostCache(tmp_path / "costs.json")


def note_of(graph: Graph) -> str:
    assert graph.engine.again == 1.0
    return graph.notes[-1].removeprefix(NOTE_NOT_IN_STEP)


@pytest.mark.usefixtures("one_thread")
def test_steps_are_measured_once_and_kept(
    profiled: Graph, cache: CostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "MOST_ERROR", 100.0)  # however busy it is here
    first = in_step(profiled, cache)
    assert NOTE_IN_STEP in first.notes
    assert first.engine.again != 1.0
    taken = first.engine.watch_seconds + first.engine.region_seconds
    assert taken > 0  # of either part, as busy machines tell them apart badly
    monkeypatch.setattr(measured, "measure_step", None)
    second = in_step(profiled, cache, asked=False)  # short, but what it takes is known
    assert second.engine == first.engine
    assert second.ops == first.ops


@pytest.mark.parametrize("seconds_per_layer", [1e-3, 2e-3, 4e-3])
def test_what_steps_take_longer_with_plans_is_what_plans_are_said_to_cost(
    profiled: Graph, monkeypatch: pytest.MonkeyPatch, seconds_per_layer: float
) -> None:
    """Of made-up rounds, where both plans add the same to each of four layers."""

    def made_up(step: TrainingStep) -> tuple[float, float, float]:
        try:
            num_regions = len(ckplan.status(step.workload.model).regions)
        except ApplyError:
            num_regions = 0
        return 0.04, 0.06 + seconds_per_layer * num_regions, 0.01

    monkeypatch.setattr(measured, "_timed", made_up)
    prior = replace(profiled.engine, watch_seconds=1e-5, region_seconds=1e-4)
    graph = replace(profiled, engine=replace(prior, rerun_seconds=0.0))
    found = in_step(graph, CostCache(None))
    assert NOTE_IN_STEP in found.notes, found.notes
    assert found.step_seconds == pytest.approx(0.11, rel=0.01)
    for regions in trial_plans(graph):
        added = simulate(found, regions).recompute_seconds
        assert added == pytest.approx(4 * seconds_per_layer, rel=0.2)
    assert found.engine.region_seconds > prior.region_seconds


@pytest.mark.usefixtures("one_thread")
def test_phases_without_a_plan_are_measured_once_and_kept(
    profiled: Graph, cache: CostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = profiled, workload, DEFAULT_TRAINING, cache
    assert phases_in_step(*how) is None  # the step is short
    monkeypatch.setattr(measured, "SHORTEST_SECONDS", 0.0)
    found = phases_in_step(*how)
    assert found is not None
    assert min(found.forward, found.backward, found.optimizer) > 0
    monkeypatch.setattr(measured, "_timed", fail)
    assert phases_in_step(*how) == found
    other = replace(profiled, options={"accumulate": 2})
    assert phases_in_step(other, *how[1:]) is None  # it fails


def test_profiling_with_steps_leaves_model_and_random_state(
    profiled: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "MOST_ERROR", 100.0)
    model, batch = Blocks(64), torch.ones(32, 64)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    random = torch.get_rng_state()
    found = ckplan.profile(model, batch, replay=False, in_step=True)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(one.grad is None for one in model.parameters())
    assert all(torch.equal(before[k], one) for k, one in model.state_dict().items())
    assert found.engine != profiled.engine


def test_a_short_and_a_long_step_are_not_measured_unless_asked(
    profiled: Graph, cache: CostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert note_of(in_step(profiled, cache, asked=False)) == "the step is short"
    monkeypatch.setattr(measured, "SHORTEST_SECONDS", 0.0)
    monkeypatch.setattr(measured, "LONGEST_SECONDS", 1e-6)
    said = note_of(in_step(profiled, cache, asked=False))
    assert said.endswith("`--in-step` takes them")


def different(step: object) -> tuple[float, float, float]:
    del step
    return NOISE.uniform(1, 9), NOISE.uniform(1, 9), 1.0


def fail(*_: object) -> None:
    raise ValueError("no step today")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "_timed",
            different,
            "the machine is busy: 60 rounds tell what a plan",
        ),
        ("machine_load", lambda: Load(9.0, 2), "the machine is busy (load average 9.0"),
        ("available_bytes", lambda: 1, "it is too large"),
        ("make_step", fail, "ValueError: no step today"),
        ("trial_plans", lambda _: [], "no layer can be recomputed"),
    ],
)
def test_what_cannot_be_measured_is_said_and_not_kept(
    name: str,
    value: object,
    said: str,
    profiled: Graph,
    cache: CostCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measured, name, value)
    if name == "machine_load":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert note_of(in_step(profiled, cache)).startswith(said)
    assert cache.path is not None and not cache.path.exists()


class Counted(nn.GELU):
    """Multiplies by a number that nothing tells."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 + next(NUMBERS))


NUMBERS = count()


class Filling(nn.GELU):
    """Multiplies by another number in its first forward than in those after it."""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.known) < 2:
            self.known.append(0.5)
        return super().forward(x) * sum(self.known)


def in_steps_of(layer: type[nn.Module], cache: CostCache) -> Graph:
    def build() -> Workload:
        layers = (nn.Sequential(nn.Linear(64, 64), layer()) for _ in range(3))
        return Workload(nn.Sequential(*layers), torch.ones(32, 64))

    one = build()
    graph = ckplan.profile(one.model, one.batch, replay=False, in_step=False)
    return with_seconds_in_step(graph, build, DEFAULT_TRAINING, cache, asked=True)


def test_steps_of_layers_that_fill_caches_are_measured(cache: CostCache) -> None:
    assert NOTE_IN_STEP in in_steps_of(Filling, cache).notes


def test_steps_with_layers_that_are_recorded_anew_say_nothing_of_others(
    cache: CostCache,
) -> None:
    found = in_steps_of(Counted, cache)
    assert note_of(found) == "a layer calls torch otherwise in each step"


class Distilled(nn.Module):
    """A student that follows a teacher, which saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (
            nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in "ab"))
            for _ in "st"
        )
        self.unused = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        return (self.student(x) - wanted).square().mean()


def test_trial_plans_leave_out_what_runs_without_gradients() -> None:
    graph = ckplan.profile(Distilled(), torch.ones(4, 8), in_step=False)
    (nothing, *_) = trial_plans(graph)
    named = [graph.calls[region.call].fqn for region in nothing]
    assert named and not [fqn for fqn in named if fqn.startswith("teacher")]


def test_parameters_without_a_gradient_are_noted() -> None:
    model = Distilled()
    graph = ckplan.profile(model, torch.ones(4, 8), in_step=False)
    (note,) = (note for note in graph.notes if note.startswith("no gradient"))
    left = [*model.teacher.parameters(), *model.unused.parameters()]
    num_bytes = sum(p.nbytes for p in left)
    assert "no gradient for teacher.0.0.weight, ...:" in note
    assert f"takes {units.format_bytes(num_bytes)} more for gradients" in note
    model.teacher.requires_grad_(False)
    model.unused = nn.Identity()
    graph = ckplan.profile(model, torch.ones(4, 8), in_step=False)
    assert not [note for note in graph.notes if note.startswith("no gradient")]


def test_trial_plans_cover_the_layers_and_keep_what_is_dear(profiled: Graph) -> None:
    nothing, dear = trial_plans(profiled)
    names = [profiled.calls[region.call].fqn for region in nothing]
    assert names == [f"layers.{number}" for number in range(4)]
    kept = {profiled.ops[op].name for region in dear for op, _ in region.save}
    assert kept == {"addmm"}


def test_a_model_without_repeated_layers_has_trial_plans_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Tanh())
    graph = ckplan.profile(model, torch.ones(4, 8), replay=False, in_step=False)
    nothing, *_ = trial_plans(graph)
    assert [graph.calls[one.call].module for one in nothing] >= ["GELU"]
