"""Ejected code: runs without ckplan, computes the same, needs what it says."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Run
from small_models import Residual, build
from trained import measured_peak, train

import ckplan
from ckplan.ejecting.code import as_code, plain_form
from ckplan.ejecting.settings import TOOLS, setting_for
from ckplan.errors import CkplanError
from ckplan.graph.graph import Graph
from ckplan.plan.file import loads
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.training.workload import Workload


def graph_of(name: str) -> Graph:
    workload = build(name)
    return ckplan.profile(workload.model, workload.batch, loss=workload.loss)


def ejected(name: str, code: str) -> Workload:
    """A workload with the code run on its model."""
    assert "ckplan" not in code.partition('"""\n\nfrom')[2]
    workload = build(name)
    content: dict[str, object] = {}
    exec(compile(code, "ejected.py", "exec"), content)
    apply = content["checkpoint_calls"]
    assert callable(apply)
    assert apply(workload.model) is workload.model
    return workload


@pytest.mark.parametrize("name", ["residual", "attention", "unrolled"])
def test_the_code_computes_the_same_and_needs_what_it_says(name: str) -> None:
    graph = graph_of(name)
    plain = plain_form(graph, ckplan.solve(graph, budget="95%"))
    assert plain.regions
    assert plain.fits
    code = as_code(plain, "0")
    expected = train(build(name))
    assert all(map(torch.equal, expected, train(ejected(name, code))))
    measured = measured_peak(ejected(name, code))
    assert plain.timeline.peak_bytes == pytest.approx(measured, rel=0.01)


def test_a_plan_of_reruns_is_ejected_as_it_is() -> None:
    plan = Plan(regions=(PlannedRegion("cell#[1..2]", "rerun"),))
    plain = plain_form(graph_of("unrolled"), plan)
    code = as_code(plain, "0")
    assert plain.same
    assert "'cell': {1, 2}," in code
    assert "no plain form" not in code
    expected = train(build("unrolled"))
    assert all(map(torch.equal, expected, train(ejected("unrolled", code))))


def two_views(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - model(2 * batch)).square().mean()


def test_calls_are_numbered_over_all_forwards_of_a_step() -> None:
    batch = torch.ones(64, 64)
    graph = ckplan.profile(six_layers(), batch, step=two_views, replay=False)
    regions = tuple(PlannedRegion(f"{n}#1", "rerun") for n in range(6))
    plain = plain_form(graph, Plan(regions=regions))
    assert plain.same
    model, times = six_layers(), Counter[str]()
    for number in range(6):
        inner = model[number][0]
        inner.register_forward_pre_hook(lambda *_, n=number: times.update([n]))
    content: dict[str, Any] = {}
    exec(compile(as_code(plain, "0"), "ejected.py", "exec"), content)
    content["checkpoint_calls"](model)
    for _ in range(3):
        with torch.no_grad():
            model(batch)  # between two steps
        times.clear()
        two_views(model, batch).backward()
        assert [times[n] for n in range(6)] == [3] * 6  # one of two runs again
    measured = measured_peak(Workload(model, batch, step=two_views))
    measured -= 6 * torch.get_rng_state().nbytes  # torch's checkpoints keep states
    assert plain.timeline.peak_bytes == pytest.approx(measured, rel=0.01)


REGIONS = {
    ("transformers", "1"): "[0..2]",
    ("transformers", "every_n_layers=2"): "[0, 2]",
    ("megatron", "uniform --recompute-num-layers 1"): "[0..2]",
    ("megatron", "block --recompute-num-layers 2"): "[0..1]",
    ("megatron", "block --recompute-num-layers 1"): "0",
}


@pytest.mark.parametrize(("tool", "said"), REGIONS)
def test_what_a_tool_can_say_is_said_as_it_is(tool: str, said: str) -> None:
    graph = graph_of("residual")
    chosen = REGIONS[tool, said].strip("[]").split(", ")
    names = [f"'{name}'" if ".." not in name else f"'[{name}]'" for name in chosen]
    regions = ", ".join(f"{{calls: {name}, by: rerun}}" for name in names)
    plan = loads(f"ckplan: 1\nregions: [{regions}]\n", "plan")
    setting = setting_for(graph, plan, tool)
    assert setting.same
    assert setting.fits
    assert said in setting.text or "gradient_checkpointing_enable" in setting.text
    assert setting.timeline.peak_bytes == setting.planned.peak_bytes


def test_a_tool_reruns_the_same_layers_in_all_forwards_of_a_step() -> None:
    made = build("residual")
    graph = ckplan.profile(made.model, made.batch, step=two_views, replay=False)
    some = [f"{n}#{forward}" for forward in (0, 1) for n in (0, 2)]
    plan = Plan(regions=tuple(PlannedRegion(call, "rerun") for call in some))
    setting = setting_for(graph, plan, "transformers")
    assert setting.same
    assert "every_n_layers=2" in setting.text
    plan = Plan(regions=(PlannedRegion("[0..1]#1", "rerun"),))
    for tool in TOOLS:
        regions = setting_for(graph, plan, tool).regions
        calls = [graph.calls[region.call] for region in regions]
        first = {call.fqn for call in calls if call.number == 0}
        assert first == {call.fqn for call in calls if call.number == 1}
    content = json.loads(setting_for(graph, plan, "deepspeed").text)
    number = content["activation_checkpointing"]["number_checkpoints"]
    interval = content["pipeline"]["activation_checkpoint_interval"]
    assert number == -(-3 // interval)


@pytest.mark.parametrize("tool", TOOLS)
def test_the_nearest_setting_fits_or_says_that_it_does_not(tool: str) -> None:
    graph = graph_of("residual")
    for budget in ("95%", "85%"):
        plan = ckplan.solve(graph, budget=budget)
        setting = setting_for(graph, plan, tool)
        assert not setting.same
        assert setting.timeline.overhead >= setting.planned.overhead
        assert setting.fits != any("NOT fit" in line for line in setting.about())
    unneeded = ckplan.solve(graph, budget="100%")
    with pytest.raises(CkplanError, match="it recomputes nothing"):
        setting_for(graph, unneeded, tool)
    alone = ckplan.profile(torch.nn.Linear(4, 4), torch.ones(2, 4))
    with pytest.raises(CkplanError, match="has no layers"):
        setting_for(alone, Plan(regions=(PlannedRegion("."),)), tool)


def test_the_section_is_what_deepspeed_reads() -> None:
    graph = graph_of("residual")
    plan = Plan(regions=(PlannedRegion("[0..2]", "rerun"),))
    content = json.loads(setting_for(graph, plan, "deepspeed").text)
    assert content["activation_checkpointing"]["number_checkpoints"] == 3
    assert content["pipeline"] == {"activation_checkpoint_interval": 1}
    config = pytest.importorskip("deepspeed.runtime.activation_checkpointing.config")
    read = config.DeepSpeedActivationCheckpointingConfig(content)
    assert {
        key: getattr(read, key) for key in content["activation_checkpointing"]
    } == content["activation_checkpointing"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("step", [1, 2])
def test_transformers_needs_what_its_setting_says(step: int) -> None:
    transformers = pytest.importorskip("transformers")

    def make() -> Workload:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_layer=4,
            n_embd=64,
            n_head=2,
            n_positions=64,
            vocab_size=100,
            use_cache=False,
            loss_type="ForCausalLMLoss",
        )
        ids = torch.randint(100, (4, 64))
        batch = {"input_ids": ids, "labels": ids}
        return Workload(transformers.GPT2LMHeadModel(config).train(), batch)

    workload = make()
    graph = ckplan.profile(workload.model, workload.batch)
    calls = [f"transformer.h.{n}" for n in range(0, 4, step)]
    regions = tuple(PlannedRegion(call, "rerun") for call in calls)
    setting = setting_for(graph, Plan(regions=regions), "transformers")
    assert setting.same
    if step > 1 and not hasattr(workload.model, "activation_checkpointing_enable"):
        pytest.skip("this version of transformers has one switch for all layers")
    exec(setting.text, {"model": workload.model})
    measured = measured_peak(workload)
    assert setting.timeline.peak_bytes == pytest.approx(measured, rel=0.005)


def six_layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [[torch.nn.Linear(64, 64), torch.nn.GELU()] for _ in range(6)]
    return torch.nn.Sequential(*(torch.nn.Sequential(*one) for one in layers))


def test_updates_in_groups_are_ejected_with_the_plan() -> None:
    step = {"loss": lambda out, _: out.sum(), "optimizer": "adamw:foreach"}
    batch = torch.ones(64, 64)
    graph = ckplan.profile(six_layers(), batch, replay=False, **step)
    plan = ckplan.solve(graph, goal="min-memory", allow=["groups"])
    assert plan.predicted
    plain = plain_form(graph, plan)
    assert plain.planned.peak_bytes == plan.predicted.peak_bytes
    code = as_code(plain, "0")
    content: dict[str, Any] = {}
    exec(compile(code, "ejected.py", "exec"), content)
    found, seen = [], []
    for is_grouped in (False, True):
        model = six_layers()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        optimizer.register_step_pre_hook(lambda one, *_: seen.append(one.param_groups))
        torch.optim.lr_scheduler.ConstantLR(optimizer)  # marks the step
        if is_grouped:
            content["update_in_groups"](optimizer)
            assert hasattr(optimizer.step, "_wrapped_by_lr_sched")
        torch.optim.lr_scheduler.ConstantLR(optimizer)  # wraps the step
        whole = optimizer.param_groups
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert optimizer.param_groups is whole
        found.append(list(model.parameters()))
    assert all(map(torch.equal, *found))
    assert len(seen[1]) > len(seen[0]) == 1
    for tool in TOOLS:
        setting = setting_for(graph, plan, tool)
        assert setting.planned.peak_bytes == plan.predicted.peak_bytes
        assert any("left out" in line and "groups" in line for line in setting.about())


def test_a_plan_that_moves_is_ejected_as_one_that_recomputes() -> None:
    graph = graph_of("residual")
    plan = ckplan.solve(graph, "75%", spill_rate="1000GB")
    assert plan.predicted and plan.predicted.moved_bytes
    plain = plain_form(graph, plan)
    assert plain.fits
    assert not any(region.offload for region in plain.regions)
    code = as_code(plain, "0")
    assert "It also moves tensors to a file" in code
    assert f"overhead +{plan.predicted.overhead:.1%}" in code.replace(" %", "%")
    expected = train(build("residual"))
    assert all(map(torch.equal, expected, train(ejected("residual", code))))
    for tool in TOOLS:
        about = list(setting_for(graph, plan, tool).about())
        assert f"left out: the plan also moves tensors; {tool} recomputes them" in about
    alone = ckplan.solve(graph, "75%")
    for tool in TOOLS:
        lines = setting_for(graph, alone, tool).about()
        assert not any("moves tensors" in line for line in lines)


def test_what_does_not_fit_says_so() -> None:
    graph = graph_of("residual")
    plan = ckplan.solve(graph, goal="min-memory")
    assert plan.predicted is not None
    plain = plain_form(graph, plan)
    code = as_code(plain, "0")
    assert plain.fits == (plain.timeline.peak_bytes <= plan.predicted.peak_bytes)
    assert ("does NOT fit" in code) == (not plain.fits)


def test_the_command_prints_or_writes(run: Run, trace: Path) -> None:
    assert run("solve", str(trace), "--max-overhead", "50%").code == 0
    printed = run("eject", "plan.yaml", str(trace))
    assert printed.code == 0
    assert "def checkpoint_calls" in printed.out
    written = run("eject", "plan.yaml", "model.py", "-o", "plain.py")
    assert (written.code, written.out) == (0, "")
    compile(Path("plain.py").read_text(), "plain.py", "exec")
    again = run("eject", "plan.yaml", str(trace), "-o", "plain.py")
    assert again.err.startswith("error: cannot write 'plain.py': it already exists")
    Path("one.yaml").write_text("ckplan: 1\nregions: [{calls: .}]\n")
    flags = run("eject", "one.yaml", str(trace), "--as", "megatron")
    assert flags.out.startswith("--recompute-granularity full --recompute-method ")
    assert "predicted: peak" in flags.err
    assert run("eject", "plan.yaml", str(trace), "--as", "nemo").code == 2
    assert run("eject", "nope.yaml", str(trace)).code == 1
    assert run("eject", "plan.yaml", "nope.json").code == 1


class Shaken(torch.nn.Module):
    """Torch's own checkpoint would shake it otherwise the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.sin(self.linear(x) * random.random()))


class Normed(torch.nn.Sequential):
    """Torch's own checkpoint would move its averages twice."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))


def stacked(kind: type[torch.nn.Module]) -> Graph:
    model = torch.nn.Sequential(*[kind() for _ in range(4)])
    return ckplan.profile(model, torch.randn(32, 64), replay=False)


RERUN = Plan(regions=(PlannedRegion("[0..3]", "rerun"),))


def test_what_torch_alone_would_get_wrong_is_not_ejected() -> None:
    graph = stacked(Shaken)
    plain = plain_form(graph, RERUN)
    assert not plain.regions
    assert not plain.same
    for tool in TOOLS:
        with pytest.raises(CkplanError, match=r"by torch alone: .* random numbers"):
            setting_for(graph, RERUN, tool)


def test_averages_that_torch_alone_would_move_twice_are_told() -> None:
    graph = stacked(Normed)
    plain = plain_form(graph, RERUN)
    assert plain.same
    assert "updated twice a step" in as_code(plain, "0")
    for tool in TOOLS:
        about = setting_for(graph, RERUN, tool).about()
        assert any("updated twice a step" in line for line in about)
    plain = plain_form(stacked(Residual), RERUN)
    assert "updated twice" not in as_code(plain, "0")


def test_no_text_of_a_trace_becomes_code() -> None:
    named = replace(graph_of("residual"), model='X"""\nraise SystemExit\n"""')
    code = as_code(plain_form(named, ckplan.solve(named, budget="95%")), "0")
    assert "SystemExit" not in code
    assert "Activation checkpointing of a model, in" in code
