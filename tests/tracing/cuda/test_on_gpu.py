"""What holds on a real GPU: predicted against its allocator, plans, costs, verify.

Every test is marked ``gpu`` and skips by name where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron import MegatronLayer, mean_square
from torch import nn

import ckplan
from ckplan import gpus
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan
from ckplan.plan.resolve import resolve
from ckplan.simulating.allocations import replayed
from ckplan.simulating.simulate import simulate
from ckplan.solving.planner import Planner
from ckplan.tracing import target as targets
from ckplan.training.allocator import GpuAllocatorStats, gpu_allocator_stats
from ckplan.training.loading import WorkloadSpec
from ckplan.training.step import Training, make_step
from ckplan.training.workload import Workload, on_device
from ckplan.verifying.compiled_steps import verify_compiled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"
    ),
]

CUDA = torch.device("cuda", 0)
STACKED = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(256), nn.Linear(256, 1024)
        self.down, self.drop = nn.Linear(1024, 256), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))

class Model(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()

def build():
    return Model(*(Block() for _ in range(4))), torch.randn(8192, 256)
"""
ROOT = Path(__file__).parents[3]


def stack(dtype: torch.dtype = torch.float32) -> Workload:
    layers = [MegatronLayer(512, 8, 0.1) for _ in range(4)]
    model = nn.Sequential(nn.Linear(512, 512), *layers).to(dtype)
    return Workload(model, torch.randn(256, 8, 512, dtype=dtype), mean_square)


def convolutions() -> Workload:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1)]
    for _ in range(4):
        layers += [nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)]
    return Workload(nn.Sequential(*layers), torch.randn(16, 3, 64, 64), mean_square)


def recurrent() -> Workload:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(256, 256, num_layers=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)[0]

    return Workload(Net(), torch.randn(128, 32, 256), mean_square)


def measured(make: Callable[[], Workload], training: Training) -> GpuAllocatorStats:
    """The allocator's own peaks of a second step."""
    torch._C._cuda_clearCublasWorkspaces()  # of tests before this one
    torch.cuda.empty_cache()
    step = make_step(on_device(make(), CUDA), training)
    step.run()
    step.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step.run()
    torch.cuda.synchronize()
    return gpu_allocator_stats(CUDA)


@pytest.mark.parametrize(
    ("make", "training"),
    [
        (stack, Training("adamw")),
        (stack, Training("adamw", amp="bf16")),
        (stack, Training("momentum", amp="fp16")),
        (stack, Training("adafactor")),
        (lambda: stack(torch.bfloat16), Training("adamw")),
        (convolutions, Training("adamw")),
        (recurrent, Training("adamw")),
    ],
)
@pytest.mark.parametrize("translate", [True, False])
def test_predicted_is_measured_within_one_percent(
    make: Callable[[], Workload],
    training: Training,
    translate: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if translate:  # as if this machine had no GPU, for the card that it has
        here = torch.cuda.get_device_capability()
        card = next(c for c in gpus.load().values() if c.capability == here)
        target = targets.TraceTarget(CUDA, card, is_here=False)
        monkeypatch.setattr(
            "ckplan.tracing.profile.find_target", lambda device, gpu: target
        )
    workload = make()
    graph = ckplan.profile(
        workload.model,
        workload.batch,
        loss=workload.loss,
        optimizer=training.optimizer,
        amp=training.amp,
        device="cuda",
    )
    assert not any("real tensors" in note for note in graph.notes[:2])
    timeline, found = simulate(graph), measured(make, training)
    print(f"predicted {timeline.peak_bytes} and {replayed(timeline)}, measured {found}")
    near = partial(pytest.approx, rel=0.01)
    assert timeline.peak_bytes == near(found.requested_peak_bytes)
    assert replayed(timeline).allocated_bytes == near(found.allocated_peak_bytes)
    assert replayed(timeline).reserved_bytes == pytest.approx(
        found.reserved_peak_bytes,
        rel=0.05,  # one segment is 3 % of so small a step
    )


@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_a_profile_leaves_the_gpu_as_it_was() -> None:
    workload = stack()
    torch.manual_seed(3)
    state = torch.cuda.get_rng_state(CUDA)
    ckplan.profile(workload.model, workload.batch, device="cuda")  # cuBLAS begins
    before = torch.cuda.memory_reserved(CUDA)
    ckplan.profile(workload.model, workload.batch, device="cuda", amp="bf16")
    assert torch.cuda.memory_reserved(CUDA) == before
    assert torch.equal(torch.cuda.get_rng_state(CUDA), state)


def test_a_planned_step_keeps_its_word_and_its_bits() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        workload = stack()
        graph = ckplan.profile(
            workload.model, workload.batch, loss=mean_square, device="cuda"
        )
        plan = ckplan.solve(graph, "70%")
        step = make_step(on_device(workload, CUDA), Training("none"))

        def gradients() -> list[torch.Tensor]:
            torch.manual_seed(0)
            step.zero_grad()
            step.accumulate()
            grads = [p.grad for p in step.workload.model.parameters()]
            return [*grads, torch.cuda.get_rng_state(CUDA)]

        expected = gradients()
        with ckplan.planned(workload.model, plan):
            found = gradients()
            assert not any(r.missing for r in ckplan.status(workload.model).regions)
        assert all(map(torch.equal, expected, found))
    finally:
        torch.use_deterministic_algorithms(False)


def test_costs_are_measured_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPLAN_CACHE", str(tmp_path))
    workload = stack()
    graph = ckplan.profile(workload.model, workload.batch, device="cuda")
    assert graph.costs == "measured"
    assert graph.hazards == ()  # dropout is put back on the GPU, too
    assert all(op.seconds > 0 for op in graph.ops)
    assert all(0 < op.launch_seconds < 1e-3 for op in graph.ops)
    matmuls = [op for op in graph.ops if op.name == "addmm"]
    small = [op for op in graph.ops if op.name == "native_layer_norm"]
    assert max(op.seconds for op in matmuls) > min(op.seconds for op in small)


def solve_halfway(trace: Graph) -> Plan:
    """Between the peak and the floor, which is what the optimizer needs here."""
    planner = Planner(trace)
    peaks = planner.unplanned.peak_bytes, planner.floor.peak_bytes
    return ckplan.solve(trace, str(sum(peaks) // 2))


def test_verify_takes_its_steps_on_the_gpu(tmp_path: Path) -> None:
    path = ROOT / "configs" / "workloads" / "mlp.py"
    spec = WorkloadSpec(str(path), {"layers": 4, "dropout": 0.1})
    from ckplan.tracing.profile import profile_workload

    plan = solve_halfway(profile_workload(spec, device="cuda", replay=False))
    found: Any = ckplan.verify(spec, plan, steps=2)
    assert found.gradients_equal
    assert found.random_state_equal
    assert found.measured_peak_bytes == pytest.approx(
        found.predicted_peak_bytes, rel=0.01
    )
    assert found.fits


def test_a_budget_is_proven_on_a_larger_card() -> None:
    path = ROOT / "configs" / "workloads" / "mlp.py"
    spec = WorkloadSpec(str(path), {"layers": 12, "dropout": 0.1})
    from ckplan.tracing.profile import profile_workload

    trace = profile_workload(spec, device="cuda", replay=False)
    plan = solve_halfway(trace)
    steps = simulate(trace), simulate(trace, resolve(plan, trace))
    cap_bytes = sum(replayed(step).reserved_bytes for step in steps) // 2
    found: Any = ckplan.verify(spec, plan, steps=0, cap_bytes=cap_bytes, trace=trace)
    assert found.unplanned_measured_peak_bytes is None
    assert found.gradients_equal is not False
    assert found.measured_peak_bytes <= cap_bytes
    assert found.fits


@pytest.mark.parametrize("amp", [None, "bf16"])
def test_a_compiled_plan_keeps_its_word_and_its_bits(
    amp: str | None, tmp_path: Path
) -> None:
    (tmp_path / "stacked.py").write_text(STACKED)
    found, plan = verify_compiled(
        tmp_path / "stacked.py", "70%", amp=amp, device="cuda", steps=0
    )
    print(f"replayed {found.replayed_peak_bytes}, measured {found.measured_peak_bytes}")
    assert found.fits
    assert found.passed
    assert found.gradients_equal
    near = partial(pytest.approx, rel=0.001)
    assert found.measured_peak_bytes == near(found.replayed_peak_bytes)
    unplanned = found.unplanned_replayed_peak_bytes
    assert found.unplanned_measured_peak_bytes == near(unplanned)
    assert plan.fingerprint["device"] == "cuda"
