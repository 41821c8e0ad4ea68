"""Experts of a mixture in tiles: their rows differ from step to step."""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from measured import peak_bytes_of
from torch import Tensor, nn

import ckplan
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan
from ckplan.plan.tiles import RowTiles
from ckplan.tracing.steps import tiled_row_bits

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, HIDDEN, ROWS, EXPERTS = 32, 512, 256, 4


class Expert(nn.Module):
    """An MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        made: Tensor = self.down(F.gelu(self.up(rows)))
        return made


class Mixture(nn.Module):
    """Gives each row to two experts; calls experts without rows, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, given: Tensor) -> Tensor:
        rows = self.norm(given)
        weights, chosen = self.router(rows).softmax(-1).topk(2, -1)
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            made.index_add_(0, row, expert(rows[row]) * weights[row, place, None])
        return given + made


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Mixture(), Mixture())


def batch(seed: int = 0) -> Tensor:
    return torch.randn(
        ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)
    ) + 0.5 * (seed > 1)


def loss_of(made: Tensor, _: object = None) -> Tensor:
    return made.square().mean()


@cache
def step() -> Graph:
    return ckplan.profile(
        model(), (batch(),), loss_fn=loss_of, optimizer="none", replay=False
    )


@cache
def planned() -> Plan:
    return ckplan.solve(step(), goal="min-memory", allow=["tiles"])


def gradients(one: nn.Module, rows: Tensor) -> list[Tensor]:
    one.zero_grad()
    loss_of(one(rows)).backward()
    found = (p.grad for p in one.parameters())
    return [grad.clone() for grad in found if grad is not None]


def test_experts_are_chosen_and_their_bytes_are_predicted() -> None:
    least = ckplan.solve(step(), goal="min-memory").predicted
    tiled = [(one.calls, one.tiles) for one in planned().regions if one.tiles]
    assert tiled == [("[1..2].experts.[0..3]", RowTiles(8, 8))]
    assert least is not None and planned().predicted is not None
    assert planned().predicted.peak_bytes < least.peak_bytes
    one, rows = model(), batch()
    ckplan.apply(one, planned())

    def run() -> None:
        made = one(rows)
        loss_of(made).backward()

    run()
    one.zero_grad()
    peak = peak_bytes_of(run, [*one.parameters(), rows])
    assert planned().predicted.peak_bytes == peak


def test_other_rows_in_each_step_have_autograds_bits() -> None:
    plain, tiled = model(), model()
    with torch.no_grad():
        for one in (plain, tiled):
            one[2].router.bias[1] = -100.0  # an expert without rows
    ckplan.apply(tiled, planned())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(4):
            expected = gradients(plain, batch(seed))
            found = gradients(tiled, batch(seed))
            assert len(found) == len(expected) > 4 * 2 * EXPERTS
            assert all(map(torch.equal, found, expected))
    regions = [one for one in ckplan.status(tiled).regions if one.by == "tiles"]
    assert {(one.runs, one.kept) for one in regions} == {(4, 0)}
    assert tiled[2].experts[1].down.bias.grad.count_nonzero() == 0


def test_bits_are_tested_at_the_fewest_and_the_most_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = step()
    assert len(graph.tiled) == 2 * EXPERTS
    asked: list[int] = []
    cache_ = tiled_row_bits.CostCache
    monkeypatch.setattr(cache_, "known", lambda *_: {})

    def noted(_: object, rows: int, **__: object) -> tiled_row_bits.Cost:
        asked.append(rows)
        raise MemoryError("none left")

    monkeypatch.setattr(tiled_row_bits, "check_row_bits", noted)
    found = tiled_row_bits.row_wise_calls(graph)
    rows = sorted(one.rows for one in found.values())
    other = ckplan.profile(
        model(), (batch(),), loss_fn=loss_of, optimizer="none", replay=False
    )
    assert sorted(asked) == [rows[0], rows[-1]] and len(set(rows)) > 2
    assert not other.tiled
