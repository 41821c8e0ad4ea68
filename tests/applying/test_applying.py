"""Planned models do bit for bit what unplanned ones do, in the bytes predicted."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from small_models import (
    MODELS,
    RUNS,
    Attention,
    Listed,
    Residual,
    Unrolled,
    build,
    plans,
    run_plans,
)
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from trained import applying_to, measured_peak, train

import ckplan
from ckplan import applying
from ckplan.applying.hooks import session
from ckplan.applying.hooks.hooks import PathHooks
from ckplan.applying.rebuilding import rebuilder as recompute
from ckplan.errors import ApplyError, PlanError, WorkloadError
from ckplan.plan.names import OpName
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.region import Region
from ckplan.plan.resolve import describe, resolve
from ckplan.simulating.simulate import simulate
from ckplan.solving.planner import Planner
from ckplan.solving.solve import to_plan
from ckplan.tracing.profile import profile_workload
from ckplan.tracing.watched_step import NOTE_MADE
from ckplan.training.loading import WorkloadSpec
from ckplan.training.workload import Workload


@pytest.mark.parametrize("name", MODELS)
def test_training_is_bitwise_the_same_and_peaks_are_as_predicted(name: str) -> None:
    workload = build(name)
    graph = ckplan.profile(workload.model, workload.batch, loss=workload.loss)
    expected = train(build(name))
    unplanned = simulate(graph).peak_bytes
    assert unplanned == pytest.approx(measured_peak(build(name)), rel=0.003)
    for plan in plans(name):
        workload = build(name)
        applying.apply(workload.model, plan)
        actual = train(workload)
        assert all(map(torch.equal, expected, actual)), plan.regions
        assert all(r.runs >= 3 for r in applying.status(workload.model).regions)
        workload = build(name)
        applying.apply(workload.model, plan)
        predicted = simulate(graph, resolve(plan, graph)).peak_bytes
        near = 0.003
        measured = measured_peak(workload)
        assert predicted == pytest.approx(measured, rel=near), plan.regions


def test_a_solved_plan_fits_its_budget_when_run() -> None:
    workload = build("residual")
    graph = ckplan.profile(workload.model, workload.batch, loss=workload.loss)
    peak = simulate(graph).peak_bytes
    plan = ckplan.solve(graph, budget=f"{int(0.8 * peak)}")
    assert plan.predicted is not None and plan.budget_bytes is not None
    assert plan.regions
    assert plan.predicted.peak_bytes <= plan.budget_bytes
    expected = train(build("residual"))
    applying.apply(workload.model, plan)
    assert measured_peak(workload) <= plan.budget_bytes + 8192  # random states
    workload = build("residual")
    assert all(map(torch.equal, expected, train(applying_to(workload, plan))))


def test_calls_of_one_module_can_have_choices_of_their_own() -> None:
    expected = train(build("unrolled"))
    regions = (
        PlannedRegion("cell#[0..1]"),
        PlannedRegion("cell#3", save=(OpName.parse("up/addmm"),)),
    )
    workload = applying_to(build("unrolled"), Plan(regions=regions))
    assert all(map(torch.equal, expected, train(workload)))
    assert [r.runs for r in applying.status(workload.model).regions] == [3 * 2, 3]


def test_names_types_and_state_stay_and_remove_takes_all_off() -> None:
    model = build("residual").model
    before = (repr(model), list(model.state_dict()), [*map(type, model.modules())])
    for by in ("program", "rerun"):
        applying.apply(model, Plan(regions=(PlannedRegion("[0..2]", by),)))
        applying.apply(model, Plan(regions=(PlannedRegion("[0..2]", by),)))
        after = (repr(model), list(model.state_dict()), [*map(type, model.modules())])
        assert before == after
        applying.remove(model)
        for module in model.modules():
            assert not module._forward_hooks and not module._forward_pre_hooks
            assert "forward" not in module.__dict__
    with pytest.raises(ApplyError, match="has no plan"):
        applying.status(model)


@pytest.mark.parametrize("by", ["program", "rerun"])
def test_a_plan_on_a_module_inside_is_told_and_taken_off(by: str) -> None:
    inner = build("residual").model
    outer = nn.Sequential(nn.Sequential(inner), nn.Linear(64, 64))
    plan = Plan(regions=(PlannedRegion("[0..2]", by),))
    ckplan.apply(inner, plan)
    ckplan.apply(outer, Plan(regions=(PlannedRegion("1", by),)))
    assert ckplan.status(inner).plan is plan  # both stay
    assert len(ckplan.status(outer).regions) == 1
    with ckplan.planned(outer, Plan()):
        assert ckplan.status(inner).plan is plan
    ckplan.remove(outer)
    ckplan.apply(inner, plan)
    assert ckplan.status(outer).plan is plan
    assert ckplan.remove(outer) is outer
    for module in outer.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert "forward" not in module.__dict__
    with pytest.raises(ApplyError, match="has no plan"):
        ckplan.status(outer)


@pytest.mark.parametrize("by", ["program", "rerun"])
def test_a_copy_of_a_module_inside_does_not_take_the_model_along(by: str) -> None:
    model = build("residual").model
    plain = len(pickle.dumps(model[0]))
    applying.apply(model, Plan(regions=(PlannedRegion("[0..2]", by),)))
    assert len(pickle.dumps(model[0])) < plain + 4096 < len(pickle.dumps(model[:2]))
    copied = copy.deepcopy(model[0])
    x = torch.randn(4, 64)
    for one in (model[0], copied):  # both train on
        one(x).sum().backward()
    assert all(p.grad is not None for p in copied.parameters())


def test_plans_that_wrap_the_same_forwards_are_taken_off_whole() -> None:
    part = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    two = [nn.Sequential(part, nn.Linear(4, 4)) for _ in range(2)]
    calls = PlannedRegion("0#0", "rerun"), PlannedRegion("0#1")
    for _ in range(2):
        ckplan.apply(two[0], Plan(regions=calls))
    ckplan.apply(two[1], Plan(regions=(PlannedRegion("0"),)))
    for model in two:
        ckplan.remove(model)
    assert "forward" not in part.__dict__


@pytest.mark.parametrize("by", ["program", "rerun"])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_copy_of_a_planned_model_trains_on_its_own_weights(
    by: str, copied: Callable[[nn.Module], nn.Module]
) -> None:
    workload = build("residual")
    applying.apply(workload.model, Plan(regions=(PlannedRegion("[0..2]", by),)))
    twin = Workload(copied(workload.model), workload.batch, workload.loss)
    for parameter in workload.model.parameters():
        parameter.data.zero_()
    expected = train(build("residual"))
    assert all(map(torch.equal, expected, train(twin)))
    assert all(r.runs == 3 for r in applying.status(twin.model).regions)
    assert all(r.runs == 0 for r in applying.status(workload.model).regions)


@pytest.mark.parametrize("by", ["program", "rerun"])
def test_what_a_model_takes_can_still_be_looked_up(by: str) -> None:
    model = Attention()
    before = inspect.signature(model.forward)
    applying.apply(model, Plan(regions=(PlannedRegion(".", by),)))
    assert inspect.signature(model.forward) == before


@pytest.mark.parametrize("by", ["program", "rerun"])
def test_a_model_is_exported_without_its_plan(by: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU()).eval(), torch.randn(2, 4)
    ckplan.apply(model, Plan(regions=(PlannedRegion(".", by),)))
    for read in (
        lambda: torch.export.export(model, (x,)),
        lambda: model.forward.__globals__,  # as torch.jit.script does
    ):
        with pytest.raises(AttributeError, match=r"ckplan\.remove\(model\)"):
            read()
    ckplan.remove(model)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))


def test_without_gradients_no_region_runs() -> None:
    workload = applying_to(build("residual"), Plan(regions=(PlannedRegion("[0..2]"),)))
    with torch.no_grad():
        workload.model(workload.batch)
    assert all(r.runs == 0 for r in applying.status(workload.model).regions)


def test_an_exception_in_forward_leaves_the_model_usable() -> None:
    workload = applying_to(build("residual"), Plan(regions=(PlannedRegion("[0..2]"),)))
    with pytest.raises(RuntimeError):
        workload.model(torch.randn(3, 5))
    assert all(map(torch.equal, train(build("residual")), train(workload)))


def test_a_parameter_changed_before_backward_is_an_error_not_a_wrong_gradient() -> None:
    workload = applying_to(build("residual"), Plan(regions=(PlannedRegion("[0..2]"),)))
    loss = workload.model(workload.batch).square().mean()
    with torch.no_grad():
        for parameter in workload.model.parameters():
            parameter.add_(1)
    with pytest.raises((ApplyError, RuntimeError), match=r"changed in place|inplace"):
        loss.backward()


class Restless(nn.Module):
    """Another number, another branch and other shapes at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual()
        self.times = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times += 1
        x = torch.tanh(self.inner(x) * (1.0 / self.times))
        return torch.sin(x) if self.times % 2 else torch.exp(x) * x.sum()


def test_programs_follow_numbers_branches_and_shapes_that_change() -> None:
    torch.manual_seed(0)
    plain = Restless()
    planned = copy.deepcopy(plain)
    applying.apply(planned, Plan(regions=(PlannedRegion("."),)))
    for step in range(6):
        batch = torch.randn(4 + step, 64)
        grads = []
        for model in (plain, planned):
            model.zero_grad()
            torch.manual_seed(step)
            model(batch).sum().backward()
            grads.append([p.grad for p in model.parameters()])
        assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_casts_the_same_once(inside: bool) -> None:
    results = []
    for planned in (False, True):
        workload = build("attention")
        if planned:
            applying.apply(workload.model, Plan(regions=(PlannedRegion("[0..2]"),)))
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = workload.model(workload.batch).float().square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        results.append([p.grad for p in workload.model.parameters()])
    assert all(map(torch.equal, *results))


class Overwriting(nn.Module):
    """Changes its input after it read it, which nothing can bring back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x)
        return torch.sin(y + x.mul_(2))


def test_an_input_overwritten_in_the_region_is_never_silently_wrong() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Overwriting())
    with pytest.raises(ApplyError, match="in place"):
        applying.apply(model, Plan(regions=(PlannedRegion("1"),)))(torch.randn(4, 8))


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ((PlannedRegion("3"),), "the model has no module '3'"),
        ((PlannedRegion("[0..1]"), PlannedRegion("0")), "overlap"),
        ((PlannedRegion("."), PlannedRegion("0.up")), "overlap"),
    ],
)
def test_a_plan_for_another_model_changes_nothing(
    regions: tuple[PlannedRegion, ...], message: str
) -> None:
    model = build("residual").model
    with pytest.raises(PlanError, match=message):
        applying.apply(model, Plan(regions=regions))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_what_torch_compile_made_of_a_model_is_told_from_another_model() -> None:
    model = torch.compile(build("residual").model)
    with pytest.raises(PlanError, match="the model has no module '0'") as refused:
        applying.apply(model, Plan(regions=(PlannedRegion("0"),)))
    assert refused.value.hint == "torch.compile(ckplan.apply(model, plan))"


class Named(nn.Linear):
    """Its batch has names."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x) * scale


@pytest.mark.parametrize("planned", ["x", "0"])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_larger_batch_is_told_by_name_and_by_position(
    planned: str, by_name: bool
) -> None:
    shapes = {"batch": {planned: "float32[4,8]"}}
    model = applying.apply(Named(8, 8), Plan(fingerprint=shapes))
    x = torch.randn(6, 8)
    with pytest.warns(UserWarning, match=rf"{planned} is float32\[6,8\], planned was"):
        model(x=x) if by_name else model(x)


def test_the_first_step_at_a_smaller_batch_is_told_by_name() -> None:
    shapes = {"batch": {"x": "float32[4,8]"}}
    plan = Plan(fingerprint=shapes, workload={"micro_batch": 4})
    model = applying.apply(Named(8, 8), plan)
    with pytest.warns(UserWarning, match="tuned for a micro-batch of 4, and x is"):
        model(torch.randn(2, 8))


def test_other_shapes_than_planned_are_a_warning_that_names_the_field() -> None:
    model = build("residual").model
    plan = Plan(fingerprint={"parameters": "0" * 16}, regions=(PlannedRegion("0"),))
    with pytest.warns(UserWarning, match="parameters: plan 0000") as caught:
        applying.apply(model, plan)
    what, needed, hint = str(caught[0].message).splitlines()
    count = len(list(model.parameters()))
    assert what.endswith(f"of a {type(model).__name__} with {count} parameters")
    assert needed.startswith("  needed: the model that was profiled")
    assert hint.startswith("  try:    profile and solve this one")
    assert caught[0].filename == __file__  # the line that applies
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        applying.remove(model)


def test_a_save_that_names_no_op_is_told() -> None:
    region = PlannedRegion("0", save=(OpName.parse("up/mm"), OpName.parse("up/addmm")))
    workload = applying_to(build("residual"), Plan(regions=(region,)))
    said = r"0 runs no op up/mm \(did you mean 'up/addmm'\?\)"
    with pytest.warns(UserWarning, match=said):
        workload.model(workload.batch)
    assert applying.status(workload.model).regions[0].missing == ("up/mm",)
    workload.model(workload.batch)  # said once


def test_a_save_that_names_no_output_is_told() -> None:
    region = PlannedRegion("0", save=(OpName.parse("up/addmm@3"),))
    workload = applying_to(build("residual"), Plan(regions=(region,)))
    with pytest.warns(UserWarning, match="0 runs no op up/addmm@3"):
        workload.model(workload.batch)


def test_a_region_that_runs_inside_another_is_told() -> None:
    run = PlannedRegion("", run=("blocks.0", "blocks.2"))
    model = Listed()
    applying.apply(model, Plan(regions=(run, PlannedRegion("blocks.1"))))
    said = "blocks.1 runs inside blocks.0 to blocks.2, a region already"
    with pytest.warns(UserWarning, match=said):
        model(torch.ones(8, 64))
    assert [r.runs for r in applying.status(model).regions] == [0, 1]


class Parts(nn.Module):
    """Two parts, each worth a region of its own."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.second = nn.Sequential(Residual(width), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x + self.first(x))


def many_calls() -> Workload:
    torch.manual_seed(0)
    model, batch = Unrolled(Parts), torch.randn(256, 64)
    return Workload(model, batch, lambda out, _: out.square().mean())


def test_every_plan_for_a_module_of_many_calls_can_be_applied() -> None:
    """Some calls of it are regions, and parts of others."""
    workload, expected, mixed = many_calls(), train(many_calls()), 0
    graph = ckplan.profile(workload.model, workload.batch, loss=workload.loss)
    planner = Planner(graph)
    for point in planner.frontier(8):
        plan = to_plan(graph, planner.solve(point.peak_bytes))
        fqns = {one.calls.partition("#")[0] for one in plan.regions}
        mixed += "cell" in fqns and len(fqns) > 1
        assert all(map(torch.equal, expected, train(applying_to(many_calls(), plan))))
        assert plan.budget_bytes is not None
        peak_bytes = measured_peak(applying_to(many_calls(), plan))
        assert peak_bytes <= plan.budget_bytes
    assert mixed


@pytest.mark.parametrize("by", ["program", "rerun"])
def test_parts_of_calls_that_a_run_leaves_out_can_be_regions(by: str) -> None:
    run = PlannedRegion("", run=("cell#0", "cell#1"))
    plan = Plan(regions=(run, PlannedRegion("cell.second#[2..3]", by)))
    workload = applying_to(many_calls(), plan)
    assert all(map(torch.equal, train(many_calls()), train(workload)))
    assert [r.runs for r in applying.status(workload.model).regions] == [6, 3]


@pytest.mark.parametrize("by", ["program", "rerun"])
def test_a_stand_in_may_be_bound_to_its_module(by: str) -> None:
    """Trainers that take their own wrappers off put back what lay below as a method."""
    plan = Plan(regions=(PlannedRegion("0", by),))
    workload = applying_to(build("residual"), plan)
    block = workload.model.get_submodule("0")
    block.forward = MethodType(block.forward, block)  # type: ignore[method-assign]
    assert all(map(torch.equal, train(build("residual")), train(workload)))
    again = copy.deepcopy(workload)
    assert all(map(torch.equal, train(workload), train(again)))


@pytest.mark.parametrize("what", [applying.remove, applying.status])
def test_what_is_no_module_has_no_plan(what: Callable[[Any], object]) -> None:
    with pytest.raises(ApplyError, match="cannot find the plan of a NoneType"):
        what(None)


@pytest.mark.parametrize("by", ["program", "rerun"])
def test_a_region_that_never_ran_is_told_once(by: str) -> None:
    model = Listed()
    model.spare = Residual()
    applying.apply(model, Plan(regions=(PlannedRegion("spare", by),)))
    with torch.no_grad():
        model(torch.ones(8, 64))
    model(torch.ones(8, 64))
    with pytest.warns(UserWarning, match="spare did not run in the first step"):
        model(torch.ones(8, 64))
    model(torch.ones(8, 64))  # said once


@pytest.mark.parametrize("by", ["program", "rerun"])
def test_calls_that_are_never_numbered_anew_are_told_once(by: str) -> None:
    planned = applying_to(
        build("unrolled"), Plan(regions=(PlannedRegion("cell#[1..3]", by),))
    )
    model, batch = planned.model, planned.batch
    model.forward(batch)
    with pytest.warns(UserWarning, match=r"cell#4 is beyond all .* never ran"):
        model.forward(batch)
    assert applying.status(model).regions[0].runs == 3
    model(batch)
    assert applying.status(model).regions[0].runs == 6


@pytest.mark.parametrize("by", ["program", "rerun"])
def test_a_list_of_modules_is_no_region(by: str) -> None:
    model = Listed()
    plan = Plan(regions=(PlannedRegion("blocks", by),))
    with pytest.raises(PlanError, match="ModuleList has no forward") as error:
        applying.apply(model, plan)
    assert error.value.hint == "the modules in it: blocks.0, ..."
    model.blocks.forward = lambda x: x  # type: ignore[method-assign]
    applying.apply(model, plan)


def test_an_error_of_a_plan_file_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("ckplan: 1\nregions:\n  - calls: '0'\n  - calls: nowhere\n")
    model = build("residual").model
    with pytest.raises(PlanError, match=r"plan\.yaml, line 4: .*'nowhere'"):
        applying.apply(model, path)
    path.write_text("ckplan: 1\nregions:\n  - calls: '0'\n  - calls: '0.up'\n")
    with pytest.raises(PlanError, match=r"plan\.yaml, line 4: regions overlap"):
        applying.apply(model, path)
    with pytest.raises(ApplyError):
        applying.status(model)


# -- runs of calls -------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
def test_runs_of_calls_are_bitwise_the_same_and_peaks_are_as_predicted(
    name: str,
) -> None:
    workload = build(name)
    graph = ckplan.profile(workload.model, workload.batch, loss=workload.loss)
    expected = train(build(name), steps=4)
    for plan in run_plans(name):
        workload = applying_to(build(name), plan)
        assert all(map(torch.equal, expected, train(workload, steps=4))), plan.regions
        for region in applying.status(workload.model).regions:
            assert (region.runs, region.kept, region.missing) == (4, 0, ())
        workload = applying_to(build(name), plan)
        predicted = simulate(graph, resolve(plan, graph)).peak_bytes
        assert predicted == pytest.approx(measured_peak(workload), rel=0.003), plan


def test_a_run_beside_regions_of_the_same_module() -> None:
    plan = Plan(
        regions=(
            PlannedRegion("cell#[0..1]"),
            PlannedRegion("", run=("cell#2", "cell#3")),
        )
    )
    workload = applying_to(build("unrolled"), plan)
    assert all(map(torch.equal, train(build("unrolled")), train(workload)))
    assert [r.runs for r in applying.status(workload.model).regions] == [6, 3]


class WalkedThrough(nn.Module):
    """Goes through a Sequential, as ResNets of transformers do, and calls another."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(6))
        self.walked, self.called = nn.Sequential(), nn.Sequential()
        for number, layer in enumerate(layers):
            (self.walked if number < 3 else self.called).append(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.walked:
            x = layer(x) + x
        return self.called(x)


class Stage(nn.Module):
    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.stage(x))


@pytest.mark.parametrize("around", ["", "stage."])
def test_paths_in_a_run_are_below_what_calls_it(around: str) -> None:
    make = WalkedThrough if not around else lambda: Stage(WalkedThrough())
    model, other = make(), make()
    other.load_state_dict(model.state_dict())
    x = torch.randn(4, 8)
    graph = ckplan.profile(model, x)
    call = {one.fqn: number for number, one in enumerate(graph.calls)}
    regions = []
    for fqn, path in (("walked", "walked.1.0"), ("called", "1.0")):
        first, last = (call[f"{around}{fqn}.{end}"] for end in (0, 2))
        kept = graph.calls[call[f"{around}{fqn}.1.0"]].start
        inner = Region(
            first, last=call[f"{around}{fqn}.1"], save=frozenset([(kept, 0)])
        )
        save = frozenset([(graph.calls[last].start, 0)])
        regions.append(Region(first, last=last, save=save, inner=(inner,)))
        (named,) = describe(graph, [inner])
        assert [op.path for op in named.save] == [path]
    plan = Plan(regions=describe(graph, regions))
    assert resolve(plan, graph) == tuple(regions)
    applying.apply(other, plan)
    for _ in range(3):
        for one in (model, other):
            one.zero_grad()
            one(x).sum().backward()
        grads = zip(model.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(p.grad, q.grad) for p, q in grads)
    assert [one.missing for one in applying.status(other).regions] == [(), ()]


def test_a_run_whose_last_call_never_comes_ends_with_its_parent() -> None:
    plan = Plan(regions=(PlannedRegion("", run=("blocks.0", "blocks.4")),))
    models = [Listed(), Listed()]
    models[1].load_state_dict(models[0].state_dict())
    applying.apply(models[1], plan)
    models[1].fewer = True
    with pytest.warns(UserWarning, match="is no run: its last call never came"):
        models[1](torch.ones(8, 64))
    for fewer in (False, True, False, True):
        grads = []
        for model in models:
            model.fewer = fewer
            model.zero_grad()
            torch.manual_seed(0)
            model(torch.ones(8, 64)).square().mean().backward()
            grads.append([p.grad for p in model.parameters() if p.grad is not None])
        assert all(map(torch.equal, *grads))
    with pytest.raises(RuntimeError):
        models[1](torch.ones(8, 5))
    assert not session.running.regions
    assert not session.running.calls


def test_calls_of_one_module_are_rebuilt_in_two_ways() -> None:
    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))

        def forward(self, x: torch.Tensor) -> Any:
            return self.block(self.block(self.block(x)))

    def make() -> Workload:
        torch.manual_seed(0)
        return Workload(Thrice(), X, lambda out, _: out.square().mean())

    workload, expected = make(), train(make())
    graph = ckplan.profile(workload.model, workload.batch, loss=workload.loss)
    rerun = [PlannedRegion(f"block#{number}", "rerun") for number in range(3)]
    run = PlannedRegion("", run=("block#1", "block#2"))
    first, last = PlannedRegion("block#0"), PlannedRegion("block#[1..2]")
    for regions in ((rerun[1], first), (rerun[0], last), (rerun[0], run)):
        plan = Plan(regions=regions)
        ckplan.apply(workload.model, plan)
        predicted = simulate(graph, resolve(plan, graph)).peak_bytes
        planned = make()
        ckplan.apply(planned.model, plan)
        assert all(map(torch.equal, expected, train(planned)))
        assert [one.runs for one in ckplan.status(planned.model).regions].count(0) == 0
        assert predicted == pytest.approx(measured_peak(planned), rel=0.001)


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ((PlannedRegion("", run=("blocks.0", "blocks.9")),), "blocks.9"),
        ((PlannedRegion("", run=("blocks.1", "blocks.1")),), "one region of"),
        ((PlannedRegion("", run=("blocks.1#2", "blocks.1#0")),), "one region of"),
        ((PlannedRegion("", run=("blocks.0", "blocks.0.up")),), "one region of"),
        (
            (
                PlannedRegion("", run=("blocks.0", "blocks.2")),
                PlannedRegion("blocks.2"),
            ),
            "overlap",
        ),
        (
            (PlannedRegion("", run=("blocks.0", "blocks.2")), PlannedRegion(".")),
            "overlap",
        ),
        (
            (
                PlannedRegion("", run=("blocks.0", "blocks.2")),
                PlannedRegion("", run=("blocks.2", "blocks.3")),
            ),
            "overlap",
        ),
    ],
)
def test_a_run_that_cannot_be_changes_nothing(
    regions: tuple[PlannedRegion, ...], message: str
) -> None:
    model = Listed()
    with pytest.raises(PlanError, match=message):
        applying.apply(model, Plan(regions=regions))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("by", ["program", "rerun"])
def test_what_others_put_on_a_forward_after_a_plan_stays(by: str) -> None:
    workload = build("residual")
    block = workload.model.get_submodule("0")
    ckplan.apply(workload.model, Plan(regions=(PlannedRegion("0", by),)))
    planned, seen = block.forward, list[int]()

    def around(*args: Any) -> Any:
        seen.append(1)
        return planned(*args)

    block.forward = around  # type: ignore[method-assign]
    ckplan.remove(workload.model)
    assert all(map(torch.equal, train(workload), train(build("residual"))))
    assert len(seen) == 3
    assert block.forward is around
    ckplan.apply(workload.model, Plan(regions=(PlannedRegion("0", by),)))
    block.__dict__.pop("forward", None)
    ckplan.remove(workload.model)
    assert "forward" not in vars(block)


def test_status_tells_what_the_last_run_dropped() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Tanh()))
    ckplan.apply(model, Plan(regions=(PlannedRegion("0"),)))
    found = []
    for batch in (100, 2, 100, 2):
        model(torch.ones(batch, 4)).sum().backward()
        (region,) = ckplan.status(model).regions
        found.append((region.recorded, region.dropped_bytes))
    assert found == [(1, 3200), (2, 64), (2, 3200), (2, 64)]


X = torch.randn(128, 64)


class Noisy(nn.Module):
    """Autograd saves the noise before the op that fills it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(functional.rrelu(self.linear(x), training=True))


class NoisyInPlace(Noisy):
    """The op that fills the noise overwrites its input, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.rrelu(self.linear(x), training=True, inplace=True)
        return torch.tanh(hidden)


class Ensemble(nn.Module):
    """Its tensors are those of ``torch.func``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.func.vmap(self.one)(x))

    def one(self, row: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.linear(row)) * row


class Reentrant(nn.Module):
    """Its forward runs again in backward, and saves tensors there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        again: torch.Tensor = checkpoint(self.part, hidden, use_reentrant=True)
        return x + again

    def part(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(functional.dropout(hidden, 0.1)))


class Saved(Reentrant):
    """Torch's own checkpoint keeps a random state each time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        again: torch.Tensor = checkpoint(self.part, hidden, use_reentrant=False)
        return x + again


@pytest.mark.parametrize("kind", [Noisy, NoisyInPlace, Ensemble, Reentrant, Saved])
@pytest.mark.parametrize("planned", [False, True])
def test_odd_ways_to_save_are_traced_and_planned(
    kind: type[nn.Module], planned: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), *[kind() for _ in range(3)])
    workload = Workload(model, torch.randn(128, 64))
    graph = ckplan.profile(model, workload.batch, replay=False)
    expected = train(copy.deepcopy(workload))
    plan = Plan(regions=(PlannedRegion("[1..3]"),) if planned else ())
    ckplan.apply(model, plan)
    assert all(map(torch.equal, expected, train(workload)))
    assert all(region.runs for region in ckplan.status(model).regions)
    predicted = simulate(graph, resolve(plan, graph)).peak_bytes
    assert predicted == pytest.approx(measured_peak(workload), rel=0.001)


class DeadEnd(nn.Module):
    """What it makes beside its output, no backward comes by."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        torch.exp(hidden)
        return torch.tanh(hidden)


def test_what_backward_never_comes_by_goes_with_its_step() -> None:
    model = nn.Sequential(DeadEnd())
    region = PlannedRegion("0", save=(OpName("", "exp"),))
    ckplan.apply(model, Plan(regions=(region,)))
    known = {id(one) for one in gc.get_objects()}
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
    gc.collect()
    found = [one for one in gc.get_objects() if id(one) not in known]
    assert not any(isinstance(one, recompute.Rebuilder) for one in found)


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*is deprecated", "ignore:The .grad:UserWarning"
)
def test_what_is_compiled_by_torchscript_is_no_region() -> None:
    inner = torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.Tanh()))
    model = nn.Sequential(nn.Sequential(inner, nn.Linear(64, 64)), nn.Linear(64, 64))
    graph = ckplan.profile(model, X, optimizer="none", replay=False)
    assert {call.fqn for call in graph.calls} == {"", "0", "0.1", "1"}
    with pytest.raises(PlanError, match="compiled by TorchScript"):
        ckplan.apply(model, Plan(regions=(PlannedRegion("0.0"),)))
    saves = (OpName("1", "addmm"),)
    ckplan.apply(model, Plan(regions=(PlannedRegion("0", save=saves),)))
    model(X).sum().backward()
    (region,) = ckplan.status(model).regions
    assert (region.runs, region.missing) == (1, ())


def test_what_is_no_plan_or_no_model_is_said() -> None:
    model: Any = nn.Linear(2, 2)
    nothing: Any = None
    for pair in ((model, nothing), (nothing, Plan()), (model, 3)):
        with pytest.raises(ApplyError, match="cannot apply a"):
            ckplan.apply(*pair)


def test_tensors_without_bytes_of_their_own_are_named() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(torch.sparse.mm(torch.eye(128).to_sparse(), x))

    model = nn.Sequential(Sparse())
    with pytest.raises(WorkloadError, match="layout sparse_coo"):
        ckplan.profile(model, X, optimizer="none", replay=False)
    ckplan.apply(model, Plan(regions=(PlannedRegion("0"),)))
    with pytest.raises(ApplyError, match=r"without bytes of their own \(sparse_coo"):
        model(X)
    ckplan.apply(model, Plan(regions=(PlannedRegion("0", "rerun"),)))
    model(X).sum().backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_named() -> None:
    class Nested(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            both = torch.nested.nested_tensor([x[0], x[1]])
            return super().forward(x) + both.to_padded_tensor(0.0).sum()

    model = nn.Sequential(Nested(64, 64))
    ckplan.apply(model, Plan(regions=(PlannedRegion("0"),)))
    with pytest.raises(ApplyError, match=r"without bytes of their own \(nested"):
        model(X)


class Recurrent(nn.Module):
    """Small states, each made from the one before, which no call of torch shows."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0]).square().mean()


def test_states_of_recurrent_layers_are_kept_as_planned() -> None:
    workload = Workload(Recurrent(), torch.randn(8, 20, 32))
    graph = ckplan.profile(workload.model, workload.batch)
    plan = ckplan.solve(graph, goal="min-memory")
    assert plan.predicted is not None
    ckplan.apply(workload.model, plan)
    peak_bytes = plan.predicted.peak_bytes
    assert measured_peak(workload) == pytest.approx(peak_bytes, rel=0.003)


class Spread(nn.Module):
    """Reads something once, makes much of it and saves little."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        return x * torch.stack([-shared] * self.times).sum(0).exp().mean()


class Shared(nn.Module):
    """Two modules that read what a third one made."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.through = nn.Linear(64, 1024), nn.Linear(64, 64)
        self.first, self.second = Spread(2), Spread(16)
        self.head = nn.Linear(64, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.up(x)
        x = self.first(self.through(x), shared)
        return self.head(self.second(x, shared))


def test_what_two_regions_read_stays_until_the_later_one_has_read_it() -> None:
    workload = Workload(Shared(), torch.randn(32, 64))
    graph = ckplan.profile(workload.model, workload.batch)
    plan = Plan(regions=(PlannedRegion("first"), PlannedRegion("second")))
    timeline = simulate(graph, resolve(plan, graph))
    assert timeline.peak_at == "recomputation in backward of second"
    measured = measured_peak(applying_to(workload, plan))
    assert timeline.peak_bytes == pytest.approx(measured, rel=0.003)


class Capturing(nn.Module):
    """Hooks its layer in its first forward, as models do that collect outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.is_hooked = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_hooked:
            self.layer.register_forward_hook(lambda layer, args, output: output + 1)
            self.is_hooked = True
        return self.layer(x).sin()


@pytest.mark.parametrize("by", ["program", "rerun"])
def test_hooks_that_a_first_forward_registers_are_not_registered_twice(by: str) -> None:
    def build() -> Workload:
        torch.manual_seed(0)
        return Workload(nn.Sequential(Capturing(), nn.Tanh()), X)

    planned = build()
    ckplan.apply(planned.model, Plan(regions=(PlannedRegion("0", by),)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hooks inside run again
        found = train(planned)
    assert all(map(torch.equal, train(build()), found))


class Positioned(nn.Module):
    """Registers a buffer in its first forward, and has none before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "shift"):
            self.register_buffer("shift", torch.linspace(0, 1, x.shape[-1]).sin())
        return (x + self.shift).sin()


@pytest.mark.parametrize("by", ["program", "rerun"])
def test_a_first_buffer_that_a_forward_registers_is_registered_again(by: str) -> None:
    def build() -> Workload:
        torch.manual_seed(0)
        return Workload(nn.Sequential(nn.Linear(64, 64), Positioned(), nn.Tanh()), X)

    planned = build()
    ckplan.apply(planned.model, Plan(regions=(PlannedRegion("1", by),)))
    assert all(map(torch.equal, train(build()), train(planned)))


def test_a_model_with_lazy_parameters_is_refused_by_name() -> None:
    plan = Plan(regions=(PlannedRegion("."),))
    model = nn.Sequential(nn.Linear(64, 64), nn.LazyLinear(64))
    with pytest.raises(ApplyError, match=r"its parameter '1\.weight' is lazy"):
        ckplan.apply(model, plan)
    with pytest.raises(WorkloadError, match=r"its parameter '1\.weight' is lazy"):
        ckplan.profile(model, X)
    model(X)
    ckplan.apply(model, plan)
    model(X).sum().backward()
    assert ckplan.status(model).regions[0].runs == 1


def test_a_factory_of_lazy_parameters_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "lazy.py"
    file.write_text(
        "import torch\n\ndef build():\n"
        "    return torch.nn.Sequential(torch.nn.LazyLinear(4)), torch.ones(2, 3)\n"
    )
    with pytest.raises(WorkloadError, match=r"its parameter '0\.weight' is lazy"):
        profile_workload(WorkloadSpec(str(file)))
    with pytest.raises(WorkloadError) as refused:
        ckplan.dry_run(str(file), None)
    assert "fake tensors cannot initialize lazy ones" in refused.value.needed


class Growing(nn.Module):
    """Makes a layer in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "second"):
            self.second = nn.Linear(64, 64)
        return torch.tanh(self.second(torch.tanh(self.first(x))))


def test_a_rerun_that_would_make_a_module_once_more_says_so() -> None:
    plan = Plan(regions=(PlannedRegion("0", "rerun"),))
    model = ckplan.apply(nn.Sequential(Growing()), plan)
    with pytest.raises(ApplyError, match=r"0#0 again: its forward made .* a module"):
        model(X).sum().backward()
    model(X).sum().backward()


def test_a_trace_says_that_the_first_forward_made_modules() -> None:
    model = nn.Sequential(Growing(), Growing())
    notes = ckplan.profile(model, X, replay=False).notes
    assert f"{NOTE_MADE}: 0.second, ..." in notes
    model(X)
    notes = ckplan.profile(model, X, replay=False).notes
    assert not any(note.startswith(NOTE_MADE) for note in notes)


@pytest.mark.parametrize(
    ("region", "followed"),
    [
        (PlannedRegion("0"), set()),
        (PlannedRegion("0", save=(OpName("0", "addmm"),)), {"0.0"}),
        (PlannedRegion("0", save=(OpName("1.0", "tanh"),)), {"0.1.0"}),
        (PlannedRegion("0", save=(OpName("1", "tanh"),)), {"0.1", "0.1.0"}),
        (PlannedRegion("[0..1]", save=(OpName("0", "addmm"),)), {"0.0", "1.0"}),
        (PlannedRegion("", run=("0", "1"), save=(OpName("0.0", "addmm"),)), {"0.0"}),
        (
            PlannedRegion(".", save=(OpName("", "addmm"),)),
            {"0", "0.0", "0.1", "0.1.0", "1", "1.0", "1.1", "1.1.0"},
        ),
        (
            PlannedRegion(
                ".", inner=(PlannedRegion("0", save=(OpName("0", "addmm"),)),)
            ),
            {"0.0"},
        ),
    ],
)
def test_only_modules_in_which_a_plan_names_ops_are_followed(
    region: PlannedRegion, followed: set[str]
) -> None:
    """Hooks cost more than most calls, so no other module has them."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh())) for _ in range(2))
    )
    applying.apply(model, Plan(regions=(region,)))
    found = {
        name
        for name, module in model.named_modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(getattr(hook, "__self__", None), PathHooks)
    }
    assert found == followed
