"""Plans whose optimizer updates groups: the bytes of a profile with these groups."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Run
from torch import nn

import ckplan
from ckplan.errors import CkplanError, PlanError
from ckplan.graph import file as trace_file
from ckplan.graph.graph import Graph
from ckplan.graph.grouped_updates import group_size, with_grouped_update
from ckplan.graph.records import Storage
from ckplan.plan import file as plan_file
from ckplan.plan.resolve import resolve
from ckplan.plan.updates import with_planned_update
from ckplan.simulating.curve import PLANNED
from ckplan.simulating.moving import Link
from ckplan.simulating.simulate import Simulator
from ckplan.solving.levers import frontier_of, search_with
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.solving.remedies import remedies
from ckplan.training.step import Training
from ckplan.tuning.settings import AS_TRACED, Way, grouped_update
from ckplan.tuning.tune import Tuning
from ckplan.units import format_bytes, parse_bytes
from ckplan.verifying.predict import predict


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(64, 8, bias=False))


@cache
def step(optimizer: str = "adamw:foreach", gpu: str | None = None) -> Graph:
    options: dict[str, Any] = {"loss": lambda out, _: out.sum(), "replay": False}
    batch = torch.ones(4, 64)
    return ckplan.profile(build(), batch, optimizer=optimizer, gpu=gpu, **options)


@pytest.mark.parametrize("name", ["adamw", "adam", "momentum"])
@pytest.mark.parametrize("gpu", [None, "T4"])
@pytest.mark.parametrize("size", ["20KiB", "1KiB", "1MiB"])
def test_a_grouped_step_is_the_one_that_a_profile_records(
    name: str, gpu: str | None, size: str
) -> None:
    found = with_grouped_update(step(f"{name}:foreach", gpu), size, parse_bytes(size))
    real = step(f"{name}:foreach={size}", gpu)
    assert found.options == real.options
    assert [op.name for op in found.ops] == [op.name for op in real.ops]
    for one, other in zip(found.ops, real.ops, strict=True):
        sizes = [
            [sorted(graph.storages[s].bytes for s in some) for some in lists]
            for graph, lists in (
                (found, (one.reads, one.writes, one.outputs)),
                (real, (other.reads, other.writes, other.outputs)),
            )
        ]
        assert sizes[0] == sizes[1]
    lines = [Simulator(one).run().live_bytes for one in (found, real)]
    assert lines[0] == lines[1]
    if gpu is None:
        whole = step(f"{name}:foreach", gpu).step_seconds
        assert found.step_seconds == pytest.approx(whole, rel=0.2)


def test_groups_go_below_the_floor_and_are_left_out_where_memory_is_enough() -> None:
    planner = Planner(step())
    search = search_with(planner, allow=["groups"], link=None)
    assert search.floor_bytes < planner.floor.peak_bytes
    least = search.solve(MemoryLimit(search.floor_bytes))
    assert least.timeline.peak_bytes == search.floor_bytes
    assert least.timeline.graph.options["optimizer"] == "adamw:foreach=16KiB"
    whole = search.solve(MemoryLimit(planner.unplanned.peak_bytes)).timeline
    assert whole.graph.options["optimizer"] == "adamw:foreach"
    assert search.within(search.floor_bytes) is not None
    with pytest.raises(CkplanError, match="no plan fits"):
        search.solve(MemoryLimit(search.floor_bytes - 1))
    both = search_with(planner, allow=["groups"], link=Link(1e12))
    assert both.floor_bytes <= search.floor_bytes


def test_what_groups_cost_is_in_the_overhead_of_a_plan() -> None:
    """On a GPU, each group launches the kernels of the whole update again."""
    graph = step("adamw:foreach", "T4")
    grouped = with_grouped_update(graph, "16KiB", parse_bytes("16KiB"))
    longer = grouped.step_seconds / graph.step_seconds - 1
    assert longer > 0.1
    planner = Planner(graph)
    search = search_with(planner, allow=["groups"], link=None)
    limit = MemoryLimit(search.floor_bytes)
    found = search.solve(limit)
    assert found.timeline.overhead >= longer - 1e-9
    assert found.bound_overhead <= found.timeline.overhead
    assert found.unplanned is planner.unplanned
    none = next(one for one in found.baselines if one.name == "none")
    assert (none.peak_bytes, none.fits) == (planner.unplanned.peak_bytes, False)
    within = search.within(search.floor_bytes)
    assert within is not None and within[0].overhead == found.timeline.overhead
    plan = ckplan.solve(graph, limit.bytes, allow=["groups"])
    assert plan.predicted is not None
    assert plan.predicted.unplanned_peak_bytes == planner.unplanned.peak_bytes


def test_what_backward_makes_last_stays_where_it_is() -> None:
    """Unlike a number that Python makes then, for each group."""
    graph = step("adamw:foreach", None)
    last = graph.backward_stop - 1
    made = Storage(8, "temporary", last, last)
    graph = replace(graph, storages=(*graph.storages, made))
    found = with_grouped_update(graph, "1KiB", parse_bytes("1KiB"))
    assert found.storages[len(graph.storages) - 1] == made


def test_the_remedy_and_the_plan_name_the_same_groups_and_bytes() -> None:
    (found,) = (one for one in remedies(step(), ()) if "groups" in one.name)
    size = group_size(step())
    assert found.how == f"--optimizer adamw:foreach={size}" and not found.about
    real = Simulator(step(f"adamw:foreach={size}")).run()
    assert found.peak_bytes == real.peak_bytes
    plan = ckplan.solve(step(), found.peak_bytes, allow=["groups"])
    assert plan.workload["optimizer"] == f"adamw:foreach={size}"
    assert plan.predicted and plan.predicted.peak_bytes == real.peak_bytes


def test_pages_and_predictions_of_a_plan_have_its_groups(tmp_path: Path) -> None:
    plan = ckplan.solve(step(), goal="min-memory", allow=["groups"])
    assert plan.predicted
    grouped = with_planned_update(step(), plan)
    assert grouped.options["optimizer"] == plan.workload["optimizer"]
    found = Simulator(grouped).run(resolve(plan, grouped))
    assert found.peak_bytes == plan.predicted.peak_bytes
    for other in (grouped, step("adam:foreach"), step("adamw:fused")):
        assert with_planned_update(other, plan) is other
    training = Training(optimizer=plan.workload["optimizer"])
    curves = predict(step(), plan, training, step().fingerprint).curves
    assert curves[PLANNED].peak_bytes == plan.predicted.peak_bytes
    clipped = with_options(clip=1.0)
    (said,) = predict(clipped, plan, training, clipped.fingerprint).notes
    assert "clipped" in said
    pytest.importorskip("jinja2")
    ckplan.save_report(step(), {"mine": plan}, tmp_path / "page.html")
    assert (
        format_bytes(plan.predicted.peak_bytes) in (tmp_path / "page.html").read_text()
    )


def two_types() -> Graph:
    """A step whose parameters are of two types: two lists of kernels."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8).double())
    model[0].register_forward_hook(lambda *given: given[2].double())
    options: dict[str, Any] = {"loss": lambda out, _: out.sum(), "replay": False}
    kind = "adamw:foreach"
    return ckplan.profile(model, torch.ones(4, 64), optimizer=kind, **options)


def with_options(**options: Any) -> Graph:
    """The step, of another training."""
    return replace(step(), options={**step().options, **options})


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: step("adafactor:foreach"), "not of lists alone"),
        (lambda: with_options(clip=1.0), "clipped or scaled"),
        (lambda: with_options(scaler=True), "clipped or scaled"),
        (lambda: with_options(optimizer="own"), "its optimizer is 'own'"),
        (lambda: with_options(optimizer="adamw:fused"), "is 'adamw:fused'"),
        (two_types, "lists are"),
    ],
)
def test_updates_that_are_no_single_list_are_refused(make: Any, found: str) -> None:
    with pytest.raises(PlanError, match=found):
        with_grouped_update(make(), "16KiB", 1 << 14)


@pytest.mark.parametrize("optimizer", ["adamw:fused", "momentum:foreach", "none"])
def test_groups_that_free_nothing_are_refused(optimizer: str) -> None:
    with pytest.raises(PlanError, match="would free nothing"):
        ckplan.solve(step(optimizer), "90%", allow=["groups"])
    with pytest.raises(CkplanError, match="cannot choose groups for this objective"):
        ckplan.solve(step(), goal="knee", allow=["groups"])


@pytest.mark.slow
def test_tune_finds_groups_where_the_whole_update_does_not_fit() -> None:
    @cache
    def record(way: Way, rows: int, accumulate: int) -> Graph:
        batch, kind = torch.ones(rows, 64), way.optimizer
        options: dict[str, Any] = {"loss": lambda out, _: out.sum(), "replay": False}
        options |= {"optimizer": kind, "accumulate": accumulate}
        graph = ckplan.profile(build(), batch, **options)
        ops = tuple(replace(op, seconds=1e-6 * len(op.reads)) for op in graph.ops)
        return replace(graph, ops=ops)

    way = Way(optimizer="adamw:foreach")
    most = Simulator(record(way, 4, 1)).run().peak_bytes
    found = Tuning(record, MemoryLimit(most * 9 // 10), way=way, rows=4).run()
    assert found.best.way.optimizer == "adamw:foreach=16KiB"
    assert found.base is None
    row = next(one for one in found.levers if one.name == "adamw:foreach=16KiB")
    assert (row.bits, row.in_best) == ("same", True)
    assert row.saved_bytes and row.saved_bytes > 0
    assert grouped_update(Way(), step("adamw:fused")) is None
    assert grouped_update(Way(), step("momentum:foreach")) is None
    assert grouped_update(Way(), step("adamw:foreach")) is not None
    assert grouped_update(AS_TRACED, step("adamw:foreach")) is None


def test_points_of_a_frontier_are_of_the_grouped_step() -> None:
    planner = Planner(step("adamw:foreach", "T4"))
    search = search_with(planner, allow=["groups"], link=None)
    smallest, *_ = frontier_of(planner, search, 4)
    assert smallest.timeline is not None  # from which a card's room is found
    assert smallest.timeline.peak_bytes == smallest.peak_bytes
    whole = planner.simulator.run(smallest.regions)
    assert whole.peak_bytes > smallest.peak_bytes


@pytest.mark.slow
def test_a_plan_with_groups_is_verified_as_it_says(run: Run, folder: Path) -> None:
    (folder / "model.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n"
        "    torch.manual_seed(0)\n"
        "    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]\n"
        "    return {'model': nn.Sequential(*layers), 'batch': torch.ones(4, 64),\n"
        "            'loss': lambda out, batch: out.sum()}\n"
    )
    foreach = ("--optimizer", "adamw:foreach")
    ended = run("profile", "model.py", *foreach, "-o", "t.json.gz")
    assert ended.code == 0, ended.err
    wish = ("--min-memory", "--allow", "groups", "-o", "plan.yaml", "--json")
    ended = run("solve", "t.json.gz", *wish)
    assert ended.code == 0, ended.err
    assert "ckplan.update_in_groups(optimizer, '16KiB')" in ended.err
    plan = plan_file.load(folder / "plan.yaml")
    assert plan.workload["optimizer"] == "adamw:foreach=16KiB"
    ended = run("verify", "model.py", "plan.yaml", "--json")
    assert ended.code == 0, ended.err
    measured = json.loads(ended.out)
    assert plan.predicted
    peak_bytes = measured["measured_peak_bytes"]
    assert peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=1e-3)
    graph = trace_file.load(folder / "t.json.gz")
    assert plan.predicted.peak_bytes < Planner(graph).floor.peak_bytes
