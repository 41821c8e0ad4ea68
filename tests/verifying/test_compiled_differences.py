"""What counts as a difference of two steps, and what float64 finds to be rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from ckplan.training.workload import Workload
from ckplan.verifying.compiled_differences import (
    differences,
    in_float64,
    rounding_alone,
)
from ckplan.verifying.compiled_runs import eager_results, results_of
from ckplan.verifying.compiled_steps import _apart

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("found", "expected", "by"),
    [
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([1.0, NAN], [1.0, 2.0], INF),
        ([1.0, 2.0], [1.0, NAN], INF),
        ([1.0, INF], [1.0, 2.0], INF),
        ([NAN, 1.0], [NAN, 2.0], 0.5),
        ([INF, 1.0], [INF, 1.0], None),
        ([NAN, 1.0], [NAN, 1.0], None),
        ([1, 2], [1, 3], INF),
        ([1.0], [1.0, 2.0], INF),
        (None, [1.0], INF),
        ([1.0], None, INF),
    ],
)
def test_differences(
    found: list[float] | None, expected: list[float] | None, by: float | None
) -> None:
    """Also of what is no number, and of what only one of them has."""
    one, other = (
        {} if values is None else {"a": torch.tensor(values)}
        for values in (found, expected)
    )
    assert differences(one, other) == ({} if by is None else {"a": by})


class Keys(nn.Module):
    """Attention: the bias of keys adds the same to all scores of a query."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        return (scores.softmax(-1) @ x).square().mean()


def keys() -> Workload:
    torch.manual_seed(0)
    return Workload(model=Keys(), batch=torch.randn(4, 16, 8))


def test_float64_decides_where_an_exact_gradient_is_zero() -> None:
    workload = keys()
    model, x = workload.model, workload.batch
    plain = results_of(workload, lambda: model(x), 0)
    # The same in another order: other rounding.
    other = results_of(workload, lambda: model(x.flip(0)), 0)
    name = "gradient key.bias"
    assert differences(other.values, plain.values)[name] > 1e-2
    apart = _apart(workload, {False: plain, True: other}, eager_results(workload, 0), 0)
    assert apart.rounding_alone == (name,)
    assert apart.from_unplanned < 1e-4
    assert apart.from_eager is not None
    assert apart.from_eager < 1e-4
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_wrong_gradient_is_never_rounding() -> None:
    workload = keys()
    plain = results_of(workload, lambda: workload.model(workload.batch), 0)
    for name in ("gradient key.bias", "gradient query.weight"):
        for wrong in (plain.values[name] + 1e-3, plain.values[name] * NAN):
            planned = replace(plain, values={**plain.values, name: wrong})
            apart = _apart(workload, {False: plain, True: planned}, plain, 0)
            assert apart.rounding_alone == ()
            assert apart.from_unplanned > 1e-4
            assert apart.from_eager > 1e-4
    left, right = (
        {**plain.values, "buffer mean": mean}
        for mean in (torch.ones(2), torch.zeros(2))
    )
    first = {False: replace(plain, values=left), True: replace(plain, values=right)}
    assert _apart(workload, first, None, 0).from_unplanned == 1.0
    assert not rounding_alone(["buffer mean"], right, left, left)


@pytest.mark.parametrize(
    ("exact", "times", "is_rounding"),
    [(1e-18, 3, True), (1e-18, 6, True), (1e-18, 60, False), (1e-9, 6, False)],
)
def test_where_the_exact_number_is_zero_roundings_may_be_further_apart(
    exact: float, times: float, is_rounding: bool
) -> None:
    theirs = torch.tensor([1e-9])
    values = {"a": exact + times * theirs}, {"a": exact + theirs}
    found = rounding_alone(["a", "b"], *values, {"a": torch.tensor([exact]).double()})
    assert found == ({"a"} if is_rounding else set())


def test_a_step_that_draws_is_judged_by_one_in_float64_that_draws_the_same() -> None:
    def dropped(one: Workload) -> Callable[[], torch.Tensor]:
        keep = torch.ones(4, 16, 8)
        keep[:, ::3] = 0.0  # stands for a mask that compiled code draws
        return lambda: one.model(one.batch * keep)

    def drawn_otherwise(one: Workload) -> Callable[[], torch.Tensor]:
        return lambda: one.model(one.batch * (torch.rand(4, 16, 1) > 0.1))

    workload = keys()
    plain = results_of(workload, dropped(workload), 0)
    name = "gradient key.bias"
    noise = replace(plain, values={**plain.values, name: -plain.values[name]})
    wrong = replace(plain, values={**plain.values, name: plain.values[name] + 1e-5})
    first = {False: plain, True: noise}
    apart = _apart(workload, first, None, 0, dropped)
    assert (apart.rounding_alone, apart.from_unplanned) == ((name,), 0.0)
    for planned, draws in ((noise, drawn_otherwise), (wrong, dropped), (noise, None)):
        first = {False: plain, True: planned}
        apart = _apart(workload, first, None, 0, draws)
        assert apart.rounding_alone == ()
        assert apart.from_unplanned > 1e-4


def test_a_model_that_wants_float32_stays_undecided() -> None:
    class Stubborn(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.float()).sum()

    workload = Workload(model=Stubborn(2, 2), batch=torch.randn(2, 2))
    assert in_float64(workload, lambda one: {"loss": one.model(one.batch)}) is None
