"""Written-out norms in tiles: the bits of autograd, and bytes as predicted."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from measured import peak_bytes_of
from torch import Tensor, nn
from written_norms import NORMS, ROWS, WIDTH, Around, batch

import ckplan
from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.resolve import resolve
from ckplan.plan.tiles import RowTiles
from ckplan.simulating.simulate import simulate

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Torch says once that its RMS norm is not fused for these.
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]

FORMS = ["float32", "bfloat16", "autocast"]
FEW_USES = ("llama", "t5", "gemma")  # of the input: each has a whole gradient


def model_of(kind: str, form: str, *, residual: bool) -> Around:
    torch.manual_seed(0)
    model = Around(NORMS[kind](WIDTH), residual=residual)
    return model.to(dtype_of(form))


def dtype_of(form: str) -> torch.dtype:
    return torch.bfloat16 if form == "bfloat16" else torch.float32


def loss_of(output: Tensor, _: object = None) -> Tensor:
    return output.float().square().mean()


@lru_cache
def recorded(kind: str, form: str, *, residual: bool) -> Graph:
    return ckplan.profile(
        model_of(kind, form, residual=residual),
        (batch(dtype_of(form)),),
        loss_fn=loss_of,
        optimizer="none",
        amp="bf16" if form == "autocast" else None,
        replay=False,
    )


def plan_of(rows: int, columns: int) -> Plan:
    region = PlannedRegion("norm", "tiles", tiles=RowTiles(rows, columns))
    return Plan(regions=(region,))


def measured(
    kind: str, form: str, plan: Plan | None, *, residual: bool
) -> tuple[int, list[Tensor]]:
    """Peak of the second step, and its gradients."""
    model, rows = model_of(kind, form, residual=residual), batch(dtype_of(form))
    if plan is not None:
        ckplan.apply(model, plan)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=form == "autocast"):
            output = model(rows)
            loss = loss_of(output)
        loss.backward()

    run()
    model.zero_grad()
    peak = peak_bytes_of(run, [*model.parameters(), rows])
    if plan is not None:
        (region,) = ckplan.status(model).regions
        assert (region.runs, region.kept) == (2, 0)
    return peak, [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", NORMS)
def test_gradients_are_the_same_and_the_peak_is_predicted(
    kind: str, form: str, residual: bool
) -> None:
    graph = recorded(kind, form, residual=residual)
    plain, expected = measured(kind, form, None, residual=residual)
    for tiles in ((1, 1), (2, 2), (8, 2)):
        plan = plan_of(*tiles)
        peak, gradients = measured(kind, form, plan, residual=residual)
        assert all(map(torch.equal, gradients, expected))
        predicted = simulate(graph, resolve(plan, graph)).peak_bytes
        assert 0 <= predicted / peak - 1 < 0.003
    assert len(gradients) == len(expected) > 4
    assert peak < plain or kind not in FEW_USES or form == "float32"


@pytest.mark.parametrize("kind", NORMS)
def test_a_frozen_parameter_has_no_pass(kind: str) -> None:
    model, rows = model_of(kind, "float32", residual=True), batch()
    model.norm.requires_grad_(requires_grad=False)
    graph = ckplan.profile(
        model, (rows,), loss_fn=loss_of, optimizer="none", replay=False
    )
    ckplan.apply(model, plan_of(4, 4))

    def run() -> None:
        output = model(rows)
        loss_of(output).backward()

    run()
    model.zero_grad()
    peak = peak_bytes_of(run, [*model.parameters(), rows])
    plan = plan_of(4, 4)
    assert 0 <= simulate(graph, resolve(plan, graph)).peak_bytes / peak - 1 < 0.003


class Repeated(Around):
    """Runs its norm three times; gradients of its parameters add up."""

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.first(rows)
        for _ in range(3):
            rows = torch.tanh(self.norm(rows))
        output: Tensor = self.last(rows)
        return output


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_that_runs_again_adds_to_its_gradients(kind: str) -> None:
    results, peaks = [], []
    for plan in (None, plan_of(4, 2)):
        torch.manual_seed(0)
        model, rows = Repeated(NORMS[kind](WIDTH), residual=False), batch()
        if plan is None:
            graph = ckplan.profile(
                model, (rows,), loss_fn=loss_of, optimizer="none", replay=False
            )
        else:
            ckplan.apply(model, plan)

        def run(model: nn.Module = model, rows: Tensor = rows) -> None:
            output = model(rows)
            loss_of(output).backward()

        run()
        model.zero_grad()
        peaks.append(peak_bytes_of(run, [*model.parameters(), rows]))
        results.append([one.grad for one in model.parameters()])
    assert all(map(torch.equal, *results))
    predicted = simulate(graph, resolve(plan_of(4, 2), graph)).peak_bytes
    assert 0 <= predicted / peaks[1] - 1 < 0.003


def test_a_norm_in_tiles_costs_its_ops_once_more() -> None:
    graph = recorded("llama", "float32", residual=True)
    line = simulate(graph, resolve(plan_of(4, 4), graph))
    own = sum(op.seconds for op in graph.ops if 0 <= op.call == norm_call(graph))
    assert 0 < line.recompute_seconds < own + 0.01
    assert line.unplanned_seconds == pytest.approx(graph.step_seconds)


def norm_call(graph: Graph) -> int:
    return next(n for n, one in enumerate(graph.calls) if one.fqn == "norm")


class Softmaxed(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows.softmax(-1) * rows.mean(-1, keepdim=True)


class Columns(nn.Module):
    """Its sums are of columns."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows - rows.mean(0, keepdim=True)


class Kept(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        self.mean = rows.mean(-1, keepdim=True)
        return rows - self.mean


class Square(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows / (rows * rows).mean(-1, keepdim=True)


class InPlace(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return (rows - rows.mean(-1, keepdim=True)).mul_(2)


class TwoInputs(nn.Module):
    """Reads a tensor that is not its input."""

    def __init__(self) -> None:
        super().__init__()
        self.other = torch.randn(4, ROWS // 4, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        return (rows - rows.mean(-1, keepdim=True)) * self.other


REFUSED: dict[str, tuple[type[nn.Module], str]] = {
    "softmax": (Softmaxed, "it runs _softmax"),
    "columns": (Columns, "another shape than its input"),
    "kept": (Kept, "changes its attribute 'mean'"),
    "in place": (InPlace, "it changes a value in place"),
    "square": (Square, "mul reads its input alone"),
    "two inputs": (TwoInputs, "reads others than its input"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_norm_is_refused(name: str) -> None:
    make, why = REFUSED[name]
    graph = ckplan.profile(
        Around(make(), residual=True),
        (batch(),),
        loss_fn=loss_of,
        optimizer="none",
        replay=False,
    )
    with pytest.raises(PlanError, match=why) as error:
        simulate(graph, resolve(plan_of(2, 2), graph))
    assert str(error.value).count("\n") == 2


class WithoutParameters(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)


def test_a_norm_without_parameters_is_tested_and_runs_in_tiles() -> None:
    model, rows = Around(WithoutParameters(), residual=False), batch()
    graph = ckplan.profile(
        model, (rows,), loss_fn=loss_of, optimizer="none", replay=False
    )
    assert [one.call for one in graph.tiled] == [norm_call(graph)]
    ckplan.apply(model, plan_of(4, 2))
    loss_of(model(rows)).backward()
    (region,) = ckplan.status(model).regions
    assert (region.runs, region.kept) == (1, 0)


def test_a_mean_of_one_position_is_no_norm() -> None:
    pooled = nn.Sequential(nn.Conv2d(3, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    graph = ckplan.profile(
        pooled,
        (torch.randn(4, 3, 1, 1),),
        loss_fn=loss_of,
        optimizer="none",
        replay=False,
    )
    assert graph.tiled == ()


def test_the_floor_falls_where_a_norm_owns_it() -> None:
    graph = recorded("gemma", "bfloat16", residual=True)
    least = ckplan.solve(graph, goal="min-memory").predicted
    plan = ckplan.solve(graph, goal="min-memory", allow=["tiles"])
    assert least and plan.predicted
    (region,) = (one for one in plan.regions if one.tiles)
    assert (region.calls, region.tiles) == ("norm", RowTiles(8, 8))
    assert plan.predicted.peak_bytes < least.peak_bytes - ROWS * WIDTH
    peak, _ = measured("gemma", "bfloat16", plan, residual=True)
    assert 0 <= plan.predicted.peak_bytes / peak - 1 < 0.003


def test_a_profile_tests_the_bits_of_a_norm() -> None:
    graph = recorded("gemma", "bfloat16", residual=True)
    (test,) = graph.tiled
    assert (test.call, test.difference) == (norm_call(graph), 0.0)
