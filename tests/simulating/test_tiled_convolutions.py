"""Plans with 1x1 convolutions in tiles of samples: predicted, as they run, refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from measured import peak_bytes_of
from pointwise import (
    GatedPointwise,
    PointwiseMlp,
    depthwise_first,
    frozen_weight,
)
from torch import Tensor, nn

import ckplan
from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.resolve import resolve
from ckplan.plan.tiles import RowTiles
from ckplan.simulating.simulate import simulate

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, HIDDEN, SIDE, CLASSES = 32, 256, 8, 10


class Model(nn.Module):
    """A stem, a layer with an MLP beside a residual, and a head."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, 4)
        self.norm = nn.GroupNorm(1, WIDTH)
        self.mlp = mlp
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        one = torch.tanh(self.stem(pictures))
        one = one + self.mlp(self.norm(one))
        made: Tensor = self.head(one.mean((2, 3)))
        return made


KINDS: dict[str, Callable[[], nn.Module]] = {
    "gelu": lambda: PointwiseMlp(WIDTH, HIDDEN),
    "relu6": lambda: PointwiseMlp(WIDTH, HIDDEN, nn.ReLU6(), bias=False),
    "gated": lambda: GatedPointwise(WIDTH, HIDDEN),
    "depthwise": lambda: depthwise_first(WIDTH, HIDDEN),
    "dropped": lambda: nn.Sequential(PointwiseMlp(WIDTH, HIDDEN), nn.Dropout(0.4)),
    "half frozen": lambda: frozen_weight(PointwiseMlp(WIDTH, HIDDEN)),
    "frozen": lambda: PointwiseMlp(WIDTH, HIDDEN).requires_grad_(requires_grad=False),
}
SAMPLES = (12, 64)  # few and many: other kernels


def model_of(kind: str) -> Model:
    torch.manual_seed(0)
    return Model(KINDS[kind]())


def batch(samples: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 3, 4 * SIDE, 4 * SIDE, generator=generator)


def loss_of(logits: Tensor, _: object = None) -> Tensor:
    return F.cross_entropy(logits, torch.arange(len(logits)) % CLASSES)


@cache
def recorded(kind: str, samples: int) -> Graph:
    given = model_of(kind), (batch(samples),)
    return ckplan.profile(*given, loss_fn=loss_of, optimizer="none", replay=False)


def plan_of(rows: int, columns: int) -> Plan:
    region = PlannedRegion("mlp", "tiles", tiles=RowTiles(rows, columns))
    return Plan(regions=(region,))


def measured(kind: str, samples: int, plan: Plan | None) -> tuple[int, list[Tensor]]:
    """Peak of the second step, and its gradients."""
    model, pictures = model_of(kind), batch(samples)
    if plan is not None:
        ckplan.apply(model, plan)

    def run() -> None:
        torch.manual_seed(1)
        output = model(pictures)  # stays until backward ends
        loss_of(output).backward()

    run()
    model.zero_grad()
    peak = peak_bytes_of(run, [*model.parameters(), pictures])
    if plan is not None:
        (region,) = ckplan.status(model).regions
        assert (region.runs, region.kept) == (2, 0)
    return peak, [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("tiles", [(1, 1), (1, 4), (3, 1), (4, 4)])
@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_peak_is_predicted_and_gradients_are_the_same(
    kind: str, samples: int, tiles: tuple[int, int]
) -> None:
    plan, graph = plan_of(*tiles), recorded(kind, samples)
    peak, gradients = measured(kind, samples, plan)
    _, expected = measured(kind, samples, None)
    assert len(gradients) == len(expected) > 0
    assert all(map(torch.equal, gradients, expected))
    predicted = simulate(graph, resolve(plan, graph)).peak_bytes
    assert predicted == peak, (predicted - peak) / peak
