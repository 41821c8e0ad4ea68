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
from ckplan.applying.tiling.bits import Bits
from ckplan.applying.tiling.row_program import RowProgram
from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.resolve import resolve
from ckplan.plan.tiles import RowTiles
from ckplan.simulating.simulate import simulate
from ckplan.solving.tiled_rows import find_tileable_rows
from ckplan.tracing.steps import fake_forward, tiled_row_bits

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


# Copies in another layout are counted where few large weights are apart: at most.
MORE = {"depthwise": 0.02, "half frozen": 0.005, "frozen": 0.005}


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
    assert 0 <= predicted - peak <= MORE.get(kind, 0) * peak


@pytest.mark.parametrize("kind", ["gelu", "gated", "depthwise"])
def test_solve_chooses_tiles_that_lower_the_floor(kind: str) -> None:
    graph = recorded(kind, 12)
    least = ckplan.solve(graph, goal="min-memory").predicted
    plan = ckplan.solve(graph, goal="min-memory", allow=["tiles"])
    assert least is not None and plan.predicted is not None
    tiled = [(one.calls, one.tiles) for one in plan.regions if one.tiles]
    assert tiled == [("mlp", RowTiles(8, 8))]
    hidden = 12 * HIDDEN * SIDE * SIDE * 4
    assert plan.predicted.peak_bytes < least.peak_bytes - hidden


def test_tiles_cost_the_products_that_run_again() -> None:
    graph = recorded("gelu", 64)
    timeline = simulate(graph, resolve(plan_of(4, 4), graph))
    inside = [
        op
        for op in graph.ops
        if op.call >= 0 and graph.calls[op.call].fqn.startswith("mlp")
    ]
    back = sum(op.flops for op in inside if op.name == "convolution_backward")
    (ahead,) = {op.flops for op in inside if op.name == "convolution"}
    assert back == 4 * ahead
    tiled = sum(op.flops for op in timeline.graph.ops)
    assert tiled - sum(op.flops for op in graph.ops) == 3 * ahead
    assert timeline.recompute_seconds > 0


class Between(nn.Module):
    """Something between two 1x1 convolutions."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(WIDTH, HIDDEN, 1), nn.Conv2d(HIDDEN, WIDTH, 1)
        self.mix = mix

    def forward(self, picture: Tensor) -> Tensor:
        made: Tensor = self.down(self.mix(self.up(picture)))
        return made


def convolutions(first: nn.Module, last: nn.Module) -> nn.Module:
    return nn.Sequential(first, nn.GELU(), last)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "wide": (
        lambda: convolutions(
            nn.Conv2d(WIDTH, HIDDEN, 3, padding=1), nn.Conv2d(HIDDEN, WIDTH, 1)
        ),
        "it is no product, ops, and a product",
    ),
    "depthwise amid": (
        lambda: Between(nn.Conv2d(HIDDEN, HIDDEN, 3, padding=1, groups=HIDDEN)),
        "a convolution in it is not 1x1, or has groups",
    ),
    "groups": (
        lambda: convolutions(
            nn.Conv2d(WIDTH, HIDDEN, 1, groups=2), nn.Conv2d(HIDDEN, WIDTH, 1)
        ),
        "it is no product, ops, and a product",
    ),
    "batch norm": (
        lambda: Between(nn.BatchNorm2d(HIDDEN)),
        "native_batch_norm updates running statistics",
    ),
    "group norm": (
        lambda: Between(nn.GroupNorm(1, HIDDEN)),
        "it runs native_group_norm",
    ),
    "dropout": (lambda: Between(nn.Dropout(0.5)), "a number for every hidden value"),
    "pool": (lambda: Between(nn.AvgPool2d(3, 1, 1)), "it runs avg_pool2d"),
    "nothing": (lambda: Between(lambda one: one), "no elementwise op"),
    "three": (
        lambda: convolutions(Between(torch.relu), nn.Conv2d(WIDTH, WIDTH, 1)),
        "it has products after products",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_convolutions_whose_samples_or_channels_are_not_apart_are_refused(
    name: str,
) -> None:
    make, why = REFUSED[name]
    graph = ckplan.profile(
        Model(make()), (batch(8),), loss_fn=loss_of, optimizer="none", replay=False
    )
    with pytest.raises(PlanError, match=why) as error:
        simulate(graph, resolve(plan_of(2, 2), graph))
    assert str(error.value).count("\n") == 2
    assert not any(graph.calls[one.call].fqn == "mlp" for one in graph.tiled)


@pytest.mark.parametrize("last", [False, True])
def test_a_profile_tests_the_layout_that_a_call_is_given(
    last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = torch.channels_last if last else torch.contiguous_format
    seen: list[torch.memory_format] = []

    def check(program: RowProgram, **given: object) -> Bits:
        seen.append(program.layout)
        return Bits("close", 1e-6, "output", 1)

    monkeypatch.setattr(tiled_row_bits, "check_row_bits", check)
    hidden = HIDDEN + 64 * (1 + last)  # not in the cache of costs
    model = Model(PointwiseMlp(WIDTH, hidden)).to(memory_format=layout)
    given = model, (batch(8).contiguous(memory_format=layout),)
    graph = ckplan.profile(*given, loss_fn=loss_of, optimizer="none", replay=False)
    assert seen == [layout]
    with pytest.raises(PlanError, match="with the same bits: profile found"):
        simulate(
            graph,
            resolve(
                Plan(regions=(PlannedRegion("mlp", "tiles", tiles=RowTiles(8, 8)),)),
                graph,
            ),
        )


def test_both_layouts_are_tested_where_no_forward_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[torch.memory_format] = []

    def check(program: RowProgram, **given: object) -> Bits:
        seen.append(program.layout)
        return Bits("same", 0.0, "", 1)

    def fail(workload: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(tiled_row_bits, "check_row_bits", check)
    monkeypatch.setattr(fake_forward, "call_model", fail)
    given = Model(PointwiseMlp(WIDTH, HIDDEN + 192)), (batch(8),)
    ckplan.profile(*given, loss_fn=loss_of, optimizer="none", replay=False)
    assert seen == [torch.contiguous_format, torch.channels_last]


class Pooled(Model):
    """On volumes, whose layout a convolution of few samples does not keep."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.stem = nn.Conv3d(3, WIDTH, 3, padding=1)
        first, last = nn.Conv3d(WIDTH, HIDDEN, 1), nn.Conv3d(HIDDEN, WIDTH, 1)
        self.mlp = nn.Sequential(first, nn.GELU(), last)

    def forward(self, volumes: Tensor) -> Tensor:
        one = torch.tanh(self.stem(volumes))
        made: Tensor = self.head((one + self.mlp(one)).mean((2, 3, 4)))
        return made


def test_convolutions_that_would_run_whole_are_not_chosen() -> None:
    model = Pooled().to(memory_format=torch.channels_last_3d)
    volumes = torch.randn(6, 3, 4, 4, 4).contiguous(
        memory_format=torch.channels_last_3d
    )
    graph = ckplan.profile(
        model, (volumes,), loss_fn=loss_of, optimizer="none", replay=False
    )
    (told,) = (note for note in graph.notes if "mlp#0: it would run whole" in note)
    assert "changes the memory layout" in told
    assert not any(
        region.call == next(n for n, c in enumerate(graph.calls) if c.fqn == "mlp")
        for regions in find_tileable_rows(graph)
        for region in regions
    )
    with pytest.raises(PlanError, match="profile found that it would run whole"):
        simulate(graph, resolve(plan_of(2, 2), graph))
