"""Train a workload: its results, and its peak as the allocator has it."""

from __future__ import annotations

import torch
from measured import peak_bytes_of

from ckplan import applying
from ckplan.plan.plan import Plan
from ckplan.training.step import Training, TrainingStep, make_step
from ckplan.training.workload import Workload, tensors_of


def state_of(step: TrainingStep, losses: list[torch.Tensor]) -> list[torch.Tensor]:
    model = step.workload.model
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    found = [*losses, *model.parameters(), *model.buffers(), *grads]
    return [t.detach().clone() for t in (*found, torch.get_rng_state())]


def train(workload: Workload, steps: int = 3) -> list[torch.Tensor]:
    step = make_step(workload, Training("adamw"))
    torch.manual_seed(1)
    return state_of(step, [step.run() for _ in range(steps)])


def measured_peak(workload: Workload) -> int:
    step = make_step(workload, Training("adamw"))
    step.run()
    step.zero_grad()
    assert step.optimizer is not None
    model, state = workload.model, list(step.optimizer.state.values())
    held = [*model.parameters(), *model.buffers(), *tensors_of([state, workload.batch])]
    return peak_bytes_of(step.run, held)


def applying_to(workload: Workload, plan: Plan) -> Workload:
    applying.apply(workload.model, plan)
    return workload
