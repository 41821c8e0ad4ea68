"""What the engine itself takes is measured, kept, and taken into predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import ckplan
from ckplan.applying import status
from ckplan.applying.recording.recorder import Recorder
from ckplan.errors import CkplanError
from ckplan.graph.file import dumps, loads
from ckplan.graph.graph import Graph
from ckplan.graph.records import EngineCosts
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.resolve import resolve
from ckplan.simulating.simulate import Simulator, simulate
from ckplan.tracing.costs import apply_overhead as engine
from ckplan.tracing.costs.apply_overhead import Flushed, calibrate_engine
from ckplan.tracing.costs.cost_cache import CostCache
from ckplan.tracing.recording.recording import RawOp

COSTS = EngineCosts(1.0, 2.0, 3.0, 4.0, path_seconds=5.0, record_seconds=6.0)
NOTHING = Flushed(0, 0)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def cache(tmp_path: Path) -> CostCache:
    return CostCache(tmp_path / "costs.json")


def moving(*sizes: int) -> list[RawOp]:
    """Ops that move so many bytes."""
    found = []
    for size in sizes:
        op = object.__new__(RawOp)
        object.__setattr__(op, "moved_bytes", size)
        found.append(op)
    return found


def test_the_engine_takes_microseconds_and_more_where_caches_are_cold() -> None:
    for _ in range(5):  # a busy moment of the machine slows either
        warm = engine._measure(NOTHING)
        cold = engine._measure(Flushed(1 << 22, 1 << 26))
        assert min(*warm, *cold) >= 0.0  # one may drown in the noise of the other
        if sum(warm[:2]) < sum(cold[:2]) and warm[3] < cold[3]:
            break
    assert 1e-6 < sum(warm[:2]) < sum(cold[:2]) < 5e-3
    assert warm[3] < cold[3] < 5e-3  # what runs once a region is colder still


@pytest.mark.parametrize(
    ("sizes", "device", "flushed"),
    [
        ([], CPU, NOTHING),
        ([4096, 4096], CPU, NOTHING),  # all stays in the cache
        ([3 << 20, 1 << 20], CPU, Flushed(4 << 20, 0)),  # two ops on average
        ([3 << 20], CPU, Flushed(8 << 20, 0)),
        (30 * [1 << 20], CPU, Flushed(2 << 20, 4 << 20)),  # eight regions
        ([1 << 30], CPU, Flushed(16 << 20, 64 << 20)),
        ([1 << 30], CUDA, NOTHING),  # which has caches of its own
    ],
)
def test_caches_are_as_cold_as_the_ops_of_a_step_leave_them(
    sizes: list[int],
    device: torch.device,
    flushed: Flushed,
    cache: CostCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Flushed] = []

    def measure(flushed: Flushed) -> tuple[float, ...]:
        asked.append(flushed)
        return 1.0, 2.0, 3.0, 4.0, 5.0, 6.0

    monkeypatch.setattr(engine, "_measure", measure)
    for _ in range(2):  # the second time it is known
        assert calibrate_engine(moving(*sizes), device, cache) == COSTS
    assert asked == [flushed]


class Picked(nn.Module):
    """A layer of which values may decide how many rows it returns."""

    def __init__(self, *, varies: bool) -> None:
        super().__init__()
        self.linear, self.varies = nn.Linear(8, 8), varies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        return x[x[:, 0] > -2] if self.varies else x[0:]


class Packed(nn.Module):
    """A layer of which values may decide how many steps it takes."""

    def __init__(self, *, varies: bool) -> None:
        super().__init__()
        self.linear, self.varies = nn.GRU(8, 8), varies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = pack_sequence([x[:3], x[:2]]) if self.varies else x
        return self.linear(input=given)[1]


class Noisy(nn.Module):
    """A layer that may draw from a generator of its own."""

    def __init__(self, *, varies: bool) -> None:
        super().__init__()
        self.linear, self.varies = nn.Linear(8, 8), varies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0) if self.varies else None
        return self.linear(x).tanh() * torch.randn(8, generator=generator)


@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("layer", [Picked, Packed, Noisy])
def test_forwards_are_recorded_each_time_where_none_repeats_another(
    layer: type[Picked | Packed | Noisy], varies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the simulator counts it, which goes by the trace."""
    model, batch = nn.Sequential(layer(varies=varies), nn.Tanh()), torch.ones(4, 8)
    graph = ckplan.profile(model, batch, in_step=False)
    views = [Simulator(graph).view(call) for call in range(len(graph.calls))]
    assert {str(view.call): view.varies for view in views} == {
        ".#0": varies,
        "0#0": varies,
        "0.linear#0": varies and layer is Packed,
        "1#0": False,
    }
    begun: list[str] = []
    begin = Recorder.__init__

    def counted(self: Recorder, name: str, *args: Any, **kwargs: Any) -> None:
        begun.append(name)
        begin(self, name, *args, **kwargs)

    monkeypatch.setattr(Recorder, "__init__", counted)
    ckplan.apply(model, Plan(regions=(PlannedRegion("0"), PlannedRegion("1"))))
    for _ in range(3):
        model(batch).sum().backward()
    assert [begun.count(name) for name in ("0", "1")] == [3 if varies else 1, 1]


class Tagger(nn.Module):
    """Packed sequences through a GRU, each step of which is several ops."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.flat = nn.GRU(16, 16), nn.Flatten()
        self.head = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.gru(pack_sequence([*self.flat(x).view(64, 10, 16)]))[0]
        return self.head(packed.data)


def test_a_layer_of_one_function_runs_again_as_one() -> None:
    """Programs of its many ops are dear, and would be recorded in each step."""
    model, batch = Tagger(), torch.ones(64, 160)
    graph = ckplan.profile(model, batch, in_step=False)
    gru = next(call for call in graph.calls if call.fqn == "gru")
    assert gru.functions is not None and gru.functions < 20
    assert gru.stop - gru.start > 5 * gru.functions
    (outer,) = (call for call in graph.calls if not call.fqn)
    assert outer.functions is not None and outer.functions >= 5  # with that of `flat`
    assert loads(dumps(graph), "x").calls == graph.calls
    plan = ckplan.solve(graph, simulate(graph).peak_bytes * 97 // 100)
    assert [region.by for region in plan.regions if "gru" in region.calls] == ["rerun"]


class Recurrent(nn.Module):
    """Two layers of a GRU, all of whose ops are inside one function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(32, 32, 2, batch_first=True, dropout=0.1)
        self.head = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(x)[0])


def test_a_plan_keeps_what_later_forwards_meet() -> None:
    """A kept value that no function returns, and autograd does not save, is not met."""
    model, batch = Recurrent(), torch.ones(64, 8, 32)
    graph = ckplan.profile(model, batch, in_step=False)
    gru = next(call for call in graph.calls if call.fqn == "gru")
    inside = [op.is_inside for op in graph.ops[gru.start : gru.stop]]
    assert len(inside) - 9 <= sum(inside) < len(inside)
    assert loads(dumps(graph), "x").ops == graph.ops
    points = ckplan.frontier(graph)
    kept = [point for point in points if any(one.save for one in point.regions)]
    assert kept
    for point in kept[:: len(kept) // 4 or 1]:
        plan = ckplan.solve(graph, point.peak_bytes)
        ckplan.apply(model, plan)
        for _ in range(2):
            model(batch).sum().backward()
        assert [(one.recorded, one.repeatable) for one in status(model).regions] == [
            (1, True) for _ in plan.regions
        ]


def test_measuring_leaves_everything_as_it_was() -> None:
    random = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu"):
        engine._measure(NOTHING)
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("host", [0.5, 4.0])
def test_another_host_launches_at_its_own_speed(host: float) -> None:
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.GELU()), torch.ones(4, 8)
    here, there = (
        ckplan.profile(model, batch, gpu="RTX 4090", host=speed)
        for speed in (1.0, host)
    )
    for what in ("watch", "rerun", "module", "region", "path", "record"):
        found = getattr(there.engine, f"{what}_seconds") * host
        assert found == pytest.approx(getattr(here.engine, f"{what}_seconds"), abs=1e-8)
    for one, other in zip(here.ops, there.ops, strict=True):
        assert one.seconds == other.seconds
        assert other.launch_seconds * host == pytest.approx(one.launch_seconds)
    assert any(f"{host:g} times as fast" in note for note in there.notes)


@pytest.mark.parametrize("host", [0.0, -1.0, float("nan"), float("inf")])
def test_a_host_without_speed_is_refused(host: float) -> None:
    model, batch = nn.Linear(8, 16), torch.ones(4, 8)
    with pytest.raises(CkplanError, match="times as fast"):
        ckplan.profile(model, batch, gpu="RTX 4090", host=host)


def test_a_host_without_a_gpu_is_refused() -> None:
    with pytest.raises(CkplanError, match="runs on the CPU itself"):
        ckplan.profile(nn.Linear(8, 16), torch.ones(4, 8), host=2.0)


def test_a_small_step_on_a_card_waits_for_its_launches() -> None:
    """The longer queue is the step, and the engine is in that of the processor."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in "abc"))
    graph = ckplan.profile(model, torch.ones(4, 8), optimizer="none", gpu="RTX 4090")
    graph = replace(graph, engine=EngineCosts(1e-3, 1e-4))
    plan = Plan(regions=(PlannedRegion("[0..2]"),))
    timeline = simulate(graph, resolve(plan, graph))
    device, launching = timeline.queues
    assert launching > device
    assert timeline.engine_seconds > 3e-3  # each layer saves a tensor at least
    again = [step for effect in timeline.effects for step in effect.steps]
    launches = sum(op.launch_seconds for op in graph.ops)
    launches += sum(graph.ops[step].launch_seconds for step in again)
    assert launching == pytest.approx(launches + timeline.engine_seconds)
    step = graph.step_seconds + timeline.recompute_seconds
    assert step == pytest.approx(launching)


def test_a_profile_has_what_this_machine_takes() -> None:
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.GELU()), torch.ones(4, 8)
    here = ckplan.profile(model, batch)
    assert here.engine.watch_seconds + here.engine.rerun_seconds > 0
    card = ckplan.profile(model, batch, gpu="RTX 4090")
    assert card.engine.watch_seconds + card.engine.rerun_seconds > 0


@pytest.mark.serial
def test_of_a_tiny_step_the_engine_is_most_of_what_a_plan_costs() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))

    def overhead(graph: Graph) -> float:
        planned = ckplan.solve(graph, goal="min-memory").predicted
        assert planned is not None
        return planned.overhead

    model = nn.Sequential(*(block() for _ in range(4)))
    tries = []
    for _ in range(6):  # what else the machine does may drown it
        graph = ckplan.profile(model, torch.ones(64, 8), optimizer="none", fresh=True)
        with_engine = overhead(graph)
        of_ops = overhead(replace(graph, engine=EngineCosts()))
        tries.append((with_engine, of_ops))
        if with_engine > 2 * of_ops > 0:
            return
    raise AssertionError(tries)
