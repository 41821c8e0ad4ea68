"""Values that only unused outputs want go when backward asks for nothing more."""

from __future__ import annotations

import pytest
import torch
from measured import peak_bytes_of
from torch import Tensor, nn

import ckplan
from ckplan.plan.file import loads
from ckplan.plan.resolve import resolve
from ckplan.simulating.simulate import simulate

pytestmark = pytest.mark.usefixtures("one_thread")


class Branched(nn.Module):
    """Wide at the beginning, where backward ends; one of two branches is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, rows: Tensor) -> Tensor:
        wide = torch.tanh((rows * self.scale).repeat(6))
        narrow = torch.sin(wide[: len(rows)])
        unused = torch.sigmoid(narrow * 0.9)
        del unused
        made = torch.tanh(narrow)
        del narrow
        return torch.sin(made)


def test_rebuilt_values_go_with_the_last_dropped_tensor() -> None:
    rows = torch.randn(8192)

    def model() -> nn.Sequential:
        return nn.Sequential(Branched(), nn.Tanh())

    graph = ckplan.profile(
        model(), (rows,), loss_fn=lambda made, _: made.mean(), optimizer="none"
    )
    plan = loads("ckplan: 1\nregions: [{calls: '0', save: [./tanh#0]}]", "plan")
    one = model()
    ckplan.apply(one, plan)

    def run() -> None:
        made = one(rows)
        made.mean().backward()

    run()
    for _ in range(2):  # recorded once, then compared
        one.zero_grad()
        peak = peak_bytes_of(run, [*one.parameters(), rows])
        assert simulate(graph, resolve(plan, graph)).peak_bytes - peak in range(100)
