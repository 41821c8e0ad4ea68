"""Plans for graphs with dynamic shapes: bits, bytes, and larger batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from compiled import Convolutions, Deep, Steps, planner_of, run_steps
from torch import nn

import ckplan
from ckplan.compiling import dynamic, nodes
from ckplan.compiling.nodes import renamed
from ckplan.compiling.replay import Replayed
from ckplan.errors import ApplyError, PlanError

LARGEST, BOUND = 1024, 2048


class Ran(NamedTuple):
    """A compiled model: a step for every batch, and the graphs compiled in all."""

    steps: dict[int, Steps]
    graphs: int


def batch(rows: int) -> torch.Tensor:
    torch.manual_seed(rows)
    return torch.randn(rows, 32)


def ran(backend: Any, mark: Callable[[torch.Tensor], None], **how: Any) -> Ran:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Deep(depth=2)
    call = torch.compile(model, backend=backend, fullgraph=True, **how)
    counters = torch._dynamo.utils.counters["stats"]
    before, steps = counters["unique_graphs"], {}
    for rows in (LARGEST, 700, 200):
        x = batch(rows)
        mark(x)
        steps[rows] = run_steps(call, model, x)
    return Ran(steps, counters["unique_graphs"] - before)


def unmarked(x: torch.Tensor) -> None:
    del x


def bounded(x: torch.Tensor) -> None:
    torch._dynamo.mark_dynamic(x, 0, min=129, max=BOUND)


@pytest.fixture(scope="module")
def unplanned() -> Ran:
    return ran("inductor", unmarked, dynamic=True)


@pytest.fixture(scope="module")
def planned() -> tuple[Ran, ckplan.Backend]:
    backend = ckplan.backend("80%")
    return ran(backend, unmarked, dynamic=True), backend


def test_every_batch_has_the_bits_of_the_compiled_unplanned_step(
    unplanned: Ran, planned: tuple[Ran, ckplan.Backend]
) -> None:
    found, backend = planned
    assert backend.plans[0].regions
    assert found.graphs == 1
    for rows, steps in found.steps.items():
        assert steps.differs_from(unplanned.steps[rows]) == []
        assert steps.peak_bytes < unplanned.steps[rows].peak_bytes


def test_the_batch_that_it_is_compiled_for_takes_the_replayed_bytes(
    planned: tuple[Ran, ckplan.Backend],
) -> None:
    found, backend = planned
    (chosen,) = backend.chosen
    assert found.steps[LARGEST].peak_bytes == chosen.replayed.step_peak_bytes
    assert backend.peak_bytes == chosen.replayed.peak_bytes
    assert chosen.replayed.peak_bytes <= chosen.plan.budget_bytes


def test_a_bound_is_what_a_plan_is_for() -> None:
    backend = ckplan.backend("80%")
    found = ran(backend, bounded)
    assert found.graphs == 1
    (chosen,) = backend.chosen
    assert found.steps[LARGEST].peak_bytes < chosen.replayed.step_peak_bytes
    model = Deep(depth=2)
    own = planner_of(model, batch(BOUND)).unplanned
    assert chosen.unplanned.peak_bytes == own.peak_bytes


def test_a_larger_batch_is_told_once() -> None:
    torch._dynamo.reset()
    compiled = ckplan.compile(Deep(depth=1), "100%", dynamic=True)
    compiled(batch(64)).backward()
    with pytest.warns(UserWarning, match="is 65, and the plan is for 64"):
        compiled(batch(65)).backward()
    compiled(batch(66)).backward()  # warnings are errors in these tests


def test_a_plan_for_one_batch_is_followed_by_code_for_all(
    planned: tuple[Ran, ckplan.Backend],
) -> None:
    torch.manual_seed(0)
    planner = planner_of(Deep(depth=2), batch(LARGEST))
    plan = planner.solve(planner.unplanned.peak_bytes * 8 // 10).plan
    backend = ckplan.backend(plan)
    found = ran(backend, unmarked, dynamic=True)
    assert backend.plans == [plan]
    for rows, steps in found.steps.items():
        assert steps.differs_from(planned[0].steps[rows]) == []
    tight = replace(plan, budget_bytes=planner.unplanned.held_bytes)
    with pytest.raises(PlanError, match="exceeds its budget"):
        ran(ckplan.backend(tight), unmarked, dynamic=True)


def test_code_for_all_sizes_that_takes_more_gets_a_smaller_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = planner_of(Deep(depth=1), batch(64))
    most = planner.unplanned.peak_bytes
    asked: list[int] = []

    def choose(_: Any, beyond: int) -> Any:
        asked.append(beyond)
        return planner.solve(most - beyond)

    peaks = iter([most + 5, most + 2, most])

    def replayed(*_: Any) -> Replayed:
        return Replayed(0, next(peaks), 0, 0, 0)

    traced = SimpleNamespace(
        inputs=(),
        sizes={},
        lower=lambda saved, sized: (sized, planner.traced),
        compile=lambda partitioner: (len, None),
    )
    monkeypatch.setattr(dynamic, "replay", replayed)
    chosen, _ = dynamic.compiled_for(traced, planner, choose)  # type: ignore[arg-type]
    assert asked == [0, 5, 7]
    assert chosen.replayed.peak_bytes == most


class MeanLoss(Deep):
    """Its gradient divides by a size, which takes more ops with dynamic shapes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, torch.zeros_like(x))


def test_a_mean_over_a_dynamic_size_is_planned() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend, model = ckplan.backend("85%"), MeanLoss(depth=2)
    options = {"fullgraph": True, "dynamic": True}
    call = torch.compile(model, backend=backend, **options)
    unplanned = torch.compile(model, **options)
    for rows in (LARGEST, 200):
        x = batch(rows)
        one, other = run_steps(call, model, x), run_steps(unplanned, model, x)
        assert one.differs_from(other) == []
        assert one.peak_bytes < other.peak_bytes
    (plan,) = backend.plans
    assert plan.regions


def test_more_ops_between_those_of_a_graph_are_passed_over() -> None:
    def places(ours: str, theirs: str) -> list[int] | None:
        return nodes._places([*ours], [*theirs])

    assert places("abcab", "abxxcab") == [0, 1, 4, 5, 6]
    assert places("abcab", "xabcxab") == [1, 2, 3, 5, 6]
    assert places("aab", "aaab") == [0, 1, 3]
    assert places("abc", "acb") is None
    assert places("abc", "ab") is None


def test_a_graph_that_runs_other_ops_is_refused() -> None:
    one, other = (
        planner_of(*given).joint.module.graph
        for given in (
            (Deep(depth=1), batch(64)),
            (Convolutions(depth=1), torch.randn(2, 3, 8, 8)),
        )
    )
    assert renamed([], one, one) == set()
    with pytest.raises(ApplyError, match="dynamic shapes: with its largest sizes"):
        renamed([], one, other)
