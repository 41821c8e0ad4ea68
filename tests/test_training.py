"""How a step is trained changes what it needs; prediction and allocator agree."""

from __future__ import annotations

import pytest
import torch
from test_applying import Residual, state_of
from torch import nn

import ckplan
from ckplan import applying
from ckplan.errors import WorkloadError
from ckplan.simulate import simulate
from ckplan.training.allocator import peak_bytes_of
from ckplan.training.step import OPTIMIZERS, Training, make_step
from ckplan.training.workload import Workload, tensors_of

WAYS = [
    *(Training(optimizer) for optimizer in OPTIMIZERS if optimizer != "own"),
    Training(amp="bf16"),
    Training(amp="fp16"),
    Training(accumulate=3),
    Training("momentum", "bf16", 2),
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
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
    return sum(sizes.values()) + peak_bytes_of(step.run)


def trained(workload: Workload, training: Training) -> list[torch.Tensor]:
    torch.manual_seed(1)
    step = make_step(workload, training)
    return state_of(step, [step.run() for _ in range(3)])


@pytest.mark.parametrize("training", WAYS, ids=str)
def test_peaks_are_as_predicted_and_results_the_same(training: Training) -> None:
    workload = build()
    graph = ckplan.profile(
        workload.model,
        workload.batch,
        loss=workload.loss,
        optimizer=training.optimizer,
        amp=training.amp,
        accumulate=training.accumulate,
    )
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


def test_a_trace_remembers_how_it_was_trained() -> None:
    workload = build()
    graph = ckplan.profile(workload.model, workload.batch, amp="bf16", accumulate=2)
    assert graph.options == {"optimizer": "default", "amp": "bf16", "accumulate": 2}


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"amp": "int8"}, "cannot train under autocast to 'int8'"),
        ({"accumulate": 0}, "cannot accumulate gradients of 0 batches"),
        ({"optimizer": "lamb"}, "unknown optimizer 'lamb'"),
    ],
)
def test_what_cannot_be_trained_is_said(wrong: dict[str, object], found: str) -> None:
    workload = build()
    with pytest.raises(WorkloadError, match=found):
        ckplan.profile(workload.model, workload.batch, **wrong)
