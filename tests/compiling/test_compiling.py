"""Plans inside torch.compile: bits, bytes, budgets, and what is refused."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from compiled import (
    Convolutions,
    Deep,
    Steps,
    Trained,
    count_lowered,
    deep,
    planner_of,
    run_steps,
    tiny_gpt2,
    train,
)
from torch import fx, nn
from torch._inductor.exc import CppCompileError
from two_ranks import run_two

import ckplan
from ckplan.compiling import (
    lowering,
    nodes,
    replays,
    search,
    workspaces,
)
from ckplan.compiling.costs import CpuCosts
from ckplan.compiling.estimating import Estimates
from ckplan.compiling.graph import as_graph
from ckplan.compiling.lowering import Code, Lowered, in_order
from ckplan.compiling.outlines import outlined
from ckplan.compiling.outside import Outside
from ckplan.compiling.partition import Saved
from ckplan.compiling.proposing import Proposer, budgets_to_try
from ckplan.compiling.replay import Replayed, replay, replay_known
from ckplan.compiling.replays import Replays
from ckplan.compiling.search import Chosen, CompiledPlanner
from ckplan.compiling.step import compiled_loss
from ckplan.compiling.torch_names import PRIMALS, TANGENTS
from ckplan.errors import (
    ApplyError,
    CkplanError,
    InfeasibleError,
    PlanError,
    WorkloadError,
)
from ckplan.plan.file import loads, save
from ckplan.plan.names import OpName
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.tiles import RowTiles
from ckplan.training.allocator import log_allocations
from ckplan.training.workload import Workload


class Watched(CompiledPlanner):
    """A backend's planner, and the code that is compiled in the end."""

    compiled: Lowered | None = None

    def check(self, chosen: Chosen, lowered: Lowered | None) -> bool:
        self.compiled = lowered
        return super().check(chosen, lowered)


class Ran(NamedTuple):
    """A compiled model: one step measured, five of training, and two backwards."""

    steps: Steps
    trained: Trained
    optimizer: torch.optim.Optimizer
    accumulated_bytes: int  # of a step with two backwards, above parameters and state
    graphs: int  # compiled in all
    backend: ckplan.Backend | str


def ran(backend: ckplan.Backend | str) -> Ran:
    torch._dynamo.reset()
    model, x = deep()
    call = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    steps = run_steps(call, model, x)
    trained = train(call, model, 5, every=4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    accumulated_bytes = accumulate(call, x, optimizer)
    graphs = counters["unique_graphs"] - before
    return Ran(steps, trained, optimizer, accumulated_bytes, graphs, backend)


def accumulate(
    call: Callable[..., Any], x: torch.Tensor, optimizer: torch.optim.Optimizer
) -> int:
    def step() -> None:
        for _ in range(2):
            call(x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    optimizer.zero_grad(set_to_none=True)
    step()
    with log_allocations() as log:
        step()
    return log.peak_bytes


@pytest.fixture(scope="module")
def unplanned() -> Ran:
    return ran("inductor")


@pytest.fixture(scope="module")
def watched() -> tuple[Ran, Chosen, Watched]:
    made: list[Watched] = []

    def watch(*args: Any, **how: Any) -> Watched:
        made.append(Watched(*args, **how))
        return made[-1]

    backend = ckplan.backend("70%")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "CompiledPlanner", watch)
        found = ran(backend)
    (chosen,) = backend.chosen  # never compiled again
    return found, chosen, made[0]


@pytest.fixture(scope="module")
def planned(watched: tuple[Ran, Chosen, Watched]) -> tuple[Ran, Chosen]:
    return watched[:2]


@pytest.fixture(scope="module")
def planner(watched: tuple[Ran, Chosen, Watched]) -> Watched:
    return watched[2]


def test_the_graph_of_a_compiled_step_has_its_calls_and_saved_values(
    planner: CompiledPlanner,
) -> None:
    graph = planner.step.graph
    found = {call.fqn for call in graph.calls}
    assert {"", "layers.0", "layers.1.up", "layers.1.down"} <= found
    layer = next(i for i, c in enumerate(graph.calls) if c.fqn == "layers.1")
    saved = {graph.saved[i].storage for i in graph.saved_in(layer)}
    names = {planner.step.name_of[s] for s in saved if s in planner.step.name_of}
    inputs = planner.joint.backward.graph.find_nodes(op="placeholder")
    given = (PRIMALS, TANGENTS)
    assert names <= {n.name for n in inputs if not n.name.startswith(given)}
    assert len(saved) >= 2  # the mask, what `down` multiplies
    backward = [op for op in graph.ops[graph.num_forward :] if op.call == layer]
    assert not any(call.fqn.startswith("L[") for call in graph.calls)
    assert backward or graph.children[layer]
    parameters = sum(p.numel() * 4 for p in deep()[0].parameters())
    assert graph.bytes_by_kind["parameter"] == parameters
    assert graph.bytes_by_kind["input"] == 1024 * 32 * 4


def test_parameters_are_saved_themselves_not_views_of_them(
    planner: CompiledPlanner,
) -> None:
    """As torch does, which knows parameters: else other code would be replayed."""
    forward = {node.name: node for node in planner.joint.forward.graph.nodes}
    inputs = planner.joint.backward.graph.find_nodes(op="placeholder")
    saved = [forward[node.name] for node in inputs if node.name in forward]
    assert any(node.op == "placeholder" for node in saved)
    views = [node for node in saved if nodes.is_view(node)]
    assert not any(nodes.base_of(node).op == "placeholder" for node in views)


def test_simulation_and_replay_agree_about_the_unplanned_step(
    planner: CompiledPlanner,
) -> None:
    (none,) = (one for one in planner.candidates if not one.regions)
    simulated = none.simulated_peak_bytes
    assert simulated == pytest.approx(planner.unplanned.peak_bytes, rel=0.15)


def test_more_budget_never_costs_more_and_no_plan_is_over(
    planner: CompiledPlanner,
) -> None:
    full = planner.unplanned.peak_bytes
    with pytest.raises(InfeasibleError) as smallest:
        planner.solve(1)
    floor = int(smallest.value.needed.partition("(")[2].partition(" B")[0])
    assert floor < 0.75 * full
    before = float("inf")
    for place in range(21):
        budget_bytes = floor + (full - floor) * place // 10
        chosen = planner.solve(budget_bytes)
        predicted = chosen.plan.predicted
        assert predicted is not None
        assert predicted.peak_bytes == chosen.replayed.peak_bytes <= budget_bytes
        assert predicted.overhead <= before
        before = predicted.overhead
    assert before == 0
    with pytest.raises(InfeasibleError):
        planner.solve(floor - 1)


def test_code_that_is_only_replayed_has_the_bytes_of_code_that_runs(
    planner: Watched, planned: tuple[Ran, Chosen]
) -> None:
    _, chosen = planned  # replayed from code that is not vectorized
    assert planner.compiled is not None
    assert "Vectorized" in planner.compiled.forward.source
    found = replay(planner.compiled, planner.joint.num_outputs)
    assert found == chosen.replayed


def having(planner: CompiledPlanner, real: Mapping[Saved, Replayed]) -> Replays:
    """Replays of a planner's graph of which some are known, as of code that runs."""
    return replace(planner.replays, found=dict(real), real=dict(real))


def test_what_saves_more_than_a_budget_leaves_is_not_replayed(
    planner: CompiledPlanner,
) -> None:
    found = {c.saved: planner.replayed(c.saved) for c in planner.candidates}
    for one in planner.candidates:
        assert 0 < one.saved_bytes <= found[one.saved].saved_bytes
    budget_bytes = min(one.peak_bytes for one in found.values())
    left = budget_bytes - planner.unplanned.held_bytes
    other = copy.copy(planner)
    other.replays = having(planner, planner.replays.real)
    solved = other.solve(budget_bytes)
    fitting = [
        c for c in planner.candidates if found[c.saved].peak_bytes <= budget_bytes
    ]
    assert solved.saved == fitting[0].saved
    saving_more = {c.saved for c in planner.candidates if c.saved_bytes > left}
    assert saving_more - {None}
    assert not saving_more & {*other.replays.found} - {None}


def test_plans_that_several_processes_replay_are_those_of_one(
    planner: CompiledPlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = copy.copy(planner)
    other.replays = having(planner, planner.replays.real)
    monkeypatch.setattr(replays, "most_at_once", lambda: 3)
    lowered = count_lowered(monkeypatch)
    found = {c.saved: one for c, one in other.each_replayed(planner.candidates)}
    assert 3 * len(lowered) <= len(found) + 3  # here, one of three
    assert found == {c.saved: planner.replayed(c.saved) for c in planner.candidates}


def test_a_copy_measures_no_kernel(planner: CompiledPlanner) -> None:
    _, lowered = planner.traced.lower(planner.candidates[-1].saved, quick=True)
    assert lowered is not None
    count = planner.joint.num_outputs
    known = replay_known(lowered, count)
    assert known == replay(lowered, count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspaces, "_KNOWN", {})
        assert replay_known(lowered, count) is None


def test_a_plan_is_made_again_if_the_code_that_runs_takes_other_bytes(
    planner: CompiledPlanner,
) -> None:
    most = planner.unplanned.peak_bytes
    peaks = (
        (c.saved, planner.replayed(c.saved).peak_bytes) for c in planner.candidates
    )
    saved = next(saved for saved, peak in peaks if peak < most)
    right = planner.replayed(saved)
    wrong = replace(right, backward_peak_bytes=right.backward_peak_bytes - 8)
    other = copy.copy(planner)  # has replayed nothing but this, and that wrongly
    other.replays = having(planner, {None: planner.unplanned, saved: wrong})
    del other.replays.real[saved]
    chosen = other.solve(right.peak_bytes)
    assert chosen.replayed == wrong
    assert not other.check(chosen, None)
    again = other.solve(right.peak_bytes)
    assert (again.saved, again.replayed) == (saved, right)
    assert other.check(again, None)


def test_budgets_are_closer_near_the_floor() -> None:
    """There the solver nests regions, which lose by flattening; others may not."""
    tried = sorted({*budgets_to_try(1000, 2000)})
    assert (tried[0], tried[-1]) == (1000, 2000)
    gaps = [after - before for before, after in pairwise(tried)]
    assert max(gaps[:7]) <= 10
    assert max(gaps[:24]) <= 12
    assert max(gaps) <= 67


def test_candidates_are_ordered_and_none_is_far_above_a_cheaper_one(
    planner: CompiledPlanner,
) -> None:
    found = planner.candidates
    costs = [(c.overhead, bool(c.regions), -c.size_bytes) for c in found]
    assert costs == sorted(costs)  # of those that cost the same, what takes more
    assert len({c.saved for c in found}) == len(found)
    compared = {c.saved for c in planner.proposer.ways.values()}
    assert compared <= {c.saved for c in found}
    proposed = [c for c in found if c.saved not in compared]
    own = {c.saved for c in planner.proposer._proposed()}
    for place, one in enumerate(proposed[1:], 1):
        cheaper = [(c.saved in own, c.simulated_peak_bytes) for c in proposed[:place]]
        of_own = min(peak for is_own, peak in cheaper if is_own)  # the solver's
        of_fewer = min((peak for is_own, peak in cheaper if not is_own), default=2**60)
        assert one.simulated_peak_bytes <= 1.1 * max(of_own, of_fewer)


def test_torch_s_own_division_comes_before_others_that_cost_nothing(
    planner: CompiledPlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Estimates, "overhead_of", lambda *_: 0.0)
    first, *others = Proposer(planner.joint, planner.step).candidates
    assert first.saved is None
    assert others


def test_contractions_that_run_again_find_what_they_read_in_the_caches(
    planner: CompiledPlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = 1.0, 0.25  # seconds: all else is microseconds

    def seconds(_: CpuCosts, node: fx.Node) -> tuple[float, float]:
        return (first, again) if nodes.is_alone(node) else (0.0, 0.0)

    monkeypatch.setattr(CpuCosts, "_of_contraction", seconds)
    everything = outlined(planner.joint, ())
    forward = {node.name for node in planner.joint.forward.graph.nodes}
    ran_before = [
        any(
            one.op == "call_function"
            for one in map(nodes.base_of, node.all_input_nodes)
        )
        for node in everything.backward.graph.nodes
        if nodes.is_alone(node) and node.name in forward
    ]
    near, far = sum(ran_before), len(ran_before) - sum(ran_before)
    assert near > 0
    own, found = map(planner.proposer.estimates.seconds_in, (planner.joint, everything))
    assert found - own == pytest.approx(again * near + first * far, abs=0.05)


def test_the_overhead_is_that_of_the_division_that_is_compiled(
    planner: CompiledPlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = planner.solve(int(0.7 * planner.unplanned.peak_bytes))
    joint, _ = planner.traced.lower(chosen.saved, quick=True)
    assert joint is not None
    assert chosen.candidate.overhead == pytest.approx(
        planner.proposer.estimates.overhead_in(joint)
    )
    # Where contractions take as long again, it is that of a ``Graph`` of the division.
    monkeypatch.setattr(CpuCosts, "again", lambda own, one: own._of_contraction(one)[0])
    proposer = Proposer(planner.joint, planner.step)
    own = planner.step.graph.step_seconds
    step = as_graph(joint, "m", planner.unplanned.kernel_bytes)
    seconds = step.graph.step_seconds  # too small to get memory anew
    rounded_up = proposer.estimates.overhead_of(chosen.saved) - (seconds / own - 1)
    assert -1e-5 < rounded_up < 0.005  # a multiple of half a percent
    predicted = chosen.plan.predicted
    assert predicted is not None
    assert predicted.overhead == round(chosen.candidate.overhead, 4)


def test_a_plan_read_back_saves_the_same_values(planner: CompiledPlanner) -> None:
    budget_bytes = int(0.7 * planner.unplanned.peak_bytes)
    chosen = planner.solve(budget_bytes)
    from ckplan.plan.file import dumps

    again = planner.follow(loads(dumps(chosen.plan), "plan"))
    assert again.saved == chosen.saved
    assert again.replayed == chosen.replayed


def test_gradients_keep_their_bits_and_the_measured_peak_is_the_replayed_one(
    unplanned: Ran, planned: tuple[Ran, Chosen]
) -> None:
    found, chosen = planned
    steps, plan = found.steps, chosen.plan
    assert steps.differs_from(unplanned.steps) == []
    assert steps.peak_bytes == chosen.replayed.step_peak_bytes
    assert unplanned.steps.peak_bytes == chosen.unplanned.step_peak_bytes
    assert plan.regions
    assert steps.peak_bytes < 0.75 * unplanned.steps.peak_bytes
    assert plan.budget_bytes is not None
    assert plan.predicted is not None
    assert chosen.replayed.peak_bytes == plan.predicted.peak_bytes <= plan.budget_bytes


def test_training_has_the_losses_of_unplanned_steps_in_flat_memory(
    unplanned: Ran, planned: tuple[Ran, Chosen]
) -> None:
    (_, trained, _, _, graphs, _), chosen = planned
    assert trained.losses == unplanned.trained.losses
    assert len({*trained.losses}) == 5
    assert graphs == 1
    assert {*trained.peaks} == {chosen.replayed.step_peak_bytes}
    assert {*unplanned.trained.peaks} == {chosen.unplanned.step_peak_bytes}


def test_a_whole_training_step_takes_what_is_promised(
    unplanned: Ran, planned: tuple[Ran, Chosen]
) -> None:
    """Two backwards, then the optimizer, with its state: to the byte."""
    found, chosen = planned
    gradients = sum(p.numel() * 4 for p in deep()[0].parameters())
    assert found.accumulated_bytes == chosen.replayed.step_peak_bytes + gradients
    for one, replayed in ((found, chosen.replayed), (unplanned, chosen.unplanned)):
        outside = Outside(0, one.optimizer, accumulates=True)
        state = [t for some in one.optimizer.state.values() for t in some.values()]
        before = replayed.held_bytes + sum(t.numel() * 4 for t in state)
        promised = outside.peak_bytes(replayed.peak_bytes, replayed.held_bytes)
        assert before + one.accumulated_bytes == promised


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_200_steps_of_training_have_the_losses_of_unplanned_steps(
    planned: tuple[Ran, Chosen],
) -> None:
    found = {}
    for how in ("inductor", ckplan.backend(planned[1].plan)):
        torch._dynamo.reset()
        model, _ = deep()
        call = torch.compile(model, backend=how, fullgraph=True, dynamic=False)
        found[how] = train(call, model, 200, every=20)
    own, with_plan = found.values()
    assert with_plan.losses == own.losses
    assert len({*with_plan.losses}) == 200
    assert {*with_plan.peaks[1:]} == {planned[1].replayed.step_peak_bytes}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_gpt2_with_dropout_keeps_its_bits() -> None:
    model, ids = tiny_gpt2()
    torch._dynamo.reset()
    whole = torch.compile(model, fullgraph=True, dynamic=False)
    unplanned = run_steps(whole, model, ids)
    torch._dynamo.reset()
    backend = ckplan.backend("75%")
    call = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    planned = run_steps(call, model, ids)
    assert planned.differs_from(unplanned) == []
    assert planned.peak_bytes == backend.chosen[0].replayed.step_peak_bytes
    assert planned.peak_bytes < unplanned.peak_bytes


def test_torch_s_own_random_numbers_are_saved_not_drawn_again() -> None:
    planner = planner_of(*deep(1), options={"fallback_random": True})
    draws = {
        str(node.target)
        for node in planner.joint.module.graph.nodes
        if nodes.is_draw(node)
    }
    assert draws
    _, lowered = planner.traced.lower([], quick=True)
    assert lowered is not None
    assert "Vectorized" not in lowered.forward.source
    for draw in draws:
        assert draw in lowered.forward.source
        assert draw not in lowered.backward.source


class Odd(nn.Module):
    """A constant, an empty tensor, a sort: values that are no activations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor([1.0, 2.0]).repeat(8)
        found = (self.weight * x).exp() * scale
        best, _ = found.sort(dim=0)
        return (best * found).sum() + (x[:0] * self.weight[:0]).sum()


def test_constants_empty_tensors_and_sorts_are_planned() -> None:
    planner = planner_of(Odd(), torch.randn(8, 16))
    found = planner.replayed(frozenset())
    assert found.peak_bytes > found.held_bytes > 0
    assert planner.solve(planner.unplanned.peak_bytes).plan.regions == ()


def test_a_model_without_gradients_compiles() -> None:
    model, x = nn.Linear(3, 3), torch.randn(4, 3)
    model.requires_grad_(False)
    compiled = ckplan.compile(model, "50%")
    assert torch.allclose(compiled(x), model(x))


DDP = """
from torch import nn
import ckplan
from compiled import deep

def trained(plan):
    torch._dynamo.reset()
    model, _ = deep()
    if plan:
        backend = ckplan.backend(plan)
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    else:
        compiled = torch.compile(model, fullgraph=True, dynamic=False)
    whole = nn.parallel.DistributedDataParallel(compiled)
    optimizer = torch.optim.AdamW(whole.parameters(), 1e-3)
    torch.manual_seed(1 + rank)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        loss = whole(torch.randn(1024, 32))
        loss.backward()
        optimizer.step()
    if plan:
        assert [bool(one.regions) for one in backend.plans] == [True]
    return [p.detach().clone() for p in model.parameters()], loss.item()

planned, loss = trained(sys.argv[2])
unplanned, expected = trained(None)
print(loss == expected, all(map(torch.equal, planned, unplanned)))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_of_ddp_train_the_same_parameters(
    planned: tuple[Ran, Chosen], tmp_path: Path
) -> None:
    save(planned[1].plan, tmp_path / "plan.yaml", force=False)
    said = run_two(tmp_path, DDP, str(tmp_path / "plan.yaml"))
    assert [one.split() for one in said] == [["True", "True"]] * 2


FSDP = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import ckplan
from torch import nn
from compiled import Block

class Pair(nn.Module):  # Dynamo does not begin in nn.Sequential, which is torch's
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(32), Block(32)

    def forward(self, x):
        return self.second(self.first(x))

mesh = init_device_mesh("cpu", (2,))

def trained(budget):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [Pair() for _ in range(2)]
    model = nn.Sequential(*layers)
    backends = [ckplan.backend(budget) if budget else "inductor" for _ in layers]
    for layer, backend in zip(layers, backends):
        layer.compile(backend=backend, fullgraph=True, dynamic=False)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(1 + rank)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        loss = model(torch.randn(1024, 32)).sum()
        loss.backward()
        optimizer.step()
    if budget:
        for (one,) in (backend.chosen for backend in backends):
            assert one.plan.regions
            assert one.replayed.saved_bytes < one.unplanned.saved_bytes
            assert one.replayed.peak_bytes < one.unplanned.peak_bytes
    return [p.to_local().detach().clone() for p in model.parameters()], loss.item()

planned, loss = trained(sys.argv[2])
unplanned, expected = trained(None)
print(loss == expected, all(map(torch.equal, planned, unplanned)))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_of_fsdp2_train_the_same_shards(tmp_path: Path) -> None:
    """Layer by layer: hooks of FSDP2 between layers break graphs."""
    said = run_two(tmp_path, FSDP, "85%")
    assert [one.split() for one in said] == [["True", "True"]] * 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_trainer_takes_a_compiled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with ``torch_compile=True``: what is compiled already stays as it is."""
    pytest.importorskip("accelerate")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # set by the Trainer
    import transformers
    from tiny_gpt2 import gpt2, ids

    data = [{key: value[0] for key, value in ids(1).items()} for _ in range(8)]
    found = []
    for backend in ("inductor", ckplan.backend("95%")):
        torch._dynamo.reset()
        model = gpt2()
        model.loss_type = "ForCausalLM"  # else a warning breaks the graph
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
        args = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            max_steps=3,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            torch_compile=True,
        )
        transformers.Trainer(compiled, args, train_dataset=data).train()
        found.append([p.detach().clone() for p in model.parameters()])
    assert [bool(one.regions) for one in backend.plans] == [True]
    assert all(map(torch.equal, *found))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_batch_norm_and_convolutions_keep_bits_and_statistics() -> None:
    def build() -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        return Convolutions(), torch.randn(8, 3, 24, 24)

    found = {}
    for budget in (None, "90%"):
        torch._dynamo.reset()
        model, x = build()
        backend = "inductor" if budget is None else ckplan.backend(budget)
        call = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
        buffers = dict(model.named_buffers())
        found[budget] = run_steps(call, model, x), buffers
    (unplanned, expected), (planned, buffers) = found.values()
    assert planned.differs_from(unplanned) == []
    assert all(torch.equal(buffers[name], one) for name, one in expected.items())
    assert planned.peak_bytes == backend.chosen[0].replayed.step_peak_bytes
    assert planned.peak_bytes < unplanned.peak_bytes


def test_a_budget_below_the_floor_names_the_replayed_floor() -> None:
    with pytest.raises(InfeasibleError, match="compiled code") as refused:
        ckplan.compile(nn.Linear(3, 3), 100)(torch.randn(4, 3))
    assert "the smallest replayed peak" in str(refused.value)
    assert str(refused.value).count("\n") == 2


def test_plans_are_not_mixed_up(planner: CompiledPlanner) -> None:
    compiled_plan = planner.solve(planner.unplanned.peak_bytes).plan
    with pytest.raises(PlanError, match="it is for uncompiled code"):
        planner.follow(Plan(model="m"))
    other = Plan(model="m", fingerprint={"compiled": "0" * 16})
    with pytest.raises(PlanError, match=f"this is {planner.joint.digest}"):
        planner.follow(other)
    with pytest.raises(PlanError, match="it is for compiled code"):
        ckplan.apply(Deep(), compiled_plan)


def test_compiled_code_moves_nothing_and_has_no_tiles(planner: CompiledPlanner) -> None:
    plan = planner.solve(planner.unplanned.peak_bytes).plan
    moved = PlannedRegion(".", offload=(OpName("0", "addmm"),))
    with pytest.raises(PlanError, match=r"\. moves 0/addmm") as refused:
        planner.follow(replace(plan, regions=(moved,)))
    assert str(refused.value).count("\n") == 2
    tiled = PlannedRegion("0", by="tiles", tiles=RowTiles(2, 2))
    with pytest.raises(PlanError, match="0 runs in tiles") as refused:
        planner.follow(replace(plan, regions=(tiled,)))
    assert str(refused.value).count("\n") == 2
    with pytest.raises(CkplanError, match="offload in the compiled step of"):
        ckplan.solve(planner.step.graph, "90%", spill_rate="1GB")


def test_a_plan_that_exceeds_its_budget_is_refused(
    planner: CompiledPlanner, planned: tuple[Ran, Chosen]
) -> None:
    _, chosen = planned
    tighter = replace(chosen.plan, budget_bytes=chosen.replayed.peak_bytes - 1)
    with pytest.raises(PlanError, match="exceeds its budget"):
        planner.follow(tighter)


def test_what_cannot_be_planned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckplan.compiling import torch_names

    x = torch.randn(4, 3)
    torch._dynamo.reset()
    with pytest.raises(ApplyError, match="mode 'max-autotune'"):
        ckplan.compile(nn.Linear(3, 3), "80%", mode="max-autotune")(x)
    torch._dynamo.reset()
    with pytest.raises(ApplyError, match="the option max_autotune"):
        ckplan.compile(nn.Linear(3, 3), "80%", options={"max_autotune": True})(x)
    with pytest.raises(ckplan.CkplanError, match="within a NoneType"):
        ckplan.compile(nn.Linear(3, 3), None)  # type: ignore[arg-type]
    with pytest.raises(ckplan.CkplanError, match="with the int 3"):
        ckplan.compile(3, "80%")  # type: ignore[arg-type]
    with pytest.raises(ckplan.CkplanError, match="cannot compile with a backend"):
        ckplan.compile(nn.Linear(3, 3), "80%", backend="inductor")
    torch._dynamo.reset()
    with pytest.raises(ckplan.CkplanError, match="all of it is reserved"):
        ckplan.compile(nn.Linear(3, 3), "80%", reserve="1GiB")(x)
    with pytest.raises(InfeasibleError, match="no plan fits") as small:
        ckplan.compile(nn.Linear(3, 3), "1.0001MiB", reserve="1MiB")(x)
    assert "1.00 MiB more are reserved" in small.value.needed
    monkeypatch.setattr(torch_names, "MISSING", ImportError("no CustomPartitionerFn"))
    with pytest.raises(ApplyError, match="no CustomPartitionerFn"):
        ckplan.backend("80%")
    monkeypatch.setattr(torch_names, "MISSING", OSError("no such file: '/nope'"))
    with pytest.raises(ApplyError, match="cache fails: no such file: '/nope'"):
        ckplan.backend("80%")


@pytest.mark.parametrize("module", ["custom_graph_pass", "virtualized", "scheduler"])
def test_a_torch_without_what_plans_stand_on_is_refused(module: str) -> None:
    code = f"""import sys
import torch
sys.modules["torch._inductor.{module}"] = None
import ckplan
try:
    ckplan.compile(torch.nn.Linear(3, 3), "80%")
except ckplan.CkplanError as error:
    print(error.what)
"""
    words = [sys.executable, "-c", code]
    found = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert "cannot plan compiled code with torch" in found.stdout, found.stderr
    assert module in found.stdout


class Broken(nn.Module):
    """Its graph breaks in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x).tanh()
        torch._dynamo.graph_break()
        return self.down(x).square().sum()


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as ever, but run the graph uncompiled: seconds of g++ fewer."""

    def uncompiled(graph: torch.fx.GraphModule, *_: object) -> Callable[..., object]:
        return graph.forward

    monkeypatch.setattr(lowering, "compile_with", uncompiled)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's, after a break
def test_several_graphs_of_one_step_are_refused_by_name() -> None:
    model, x = Broken(), torch.randn(16, 8)
    with pytest.raises(ApplyError, match="several graphs of one step") as refused:
        torch.compile(model, backend=ckplan.backend("100%"), dynamic=False)(x)
    assert "fullgraph=False" in str(refused.value)
    assert "return self.down(x)" in str(refused.value)
    assert str(refused.value).count("\n") == 2
    torch._dynamo.reset()
    with pytest.raises(WorkloadError, match="the model as one graph") as broken:
        ckplan.compile(model, "100%")(x)
    assert str(broken.value).count("\n") == 2


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("between", [False, True])
def test_after_a_reset_of_dynamo_a_step_is_compiled_anew(between: bool) -> None:
    call = ckplan.compile(nn.Sequential(nn.Linear(8, 1), nn.Tanh()), "100%")
    x = torch.randn(16, 8)
    first = call(x).sum()
    first.backward()
    torch._dynamo.reset()
    if between:  # the step is not the first that is compiled then
        torch.compile(torch.sin, backend="eager")(x)
    again = call(x).sum()
    again.backward()
    assert torch.equal(first, again)


@pytest.mark.usefixtures("no_kernels")
def test_a_step_that_fits_is_torch_s_own() -> None:
    model, x = nn.Sequential(nn.Linear(8, 1), nn.Tanh()), torch.randn(16, 8)
    backend = ckplan.backend("100%")
    call = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    call(x).sum().backward()
    (chosen,) = backend.chosen
    assert chosen.plan.regions == ()
    assert chosen.saved is None
    assert chosen.replayed == chosen.unplanned


@pytest.mark.usefixtures("no_kernels")
def test_more_shapes_than_torch_compiles_for_are_refused() -> None:
    call = ckplan.compile(nn.Sequential(nn.Linear(16, 4), nn.Tanh()), "100%")
    with torch._dynamo.config.patch(recompile_limit=2):
        call(torch.ones(2, 16))
        call(torch.ones(3, 16))
        with pytest.raises(ApplyError, match="at most 2 times") as refused:
            call(torch.ones(4, 16))
    assert "dynamic=True" in refused.value.hint


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor, by: int = 2) -> torch.Tensor:
        return super().forward(x).tanh() * by


@pytest.mark.usefixtures("no_kernels")
def test_other_models_may_use_up_what_torch_compiles_a_function_for() -> None:
    call = ckplan.compile(Scaled(8, 4), "100%")
    other = torch.compile(Scaled(8, 4), backend="eager", fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        call(torch.ones(2, 8))
        other(torch.ones(2, 8))
        with pytest.raises(ApplyError, match="at most 2 times"):
            call(torch.ones(2, 8), by=3)


@pytest.mark.usefixtures("no_kernels")
def test_another_shape_is_planned_again_by_the_same_backend() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    planned = ckplan.backend("100%")
    call = torch.compile(model, backend=planned, fullgraph=True, dynamic=False)
    for rows in (16, 32, 16):
        call(torch.randn(rows, 8)).sum().backward()
    assert len(planned.plans) == 2


@pytest.mark.usefixtures("no_kernels")
def test_percent_are_of_the_largest_batch_so_that_the_last_one_of_few_rows_fits() -> (
    None
):
    planned, (model, x) = ckplan.backend("75%"), deep()
    call = torch.compile(model, backend=planned, fullgraph=True, dynamic=False)
    call(x).backward()
    (largest,) = planned.chosen
    call(x[:64]).backward()
    last = planned.chosen[-1]
    assert last.plan.regions == ()
    assert last.replayed.peak_bytes < largest.replayed.peak_bytes
    assert last.plan.budget_bytes == largest.plan.budget_bytes
    with pytest.raises(InfeasibleError):  # if it were the first one
        ckplan.compile(deep()[0], "75%")(x[:64])


@pytest.mark.usefixtures("no_kernels")
def test_a_graph_that_is_compiled_anew_is_planned_once() -> None:
    class Settles(Deep):
        kind: str | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.kind is None:
                self.kind = "mean"  # as losses of transformers do
            return super().forward(x)

    stages: list[str] = []
    planned = ckplan.backend("90%", progress=lambda stage, *_: stages.append(stage))
    model, x = Settles(), deep()[1]
    compiled = torch.compile(model, backend=planned, fullgraph=True)
    first, second = compiled(x), compiled(x)
    assert first.shape == second.shape
    one, other = planned.chosen
    assert planned.plans == [one.plan] == [other.plan]
    assert stages.count("solving") == 1


@pytest.mark.parametrize(
    ("copied", "fullgraph"),
    [(copy.deepcopy, False), (lambda one: pickle.loads(pickle.dumps(one)), True)],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_of_a_compiled_model_has_the_same_plan(
    copied: Callable[[Any], Any], fullgraph: bool
) -> None:
    model, x = deep()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = ckplan.compile(model, "80%", optimizer=optimizer, fullgraph=fullgraph)
    original = run_steps(compiled, model, x)
    other = copied(compiled)
    steps = run_steps(other, other._orig_mod, x)
    assert not steps.differs_from(original)
    unplanned = run_steps(torch.compile(model), model, x)
    assert steps.peak_bytes == original.peak_bytes < unplanned.peak_bytes


@pytest.mark.usefixtures("no_kernels")
def test_the_compiled_model_keeps_its_parameters_and_its_mode() -> None:
    model, x = nn.Linear(8, 1), torch.randn(16, 8)
    compiled = ckplan.compile(model, "100%", mode="reduce-overhead")
    assert isinstance(compiled, nn.Module)
    assert [*compiled.parameters()] == [*model.parameters()]
    torch.testing.assert_close(compiled(x), model(x))
    function = ckplan.compile(lambda x: model(x).sum(), "100%")
    torch.testing.assert_close(function(x), model(x).sum())


def test_code_that_cannot_be_replayed_is_said() -> None:
    code = Code("def call(args):\n    return not_there(args)", {}, [])
    with pytest.raises(ApplyError, match="NameError: name 'not_there'"):
        replay(Lowered(code, code), 1)


def test_the_replay_counts_births_reuse_and_deaths() -> None:
    x = torch.empty(256)  # 1024 bytes, as every buffer below
    forward = """
def call(args):
    x, = args
    args.clear()
    a = empty_strided_cpu((256,), (1,), torch.float32)
    b = a; del a  # reuse
    c = empty_strided_cpu((256,), (1,), torch.float32)
    extern_kernels.mm(reinterpret_tensor(x, (16, 16), (16, 1), 0),
        reinterpret_tensor(b, (16, 16), (16, 1), 0),
        out=reinterpret_tensor(c, (16, 16), (16, 1), 0))
    del b
    return (c, reinterpret_tensor(c, (2,), (1,), 0), x)
"""
    backward = """
def call(args):
    saved, x, tangent = args
    args.clear()
    del saved
    g = empty_strided_cpu((512,), (1,), torch.float32)
    del tangent
    return (g,)
"""
    imports = "import torch\n"
    given = [torch.empty(2), x, torch.empty(256)]
    lowered = Lowered(
        Code(imports + forward, {}, [x]), Code(imports + backward, {}, given)
    )
    found = replay(lowered, 1)
    assert found.held_bytes == 1024
    assert found.forward_peak_bytes == 2048
    assert found.saved_bytes == 1024  # the view shares the output's memory
    assert found.backward_peak_bytes == 1024 + 1024 + 2048
    assert found.gradient_bytes == 1024 + 2048
    assert found.peak_at == "compiled backward"


@pytest.mark.parametrize(
    ("returned", "copied_bytes"),
    [
        ("g, h", 0),  # laid out as the parameters: autograd takes them
        ("reinterpret_tensor(g, (16, 16), (1, 16), 0), h", 1024),
        ("g, reinterpret_tensor(h, (16, 16), (1, 16), 0)", 1024),
        ("h, h", 0),  # copied for one, taken for the other, when g is freed
    ],
)
def test_gradients_that_autograd_copies_count(returned: str, copied_bytes: int) -> None:
    one, other = torch.empty(16, 16), torch.empty(16, 16)
    forward = """
import torch
def call(args):
    args.clear()
    return (empty_strided_cpu((), (), torch.float32),)
"""
    backward = f"""
import torch
def call(args):
    args.clear()
    g = empty_strided_cpu((16, 16), (16, 1), torch.float32)
    h = empty_strided_cpu((16, 16), (16, 1), torch.float32)
    return ({returned},)
"""
    codes = Code(forward, {}, [one, other]), Code(backward, {}, [torch.empty(())])
    found = replay(Lowered(*codes), 1)
    gradients_and_loss = 2 * 1024 + 2 * 4  # the loss has a gradient, too
    assert found.gradient_bytes == gradients_and_loss
    assert found.backward_peak_bytes == gradients_and_loss + copied_bytes


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("x.so: invalid ELF header"), "a file of Inductor's cache fails"),
        (
            CppCompileError(["g++"], "In file\nk.cpp:1:2: error: no 'at::vec'\n"),
            "cache fails: .*k.cpp:1:2: error: no 'at::vec'",
        ),
        (AssertionError("no such layout"), "Inductor fails: AssertionError"),
    ],
)
def test_what_inductor_cannot_compile_or_load_is_said(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(lowering, "compile_with", fails)
    with pytest.raises(ApplyError, match=said) as refused:
        ckplan.compile(nn.Linear(3, 1), "100%")(torch.randn(4, 3))
    assert str(refused.value).count("\n") == 2


def test_no_compiler_is_said(tmp_path: Path) -> None:
    from torch._inductor import config

    torch._dynamo.reset()
    without = config.patch({"cpp.cxx": (str(tmp_path / "no-such-compiler"),)})
    with without, pytest.raises(ApplyError, match="no C\\+\\+ compiler"):
        ckplan.compile(nn.Linear(3, 3), "80%")(torch.randn(4, 3))
    workload = Workload(nn.Linear(3, 1), torch.randn(4, 3))
    with without, pytest.raises(ApplyError, match="no C\\+\\+ compiler"):
        compiled_loss(workload, in_order)()  # as verify does at first
