"""Steps inside Trainers: recorded to the byte, planned to the bit over twenty steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from measured import peak_bytes_of
from torch import nn

import ckplan
from ckplan.plan.plan import Plan
from ckplan.plan.resolve import resolve
from ckplan.simulating.simulate import simulate
from ckplan.tracing.record import LoopRecorder

for name in ("transformers", "accelerate", "peft", "lightning"):
    pytest.importorskip(name)
from trainer_loops import TOKENS, TRAINERS  # noqa: E402


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:lightning")
@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_is_recorded_to_the_byte_and_planned_to_the_bit(
    name: str, tmp_path: Path
) -> None:
    make, train = TRAINERS[name]
    recorders: list[LoopRecorder] = []

    def watch(model: nn.Module, optimizer: Any) -> None:
        recorders.append(ckplan.record(model, optimizer).__enter__())

    model = make()
    train(model, 3, tmp_path, watch)
    recorders[0].__exit__()
    graph = recorders[0].graph
    del model

    def peak(plan: Plan | None) -> int:
        model = make()
        held = [*model.parameters(), *model.buffers(), TOKENS]
        if plan is not None:
            ckplan.apply(model, plan)
        return peak_bytes_of(lambda: train(model, 4, tmp_path, None), held)

    plan = ckplan.solve(graph, "80%")
    planned = simulate(graph, resolve(plan, graph)).peak_bytes
    assert simulate(graph).peak_bytes == pytest.approx(peak(None), rel=1e-3)
    assert planned == pytest.approx(peak(plan), rel=1e-3)
    models = make(), ckplan.apply(make(), plan)
    for one in models:
        train(one, 20, tmp_path, None)
    assert all(map(torch.equal, *(one.parameters() for one in models)))
