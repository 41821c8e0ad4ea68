"""What deep models cost: as much for the last layer as for the first."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import graphs
import pytest
import torch
from torch import nn

import ckplan
from ckplan.applying.hooks import choices
from ckplan.ejecting.settings import setting_for
from ckplan.graph.file import dumps
from ckplan.graph.graph import Graph
from ckplan.graph.records import OUTSIDE_CALLS
from ckplan.graph.redrawn import with_costs_of
from ckplan.plan.names import OpName
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.region import Region
from ckplan.plan.resolve import describe
from ckplan.simulating import simulate
from ckplan.simulating.simulate import Simulator
from ckplan.solving.baselines import min_regions_to_fit, run_lengths
from ckplan.solving.common_strategies import strategy_baselines
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.menu import Menus
from ckplan.solving.nesting import Nesting
from ckplan.solving.segmentation import segmentation_frontier

COSTS = ("workspace", "flops", "moved_bytes", "seconds", "launch_seconds")
ROOT = Path(__file__).parents[2]
LLAMA_3_70B = (
    "layers=80 width=8192 heads=64 groups=8 inner=28672 vocab=128256 batch=1 "
    "length=4096 dtype=bfloat16"
)


def measured(layers: int) -> tuple[int, int]:
    """Ops, and bytes of the file before it is packed."""
    block = [nn.Linear(16, 32), nn.GELU(), nn.Dropout(), nn.Linear(32, 16)]
    model = nn.Sequential(*(nn.Sequential(*block) for _ in range(layers)))
    graph = ckplan.profile(model, torch.ones(4, 16), gpu="T4", replay=False)
    return len(graph.ops), len(dumps(graph))


def test_every_layer_adds_as_many_ops_and_bytes() -> None:
    (ops_4, bytes_4), (ops_8, bytes_8), (ops_16, bytes_16) = map(measured, (4, 8, 16))
    assert ops_16 - ops_8 == 2 * (ops_8 - ops_4)
    assert bytes_16 - bytes_8 == pytest.approx(2 * (bytes_8 - bytes_4), rel=0.1)


def least_seconds(run: Callable[[], object]) -> float:
    """CPU time of this thread alone, the least of three."""
    found = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            start = time.thread_time()
            run()
            found.append(time.thread_time() - start)
    finally:
        gc.enable()
    return min(found)


def growth(task: Callable[[int], Callable[[], object]], layers: int) -> float:
    """How much longer a task takes on four times the layers: 4 if each costs as much.

    16 if each is compared with all others.
    """
    return least_seconds(task(4 * layers)) / least_seconds(task(layers))


def naming_masks(layers: int) -> Callable[[], object]:
    graph = graphs.chain(layers)
    places = frozenset((one.op, one.output) for one in graph.encodings)
    return lambda: describe(graph, [Region(0, encode=places)])


def comparing_gaps(layers: int) -> Callable[[], object]:
    graph = graphs.chain(layers)
    simulator, menus = Simulator(graph), Menus(Simulator(graph))
    units = [(block, None) for block in graph.children[0]]
    options = {unit: menus.whole(unit) for unit in units}
    segmentation_frontier(
        simulator, units, options.__getitem__
    )  # which looks at each unit once
    return lambda: segmentation_frontier(
        simulator, units, lambda unit: options[unit][:1]
    )


def nesting(layers: int) -> Callable[[], object]:
    graph = graphs.chain(layers)
    region = Region(0, inner=tuple(map(Region, graph.children[0])))
    view = Simulator(graph).view(0)
    view.parts(region)
    return lambda: view.parts(region)


@pytest.mark.serial
@pytest.mark.parametrize("task", [naming_masks, comparing_gaps, nesting])
def test_four_times_the_layers_take_four_times_as_long(
    task: Callable[[int], Callable[[], object]],
) -> None:
    tries = (growth(task, 100) for _ in range(3))  # others may use the machine, too
    assert any(times < 8 for times in tries)


def seconds_comparing(layers: int) -> float:
    """What later forwards are compared with, found in the first of a model."""
    make, seconds = choices.make_guards, []

    def measured(*seen: object) -> object:
        seconds.append(least_seconds(lambda: make(*seen)))  # type: ignore[arg-type]
        return make(*seen)  # type: ignore[arg-type]

    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout())

    model = nn.Sequential(*(layer() for _ in range(layers)))
    ops = [OpName.parse(f"{i}.0/addmm") for i in range(layers)]
    masks = [(OpName.parse(f"{i}.2/bernoulli_"), "bits") for i in range(layers)]
    region = PlannedRegion(".", save=tuple(ops), encode=tuple(masks))
    ckplan.apply(model, Plan(regions=(region,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "make_guards", measured)
        model(torch.ones(4, 8)).sum().backward()
    (status,) = ckplan.status(model).regions
    assert not status.missing
    (found,) = seconds
    return found


def test_what_later_forwards_are_compared_with_is_found_once() -> None:
    tries = (seconds_comparing(200) / seconds_comparing(50) for _ in range(3))
    assert any(times < 8 for times in tries)


def feed_forward() -> nn.Module:
    up, down = nn.Linear(16, 32), nn.Linear(32, 16)
    return nn.Sequential(up, nn.GELU(), nn.Dropout(), down)


@pytest.mark.parametrize("amp", [None, "bf16"])
def test_layers_that_do_the_same_are_looked_at_once(
    amp: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autocast holds casts of their weights until all of them are over."""
    effects, effect = [0], simulate.find_effect

    def counted(*args: object) -> object:
        effects[0] += 1
        return effect(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(simulate, "find_effect", counted)
    looked: list[int] = []
    for layers in (12, 24):
        model = nn.Sequential(*(feed_forward() for _ in range(layers)))
        graph = ckplan.profile(
            model, torch.ones(4, 16), amp=amp, gpu="T4", replay=False
        )
        simulator = Simulator(graph)
        menus = Menus(simulator)
        inner = graph.children[graph.children[OUTSIDE_CALLS][0]]
        assert len({menus.signature((call, None)) for call in inner[1:-1]}) == 1
        effects[0] = 0
        nesting = Nesting(simulator, menus)
        for first, last in ((1, 3), (4, 6), (7, 9), (1, 9)):
            nesting.options((inner[first], inner[last]))
        looked.append(effects[0])
    assert 0 < looked[0] == looked[1] < 400, looked


def num_replays(monkeypatch: pytest.MonkeyPatch, task: Callable[[], object]) -> int:
    """How often a task asks the simulator for a whole step."""
    replays, run = [0], Simulator.run

    def counted(*args: object) -> object:
        replays[0] += 1
        return run(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Simulator, "run", counted)
        task()
    return replays[0]


def telling(tool: str, graph: Graph) -> object:
    return setting_for(graph, Plan(regions=(PlannedRegion("h.0"),)), tool)


def listing_practices(graph: Graph) -> object:
    simulator = Simulator(graph)
    budget = simulator.run().peak_bytes * 2 // 3
    return strategy_baselines(simulator, Menus(simulator), MemoryLimit(budget))


@pytest.mark.parametrize(
    "task",
    [partial(telling, "megatron"), partial(telling, "deepspeed"), listing_practices],
)
def test_deep_models_are_not_cut_in_every_way(
    task: Callable[[Graph], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (
        num_replays(monkeypatch, partial(task, graphs.chain(layers)))
        for layers in (65, 260)
    )
    assert many < 3 * few


def test_runs_of_many_layers_are_of_every_number_once() -> None:
    assert run_lengths(64) == list(range(1, 65))
    assert run_lengths(100)[-4:] == [25, 34, 50, 100]
    for count in (100, 101, 360):
        lengths = run_lengths(count)
        numbers = [-(-count // length) for length in lengths]
        assert numbers == sorted(set(numbers), reverse=True)
        assert {*numbers} == {-(-count // length) for length in range(1, count + 1)}
        assert all(-(-count // (n - 1)) > -(-count // n) for n in lengths if n > 1)


@pytest.mark.parametrize(("layers", "width_bytes"), [(12, 100), (80, 10_000)])
def test_as_few_regions_as_needed_are_found(layers: int, width_bytes: int) -> None:
    graph = graphs.chain(layers, width_bytes=width_bytes, hidden_bytes=4 * width_bytes)
    simulator = Simulator(graph)
    regions = [Region(block, "rerun") for block in graph.children[0]]
    peaks = [simulator.run(regions[:k]).peak_bytes for k in range(layers + 1)]
    assert (peaks[0] > peaks[-1]) == (width_bytes > 100)  # else random states are more
    for budget in (peaks[0] + 1, *peaks, peaks[-1] - 1):
        expected = next((k for k, p in enumerate(peaks) if p <= budget), layers)
        assert min_regions_to_fit(simulator, regions, MemoryLimit(budget)) == expected


@pytest.mark.slow
def test_llama_3_70b_is_profiled_in_a_minute_and_two_gib(tmp_path: Path) -> None:
    settings = [word for one in LLAMA_3_70B.split() for word in ("--set", one)]
    workload = str(ROOT / "configs" / "workloads" / "llama.py")
    argv = [sys.executable, "-m", "ckplan", "profile", workload, *settings]
    process = subprocess.Popen(
        [*argv, "--gpu", "H100", "-o", str(tmp_path / "trace.json.gz")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    unit = 1 if sys.platform == "darwin" else 1024
    assert used.ru_maxrss * unit < 2 * 2**30
    assert used.ru_utime + used.ru_stime < 60
    graph = ckplan.load_graph(tmp_path / "trace.json.gz")
    parameter_bytes = graph.bytes_by_kind["parameter"]
    assert parameter_bytes == pytest.approx(2 * 70.6e9, rel=0.01)


def test_an_op_with_the_costs_of_another_is_the_same_op() -> None:
    op = replace(graphs.chain(1).ops[0], random=True, line="a.py:1", is_inside=True)
    other = replace(op, flops=7, moved_bytes=8, seconds=9.0, launch_seconds=1.0)
    given = {name: getattr(other, name) for name in COSTS}
    assert with_costs_of(op, replace(other, line="", is_inside=False)) == replace(
        op, **given
    )
