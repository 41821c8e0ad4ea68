"""The command line as its user sees it: exit codes, streams, files."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
from commands import MODEL, ROOT, Run, in_traces, profiled
from verifications import verification

import ckplan
from ckplan.cli.options import Amp, EjectFormat, Method, Shard
from ckplan.ejecting.settings import TOOLS
from ckplan.errors import CkplanError
from ckplan.gpus import find
from ckplan.graph import file as trace_file
from ckplan.graph.file import save
from ckplan.graph.sharding import SCHEMES
from ckplan.plan import file as plan_file
from ckplan.plan.resolve import resolve
from ckplan.simulating.simulate import simulate
from ckplan.solving.solve import METHODS
from ckplan.tracing.costs import apply_overhead
from ckplan.training.step import AMP
from ckplan.units import format_bytes
from ckplan.verifying import timing
from ckplan.verifying import verify as verifying

BAD_STEPS = """
import os
import signal
import torch
from torch import nn

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("no gradient")

class Stuck(torch.optim.SGD):
    def step(self, closure=None):
        raise ZeroDivisionError("no step")

@torch.library.custom_op("ckplan_test::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x * 1

opaque.register_autograd(lambda ctx, grad: grad)

class Net(nn.Module):
    def __init__(self, do):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.do = do
        self.count = 0

    def forward(self, x):
        self.count += 1
        return self.do(self, self.inner(x))

def second(net, x):
    return x if net.count < 2 else [][x.dim()]

def interrupt(net, x):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # if ignored
    os.kill(os.getpid(), signal.SIGINT)
    return x

def asking(net, x):
    return x if x.sum().item() < 1e30 else -x

def too_much(net, x):
    return opaque(x) + torch.ones(2**60)

def net(do, batch=None):
    return lambda: (Net(do), torch.randn(4, 8) if batch is None else batch)

def optimizer():
    model = nn.Linear(8, 8)
    own = Stuck(model.parameters(), lr=1.0)
    return {"model": model, "batch": torch.randn(4, 8), "optimizer": own}

in_backward = net(lambda net, x: Fails.apply(x))
in_second = net(second)
mismatch = net(lambda net, x: x.view(3, 3))
interrupted = net(interrupt)
is_nan = net(asking, torch.full((4, 8), float("nan")))
is_opaque = net(lambda net, x: opaque(x))
is_too_much = net(too_much)
"""


@pytest.fixture(scope="session")
def traced_large(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A trace of the model in a step that is mostly activations."""
    options = ("--set", "layers=9", "--set", "batch=4096")
    return profiled(tmp_path_factory.mktemp("traced"), *options)


@pytest.fixture
def large_trace(folder: Path, traced_large: bytes) -> Path:
    """That trace in traces/."""
    return in_traces(folder, traced_large)


# -- what goes well ----------------------------------------------------------------


def test_profile_writes_a_trace_and_shows_it(run: Run, folder: Path) -> None:
    ended = run("profile", "model.py")
    assert ended.code == 0
    assert ended.err.splitlines()[-1] == "wrote traces/model.json.gz"
    assert ended.out.startswith("Memory of one training step of Sequential\n")
    assert "[0..3]" in ended.out and "x4" in ended.out
    assert max(map(len, ended.out.splitlines())) <= 80
    assert "not the product" not in ended.out
    graph = ckplan.load_graph(folder / "traces/model.json.gz")
    assert graph.model == "Sequential"


def test_profile_json_is_all_of_stdout(run: Run) -> None:
    ended = run(
        "profile", "model.py:two", "--optimizer", "sgd", "--json", "-o", "t.json"
    )
    content = json.loads(ended.out)
    assert content["trace"] == "t.json"
    assert content["activation_bytes"] == 192
    found = {layer["call"]: layer["activation_bytes"] for layer in content["layers"]}
    assert found == {"0": 64, "1": 128}


def test_profile_passes_options_to_the_factory(run: Run) -> None:
    ended = run(
        "profile", "model.py", "--set", "layers=2", "--set", "width=16", "--json"
    )
    content = json.loads(ended.out)
    assert [layer["call"] for layer in content["layers"]] == [
        f"{block}.{place}" for block in range(2) for place in range(3)
    ]
    assert content["input_bytes"] == 4 * 16 * 4


def test_options_offer_all_that_there_is() -> None:
    known = (
        (Amp, AMP),
        (Shard, SCHEMES),
        (EjectFormat, ("torch", *TOOLS)),
        (Method, METHODS),
    )
    for offered, there in known:
        assert [one.value for one in offered] == [*there]


def test_solve_takes_the_newest_trace_and_writes_a_plan(run: Run, trace: Path) -> None:
    older = trace.with_name("older.json")
    older.write_text("{}")
    os.utime(older, (0, 0))
    ended = run("solve", "--budget", "1GiB")
    assert ended.code == 0
    lines = ended.err.splitlines()
    assert (lines[0], lines[-1]) == ("reading traces/step.json.gz", "wrote plan.yaml")
    assert ended.out.startswith("Plan for Sequential within 1.00 GiB\n")
    assert max(map(len, ended.out.splitlines())) <= 80
    assert ckplan.load_plan("plan.yaml").budget_bytes == 2**30


def test_solve_takes_the_reserve_off_the_budget(run: Run, trace: Path) -> None:
    argv = ("solve", str(trace), "--budget", "3MB", "--reserve", "1MB", "--json")
    content = json.loads(run(*argv).out)
    assert (content["budget_bytes"], content["reserve_bytes"]) == (3_000_000, 1_000_000)
    assert content["peak_bytes"] == content["unplanned_peak_bytes"]
    assert content["plan"] == "plan.yaml"
    assert ckplan.load_plan("plan.yaml").budget_bytes == 2_000_000


def for_card(trace: Path, gpu: str) -> Path:
    """The same trace, as if it were profiled for a card."""
    graph = ckplan.load_graph(trace)
    save(replace(graph, options={**graph.options, "gpu": gpu}), trace, force=True)
    return trace


def test_solve_takes_the_memory_of_a_card(run: Run, trace: Path) -> None:
    for_card(trace, "L4")
    ended = run("solve", str(trace), "--gpu", "l4", "--reserve", "1GiB", "--json")
    usable_bytes = find("L4").usable_bytes
    assert json.loads(ended.out)["budget_bytes"] == usable_bytes
    assert json.loads(ended.out)["reserve_bytes"] == 2**30
    assert ckplan.load_plan("plan.yaml").budget_bytes == usable_bytes - 2**30
    assert "budget of L4: 22.03 GiB less 400.00 MiB" in ended.err


def test_solve_takes_the_card_that_a_trace_is_for(run: Run, trace: Path) -> None:
    content = json.loads(run("solve", str(for_card(trace, "T4")), "--json").out)
    usable_bytes = find("T4").usable_bytes
    assert content["budget_bytes"] == usable_bytes
    assert ckplan.solve(ckplan.load_graph(trace)).budget_bytes == usable_bytes


@pytest.mark.parametrize("command", ["solve", "compare", "frontier"])
def test_a_trace_of_the_cpu_or_of_another_card_is_refused_with_the_command(
    command: str, run: Run, trace: Path, folder: Path
) -> None:
    ended = run(command, str(trace), "--gpu", "L4")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.splitlines() == [
        "error: cannot plan for L4: this trace has the bytes and seconds of the CPU",
        "  needed: a trace for L4; no GPU is needed to make it",
        "  try:    ckplan profile model.py --gpu L4",
    ]
    of_size = run(command, str(trace), "--gpu-memory", "16GB")
    assert (
        "cannot plan for a GPU: this trace has the bytes and seconds of the CPU"
        in of_size.err
    )
    for_card(trace, "RTX 4090")
    ended = run(command, str(trace), "--gpu", "A10G")
    assert ended.code == 1
    assert "cannot plan for A10G: this trace has the bytes and seconds of RTX 4090" in (
        ended.err
    )
    assert "--gpu A10G" in ended.err.splitlines()[-1]
    assert not (folder / "plan.yaml").exists()


def test_a_card_by_its_size_alone(run: Run, trace: Path) -> None:
    for_card(trace, "RTX 4090")
    ended = run("solve", str(trace), "--gpu-memory", "16GB", "--json")
    assert json.loads(ended.out)["budget_bytes"] == 16 * 10**9 - 600 * 2**20
    assert "budget of a card of 16GB: 14.90 GiB less 600.00 MiB" in ended.err
    plan = ckplan.solve(trace, gpu_memory="16GB")
    assert plan == ckplan.load_plan("plan.yaml")
    small = run("solve", str(trace), "--gpu-memory", "500MB", "--force")
    assert (small.code, small.err.splitlines()[0]) == (
        1,
        "error: cannot plan for a card of 476.84 MiB: CUDA itself takes 600.00 MiB",
    )


def test_what_is_not_of_the_card_is_said(run: Run, trace: Path) -> None:
    for_card(trace, "H200")
    ended = run("solve", str(trace), "--gpu", "MI300X")
    assert ended.code == 0
    assert "warning: bytes are those of a CPU" in ended.err  # as this trace was
    graph = ckplan.load_graph(trace)
    on_cuda = {**graph.fingerprint, "device": "cuda"}
    save(replace(graph, fingerprint=on_cuda), trace, force=True)
    ended = run("solve", str(trace), "--gpu", "MI300X", "--force")
    assert (
        "warning: bytes and seconds are those of H200: the kernels of rocm are not "
        "known" in ended.err
    )
    assert "warning" not in run("solve", str(trace), "--gpu", "H200", "--force").err


def test_python_takes_a_reserve_off_the_memory_of_a_card(trace: Path) -> None:
    for_card(trace, "A100 40GB")
    plan = ckplan.solve(ckplan.load_graph(trace), gpu="A100 40GB", reserve="2GiB")
    assert plan.budget_bytes == find("A100 40GB").usable_bytes - 2 * 2**30


def test_python_refuses_a_reserve_without_a_budget(trace: Path) -> None:
    with pytest.raises(CkplanError, match=r"reserve 2\.00 GiB: there is no"):
        ckplan.solve(ckplan.load_graph(trace), goal="min-memory", reserve="2GiB")


def test_frontier_adds_the_reserve_to_what_a_plan_needs(
    run: Run, large_trace: Path
) -> None:
    argv = ("frontier", str(large_trace), "--points", "3", "--reserve", "1GiB")
    points = json.loads(run(*argv, "--json").out)["points"]
    assert all(p["budget_bytes"] == p["peak_bytes"] + 2**30 for p in points)
    text = run(*argv).out.splitlines()
    assert "with 1.00 GiB in reserve" in text[0]
    assert text[1].split()[0] == "budget"
    needed = [" ".join(line.split()[:2]) for line in text[2:]]
    assert needed == [format_bytes(point["budget_bytes"]) for point in points]


def test_compare_takes_the_reserve_off_the_budget(run: Run, large_trace: Path) -> None:
    for_card(large_trace, "T4")
    argv = ("compare", str(large_trace), "--gpu", "T4", "--reserve", "1GiB")
    content = json.loads(run(*argv, "--json").out)
    assert content["budget_bytes"] == find("T4").usable_bytes
    assert "within 13.41 GiB, with 1.00 GiB in reserve\n" in run(*argv).out
    peak = content["baselines"][0]["peak_bytes"]
    tight = ("compare", str(large_trace), "--budget", str(peak), "--reserve", "1")
    rows = json.loads(run(*tight, "--json").out)["baselines"]
    assert not rows[0]["fits"]
    assert rows[-1]["fits"]


def test_solve_overwrites_by_force(run: Run, trace: Path, folder: Path) -> None:
    (folder / "plan.yaml").write_text("mine")
    assert run("solve", str(trace), "--budget", "80GB", "--force").code == 0
    assert (folder / "plan.yaml").read_text().startswith("ckplan: 1\n")


def test_a_plan_is_not_written_over_its_trace(run: Run, trace: Path) -> None:
    before = trace.read_bytes()
    ended = run("solve", str(trace), "--budget", "80GB", "--force", "-o", str(trace))
    assert (ended.code, trace.read_bytes()) == (1, before)
    assert "a plan is YAML" in ended.err and "try:    -o plan.yaml" in ended.err


@pytest.mark.parametrize("goal", ["--max-overhead 50%", "--min-memory", "--knee"])
def test_solve_takes_a_goal_in_place_of_a_budget(
    goal: str, run: Run, large_trace: Path
) -> None:
    content = json.loads(run("solve", str(large_trace), *goal.split(), "--json").out)
    plan = ckplan.load_plan("plan.yaml")
    assert content["peak_bytes"] <= content["budget_bytes"] == plan.budget_bytes
    assert content["peak_bytes"] < content["unplanned_peak_bytes"]
    if "max" in goal:
        assert content["overhead"] <= 0.5
    if "min" in goal:
        assert content["peak_bytes"] == content["floor_bytes"]


def test_solve_of_a_step_that_fits_says_so_and_writes_an_empty_plan(
    run: Run, trace: Path
) -> None:
    ended = run("solve", str(trace), "--budget", "1GiB")
    assert "no plan is needed" in ended.err
    assert ckplan.load_plan("plan.yaml").regions == ()


def test_frontier_goes_from_the_floor_to_the_unplanned_step(
    run: Run, large_trace: Path
) -> None:
    ended = run("frontier", "--json")
    points = json.loads(ended.out)["points"]
    peaks = [point["peak_bytes"] for point in points]
    assert peaks == sorted(peaks)
    assert points[-1]["overhead"] == points[-1]["regions"] == 0
    assert points[0]["overhead"] >= points[0]["bound_overhead"] - 1e-9
    assert "every call" in {
        other["name"] for other in json.loads(ended.out)["baselines"]
    }
    table = run("frontier", str(large_trace), "--points", "3").out
    assert table.startswith("Frontier of Sequential\n")
    assert "100.0 %" in table.splitlines()[-1]
    assert max(map(len, table.splitlines())) <= 80


def test_frontier_marks_what_fits_on_a_card_and_shows_no_memory_twice(
    run: Run, large_trace: Path
) -> None:
    for_card(large_trace, "T4")
    argv = ("frontier", str(large_trace), "--points", "500")
    size = json.loads(run(*argv, "--json").out)["points"][-1]["peak_bytes"]
    card = ("--gpu-memory", f"{size + 600 * 2**20}B")
    points = json.loads(run(*argv, *card, "--json").out)["points"]
    assert {point["fits"] for point in points} == {True, False}
    for point in points:
        assert point["fits"] == (point["reserved_bytes"] <= size)
    table = run(*argv, *card).out.splitlines()
    assert table[1].split()[:3] == ["peak", "reserved", "fits"]
    peaks = [" ".join(line.split()[:2]) for line in table[2:]]
    assert len(peaks) == len({*peaks}) < len(points)
    assert max(map(len, table)) <= 80


@pytest.mark.parametrize(
    ("file", "start"), [("f.png", b"\x89PNG"), ("f.svg", b"<?xml")]
)
def test_frontier_draws(
    file: str, start: bytes, run: Run, large_trace: Path, folder: Path
) -> None:
    ended = run("frontier", str(large_trace), "--points", "3", "--plot", file)
    assert (ended.code, ended.err.splitlines()[-1]) == (0, f"wrote {file}")
    assert (folder / file).read_bytes().startswith(start)
    again = run("frontier", str(large_trace), "--plot", file)
    assert again.err.startswith(f"error: cannot write '{file}': it already exists")
    assert run("frontier", str(large_trace), "--plot", file, "--force").code == 0


def test_frontier_says_which_extra_draws(
    run: Run, trace: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended = run("frontier", str(trace), "--plot", "f.png")
    assert ended.code == 1
    assert ended.err.splitlines()[0] == (
        "error: cannot draw: matplotlib is not installed"
    )
    assert not (folder / "f.png").exists()


def test_compare_puts_practice_beside_the_plan(run: Run, large_trace: Path) -> None:
    argv = ("compare", str(large_trace), "--budget", "100%")
    rows = json.loads(run(*argv, "--json").out)["baselines"]
    assert rows[0]["name"] == "none"
    assert rows[-1]["name"] == "this plan"
    assert {"every call", "sqrt(n) segments", "tf memory"} <= {
        row["name"] for row in rows
    }
    assert all(
        row["fits"] == (row["peak_bytes"] <= rows[0]["peak_bytes"]) for row in rows
    )
    text = run(*argv).out
    assert all(row["name"] in text for row in rows)


def test_show_tells_traces_from_plans_by_content(
    run: Run, folder: Path, traced: bytes
) -> None:
    (folder / "a").write_bytes(traced)
    (folder / "b").write_bytes(gzip.decompress(traced))
    (folder / "c").write_text("ckplan: 1\nregions: [{calls: h.0}]\n")
    assert run("show", "a").out == run("show", "b").out
    assert run("show", "a").out.startswith("Memory of one training step")
    assert run("show", "c").out.startswith("Plan for any model")
    assert json.loads(run("show", "a", "--json").out)["model"] == "Sequential"
    shown = json.loads(run("show", "c", "--json").out)
    region = {"calls": "h.0", "by": "program", "save": [], "encode": {}}
    assert shown["regions"] == [region]


def test_verify_compares_and_passes(run: Run, folder: Path) -> None:
    (folder / "plan.yaml").write_text("ckplan: 1\nregions: [{calls: '0'}]\n")
    ended = run("verify", "model.py", "plan.yaml", "--steps", "1", "--json")
    content = json.loads(ended.out)
    assert (ended.code, content["passed"], content["regions_ran"]) == (0, True, 1)


def test_verify_names_regions_that_each_step_records_anew(
    run: Run, folder: Path
) -> None:
    (folder / "drawing.py").write_text(DRAWING)
    (folder / "plan.yaml").write_text(
        "ckplan: 1\nregions: [{calls: '0'}, {calls: '1'}]\n"
    )
    ended = run("verify", "drawing.py", "plan.yaml", "--steps", "0", "--json")
    assert ended.code == 0
    assert json.loads(ended.out)["regions_recorded"] == ["1"]
    assert "warning: each step records the forwards of 1 anew, as nothing" in ended.err
    shown = run("verify", "drawing.py", "plan.yaml", "--steps", "0").out
    assert "recorded anew  1\n" in shown


DRAWING = """
import torch
from torch import nn

class Noise(nn.Module):
    def forward(self, x):
        generator = torch.Generator().manual_seed(0)
        return x + torch.randn(8, generator=generator)

def build():
    return nn.Sequential(nn.Linear(8, 8), Noise(), nn.Tanh()), torch.ones(4, 8)
"""


def test_a_profile_after_calibrate_has_the_costs_of_the_measured_step(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPLAN_CACHE", str(folder / "costs"))
    monkeypatch.setattr(
        apply_overhead, "_measure", lambda _: (20e-6, 30e-6, 0, 0, 0, 0)
    )
    (folder / "plan.yaml").write_text("ckplan: 1\nregions: [{calls: '0'}]\n")
    assert run("profile", "model.py").code == 0
    before = trace_file.load(folder / "traces" / "model.json.gz")
    plan = resolve(plan_file.load(folder / "plan.yaml"), before)
    timeline = simulate(before, plan)
    slower = timeline.overhead + timeline.engine_overhead  # the engine takes twice that
    compare_times = verifying.compare_times

    def compared(*args: Any) -> timing.Timing:
        found = compare_times(*args)
        overhead = timing.Quartiles(slower, slower, slower)
        return replace(found, overhead=overhead, problem=None)

    monkeypatch.setattr(verifying, "compare_times", compared)
    monkeypatch.setattr(verifying, "machine_load", lambda: timing.Load(0.0, 2))
    command = ("verify", "model.py", "plan.yaml", "--steps", "3", "--calibrate")
    ended = run(*command)
    assert ended.code == 0
    assert "calibrated: the engine takes 2.00 times what the trace says" in ended.err
    assert run("profile", "model.py", "--force").code == 0
    after = trace_file.load(folder / "traces" / "model.json.gz")
    assert astuple(before.engine)[:2] == (20e-6, 30e-6)
    assert astuple(after.engine)[:2] == pytest.approx((40e-6, 60e-6), rel=1e-3)

    monkeypatch.setattr(verifying, "machine_load", lambda: timing.Load(9.0, 2))
    monkeypatch.setattr(verifying, "compare_times", compare_times)
    kept = snapshot(folder / "costs")
    ended = run(*command)
    assert ended.code == 1
    error = ended.err[ended.err.index("error: ") :].splitlines()
    assert error[0].startswith("error: cannot calibrate: time could not be measured:")
    assert len(error) == 3
    assert snapshot(folder / "costs") == kept


# -- what does not -----------------------------------------------------------------

NOT_PYTHON = "this is no Python\n"
PLAN = "ckplan: 1\nregions: []\n"

BAD_INPUT = [
    ("profile nope.py", "cannot read the workload: nope.py is not there"),
    ("profile nope.module:build", "cannot import the workload: nope.module"),
    ("profile notes.txt", "cannot read the workload: notes.txt is not a Python file"),
    ("fit plan.yaml", "cannot read the workload: plan.yaml is a plan, not a Python"),
    ("verify cut.json --budget 60%", "cannot read the workload: cut.json is a trace"),
    ("show words.json", "cannot read the trace: words.json is not a ckplan trace"),
    ("profile words.py", "cannot read the workload: words.py is not valid Python"),
    (
        "profile values.py",
        "cannot build the workload: values.py raised ValueError: not one",
    ),
    ("profile empty.py", "cannot build a workload: empty.py has no factory 'build'"),
    ("profile model.py:biuld", "cannot build the workload: model.py has no function"),
    (
        "profile model.py:raises",
        "cannot build the workload: model.py:raises raised OSError: no data",
    ),
    (
        "profile model.py:nonsense",
        "cannot build the workload: what model.py:nonsense returned is of type str",
    ),
    ("profile model.py:elsewhere", "the batch is on another device: a tensor of shape"),
    ("profile model.py:frozen", "the loss requires no gradient"),
    ("profile model.py:quits", "cannot use the workload: it called sys.exit("),
    ("profile model.py --set depth=3", "model.py: the factory takes no option 'depth'"),
    ("profile model.py --set 3", "cannot read the option: --set '3'"),
    ("profile model.py --optimizer lamb", "unknown optimizer 'lamb'"),
    ("profile model.py --clip 0", "cannot clip gradients to the norm 0.0"),
    ("profile model.py --clip inf", "cannot clip gradients to the norm inf"),
    (
        "profile model.py --optimizer adamw:fast",
        "the optimizer 'adamw' has no kernel 'fast'",
    ),
    ("profile model.py --optimizer own", "the workload has no optimizer of its own"),
    ("profile model.py --device tpu", "cannot profile on the device 'tpu'"),
    ("profile model.py -o traces", "cannot write 'traces': it is a folder"),
    (
        "solve nope.json.gz --budget 1GB",
        "cannot read the trace 'nope.json.gz': no such",
    ),
    ("solve cut.json.gz --budget 1GB", "cannot read the trace: cut.json.gz is cut or"),
    ("solve odd.json --budget 1GB", "cannot read the trace: odd.json has unknown key"),
    ("solve empty.py --budget 1GB", "cannot read the trace: empty.py is a workload"),
    ("solve --budget 12bananas", "cannot read the budget '12bananas': unknown unit"),
    ("solve --budget -1", "cannot read the budget '-1': not a number with a unit"),
    ("solve --budget 0", "cannot plan for the budget '0': it is 0 bytes"),
    ("solve --budget 1GB --reserve much", "cannot read the size 'much'"),
    ("solve --budget 1GB --reserve 1GB", "cannot plan for the budget 953.67 MiB: all"),
    ("solve --knee --reserve 1GB", "cannot subtract the reserve 953.67 MiB: there"),
    (
        "solve --max-overhead 5% --reserve 1GB",
        "cannot subtract the reserve 953.67 MiB: there",
    ),
    ("solve --max-overhead much", "cannot read the overhead 'much'"),
    ("solve --max-overhead -5%", "cannot read the overhead '-5%'"),
    ("frontier nope.json", "cannot read the trace 'nope.json': no such file"),
    ("frontier --plot f.jpg", "cannot draw 'f.jpg': its format is not known"),
    ("compare nope.json", "cannot read the trace 'nope.json': no such file"),
    ("compare --budget 12bananas", "cannot read the budget '12bananas': unknown"),
    ("show nope.yaml", "cannot read the trace or plan 'nope.yaml': no such file"),
    ("show cut.json.gz", "cannot read the trace: cut.json.gz is cut or damaged"),
    ("show cut.json", "cannot read the trace: cut.json is not complete JSON"),
    ("show odd.json", "cannot read the trace: odd.json has unknown key 'colour'"),
    ("show odd.yaml", "odd.yaml, line 2: unknown key 'colour'"),
    ("verify model.py plan.yaml --cap 1GB", "cannot cap the memory of cpu"),
    ("verify model.py nope.yaml", "cannot read the plan 'nope.yaml': no such file"),
    ("verify model.py odd.yaml", "odd.yaml, line 2: unknown key 'colour'"),
    ("verify nope.py plan.yaml", "cannot read the workload: nope.py is not there"),
    (
        "verify model.py plan.yaml --calibrate",
        "cannot calibrate: there is no trace of this workload",
    ),
    (
        "verify model.py plan.yaml --trace traces/step.json.gz --calibrate --steps 2",
        "cannot calibrate: 2 timed steps have no spread",
    ),
    (
        "verify model.py plan.yaml --fake --calibrate",
        "cannot calibrate a dry run: it has no seconds",
    ),
    (
        "verify model.py plan.yaml --fake --energy",
        "cannot measure the energy of a dry run: it runs nothing",
    ),
    (
        "verify model.py --budget 90% --save new.yaml --report notes.txt",
        "cannot write 'notes.txt': it already exists",
    ),
    (
        "tune model.py --budget 1GiB -o traces/step.json.gz --force",
        "cannot write the plan to 'traces/step.json.gz': a plan is YAML",
    ),
    (
        "profile bad.py:in_backward",
        "the first step raised ValueError in backward: no gradient",
    ),
    (
        "verify bad.py:in_backward plan.yaml",
        "the unplanned step raised ValueError in backward: no gradient",
    ),
    (
        "profile bad.py:optimizer",
        "the first step raised ZeroDivisionError in the optimizer: no step",
    ),
    (
        "profile bad.py:mismatch",
        "the first step raised RuntimeError in forward: shape '[3, 3]' is invalid",
    ),
    ("profile bad.py:in_second", "the second step raised IndexError in forward: list"),
    ("profile bad.py:is_nan", "the loss of the first step is nan"),
    ("verify bad.py:is_nan plan.yaml", "the loss of step 1 is nan"),
    ("profile bad.py:is_too_much", "the step does not fit in memory"),
    ("profile bad.py:interrupted", "interrupted"),
]


@pytest.mark.parametrize(("command", "message"), BAD_INPUT)
def test_bad_input_ends_with_one_and_three_lines(
    command: str, message: str, run: Run, trace: Path, folder: Path
) -> None:
    content = json.loads(gzip.decompress(trace.read_bytes()))
    for name, text in {
        "notes.txt": NOT_PYTHON,
        "words.py": NOT_PYTHON,
        "empty.py": "",
        "values.py": "raise ValueError('not one')\n",
        "odd.json": json.dumps({**content, "colour": "red"}),
        "odd.yaml": PLAN.replace("\n", "\ncolour: red\n", 1),
        "cut.json": json.dumps(content)[:1000],
        "plan.yaml": PLAN,
        "words.json": '{"colour": "red"}',
        "bad.py": BAD_STEPS,
    }.items():
        (folder / name).write_text(text)
    (folder / "cut.json.gz").write_bytes(trace.read_bytes()[:1000])
    before = snapshot(folder)
    ended = run(*command.split(), *(["-o", "new.yaml"] if "solve" in command else []))
    error = ended.err[ended.err.index("error: ") :].splitlines()
    assert (ended.code, ended.out) == (1, "")
    assert error[0].startswith(f"error: {message}")
    assert [line[:10] for line in error[1:]] == ["  needed: ", "  try:    "]
    assert "Traceback" not in ended.err
    assert snapshot(folder) == before


def snapshot(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(p): p.read_bytes() for p in files if "__pycache__" not in p.parts}


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("profile model.py", "traces/model.json.gz"),
        ("profile model.py -o mine.json", "mine.json"),
        ("solve traces/step.json.gz --budget 1GB", "plan.yaml"),
        ("solve nope.json.gz --budget 1GB -o mine.yaml", "mine.yaml"),
    ],
)
def test_existing_output_asks_for_force_before_any_work(
    command: str, path: str, run: Run, folder: Path
) -> None:
    (folder / path).parent.mkdir(exist_ok=True)
    (folder / path).write_text("mine")
    ended = run(*command.split())
    assert ended.code == 1
    assert ended.err.splitlines()[0] == (
        f"error: cannot write '{path}': it already exists"
    )
    assert "--force" in ended.err
    assert (folder / path).read_text() == "mine"


def test_solve_without_any_trace_says_how_to_get_one(run: Run) -> None:
    ended = run("solve", "--budget", "1GB")
    assert ended.code == 1
    assert ended.err.splitlines()[0] == (
        "error: cannot find a trace: there is none in traces/"
    )


def test_budget_below_the_floor_exits_with_three(
    run: Run, trace: Path, folder: Path
) -> None:
    ended = run("solve", str(trace), "--budget", "1kB")
    assert (ended.code, ended.out) == (3, "")
    assert ended.err.startswith(
        "error: no plan fits 1000 B: the floor of Sequential is"
    )
    assert "needed: at least" in ended.err
    assert not (folder / "plan.yaml").exists()


def test_difference_exits_with_four(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "plan.yaml").write_text(PLAN)
    different = ("gradient of 0.weight, step 1",)
    found = verification(gradients_equal=False, different=different)
    monkeypatch.setattr(verifying, "verify", lambda *args, **kwargs: found)
    ended = run("verify", "model.py", "plan.yaml")
    assert ended.code == 4
    assert "differs       gradient of 0.weight, step 1" in ended.out
    assert "\nerror: the planned step differs" in f"\n{ended.err}"


@pytest.mark.parametrize(("peak_mib", "told"), [(16, False), (45, True)])
def test_a_prediction_of_another_step_is_told(
    run: Run,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    peak_mib: int,
    told: bool,
) -> None:
    (folder / "plan.yaml").write_text(PLAN)
    found = verification(measured_peak_bytes=peak_mib * 2**20 * 15 // 16)
    monkeypatch.setattr(verifying, "verify", lambda *args, **kwargs: found)
    ended = run("verify", "model.py", "plan.yaml")
    said = f"peak is {peak_mib / 16:.2f} times what the plan predicts"
    assert (ended.code, said in ended.err) == (0, told)


@pytest.mark.parametrize(
    "command",
    [
        "",
        "nope",
        "solve traces/step.json.gz",
        "solve --budget 1GB --knee",
        "solve --budget 1GB --gpu L4",
        "compare --budget 1GB --gpu L4",
        "solve --min-memory --knee",
        "frontier --points 1",
        "profile",
        "profile model.py --amp int8",
        "profile model.py --accumulate 0",
        "verify model.py",
        "verify model.py plan.yaml --steps -1",
        "show plan.yaml --nope",
    ],
)
def test_wrong_usage_exits_with_two(command: str, run: Run, trace: Path) -> None:
    ended = run(*command.split())
    assert ended.code == 2
    assert "Usage: ckplan" in ended.out + ended.err


@pytest.mark.parametrize(
    "argv",
    [
        "--traceback show nope",
        "show nope --traceback",
        "record --traceback nope.py",
    ],
)
def test_traceback_is_shown_if_asked_for(argv: str, run: Run) -> None:
    ended = run(*argv.split())
    assert ended.code == 1
    assert ended.err.startswith("Traceback (most recent call last)")
    assert "Traceback" not in run("show", "nope").err


def test_bug_says_so_without_a_traceback(
    run: Run, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckplan.simulating.simulate.simulate", lambda graph: 1 / 0)
    ended = run("show", str(trace))
    assert ended.code == 1
    assert ended.err.splitlines() == [
        "error: ckplan failed: ZeroDivisionError: division by zero",
        "  needed: nothing from you: this is a bug in ckplan",
        "  try:    the same command with --traceback, and report its output",
    ]


def test_an_op_without_a_fake_kernel_is_named_with_what_to_do(
    run: Run, folder: Path
) -> None:
    (folder / "bad.py").write_text(BAD_STEPS)
    ended = run("profile", "bad.py:is_opaque", "--json")
    (note,) = (n for n in json.loads(ended.out)["notes"] if "traced on real" in n)
    assert "the op ckplan_test::opaque has no fake kernel" in note
    assert "torch.library.register_fake" in note


def test_a_kernel_that_gets_no_memory_is_named(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        del args
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("ckplan.tracing.costs.op_arguments.make_tensor", full)
    before = snapshot(folder)
    ended = run("profile", "model.py", "--fresh")
    error = ended.err[ended.err.index("error: ") :].splitlines()
    assert (ended.code, ended.out, len(error)) == (1, "", 3)
    assert error[0].startswith("error: cannot measure aten.")
    assert "can't allocate memory" in error[0]
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device"), "cannot write 'traces/mode"),
    ],
)
def test_an_end_while_writing_leaves_no_half_written_file(
    ending: BaseException,
    message: str,
    run: Run,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fsync(file: int) -> None:
        raise ending

    monkeypatch.setattr(os, "fsync", fsync)
    before = snapshot(folder)
    ended = run("profile", "model.py")
    error = ended.err[ended.err.index("error: ") :].splitlines()
    assert (ended.code, ended.out, len(error)) == (1, "", 3)
    assert error[0].startswith(f"error: {message}")
    assert snapshot(folder) == before


def test_what_a_workload_raises_is_never_a_bare_traceback(
    run: Run, folder: Path
) -> None:
    odd = "\nclass Odd(BaseException):\n    pass\n\ndef odd():\n    raise Odd('no')\n"
    (folder / "model.py").write_text(MODEL + odd)
    ended = run("profile", "model.py:odd")
    assert ended.code == 1
    assert "error: cannot use the workload: it raised Odd: no\n" in ended.err


def test_a_module_of_this_folder_is_found_by_its_name(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "dotted_here").mkdir()
    (folder / "dotted_here" / "__init__.py").touch()
    shutil.copy(folder / "model.py", folder / "dotted_here" / "inside.py")
    paths = [one for one in sys.path if one not in ("", str(folder))]
    monkeypatch.setattr(sys, "path", paths)  # as the installed command has it
    ended = run("profile", "dotted_here.inside:build", "-o", "d.json.gz")
    assert ended.code == 0, ended.err


def test_a_file_of_a_package_is_told_its_name(run: Run, folder: Path) -> None:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "net.py").write_text("from . import other\n")
    ended = run("profile", "pkg/net.py")
    assert ended.code == 1
    assert ended.err.splitlines()[-1] == "  try:    ckplan profile pkg.net:build"


def test_a_place_in_a_plan_is_named_once(run: Run, folder: Path) -> None:
    (folder / "plan.yaml").write_text("ckplan: 1\nregions:\n  - run: blocks.0\n")
    ended = run("show", "plan.yaml")
    said = "error: plan.yaml, line 3: 'run' is a single value"
    assert ended.err.splitlines()[0] == said


def test_a_closed_output_is_no_bug(trace: Path) -> None:
    ended = subprocess.run(
        ["/bin/bash", "-c", f"'{sys.executable}' -m ckplan show {trace} >&-"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[0] == (
        "error: cannot write the output: the standard output is closed"
    )


def test_a_trace_without_a_name_is_no_trace(
    run: Run, folder: Path, trace: Path
) -> None:
    content = json.loads(gzip.decompress(trace.read_bytes()))
    nameless = json.dumps({**content, "model": None})
    (folder / "nameless.json").write_text(nameless)
    ended = run("show", "nameless.json")
    assert ended.code == 1
    assert "the model has no name" in ended.err


def test_an_interrupt_inside_of_exec_ends_with_the_code_of_others(folder: Path) -> None:
    """Python remembers such a one, and would end by the signal."""
    interrupts = MODEL + "\ndef interrupted():\n    exec('raise KeyboardInterrupt')\n"
    (folder / "model.py").write_text(interrupts)
    command = [sys.executable, "-m", "ckplan", "profile", "model.py:interrupted"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr.splitlines()[-3]) == (
        1,
        "error: interrupted",
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_onto_a_full_disk_is_no_bug(trace: Path, unbuffered: str) -> None:
    ended = subprocess.run(
        ["/bin/bash", "-c", f"'{sys.executable}' -m ckplan show {trace} > /dev/full"],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": unbuffered,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[0] == (
        "error: cannot write all of the output: no space left on device"
    )


def test_reader_that_has_had_enough_is_no_error(trace: Path) -> None:
    shell = f"'{sys.executable}' -m ckplan show {trace} --json | true; exec >&2"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    ended = subprocess.run(
        ["/bin/bash", "-c", f"{shell}; exit ${{PIPESTATUS[0]}}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in ended.stderr
    assert "Broken pipe" not in ended.stderr


def test_module_runs_as_the_program(folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "ckplan", "--version"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == f"ckplan {ckplan.__version__}\n"
