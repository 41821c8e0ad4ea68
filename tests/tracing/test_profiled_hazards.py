"""Hazards that a profile finds: each kind by a model that has it, and what follows."""

from __future__ import annotations

import gc
import math
import os
import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from trained import train

import ckplan
from ckplan.errors import ApplyError, PlanError, WorkloadError
from ckplan.graph.file import dumps, loads
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.resolve import resolve
from ckplan.report.step import step_json, step_report
from ckplan.report.tables import render
from ckplan.simulating.simulate import simulate
from ckplan.tracing.hazards.nondeterminism import (
    NOTE_DIFFERENT,
    NOTE_SAME,
    find_nondeterminism,
)
from ckplan.tracing.trace import NOTE_FAKE
from ckplan.training.step import Training, make_step
from ckplan.training.workload import Workload

CALLS_SO_FAR: list[int] = []


@torch.library.custom_op("ckplan_test::chance", mutates_args=())
def chance(x: torch.Tensor) -> torch.Tensor:
    """A kernel that is not deterministic."""
    return x + int.from_bytes(os.urandom(4), "big") * 2.0**-34


chance.register_fake(torch.empty_like)
chance.register_autograd(lambda ctx, grad: grad)


class Block(nn.Module):
    """A layer with something else in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.count, self.seen = 0, []
        self.register_buffer("average", torch.ones(64))
        self.plain = torch.ones(64)
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.exp(torch.tanh(self.change(self.linear(x)))))

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Calm(Block):
    """Dropout is put back by the engine: no hazard."""

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.1)


class PythonRandom(Block):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        return x * random.random()


class NumpyRandom(Block):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(numpy.random.rand())


class OwnGenerator(Block):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(64, generator=self.generator)


class NumpyGenerator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.rng = numpy.random.RandomState(0)

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.from_numpy(self.rng.rand(64)).float()


class Counter(Block):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x / self.count


class Lists(Block):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(1)
        return x / len(self.seen)


class StorageTracker:
    """Nobody knows how to put it back."""

    def __init__(self) -> None:
        self.total = 0


class Objects(Block):
    def __init__(self) -> None:
        super().__init__()
        self.meter = StorageTracker()

    def change(self, x: torch.Tensor) -> torch.Tensor:
        self.meter.total += 1
        return x / self.meter.total


class Codebook(Block):
    """Its output follows the buffer that it moves."""

    def change(self, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x + self.average


class Replaced(Block):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return x + self.average


class MovingAverage(Block):
    """Its output does not."""

    def change(self, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x


class PlainTensor(Block):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        self.plain.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x + self.plain


class Norm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Spectral(Block):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.linear)


class Experts(Block):
    """Rows go where the largest of two columns says."""

    def change(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x[:, 0] > x[:, 1]).nonzero().squeeze(-1)
        return x.index_add(0, chosen, self.linear(x[chosen]))


class Cached(Block):
    """A cache that its parent makes and hands down by keyword."""

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        cache.append(x.detach())
        return torch.sin(torch.exp(torch.tanh(self.linear(x) + sum(cache))))


class GlobalState(Block):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        CALLS_SO_FAR.append(1)
        return x / len(CALLS_SO_FAR)


class Chance(Block):
    def change(self, x: torch.Tensor) -> torch.Tensor:
        return chance(x)


class Observed(Block):
    """Quantizes to a range that its kernel moves: aware training of torch."""

    def __init__(self) -> None:
        super().__init__()
        for name, start in (("low", math.inf), ("high", -math.inf), ("scale", 1.0)):
            self.register_buffer(name, torch.full((1,), start))
        self.register_buffer("zero", torch.zeros(1, dtype=torch.int))
        self.register_buffer("on", torch.ones(1, dtype=torch.long))

    def change(self, x: torch.Tensor) -> torch.Tensor:
        moved = self.low, self.high, self.scale, self.zero
        limits = 0.01, 0, 127, -1
        return torch.fused_moving_avg_obs_fake_quant(
            x, self.on, self.on, *moved, *limits
        )


class Asking(Block):
    """Asks for a value, so that it is traced on real tensors."""

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() < 1e30 else -x


class Penalty(Block):
    """Differentiates itself, and trains on that."""

    def change(self, x: torch.Tensor) -> torch.Tensor:
        given = x.detach().requires_grad_()
        total = torch.tanh(self.linear(given)).sum()
        (slope,) = torch.autograd.grad(total, given, create_graph=True)
        return x + 0.01 * slope.square()


class Three(nn.Module):
    """Three of a block."""

    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.h = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache: list[torch.Tensor] = []
        for block in self.h:
            x = block(x, cache=cache) if isinstance(block, Cached) else block(x)
        return x


def build(kind: type[Block]) -> Workload:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    CALLS_SO_FAR.clear()
    return Workload(Three(kind), torch.randn(512, 64), lambda out, _: out.sum())


def profiled(kind: type[Block], **options: Any) -> Graph:
    found = build(kind)
    return ckplan.profile(found.model, found.batch, loss=found.loss, **options)


def kinds_of(graph: Graph) -> set[tuple[str, tuple[str, ...]]]:
    return {(hazard.kind, hazard.guarded_by) for hazard in graph.hazards}


PROGRAM, BOTH = ("program",), ("program", "rerun")
GUARDED = [
    (Norm, "statistics", BOTH),
    (MovingAverage, "buffer", BOTH),
    (Experts, "shapes", BOTH),
    (Codebook, "buffer", BOTH),
    (PlainTensor, "buffer", BOTH),
    (Spectral, "buffer", BOTH),
    (Replaced, "state", PROGRAM),
    (PythonRandom, "random", BOTH),
    (NumpyRandom, "random", BOTH),
    (OwnGenerator, "random", BOTH),
    (NumpyGenerator, "state", BOTH),
    (Counter, "state", BOTH),
    (Lists, "state", BOTH),
    (Objects, "state", PROGRAM),
    (Cached, "state", PROGRAM),
    (GlobalState, "state", PROGRAM),
    (Chance, "chance", ()),
    (Penalty, "backward", ()),
    (Observed, "unseen", ()),
]


@pytest.mark.parametrize(("kind", "hazard", "guarded_by"), GUARDED)
def test_each_hazard_is_found_and_said(
    kind: type[Block], hazard: str, guarded_by: tuple[str, ...]
) -> None:
    graph = profiled(kind)
    assert kinds_of(graph) == {(hazard, guarded_by)}
    assert (NOTE_FAKE in graph.notes) == (kind is not Experts)
    calls = {graph.calls[one.call].fqn.split(".")[1] for one in graph.hazards}
    assert calls == {"0", "1", "2"}
    assert loads(dumps(graph), "again").hazards == graph.hazards
    timeline = simulate(graph)
    text = render(step_report(graph, timeline))
    assert "Hazards\n" in text
    assert max(map(len, text.splitlines())) <= 80
    first = step_json(graph, timeline, "")["hazards"][0]
    assert (first["kind"], first["guarded_by"]) == (hazard, [*guarded_by])


def test_what_the_engine_puts_back_is_no_hazard() -> None:
    graph = profiled(Calm)
    assert graph.hazards == ()
    assert "Hazards" not in render(step_report(graph, simulate(graph)))


@pytest.mark.parametrize(("kind", "hazard", "guarded_by"), GUARDED)
@pytest.mark.parametrize("by", ["program", "rerun"])
def test_what_guards_a_hazard_trains_to_the_same_bits_and_what_does_not_is_refused(
    kind: type[Block], hazard: str, guarded_by: tuple[str, ...], by: str
) -> None:
    del hazard
    plan = Plan(regions=(PlannedRegion("h.[0..2]", by),))
    graph = profiled(kind)
    if by not in guarded_by:
        with pytest.raises(PlanError, match=f"cannot recompute h.0#0 by {by}: h.0"):
            resolve(plan, graph)
        return
    expected = train(build(kind))
    workload = build(kind)
    ckplan.apply(workload.model, plan)
    try:
        simulate(graph, resolve(plan, graph))
    except PlanError as refused:  # it would have to rebuild from what it overwrote
        assert "in place" in refused.what
    assert all(map(torch.equal, expected, train(workload)))


@pytest.mark.parametrize("kind", [kind for kind, _, ways in GUARDED if ways])
def test_what_the_solver_makes_of_a_hazard_trains_to_the_same_bits(
    kind: type[Block],
) -> None:
    plan = ckplan.solve(profiled(kind), goal="min-memory")
    assert plan.regions
    expected = train(build(kind))
    workload = build(kind)
    ckplan.apply(workload.model, plan)
    assert all(map(torch.equal, expected, train(workload)))


@pytest.mark.parametrize("kind", [kind for kind, _, ways in GUARDED if ways == PROGRAM])
def test_rerun_of_what_only_programs_guard_is_never_silently_wrong(
    kind: type[Block],
) -> None:
    expected = train(build(kind))
    workload = build(kind)
    ckplan.apply(workload.model, Plan(regions=(PlannedRegion("h.[0..2]", "rerun"),)))
    try:
        actual = train(workload)
    except ApplyError as error:
        assert "its forward differs" in error.what
    else:
        assert all(map(torch.equal, expected, actual))


@pytest.mark.parametrize("kind", [kind for kind, _, ways in GUARDED if not ways])
def test_the_solver_makes_no_region_of_what_nothing_guards(kind: type[Block]) -> None:
    assert ckplan.solve(profiled(Calm), goal="min-memory").regions
    assert ckplan.solve(profiled(kind), goal="min-memory").regions == ()


class Borrowing(nn.Module):
    """Calls a module that its parent owns."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), [norm]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.exp(torch.tanh(self.norm[0](self.linear(x)))))


class Lending(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.block = norm, Borrowing(norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, lambda _: Counter()])
def test_what_a_module_borrows_is_not_put_back_with_it(norm: Any) -> None:
    graph = ckplan.profile(Lending(norm(64)), torch.randn(512, 64), replay=False)
    for calls, by in ((".", "rerun"), ("block", "program")):
        assert resolve(Plan(regions=(PlannedRegion(calls, by),)), graph)
    refused = "cannot recompute block#0 by rerun: norm#0"
    with pytest.raises(PlanError, match=refused):
        resolve(Plan(regions=(PlannedRegion("block", "rerun"),)), graph)


def test_without_replay_only_what_can_be_seen_is_found() -> None:
    assert profiled(Chance, replay=False).hazards == ()
    assert kinds_of(profiled(Counter, replay=False)) == {("state", BOTH)}


def test_a_large_model_is_not_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckplan.tracing.hazards import nondeterminism as repeat

    monkeypatch.setattr(repeat, "free_bytes", lambda device: 1000)
    graph = profiled(Chance)
    assert graph.hazards == ()
    assert any(note.startswith(repeat.NOTE_NOT) for note in graph.notes)


def blocks_alive() -> int:
    return sum(issubclass(type(one), Block) for one in gc.get_objects())


@pytest.mark.parametrize("kind", [Calm, Chance, Asking])
def test_what_was_run_is_let_go(kind: type[Block]) -> None:
    found = build(kind)
    gc.collect()
    before = blocks_alive()
    ckplan.profile(found.model, found.batch, loss=found.loss)
    gc.collect()
    assert blocks_alive() == before


def slope(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A loss of the derivative of the model by its input."""
    at = batch.detach().requires_grad_()
    (found,) = torch.autograd.grad(model(at).sum(), at, create_graph=True)
    return found.square().mean()


def test_a_forward_that_takes_gradients_is_run_twice_too() -> None:
    batch = torch.ones(2, 64)
    assert NOTE_DIFFERENT in ckplan.profile(Chance(), batch, step=slope).notes
    assert NOTE_SAME in ckplan.profile(Calm(), batch, step=slope).notes


@pytest.mark.usefixtures("quick_collector")
def test_what_ran_twice_is_let_go_at_once() -> None:
    step = make_step(build(Chance), Training())
    gc.collect()
    gc.disable()
    try:
        before = blocks_alive()
        assert find_nondeterminism(step)[0]
        assert blocks_alive() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("worst", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_seen_although_the_trace_is_fake(
    worst: float,
) -> None:
    model, batch = Three(Calm), torch.randn(128, 64)

    def loss(out: torch.Tensor, _: Any) -> torch.Tensor:
        return out.sum() * worst

    with pytest.raises(WorkloadError, match=f"the loss of the first step is .*{worst}"):
        ckplan.profile(model, batch, loss=loss)
    assert ckplan.profile(model, batch, loss=loss, replay=False)


def test_a_profile_leaves_random_numbers_alone() -> None:
    def state() -> list[Any]:
        keys = numpy.random.get_state()[1].tolist()
        return [random.getstate(), keys, torch.get_rng_state().tolist()]

    for kind in (PythonRandom, NumpyRandom, Calm):
        model, batch = Three(kind), torch.randn(128, 64)
        before = state()
        ckplan.profile(model, batch)
        assert state() == before


class Both(Counter):
    """Something hidden beside dropout, which is no hazard, and memory not filled."""

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().change(x), 0.1)


def test_memory_that_nobody_filled_yet_is_no_chance() -> None:
    assert {kind for kind, _ in kinds_of(profiled(Both))} == {"state"}


class Checkpointing(nn.Module):
    """Runs one of its modules again in backward, whoever plans what."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(64, 64), Calm()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        out: torch.Tensor = checkpoint(self.part, x, use_reentrant=self.reentrant)
        return x + out


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("by", BOTH)
def test_regions_are_around_a_checkpoint_of_the_model_and_not_inside(
    reentrant: bool, by: str
) -> None:
    model = nn.Sequential(*[Checkpointing(reentrant=reentrant) for _ in range(3)])
    graph = ckplan.profile(model, torch.randn(512, 64), replay=False)
    assert kinds_of(graph) == {("again", BOTH)}
    assert resolve(Plan(regions=(PlannedRegion("[0..2]", by),)), graph)
    assert resolve(Plan(regions=(PlannedRegion("[0..2].first", by),)), graph)
    for inside in ("[0..2].part", "[0..2].part.linear"):
        with pytest.raises(PlanError, match=r"0.part#0 runs again in backward already"):
            resolve(Plan(regions=(PlannedRegion(inside, by),)), graph)
    assert "calls around: program or rerun" in render(
        step_report(graph, simulate(graph))
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_under_the_switch_of_transformers_programs_are_not_predicted() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(64, (2, 16))
    batch = {"input_ids": ids, "labels": ids}
    graph = ckplan.profile(model, batch, replay=False)
    layers = "transformer.h.[0..1]"
    assert resolve(Plan(regions=(PlannedRegion(layers, "rerun"),)), graph)
    with pytest.raises(PlanError, match="gradient_checkpointing is on"):
        resolve(Plan(regions=(PlannedRegion(layers, "program"),)), graph)
    with pytest.raises(PlanError, match="gradient_checkpointing is on"):
        resolve(Plan(regions=(PlannedRegion(f"{layers}.mlp", "rerun"),)), graph)


class Telling(nn.Module):
    """Hands what it makes to the module that calls it."""

    def __init__(self, *told: nn.Module) -> None:
        super().__init__()
        self.linear, self.told = nn.Linear(64, 64), told

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        for one in self.told:
            one.outputs.append(x)
        return torch.sin(x)


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []
        self.h = nn.Sequential(Telling(self), Telling(), Telling(self))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.outputs.clear()
        return self.h(x) + sum(self.outputs)


def test_what_a_layer_tells_a_module_around_it_is_not_told_twice() -> None:
    graph = ckplan.profile(Told(), torch.randn(512, 64), replay=False)
    assert resolve(Plan(regions=(PlannedRegion("h.[0..2]", "program"),)), graph)
    assert resolve(Plan(regions=(PlannedRegion("h.1", "rerun"),)), graph)
    for calls in ("h.0", "h.2", "h"):
        refused = r"'outputs' of the Told around it"
        with pytest.raises(PlanError, match=refused):
            resolve(Plan(regions=(PlannedRegion(calls, "rerun"),)), graph)
