"""Steps that graph breaks divide: the graphs share one budget."""

from __future__ import annotations

import copy
import gc
import json
import random
import re
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import ref

import numpy
import pytest
import torch
from commands import Run
from compiled import Block, Deep, Steps, run_steps
from torch import nn

import ckplan
from ckplan.compiling import finding, lowering, other_batches, planned_backend
from ckplan.compiling.finding import find_parts
from ckplan.compiling.partition import cached_partitioner
from ckplan.compiling.parts import Parts
from ckplan.compiling.step import compiled_loss, parts_of
from ckplan.errors import (
    ApplyError,
    GraphBreakError,
    InfeasibleError,
    PlanError,
    UnitError,
    WorkloadError,
)
from ckplan.plan import file as plan_file
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.resolve import resolve
from ckplan.simulating.simulate import Simulator
from ckplan.solving.solve import solve_plan
from ckplan.training.loading import WorkloadSpec
from ckplan.training.workload import Workload

# Dynamo's own, where it resumes after a break
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")


class Breaks(nn.Module):
    """Two compiled graphs, and a layer between them that is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(32), Block(32)
        self.between = nn.Linear(32, 32)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        x = uncompiled(self.between, self.first(x))
        numbers()
        return self.second(x).square().mean()


@torch._dynamo.disable
def numbers() -> None:
    """Draw some, as augmentations do."""
    random.random()
    numpy.random.rand()


@torch._dynamo.disable
def uncompiled(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x).tanh()


def breaks() -> tuple[Breaks, torch.Tensor]:
    torch.manual_seed(0)
    return Breaks(), torch.randn(256, 32)


@pytest.fixture(scope="module")
def parts() -> Parts:
    torch._dynamo.reset()
    model, x = breaks()
    before = torch.get_rng_state()
    found = find_parts(model, model, (x,), {}, {"dynamic": False})
    assert torch.equal(torch.get_rng_state(), before)
    assert model.steps == 0
    assert all(one.grad is None for one in model.parameters())
    return found


def test_what_finds_the_graphs_holds_no_tensors_of_theirs() -> None:
    model, x = Breaks(), torch.randn(16, 32)
    find_parts(model, model, (x,), {}, {"dynamic": False})
    seekers = [one for one in gc.get_objects() if type(one) is finding._Seeker]
    assert all(one._kept == [] for one in seekers)
    assert seekers  # Dynamo keeps it


def test_graphs_and_what_is_saved_between_them_are_found(parts: Parts) -> None:
    model, x = breaks()
    assert len(parts.planners) == len(parts.runs) == 2
    assert parts.eager_bytes == (0, 256 * 32 * 4, 0)  # what tanh saves; its input: ours
    size = {n: p.numel() * 4 for n, p in model.named_parameters()}
    assert parts.held_bytes == sum(size.values()) + 4 + x.numel() * 4
    assert parts.code_bytes == {".": 256 * 32 * 4, "between": 0}
    assert parts.eager_gradient_bytes == size["between.weight"] + size["between.bias"]
    assert sum(parts.gradient_bytes) == sum(
        n for name, n in size.items() if not name.startswith("between")
    )


class SetsUp(nn.Module):
    """Breaks the graph in its first forward, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lock, self.is_ready = nn.Linear(8, 8), Lock(), False
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        x = self.layer(x)
        if not self.is_ready:
            with self.lock:
                self.is_ready = True
        return x.tanh().square().mean()


def test_a_model_that_breaks_in_its_first_forward_alone_is_one_graph() -> None:
    model, x = SetsUp(), torch.ones(4, 8)
    found = find_parts(model, model, (x,), {}, {"dynamic": False})
    assert not found.runs_uncompiled
    assert len(found.planners) == len(found.runs) == 1
    assert model.steps == 0
    torch._dynamo.reset()
    alone = parts_of(Workload(SetsUp(), x))
    assert len(alone.planners) == len(alone.runs) == 1
    plan = alone.plan(alone.share(alone.unplanned_peak_bytes), None)
    assert plan.predicted is not None
    assert plan.predicted.peak_at in ("compiled forward", "compiled backward")


class Beside(nn.Module):
    """Its layer is not compiled, and saves its input alone, which is there anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return straight(self.layer, x).square().mean()


@torch._dynamo.disable
def straight(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


def test_a_layer_that_runs_uncompiled_is_known_where_it_saves_nothing_anew() -> None:
    model, x = Beside(), torch.ones(4, 8)
    found = find_parts(model, model, (x,), {}, {"dynamic": False})
    assert len(found.runs) == 1
    assert found.runs_uncompiled


class Tied(nn.Module):
    """Two graphs that train one parameter, and buffers that are assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.between = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps, self.last = self.steps + 1, x
        x = uncompiled(self.between, self.shared(x).tanh())
        return self.shared(x).square().mean()


class Layers(nn.Module):
    """Layers that break the graph inside: they run one code, with other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Inside() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x).tanh()
        torch._dynamo.graph_break()
        return self.down(x.tanh()).tanh()


def test_layers_that_share_code_train_their_own_parameters() -> None:
    torch._dynamo.reset()
    model, x = Layers(), torch.ones(4, 8)
    found = find_parts(model, model, (x,), {}, {"dynamic": False})
    parameters = sum(one.numel() * 4 for one in model.parameters())
    assert sum(found.gradient_bytes) == parameters
    assert found.eager_gradient_bytes == 0
    assert not any(path.startswith("layers.") for path in found.code_bytes)


def test_what_no_graph_trains_is_known_where_two_train_one_parameter() -> None:
    model, x = Tied(), torch.ones(4, 8)
    found = find_parts(model, model, (x,), {}, {"dynamic": False})
    assert found.gradient_bytes == (0, 256)
    assert found.eager_gradient_bytes == 256 + 32
    assert (model.steps, model.last) == (0, None)


def test_a_forward_that_fails_leaves_buffers_as_they_were() -> None:
    model, wide = Tied(), nn.Linear(9, 8)
    buffer = model.steps
    model.between = wide
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        find_parts(model, model, (torch.ones(4, 8),), {}, {"dynamic": False})
    assert model.steps is buffer
    assert model.last is None


def seconds_of(parts: Parts, shares: dict[str, Any]) -> float:
    return parts.overhead_of(
        {k: one.plan.predicted.overhead for k, one in shares.items()}
    )


def test_more_budget_never_costs_more_and_all_graphs_fit_together(parts: Parts) -> None:
    full = parts.unplanned_peak_bytes
    with pytest.raises(InfeasibleError, match="2 compiled graphs") as refused:
        parts.share(1)
    floor = int(refused.value.needed.partition("(")[2].partition(" B")[0])
    assert floor < 0.85 * full
    found = []
    for place in range(9):
        budget_bytes = floor + (full - floor) * place // 8
        shares = parts.share(budget_bytes)
        replayed = {key: one.replayed for key, one in shares.items()}
        assert parts.peak_bytes(replayed) <= budget_bytes
        found.append(seconds_of(parts, shares))
    assert all(less >= more for less, more in pairwise(found))
    assert found[0] > found[-1] == 0


def test_few_plans_of_several_graphs_are_replayed() -> None:
    torch._dynamo.reset()
    model, x = breaks()
    found = find_parts(model, model, (x,), {}, {"dynamic": False})
    found.share(int(0.93 * found.unplanned_peak_bytes))
    planners = found.planners.values()
    replayed = sum(len(one.replays.found) for one in planners)
    assert 2 * replayed < sum(len(one.candidates) for one in planners)


def test_one_plan_is_for_all_graphs_and_reads_back(parts: Parts) -> None:
    graph = parts.joined.graph
    assert [str(call) for call in graph.calls if not call.fqn] == [".#0", ".#1"]
    assert {call.fqn for call in graph.calls} >= {"first.up", "second.down"}
    simulated = Simulator(graph).run(()).peak_bytes
    assert simulated == pytest.approx(parts.unplanned_peak_bytes, rel=0.1)
    budget_bytes = int(0.85 * parts.unplanned_peak_bytes)
    shares = parts.share(budget_bytes)
    plan = plan_file.loads(plan_file.dumps(parts.plan(shares, budget_bytes)), "p.yaml")
    again = parts.follow(plan)
    assert any(one.saved is not None for one in again.values())
    assert {k: one.saved for k, one in again.items()} == {
        k: one.saved for k, one in shares.items()
    }
    assert plan.predicted is not None
    assert plan.predicted.peak_bytes <= budget_bytes
    assert plan.predicted.overhead > 0
    most = plan.predicted.peak_bytes - 1
    with pytest.raises(PlanError, match="exceeds its budget") as refused:
        parts.follow(replace(plan, budget_bytes=most))
    assert f"verify TARGET --compile --budget {most} --save" in refused.value.hint


def test_one_solve_over_the_whole_step_is_shared(parts: Parts) -> None:
    graph = parts.joined.graph
    plan = solve_plan(graph, goal="min-memory")
    regions = parts.joined.divided(resolve(plan, graph))
    assert len(regions) == 2
    assert any(regions)
    chosen = parts.follow(replace(plan, budget_bytes=None))
    replayed = {key: one.replayed for key, one in chosen.items()}
    assert parts.peak_bytes(replayed) < 0.9 * parts.unplanned_peak_bytes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:2 graphs of the step")
def test_graphs_that_share_a_budget_keep_its_bytes_and_all_bits() -> None:
    found: dict[str, Steps] = {}
    for budget in ("", "85%"):
        torch._dynamo.reset()
        model, x = breaks()
        if budget:
            call = ckplan.compile(model, budget, fullgraph=False)
        else:
            call = torch.compile(model, dynamic=False)
        found[budget] = run_steps(call, model, x)
        assert model.steps == 2
    assert found["85%"].differs_from(found[""]) == []
    (model_bytes,) = {sum(p.numel() * 4 for p in breaks()[0].parameters()) + 4 + 32768}
    whole = found[""].peak_bytes + model_bytes
    assert found["85%"].peak_bytes + model_bytes <= 0.85 * whole


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as ever, but run graphs uncompiled: seconds of g++ fewer."""
    monkeypatch.setattr(lowering, "compile_with", lambda graph, *_: graph.forward)


@pytest.mark.usefixtures("no_kernels")
def test_what_runs_uncompiled_is_said_and_planned_once(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned_backend, "find_parts", lambda *_: parts)
    model, x = breaks()
    call = ckplan.compile(model, "100%", fullgraph=False)
    with pytest.warns(UserWarning, match=r"code between them .* keeps 32.00 KiB") as it:
        call(x)
    said = str(it[0].message)
    assert "includes: . (32.00 KiB), between (0 B); ckplan.apply(model, plan)" in said
    with warnings.catch_warnings():  # said once, planned once
        warnings.simplefilter("error")
        call(x)
    call(x[:8])
    with torch.no_grad():
        call(x[:8])
    torch._dynamo.reset()
    plan = Plan(model="m", fingerprint={"compiled": "0" * 16})
    with pytest.raises(PlanError, match=r"this is [0-9a-f]{16} in 2 graphs"):
        ckplan.compile(model, plan, fullgraph=False)(x)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("fullgraph", [True, False])
def test_the_first_batch_is_not_kept_alive(fullgraph: bool) -> None:
    model, x = (Deep(depth=1), torch.randn(64, 32)) if fullgraph else breaks()
    first = ref(x)
    call = ckplan.compile(model, "100%", fullgraph=fullgraph)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of code between graphs
        call(x).backward()
    del x
    gc.collect()
    assert first() is None


@pytest.mark.usefixtures("no_kernels")
def test_a_copy_from_before_the_first_forward_trains_with_the_same_plans() -> None:
    model, x = breaks()
    call = ckplan.compile(model, "100%", fullgraph=False)
    copied = copy.deepcopy(call)
    once = random.Random(), numpy.random.RandomState()
    once[0].setstate(random.getstate())
    once[1].set_state(numpy.random.get_state())
    drawn = once[0].random(), once[1].rand()
    following = once[0].random(), once[1].rand()
    with pytest.warns(UserWarning, match="2 graphs of the step"):
        call(x).backward()
    assert (random.random(), numpy.random.rand()) == following != drawn
    copied(x).backward()
    for one in copied.parameters():
        assert one.grad is not None


@pytest.mark.usefixtures("no_kernels")
def test_such_a_model_compiles_after_a_forward_that_leaves_no_trace() -> None:
    model, x = SetsUp(), torch.ones(4, 8)
    before = torch.get_rng_state()
    call = ckplan.compile(model, "100%")
    call(x).backward()
    assert model.steps == 1
    assert torch.equal(torch.get_rng_state(), before)
    assert model.layer.weight.grad is not None
    call = ckplan.compile(Breaks(), "100%")
    with pytest.raises(GraphBreakError, match="as one graph"):
        call(torch.randn(4, 32))


class Pools(nn.Module):
    """As many sums as a value decides: ``fullgraph=True`` makes one graph of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        sums = torch.zeros(int(groups[-1]) + 1, 8).index_add(0, groups, x)
        return self.second(sums).square().mean()


@pytest.mark.usefixtures("no_kernels")
def test_a_graph_that_goes_by_values_is_one_that_breaks() -> None:
    batch = torch.randn(8, 8), torch.arange(8) // 2
    call = ckplan.compile(Pools(), "100%")
    with pytest.raises(GraphBreakError, match=r"of a tensor, at 'sums = torch") as no:
        call(*batch)
    assert "fullgraph=False" in no.value.hint
    workload = Workload(Pools(), batch)
    unplanned = compiled_loss(workload, lowering.in_order)
    with pytest.raises(GraphBreakError, match="values of a tensor"):
        unplanned()
    assert len(parts_of(workload).runs) == 2


@pytest.mark.parametrize("budget", ["zz", "0GB", -1, "80"])
def test_what_is_no_budget_is_refused_at_once(budget: Any) -> None:
    for plans in (ckplan.backend, lambda one: ckplan.compile(nn.Linear(2, 2), one)):
        with pytest.raises(UnitError, match="budget"):
            plans(budget)


@pytest.mark.parametrize("how", [{"mode": "max-autotune"}, {"dynamic": True}])
def test_what_cannot_be_planned_is_refused_before_anything_is(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowering, "generate_code", lambda *_: pytest.fail("planned"))
    torch._dynamo.reset()
    model, x = breaks()
    with pytest.raises(ApplyError, match=r"max-autotune|dynamic shapes"):
        ckplan.compile(model, "80%", fullgraph=False, **how)(x)
    assert model.steps == 0


@pytest.mark.usefixtures("no_kernels")
def test_graphs_of_another_batch_or_branch_follow_what_is_known_or_are_told(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    least = {key: one.candidates[-1] for key, one in parts.planners.items()}
    shares = parts._chosen(least)
    assert any(one.saved is not None for one in shares.values())
    monkeypatch.setattr(planned_backend, "find_parts", lambda *_: parts)
    monkeypatch.setattr(Parts, "share", lambda *_: shares)
    saved: list[Any] = []

    def partitioner(wanted: Any) -> Any:
        saved.append(wanted)
        return cached_partitioner(wanted)

    monkeypatch.setattr(other_batches, "cached_partitioner", partitioner)
    model, x = breaks()
    call = ckplan.compile(model, "100%", fullgraph=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "2 graphs of the step")
        call(x)
        assert saved == []
        call(x[:8])
    assert {*saved} == {one.saved for one in shares.values()}
    with pytest.warns(UserWarning, match="compiled for more than is planned"):
        call(x.repeat(2, 1))
    model.first = nn.Sequential(model.first, nn.Tanh())
    with pytest.warns(UserWarning, match="compiled without a plan, from '"):
        call(x)


class Adds(nn.Module):
    """Its second graph adds two tensors: there is nothing to compute in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, y = self.layer(x), self.layer(x).tanh()
        torch._dynamo.graph_break()
        return x + y


def test_a_graph_whose_backward_has_no_code_is_compiled_as_it_is() -> None:
    torch._dynamo.reset()
    model, x = Adds(), torch.randn(16, 8)
    expected = torch.autograd.grad(model(x).sum(), [*model.parameters()])
    ckplan.compile(model, "100%", fullgraph=False)(x).sum().backward()
    for one, other in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(one.grad, other)


@pytest.mark.usefixtures("no_kernels")
def test_a_graph_that_cannot_be_lowered_runs_uncompiled_and_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = breaks()
    real, seen = lowering.generate_code, []

    def fails_first(*args: Any) -> None:
        seen.append(1)
        if len(seen) == 1:
            raise RuntimeError("no lowering for this op")
        real(*args)

    monkeypatch.setattr(lowering, "generate_code", fails_first)
    call = ckplan.compile(model, "100%", fullgraph=False)
    said = r"1 graphs of the step.*; Inductor fails at '.*RuntimeError: no lowering for"
    with pytest.warns(UserWarning, match=said):
        loss = call(x)
    loss.backward()
    assert all(one.grad is not None for one in model.parameters())


@pytest.mark.slow
@pytest.mark.usefixtures("no_kernels")
def test_what_runs_uncompiled_follows_the_regions_of_a_plan_applied_before() -> None:
    gradients, kept = [], []
    for has_regions in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Breaks(), torch.randn(256, 32)
        layers = nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)
        model.between = nn.Sequential(*layers)
        if has_regions:
            ckplan.apply(model, Plan(regions=(PlannedRegion("between"),)))
        call = ckplan.compile(model, "100%", fullgraph=False)
        with pytest.warns(UserWarning, match="2 graphs of the step") as said:
            loss = call(x)
        loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
        size = re.search(r"keeps ([\d.]+) KiB", str(said[0].message))
        assert size is not None
        kept.append(float(size[1]))
    assert "dropped 65536 B" in str(ckplan.status(model))
    assert kept[0] - kept[1] == 64.0
    plain, planned = gradients
    assert all(torch.equal(plain[name], planned[name]) for name in plain)


class Recurrent(nn.Module):
    """Dynamo compiles nothing of it, unless it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(x)[0].square().mean()


@pytest.mark.parametrize("whole", [True, False])
def test_what_lets_recurrent_layers_compile_is_named(whole: bool) -> None:
    torch._dynamo.utils.counters.clear()
    call = ckplan.compile(Recurrent(), "80%", fullgraph=whole)
    with pytest.raises((ApplyError, WorkloadError)) as refused:
        call(torch.randn(1, 2, 4))
    assert "allow_rnn = True" in refused.value.hint
    # no hook of ours is compiled in place of the function that is not
    assert torch._dynamo.utils.counters["frames"]["ok"] == 0


@pytest.mark.usefixtures("no_kernels")
def test_recurrent_layers_are_planned_or_refused_where_dynamo_may_compile_them() -> (
    None
):
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(1, 2, 4)
    planned = ckplan.backend("100%")
    call = torch.compile(model, backend=planned, fullgraph=True)
    with torch._dynamo.config.patch(allow_rnn=True):
        # oneDNN's kernel takes a gradient of its weights alone; zeros would crash it
        with pytest.raises(ApplyError, match="of oneDNN"):
            call(x)
        call(x.requires_grad_()).backward()
    assert len(planned.plans) == 1
    assert all(one.grad is not None for one in model.parameters())


BOTH = """
import torch
from torch import nn

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.between = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32))
        self.second = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x):
        x = self.looked_at(self.first(x))
        return self.second(x).square().mean()

    @torch._dynamo.disable
    def looked_at(self, x):
        return self.between(x) * (2.0 if x.detach().sum().item() < 1e9 else 3.0)

def build():
    return Both(), torch.randn(512, 32)
"""


def test_one_plan_file_is_for_compiled_and_eager_code(run: Run, folder: Path) -> None:
    (folder / "both.py").write_text(BOTH)
    (folder / "eager.yaml").write_text("ckplan: 1\nregions: [{calls: between}]\n")
    words = ("verify", "both.py", "--compile", "--json")
    budget = ("--budget", "4MiB", "--save", "both.yaml")
    ended = run(*words[:2], "eager.yaml", *words[2:], *budget)
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["gradients_equal"] and found["graphs"] == 2
    assert found["fits"]  # what eager code allocates and frees is not replayed
    assert "for: eager" in (folder / "both.yaml").read_text()
    plan = plan_file.load(folder / "both.yaml")
    assert plan_file.loads(plan_file.dumps(plan), "again") == plan
    assert "program, eager code" in run("show", "both.yaml").out
    again = json.loads(run(*words[:2], "both.yaml", *words[2:]).out)
    assert again["gradients_equal"]
    assert again["replayed_peak_bytes"] == found["replayed_peak_bytes"]
    assert again["uncompiled_bytes"] == found["uncompiled_bytes"]
    torch._dynamo.reset()  # each command is a process of its own
    plain = json.loads(run(*words, *budget[:2]).out)
    # the region keeps its input alone, not 512 x 256 numbers
    kept, all_kept = (sum(one["uncompiled_bytes"].values()) for one in (found, plain))
    assert all_kept - kept == 512 * 256 * 4
    both = run(*words[:2], "both.yaml", *words[2:], *budget[:2])
    assert "a plan is for code that runs uncompiled" in " ".join(both.err.split())
    torch._dynamo.reset()
    (folder / "eager.yaml").write_text("ckplan: 1\nregions: [{calls: second}]\n")
    amiss = run(*words[:2], "eager.yaml", *words[2:], *budget[:2])
    assert "cannot plan second for eager code: it compiles" in amiss.err
    alone = run(*words[:2], "eager.yaml", *words[2:])
    assert "it is for uncompiled code" in alone.err


@pytest.mark.usefixtures("no_kernels")
def test_regions_for_eager_code_are_applied_and_never_lost(folder: Path) -> None:
    (folder / "both.py").write_text(BOTH)
    workload = WorkloadSpec("both.py").build()
    model, x = workload.model, workload.batch
    ckplan.apply(model, Plan(regions=(PlannedRegion("between"),)))
    parts = find_parts(model, model, (x,), {}, {"dynamic": False})
    plan = parts.plan(parts.share(parts.unplanned_peak_bytes), None)
    assert plan.regions[-1] == PlannedRegion("between", code="eager")
    ckplan.remove(model)
    with pytest.raises(PlanError, match="regions for eager code"):
        ckplan.backend(plan)
    with pytest.raises(PlanError, match="between is for eager code"):
        ckplan.compile(model, plan, fullgraph=True)
    call = ckplan.compile(model, plan)
    with pytest.warns(UserWarning, match="uncompiled, with regions for between, and"):
        loss = call(x)
    loss.backward()
    assert "dropped 524288 B" in str(ckplan.status(model))
    # where the compiler would have compiled it, graphs are others: said, not lost
    other = replace(plan.regions[-1], calls="second")
    torch._dynamo.reset()
    with pytest.raises(PlanError, match="this is"):
        ckplan.compile(model, replace(plan, regions=(other,)))(x)


def test_a_region_for_compiled_code_needs_a_plan_for_it() -> None:
    text = "ckplan: 1\nregions: [{calls: a, for: compiled}]\n"
    with pytest.raises(PlanError, match=r"line 2: cannot plan 'a' for compiled"):
        plan_file.loads(text, "p.yaml")
    with pytest.raises(PlanError, match="cannot plan a region for 'eagre'"):
        plan_file.loads(text.replace("compiled", "eagre"), "p.yaml")
