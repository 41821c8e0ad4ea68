"""Records to tables and JSON: what adds up, what folds, what fits on a screen."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import count

import graphs
import pytest
import torch
from torch import nn
from verifications import MIB, verification

import ckplan
from ckplan.errors import VerifyError
from ckplan.graph.graph import Graph
from ckplan.graph.records import (
    BEFORE_STEP,
    NO_WORKSPACE,
    OUTSIDE_CALLS,
    Call,
    EngineCosts,
    Op,
    Saved,
    Storage,
)
from ckplan.plan.names import OpName
from ckplan.plan.plan import Plan, PlannedRegion, Prediction
from ckplan.plan.region import Region
from ckplan.report.layers import fold_layers, forward_costs
from ckplan.report.plans import plan_json, plan_report, solution_json, solution_report
from ckplan.report.progress import ProgressLine
from ckplan.report.step import step_json, step_report
from ckplan.report.tables import render
from ckplan.report.verification import verification_error, verification_report
from ckplan.simulating.simulate import simulate
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.solving.solution import Baseline, Floor, Solution
from ckplan.solving.solve import Objective, find, to_plan
from ckplan.units import format_percent, format_seconds
from ckplan.verifying.phases import PhaseSeconds
from ckplan.verifying.timing import Quartiles
from ckplan.verifying.verify import Breakdown


def chain_graph(*layers: tuple[str, int], own_bytes: int = 0) -> Graph:
    """A model whose layers run one op each, then one of its own, then a loss.

    Args:
        layers: FQN and activation bytes. A layer with the FQN of another before the
            last dot runs inside that one; all others run inside the model.
        own_bytes: What the model's own op makes, if it is to run one.
    """
    fqns = ["", *(fqn for fqn, _ in layers)]
    made = [*layers, *([("", own_bytes)] if own_bytes else [])]
    owners = [fqns.index(fqn) for fqn, _ in made]
    calls = [Call("", 0, OUTSIDE_CALLS, 0, len(made), "Model")]
    for index, fqn in enumerate(fqns[1:]):
        inside = [i for i, f in enumerate(fqns[1:]) if f"{f}.".startswith(f"{fqn}.")]
        around = fqn.rpartition(".")[0]
        parent = fqns.index(around) if around in fqns else 0
        calls.append(Call(fqn, 0, parent, index, inside[-1] + 1, "Layer"))
    num_forward = len(made) + 1
    backward_of = {i: 2 * num_forward - 1 - i for i in range(num_forward)}
    forward = [
        Op("mm", owner, (i,), (), (i + 1,), NO_WORKSPACE, 100, 0, 1e-3, False)
        for i, owner in enumerate([*owners, OUTSIDE_CALLS])
    ]
    backward = [
        Op(
            "mm_backward",
            op.call,
            op.outputs,
            (),
            (),
            NO_WORKSPACE,
            200,
            0,
            2e-3,
            False,
        )
        for op in reversed(forward)
    ]
    return Graph(
        model="Model",
        fingerprint={},
        ops=(*forward, *backward),
        storages=(
            Storage(1000, "input", BEFORE_STEP, 2 * num_forward),
            *(
                Storage(size, "activation", i, i + 1)
                for i, (_, size) in enumerate(made)
            ),
            Storage(4, "activation", num_forward - 1, num_forward),
        ),
        saved=tuple(
            Saved(i + 1, owner, i + 1, *[backward_of[i]] * 3)
            for i, owner in enumerate(owners)
        ),
        calls=tuple(calls),
        num_forward=num_forward,
        num_backward=num_forward,
        notes=("loss: made up",),
    )


def shown(graph: Graph) -> str:
    return render(step_report(graph, simulate(graph)))


def folded(graph: Graph) -> list[tuple[str, int, int]]:
    rows = fold_layers(graph, forward_costs(graph).layers)
    return [(row.name, row.count, row.cost.activation_bytes) for row in rows]


# -- profile -----------------------------------------------------------------------


def test_two_linear_layers_keep_their_outputs() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 32))
    graph = ckplan.profile(model, torch.randn(1, 8))
    content = step_json(graph, simulate(graph), "two.json.gz")
    by_call = {layer["call"]: layer["activation_bytes"] for layer in content["layers"]}
    assert by_call == {"0": 64, "1": 128}
    assert content["activation_bytes"] == 192
    assert content["outside_activation_bytes"] == 4  # the loss, which is a sum
    rows = [line.split() for line in shown(graph).splitlines()]
    assert ["activations", "192", "B"] in [row[:3] for row in rows]
    assert ["all", "layers", "192", "B"] in [row[:4] for row in rows]
    assert ["loss,", "outside", "the", "model", "4", "B"] in [row[:6] for row in rows]


def test_layers_add_up_to_the_total() -> None:
    graph = chain_graph(("a", 64), ("b", 128), own_bytes=32)
    content = step_json(graph, simulate(graph), "")
    layers = content["layers"]
    assert sum(layer["activation_bytes"] for layer in layers) == 64 + 128 + 32
    assert content["activation_bytes"] == 64 + 128 + 32
    assert [layer["part"] for layer in layers] == ["own code", "whole", "whole"]
    assert content["forward_flops"] == 4 * 100
    assert sum(layer["forward_flops"] for layer in layers) == 3 * 100


def test_kinds_alive_at_the_peak_add_up_to_it() -> None:
    graph = chain_graph(("a", 64), ("b", 128))
    content = step_json(graph, simulate(graph), "")
    assert sum(content["alive_at_peak"].values()) == content["peak_bytes"]
    assert content["peak_bytes"] == 1000 + 64 + 128 + 4
    assert content["peak_at"] == "forward of the loss"


def test_json_has_the_keys_that_scripts_use() -> None:
    graph = chain_graph(("a", 64))
    content = step_json(graph, simulate(graph), "traces/a.json.gz")
    assert {
        "parameter_bytes",
        "gradient_bytes",
        "optimizer_bytes",
        "input_bytes",
        "buffer_bytes",
        "activation_bytes",
        "temporary_bytes",
        "peak_bytes",
        "peak_at",
        "forward_flops",
        "step_seconds",
        "trace",
        "notes",
        "layers",
    } <= set(content)
    assert {"call", "activation_bytes", "forward_flops", "forward_seconds"} <= set(
        content["layers"][0]
    )


def test_identical_layers_are_one_row() -> None:
    graph = chain_graph(*((f"h.{i}", 64) for i in range(12)), ("head", 32))
    assert folded(graph) == [("h.[0..11]", 12, 12 * 64), ("head", 1, 32)]
    row = next(line for line in shown(graph).splitlines() if "h.[0..11]" in line)
    assert row.split()[1:4] == ["x12", "768", "B"]


def test_layers_that_differ_are_rows_of_their_own() -> None:
    graph = chain_graph(("h.0", 64), ("h.1", 65), ("h.2", 64))
    assert folded(graph) == [("h.1", 1, 65), ("h.0", 1, 64), ("h.2", 1, 64)]


def test_a_call_with_most_of_the_bytes_gives_way_to_its_children() -> None:
    graph = chain_graph(("body", 8), ("body.a", 64), ("body.b", 128), ("head", 16))
    rows = fold_layers(graph, forward_costs(graph).layers)
    assert [(row.name, row.own_code) for row in rows] == [
        ("body.b", False),
        ("body.a", False),
        ("head", False),
        ("body", True),
    ]
    assert "body, own code" in shown(graph)


def test_a_small_call_is_one_row_with_all_inside() -> None:
    graph = chain_graph(("body", 8), ("body.a", 8), ("head", 1000))
    assert folded(graph) == [("head", 1, 1000), ("body", 1, 16)]


@pytest.mark.parametrize(
    ("head_bytes", "names"),
    [(48, ["head", "body"]), (47, ["head", "body.a", "body"])],
)
def test_a_call_gives_way_above_a_quarter_of_the_bytes(
    head_bytes: int, names: list[str]
) -> None:
    """A body of 16 bytes is a quarter of 64 and more than a quarter of 63."""
    graph = chain_graph(("body", 7), ("body.a", 9), ("head", head_bytes))
    assert [
        row.name for row in fold_layers(graph, forward_costs(graph).layers)
    ] == names


def test_many_rows_end_in_one_for_all_others() -> None:
    graph = chain_graph(*((f"layer{i}", 1000 + i) for i in range(40)))
    lines = shown(graph).splitlines()
    others = next(line for line in lines if "all others" in line)
    assert "x24" in others
    assert len(lines) < 45


def test_names_that_plans_cannot_write_are_still_shown() -> None:
    graph = chain_graph(("odd[red]", 64))
    assert folded(graph) == [("odd[red]#0", 1, 64)]
    assert "odd[red]#0" in shown(graph)


def test_long_names_wrap_within_80_columns() -> None:
    name = "_".join(f"very_long_module_name_{i}" for i in range(6))
    lines = shown(chain_graph((name, 123_456_789))).splitlines()
    assert max(map(len, lines)) <= 80
    assert name in "".join(line.split()[0] for line in lines if line)


def test_a_step_without_any_op_is_shown() -> None:
    empty = Graph("Nothing", {}, (), (), (), (), 0, 0)
    assert "Nothing" in shown(empty)


# -- solve and show PLAN -----------------------------------------------------------


@pytest.fixture
def solution() -> Solution:
    graph = chain_graph(("h.0", 3 * MIB), ("h.1", 5 * MIB))
    timeline = simulate(graph)
    return Solution(
        budget_bytes=16 * MIB,
        limit=MemoryLimit(16 * MIB),
        regions=(),
        timeline=timeline,
        unplanned=timeline,
        floor=Floor(4 * MIB, "backward of h.1", "activation"),
        bound_overhead=0.0,
        baselines=(
            Baseline("none", 8 * MIB, 0.0, True),
            Baseline("every call", 32 * MIB, 0.35, False),
        ),
    )


PLAN = Plan(
    model="Model",
    fingerprint={"torch": "2.13.0", "batch": {"x": "float32[8,256]"}},
    budget_bytes=16 * MIB,
    predicted=Prediction(15 * MIB, "backward of h.1", 0.031, 20 * MIB),
    bound={"any_schedule": 0.029},
    regions=(
        PlannedRegion("h.[0..7]", save=(OpName("mlp", "addmm"), OpName("", "mul"))),
        PlannedRegion("h.8", by="rerun"),
    ),
)


def test_solution_shows_budget_bound_floor_and_baselines(solution: Solution) -> None:
    text = render(solution_report(solution, PLAN, reserve_bytes=2 * MIB))
    for said in (
        "16.00 MiB, which is 18.00 MiB less the reserve of 2.00 MiB",
        "+0.0 %: no schedule",
        "4.00 MiB during backward of h.1",
        "h.[0..7]",
        "2 ops",
    ):
        assert said in text
    assert "every call" in text
    assert max(map(len, text.splitlines())) <= 80
    rows = [line.split() for line in text.splitlines()]
    assert ["every", "call", "32.00", "MiB", "+35.0", "%", "no"] in rows


def test_solution_json_has_the_keys_that_scripts_use(solution: Solution) -> None:
    content = solution_json(solution, PLAN, 2 * MIB, "plan.yaml")
    assert {
        "budget_bytes": 18 * MIB,
        "reserve_bytes": 2 * MIB,
        "unplanned_peak_bytes": solution.unplanned.peak_bytes,
        "peak_bytes": solution.timeline.peak_bytes,
        "peak_at": solution.timeline.peak_at,
        "floor_bytes": 4 * MIB,
        "floor_at": "backward of h.1",
        "overhead": 0.0,
        "bound_overhead": 0.0,
        "gap": 0.0,
        "recompute_seconds": 0.0,
        "extra_flops_per_sample": 0,
        "extra_link_bytes_per_sample": 0,
        "plan": "plan.yaml",
    }.items() <= content.items()
    assert content["step_seconds"] == pytest.approx(0.009)
    tiled = replace(solution, timeline=replace(solution.timeline, added_seconds=0.001))
    in_tiles = solution_json(tiled, PLAN, 0, "plan.yaml")  # of which the graph has them
    assert in_tiles["unplanned_step_seconds"] == pytest.approx(0.008)
    assert in_tiles["step_seconds"] == pytest.approx(0.009)
    assert content["baselines"][1] == {
        "name": "every call",
        "peak_bytes": 32 * MIB,
        "reserved_bytes": None,
        "overhead": 0.35,
        "fits": False,
    }
    assert content["regions"] == plan_json(PLAN)["regions"]


def test_what_the_engine_takes_is_shown_where_it_takes_any(solution: Solution) -> None:
    graph = chain_graph(("h.0", 3 * MIB), ("h.1", 5 * MIB))
    costs = EngineCosts(watch_seconds=1e-3, rerun_seconds=1e-4)
    timeline = simulate(replace(graph, engine=costs), [Region(0)])
    found = replace(solution, timeline=timeline)
    took = timeline.engine_overhead
    assert 0 < took < timeline.overhead
    text = render(solution_report(found, PLAN, reserve_bytes=0))
    assert f"engine  {format_percent(took, sign=True)} for the engine" in text
    assert solution_json(found, PLAN, 0, "plan.yaml")["engine_overhead"] == took
    assert "engine" not in render(solution_report(solution, PLAN, reserve_bytes=0))
    assert solution_json(solution, PLAN, 0, "plan.yaml")["engine_overhead"] == 0.0


@pytest.mark.parametrize(
    ("launch", "watch", "engine", "waits"),
    [
        (1e-5, 1e-6, "engine 2.00 us of the CPU's time, beside the device", "device"),
        (1e-5, 1e-2, "engine +", "launches"),
        (1.0, 1e-3, "engine +", "launches"),
    ],
)
def test_on_a_card_the_engine_and_what_is_hidden_of_it_are_shown(
    solution: Solution, launch: float, watch: float, engine: str, waits: str
) -> None:
    graph = chain_graph(("h.0", 3 * MIB), ("h.1", 5 * MIB))
    ops = [replace(op, seconds=1e-3, launch_seconds=launch) for op in graph.ops]
    graph = replace(graph, ops=tuple(ops), engine=EngineCosts(watch))
    timeline = simulate(graph, [Region(0)])
    found = replace(solution, timeline=timeline)
    text = " ".join(render(solution_report(found, PLAN, reserve_bytes=0)).split())
    assert engine in text
    assert f"waits for {'the ' * (waits == 'device')}{waits}: device" in text
    content = solution_json(found, PLAN, 0, "plan.yaml")
    hidden = content["engine_hidden_seconds"]
    assert ("beside the device" in text) == (hidden > 0)
    added = content["engine_overhead"] * graph.step_seconds
    assert hidden + added == pytest.approx(content["engine_seconds"])


def test_plan_is_shown_in_full() -> None:
    text = render(plan_report(PLAN))
    for said in (
        "batch x float32[8,256]",
        "15.00 MiB during backward of h.1; unplanned 20.00 MiB",
        "+3.1 % of an unplanned step",
        "+2.9 % at least (any schedule)",
        "mlp/addmm, ./mul",
        "rerun",
    ):
        assert said in text


def test_plan_json_says_what_the_file_says() -> None:
    content = plan_json(PLAN)
    assert content["budget_bytes"] == 16 * MIB
    assert content["predicted"]["peak_at"] == "backward of h.1"
    assert content["regions"][0] == {
        "calls": "h.[0..7]",
        "by": "program",
        "save": ["mlp/addmm", "./mul"],
        "encode": {},
    }


def test_bare_plan_is_shown() -> None:
    text = render(plan_report(Plan()))
    assert "any model" in text
    assert "nothing is recomputed" in text
    assert plan_json(Plan())["predicted"] is None


# -- verify ------------------------------------------------------------------------


def test_verification_puts_predicted_beside_measured() -> None:
    text = render(verification_report(verification()))
    rows = [line.split() for line in text.splitlines()]
    assert ["overhead", "+3.1", "%", "+3.0", "%"] in rows
    assert ["gradients", "bitwise", "equal"] in rows
    assert ["regions", "8", "ran,", "0", "never", "ran"] in rows


def test_verification_puts_every_phase_side_by_side() -> None:
    phases = Breakdown(
        predicted_unplanned=PhaseSeconds(0.1, 0.2, 0.03, 0.0, 0.0),
        predicted=PhaseSeconds(0.1, 0.2, 0.03, 0.04, 0.005),
        measured_unplanned=PhaseSeconds(0.11, 0.21, 0.031),
        measured=PhaseSeconds(0.115, 0.25, 0.032),
        added_seconds=Quartiles(0.04, 0.044, 0.05),
    )
    found = verification(phases=phases, overhead_quartiles=(0.02, 0.045))
    text = render(verification_report(found))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    for row in (
        "its quartiles +2.0 % to +4.5 %",
        "forward 100 ms 100 ms 110 ms 115 ms",
        "backward 200 ms 200 ms 210 ms 250 ms",
        "optimizer 30.0 ms 30.0 ms 31.0 ms 32.0 ms",
        "recomputation 40.0 ms",
        "engine 5.00 ms",
        "added 45.0 ms 44.0 ms",
        "step 330 ms 375 ms 1.00 s 1.03 s",
    ):
        assert row in rows
    assert max(map(len, text.splitlines())) <= 80
    plain = found.as_json()["phases"]
    assert plain["predicted"]["engine_seconds"] == 0.005
    assert plain["measured"]["engine_seconds"] is None

    problem = "the machine is busy (load average 9.0, 2 cores)"
    busy = replace(found, overhead=None, overhead_quartiles=None)
    busy = replace(
        busy, timing_problem=problem, phases=replace(phases, added_seconds=None)
    )
    text = render(verification_report(busy))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert f"time could not be measured: {problem}" in rows
    assert "backward 200 ms 200 ms n/a n/a" in rows
    assert "step 330 ms 375 ms n/a n/a" in rows


def test_verification_without_an_unplanned_step_says_what_is_missing() -> None:
    found = verification(
        gradients_equal=None,
        unplanned_measured_peak_bytes=None,
        unplanned_step_seconds=None,
        overhead=None,
        notes=("the unplanned step does not fit",),
    )
    text = render(verification_report(found))
    assert "not compared" in text
    assert "n/a" in text
    assert "the unplanned step does not fit" in text


def test_verification_on_a_gpu_shows_what_its_allocator_did() -> None:
    assert "reserved" not in render(verification_report(verification()))
    found = verification(
        predicted_allocated_bytes=17 * MIB,
        measured_allocated_bytes=18 * MIB,
        measured_reserved_bytes=22 * MIB,
    )
    rows = render(verification_report(found)).splitlines()
    allocated, reserved = (
        next(row for row in rows if row.split()[:1] == [name])
        for name in ("allocated", "reserved")
    )
    assert allocated.split()[1:5] == ["17.00", "MiB", "18.00", "MiB"]
    assert reserved.split()[1:4] == ["n/a", "22.00", "MiB"]
    assert found.as_json()["measured_reserved_bytes"] == 22 * MIB


def test_failure_names_the_budget() -> None:
    error = verification_error(verification(measured_peak_bytes=17 * MIB, fits=False))
    assert isinstance(error, VerifyError)
    assert "measured peak 17.00 MiB" in error.what
    assert error.needed == "at most 16.00 MiB"


def test_failure_names_what_differs() -> None:
    differs = ("gradient of h.0.weight, step 1",)
    error = verification_error(verification(gradients_equal=False, different=differs))
    assert "gradient of h.0.weight, step 1" in error.what


# -- progress ----------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_one_line_and_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with ProgressLine(stream, clock=map(float, count()).__next__) as progress:
        progress("tracing", 0, 0)
        progress("measuring ops", 3, 7)
    erase = "\r\x1b[2K"
    assert stream.getvalue() == f"{erase}tracing ...{erase}measuring ops 3/7{erase}"


def test_terminal_is_not_flooded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with ProgressLine(stream, clock=lambda: 5.0) as progress:
        for done in range(1000):
            progress("measuring ops", done, 1000)
    assert stream.getvalue().count("measuring") == 1


def test_log_names_every_stage_of_long_work_once() -> None:
    stream = io.StringIO()
    with ProgressLine(stream, clock=map(float, count()).__next__) as progress:
        for done in range(9):
            progress("measuring ops", done, 9)
        progress("solving", 0, 0)
    assert stream.getvalue() == "measuring ops ...\nsolving ...\n"


def test_log_of_short_work_is_empty() -> None:
    stream = io.StringIO()
    with ProgressLine(stream, clock=lambda: 5.0) as progress:
        progress("tracing", 0, 0)
    assert stream.getvalue() == ""


def test_regions_inside_regions_are_shown_below_the_one_around_them() -> None:
    inner = PlannedRegion("h.[0..1].mlp", save=(OpName.parse("up/addmm"),))
    plan = Plan(regions=(PlannedRegion("h.[0..1]", inner=(inner,)),))
    lines = render(plan_report(plan)).splitlines()
    outside = next(i for i, line in enumerate(lines) if "h.[0..1] " in line)
    assert lines[outside + 1].startswith("    h.[0..1].mlp")
    (region,) = plan_json(plan)["regions"]
    assert [one["calls"] for one in region["regions"]] == ["h.[0..1].mlp"]


def test_seconds_are_those_of_a_step_of_the_optimizer() -> None:
    """With ``--accumulate 3``: three forwards and backwards, and one update."""
    once = graphs.chain(3)
    graph = replace(once, options={"accumulate": 3})
    update = sum(op.seconds for op in once.ops[once.backward_stop :])
    assert update > 0
    step_seconds = 3 * (once.step_seconds - update) + update
    timeline = simulate(graph)
    found = step_json(graph, timeline, "t")
    assert found["step_seconds"] == pytest.approx(step_seconds)
    assert found["batches_per_step"] == 3
    text = render(step_report(graph, timeline))
    assert f"{format_seconds(step_seconds)} of 3 batches" in text
    assert "Layers in forward of one of 3 batches" in text
    solution = find(Planner(graph), Objective(goal="min-memory"))
    content = solution_json(solution, to_plan(graph, solution), 0, "plan.yaml")
    alone = find(Planner(once), Objective(goal="min-memory"))
    assert content["unplanned_step_seconds"] == pytest.approx(step_seconds)
    extra = alone.timeline.recompute_seconds
    assert content["recompute_seconds"] == pytest.approx(3 * extra)
    assert content["overhead"] == pytest.approx(3 * extra / step_seconds)
    shown = render(solution_report(solution, to_plan(graph, solution), 0))
    assert "step of 3 batches" in shown
