"""Regions inside regions: bit for bit the same, in the bytes predicted."""

from __future__ import annotations

import copy
from collections import Counter
from random import Random
from typing import Any

import graphs
import pytest
import torch
from small_models import build
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from trained import applying_to, measured_peak, train

import ckplan
from ckplan import applying
from ckplan.errors import PlanError
from ckplan.plan.file import dumps, loads
from ckplan.plan.names import OpName
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.region import RERUN, Region
from ckplan.plan.resolve import describe, resolve
from ckplan.simulating.simulate import Simulator, simulate

ADDMM = OpName.parse("up/addmm")
PLANS = {
    "residual": """
      - calls: .
        regions:
          - calls: '[0..2]'
            save: [up/addmm]
            regions:
              - calls: '[0..2].norm'
    """,
    "convolution": """
      - run: [0, 2]
        save: [0.conv/convolution]
        regions:
          - run: [0, 1]
            regions:
              - calls: '[0..1]'
                save: [./add_]
          - calls: 2
    """,
    "attention": """
      - calls: .
        regions:
          - run: [0, 1]
            regions:
              - calls: '[0..1]'
          - calls: 2
            save: [out/addmm]
    """,
    "masked": """
      - calls: .
        regions:
          - calls: '[0..2]'
            regions:
              - calls: '[0..2].conv'
    """,
    "unrolled": """
      - calls: .
        regions:
          - run: ["cell#0", "cell#3"]
            regions:
              - calls: cell#1
              - run: ["cell#2", "cell#3"]
    """,
    "listed": """
      - run: [blocks.0, blocks.4]
        save: [blocks.1.up/addmm]
        regions:
          - run: [blocks.0, blocks.1]
          - run: [blocks.2, blocks.4]
            regions:
              - calls: blocks.[2..3]
    """,
}


def plan_of(name: str) -> Plan:
    return loads(f"ckplan: 1\nregions:{PLANS[name]}", name)


@pytest.mark.parametrize("name", PLANS)
def test_nested_regions_are_bitwise_the_same_and_peaks_are_as_predicted(
    name: str,
) -> None:
    workload, plan = build(name), plan_of(name)
    graph = ckplan.profile(workload.model, workload.batch, loss=workload.loss)
    regions = resolve(plan, graph)
    planned = applying_to(build(name), plan)
    assert all(map(torch.equal, train(build(name), steps=4), train(planned, steps=4)))
    for region in applying.status(planned.model).regions:
        assert (region.runs, region.recorded, region.kept) == (4, 1, 0)
        assert region.missing == ()
    predicted = simulate(graph, regions).peak_bytes
    measured = measured_peak(applying_to(build(name), plan))
    assert predicted == pytest.approx(measured, rel=0.003)
    again = loads(dumps(Plan(regions=describe(graph, regions))), "again")
    assert resolve(again, graph) == regions


@pytest.mark.parametrize(
    "seed",
    [*range(5), *(pytest.param(s, marks=pytest.mark.slow) for s in range(5, 12))],
)
def test_regions_nested_at_random_are_bitwise_the_same(seed: int) -> None:
    rng = Random(seed)
    name = rng.choice(["residual", "convolution", "attention", "masked", "listed"])
    workload = build(name)
    graph = ckplan.profile(workload.model, workload.batch, loss=workload.loss)
    (root,) = graphs.nested(graph, [Region(0)], rng)
    plan = Plan(regions=describe(graph, [root]))
    planned = applying_to(build(name), plan)
    assert all(map(torch.equal, train(build(name)), train(planned)))
    predicted = simulate(graph, [root]).peak_bytes
    measured = measured_peak(applying_to(build(name), plan))
    assert predicted == pytest.approx(measured, rel=0.003)


def test_nesting_runs_ops_again_and_holds_less() -> None:
    graph = graphs.chain(8, width_bytes=10**4, hidden_bytes=10**5)
    blocks = [i for i, call in enumerate(graph.calls) if call.fqn.startswith("h.")]
    blocks = [i for i in blocks if graph.calls[i].fqn.count(".") == 1]
    first, last = blocks[0], blocks[-1]
    flat = Region(first, last=last)
    halves = tuple(
        Region(a, last=b, inner=tuple(Region(i) for i in blocks if a <= i <= b))
        for a, b in ((blocks[0], blocks[3]), (blocks[4], blocks[7]))
    )
    nested = Region(first, last=last, inner=halves)
    simulator = Simulator(graph)
    runs = [Counter(simulator.effect(r).steps) for r in (flat, nested)]
    assert set(runs[0].values()) == {1}
    assert max(runs[1].values()) == 3  # once in each of the regions around it
    peaks = [simulator.run([r]).peak_bytes for r in (flat, nested)]
    assert peaks[1] < peaks[0]


def test_a_save_inside_that_names_no_op_is_told() -> None:
    inner = PlannedRegion("blocks.0", save=(OpName.parse("up/cos"),))
    plan = Plan(regions=(PlannedRegion(".", inner=(inner,)),))
    planned = applying_to(build("listed"), plan)
    with pytest.warns(UserWarning, match=r"\. runs no op up/cos"):
        train(planned, steps=1)
    (region,) = applying.status(planned.model).regions
    assert region.missing == ("up/cos",)


@pytest.mark.parametrize(
    ("region", "message"),
    [
        (PlannedRegion("blocks.0", inner=(PlannedRegion("blocks.1"),)), "not inside"),
        (PlannedRegion("blocks.0", inner=(PlannedRegion("blocks.0"),)), "not inside"),
        (PlannedRegion("blocks.0", inner=(PlannedRegion("block.7"),)), "block.7"),
        (
            PlannedRegion(
                ".", inner=(PlannedRegion("blocks.0"), PlannedRegion("blocks.0.up"))
            ),
            "overlap",
        ),
        (
            PlannedRegion(
                ".",
                inner=(
                    PlannedRegion("", run=("blocks.0", "blocks.2")),
                    PlannedRegion("blocks.2"),
                ),
            ),
            "overlap",
        ),
    ],
)
def test_nesting_that_cannot_be_is_refused_for_graphs_and_models(
    region: PlannedRegion, message: str
) -> None:
    workload, plan = build("listed"), Plan(regions=(region,))
    graph = ckplan.profile(workload.model, workload.batch, loss=workload.loss)
    with pytest.raises(PlanError, match=message):
        resolve(plan, graph)
    with pytest.raises(PlanError, match=message):
        applying.apply(workload.model, plan)
    hooks = (m._forward_hooks or m._forward_pre_hooks for m in workload.model.modules())
    assert not any(hooks)


def test_only_programs_nest() -> None:
    rerun = PlannedRegion("h.0", "rerun")
    coded = PlannedRegion("h.0", encode=((ADDMM, "bits"),))
    for region in (rerun, coded):
        with pytest.raises(PlanError, match=r"cannot nest 'h\.0'"):
            PlannedRegion("h", inner=(region,))
    with pytest.raises(PlanError, match="cannot nest 'h', which runs again"):
        PlannedRegion("h", "rerun", inner=(PlannedRegion("h.0"),))
    graph = graphs.chain(2)
    inner = (Region(1),)
    for region in (Region(0, RERUN, inner=inner), Region(0, inner=(Region(1, RERUN),))):
        with pytest.raises(PlanError, match="cannot nest"):
            simulate(graph, [region])


class TakingTurns(nn.Module):
    """Layers alike, of which another is the first in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU())
            for _ in range(4)
        )
        self.turned = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.h) if self.turned else self.h:
            x = x + layer(x)
        return x


ONE_OF_FOUR = {
    "save": PlannedRegion(".", save=(OpName.parse("h.0.0/addmm"),)),
    "inner": PlannedRegion(".", inner=(PlannedRegion("h.0"),)),
    "save inside": PlannedRegion(
        ".", inner=(PlannedRegion("h.[0..1]", save=(OpName.parse("0/addmm"),)),)
    ),
}


class Products(TorchDispatchMode):
    """Which weights ops multiply by that have a bias: what runs again in backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {p.data_ptr(): name for name, p in model.named_parameters()}
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.addmm.default:
            self.seen.append(self.names[args[2].data_ptr()])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("region", ONE_OF_FOUR.values(), ids=ONE_OF_FOUR)
def test_layers_alike_that_take_turns_are_told_apart(region: PlannedRegion) -> None:
    def run_again(turns: list[bool]) -> list[list[str]]:
        torch.manual_seed(0)
        plain = TakingTurns()
        planned = copy.deepcopy(plain)
        applying.apply(planned, Plan(regions=(region,)))
        found = []
        for turned in turns:
            grads = []
            for model in (plain, planned):
                model.turned = turned
                model.zero_grad()
                torch.manual_seed(1)
                loss = model(torch.randn(512, 64)).sum()
                with Products(model) as products:
                    loss.backward()
                grads.append([p.grad for p in model.parameters()])
            assert all(map(torch.equal, *grads))
            found.append(products.seen)
        (status,) = applying.status(planned).regions
        assert (status.kept, status.missing) == (0, ())
        return found

    turns = [False, True, True, False, False, True]
    alone = {turned: run_again([turned])[0] for turned in (False, True)}
    assert run_again(turns) == [alone[turned] for turned in turns]
