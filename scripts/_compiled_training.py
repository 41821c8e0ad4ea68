"""Training steps of a workload, compiled with a plan and without one."""

from __future__ import annotations

from typing import Any

import torch

from ckplan.compiling import backend
from ckplan.compiling.step import compiled_loss
from ckplan.training.allocator import log_allocations
from ckplan.training.loading import WorkloadSpec


def training(
    spec: WorkloadSpec, budget: str, steps: int, seed: int = 0
) -> dict[str, Any]:
    """Train the same model from the same seed with and without a plan.

    Args:
        spec: The workload; every step has its batch, and AdamW.
        budget: For the plan.
        steps: Number of steps.
        seed: Seed of weights and of dropout.
    """
    planned = backend(budget)
    own, _, graphs_own = _losses(spec, "inductor", steps, seed)
    with_plan, peaks, graphs = _losses(spec, planned, steps, seed)
    same = sum(one == other for one, other in zip(own, with_plan, strict=True))
    return {
        "steps": steps,
        "equal_losses": same,
        "first_loss": own[0],
        "last_loss": own[-1],
        "graphs": graphs,
        "unplanned_graphs": graphs_own,
        "second_step_bytes": peaks[1],
        "last_step_bytes": peaks[-1],
        "most_bytes": max(peaks[1:]),
    }


def _losses(
    spec: WorkloadSpec, how: Any, steps: int, seed: int
) -> tuple[list[float], list[int], int]:
    """Losses, bytes that each forward and backward allocate at once, graphs made."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    workload = spec.build()
    call = compiled_loss(workload, how)
    optimizer = torch.optim.AdamW(workload.model.parameters(), 1e-3)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    losses, peaks = [], []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        with log_allocations() as log:
            loss = call()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        peaks.append(log.peak_bytes)
        del loss  # else it is freed within the next step
    return losses, peaks, graphs["unique_graphs"] - before
