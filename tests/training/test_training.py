"""How a step is trained changes what it needs; prediction and allocator agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
import torch
from measured import peak_bytes_of
from small_models import Residual
from torch import nn
from trained import state_of

import ckplan
from ckplan import applying
from ckplan.errors import WorkloadError
from ckplan.graph.graph import Graph
from ckplan.graph.updates import with_update_of
from ckplan.simulating.simulate import simulate
from ckplan.training.failures import first_line, is_out_of_memory
from ckplan.training.loading import WorkloadSpec
from ckplan.training.optimizers import OPTIMIZERS
from ckplan.training.randomness import draws
from ckplan.training.step import Training, make_step
from ckplan.training.workload import Workload, tensors_of

WAYS = [
    Training("adafactor"),
    Training("sgd"),
    Training("adamw:single"),
    Training("momentum:foreach", clip=0.1),
    Training("adamw:fused", "fp16", scaler=True, clip=0.1),
    Training("momentum", "bf16", 2),
]
# What the ways above combine, one at a time.
MORE_WAYS = [
    *(Training(name) for name in OPTIMIZERS if name not in ("own", "adamw8bit")),
    *(Training(f"adamw:{kernel}") for kernel in ("foreach", "fused")),
    Training("momentum:foreach"),
    Training("sgd:fused"),
    Training("adafactor:foreach"),
    Training("adamw:foreach=20KiB"),
    Training(clip=0.1),
    Training(amp="fp16", scaler=True),
    Training(amp="bf16"),
    Training(amp="fp16"),
    Training(accumulate=3),
]


def build() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual() for _ in range(4)))
    return Workload(
        model, torch.randn(256, 64), lambda out, _: out.float().square().mean()
    )


def measured_peak(workload: Workload, training: Training) -> int:
    step = make_step(workload, training)
    step.run()
    step.zero_grad()
    state = [] if step.optimizer is None else list(step.optimizer.state.values())
    held = tensors_of([list(workload.model.parameters()), state, workload.batch])
    return peak_bytes_of(step.run, held)


def profiled(workload: Workload, training: Training) -> Graph:
    return ckplan.profile(
        workload.model, workload.batch, loss=workload.loss, **asdict(training)
    )


def trained(workload: Workload, training: Training) -> list[torch.Tensor]:
    torch.manual_seed(1)
    step = make_step(workload, training)
    return state_of(step, [step.run() for _ in range(3)])


@pytest.mark.parametrize(
    "training",
    [
        *WAYS,
        *(
            pytest.param(way, marks=pytest.mark.slow)
            for way in MORE_WAYS
            if way not in WAYS
        ),
    ],
    ids=str,
)
def test_peaks_are_as_predicted_and_results_the_same(training: Training) -> None:
    workload = build()
    graph = profiled(workload, training)
    unplanned = simulate(graph).peak_bytes
    assert unplanned == pytest.approx(measured_peak(build(), training), rel=0.003)
    plan = ckplan.solve(graph, budget="92%")
    assert plan.regions
    assert plan.predicted is not None
    expected = trained(build(), training)
    workload = build()
    applying.apply(workload.model, plan)
    assert all(map(torch.equal, expected, trained(workload, training)))
    workload = build()
    applying.apply(workload.model, plan)
    measured = measured_peak(workload, training)
    assert plan.predicted.peak_bytes == pytest.approx(measured, rel=0.003)
    assert measured <= (plan.budget_bytes or 0)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free. "
        "Of the allocated memory 77.00 GiB is allocated by PyTorch",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp",
    ],
)
def test_a_gpu_wants_memory_in_several_words(text: str) -> None:
    error = RuntimeError(text)
    assert is_out_of_memory(error)
    assert len(first_line(error)) < 80
    assert not is_out_of_memory(RuntimeError("CUDA error: invalid device ordinal"))


def test_a_trace_remembers_how_it_was_trained() -> None:
    workload = build()
    for amp in ("bf16", torch.bfloat16):
        graph = ckplan.profile(workload.model, workload.batch, amp=amp, accumulate=2)
        assert graph.options == {"optimizer": "default", "amp": "bf16", "accumulate": 2}
    with pytest.raises(WorkloadError, match=r"under autocast to 'torch\.int8'"):
        ckplan.profile(workload.model, workload.batch, amp=torch.int8)


def test_adam_in_8_bits_has_two_bytes_per_parameter() -> None:
    workload = build()
    graph = ckplan.profile(workload.model, workload.batch, optimizer="adamw8bit")
    elements = sum(parameter.numel() for parameter in workload.model.parameters())
    assert graph.bytes_by_kind["optimizer"] == 2 * elements
    assert any("predicted only" in note for note in graph.notes)
    update = graph.ops[graph.backward_stop :]
    assert not any(op.creates for op in update)
    with pytest.raises(WorkloadError, match="its memory is only predicted"):
        ckplan.verify(WorkloadSpec("model.py"), None, optimizer="adamw8bit")


class Reused(nn.Module):
    """One layer twice: autocast casts its weight once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.tanh(self.inner(x)))


def reused() -> nn.Module:
    return nn.Sequential(*(Reused() for _ in range(3)))


def frozen() -> nn.Module:
    model = build().model
    model[:2].requires_grad_(False)
    return model


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["up", "down"], lora_dropout=0.1)
    return peft.get_peft_model(build().model, config)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("make", "training"),
    [
        pytest.param(reused, Training(amp="bf16"), marks=pytest.mark.slow),
        (reused, Training(amp="fp16", scaler=True)),
        pytest.param(frozen, Training(), marks=pytest.mark.slow),
        (frozen, Training(amp="bf16", accumulate=2)),
        pytest.param(lora, Training(), marks=pytest.mark.slow),
        (lora, Training(amp="bf16", clip=0.1)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_peaks_of_what_is_cast_frozen_or_adapted(
    make: Callable[[], nn.Module], training: Training
) -> None:
    def workload() -> Workload:
        torch.manual_seed(0)
        return replace(build(), model=make())

    graph = profiled(workload(), training)
    measured = measured_peak(workload(), training)
    assert simulate(graph).peak_bytes == pytest.approx(measured, rel=0.003)
    plan = ckplan.solve(graph, budget="88%")
    assert plan.regions
    assert plan.predicted is not None
    planned = workload()
    applying.apply(planned.model, plan)
    measured = measured_peak(planned, training)
    assert plan.predicted.peak_bytes == pytest.approx(measured, rel=0.003)


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"amp": "int8"}, "cannot train under autocast to 'int8'"),
        ({"accumulate": 0}, "cannot accumulate gradients of 0 batches"),
        ({"accumulate": 1.5}, "cannot accumulate gradients of 1.5 batches"),
        ({"optimizer": "lamb"}, "unknown optimizer 'lamb'"),
        ({"optimizer": torch.optim.SGD}, "cannot train with a type: an optimizer is"),
        ({"optimizer": "adafactor:fused"}, "'adafactor' has no kernel 'fused'"),
        ({"clip": -1.0}, "cannot clip gradients to the norm -1.0"),
        ({"clip": "1"}, "cannot clip gradients to the norm '1'"),
    ],
)
def test_what_cannot_be_trained_is_said(wrong: dict[str, object], found: str) -> None:
    workload = build()
    with pytest.raises(WorkloadError, match=found):
        ckplan.profile(workload.model, workload.batch, **wrong)


def test_attention_draws_random_numbers_only_if_it_drops() -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert not draws(flash, (None, None, None), {})
    assert not draws(flash, (None, None, None, 0.0), {})
    assert draws(flash, (None, None, None, 0.1), {})
    assert draws(flash, (None, None, None), {"dropout_p": 0.1})
    assert draws(torch.ops.aten.bernoulli_.float, (None, 0.5), {})
    assert not draws(torch.ops.aten.add.Tensor, (None, None), {})


@pytest.mark.parametrize("amp", [None, "fp16"])
def test_a_number_that_the_update_makes_is_not_there_before(amp: str | None) -> None:
    """Of AdamW with foreach: one that adds to all counts of steps."""
    training, single = (Training(f"adamw:{name}", amp) for name in ("foreach", "fused"))
    graph, other = profiled(build(), training), profiled(build(), single)
    assert simulate(graph).peak_bytes == measured_peak(build(), training)
    numbers = [
        one
        for one in graph.storages
        if (one.bytes, one.maker, one.kind) == (4, graph.backward_stop - 1, "temporary")
    ]
    assert [one.last for one in numbers] == [graph.backward_stop]
    found = with_update_of(other, graph)
    assert found is not None
    assert simulate(found).peak_bytes == simulate(graph).peak_bytes
    back = with_update_of(graph, other)
    assert back is not None
    assert simulate(back).peak_bytes == simulate(other).peak_bytes
    assert len(back.storages) == len(other.storages)
