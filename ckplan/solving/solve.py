"""The front door of solving: a budget in, the cheapest plan that fits out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TypeAlias

from ckplan import units
from ckplan.errors import InfeasibleError, PlanError
from ckplan.graph import Graph
from ckplan.plan import Plan, Prediction, plan_fingerprint
from ckplan.resolve import describe
from ckplan.simulate import Region, Simulator, Timeline
from ckplan.solving.baselines import baselines
from ckplan.solving.bound import lower_bound
from ckplan.solving.chain import ChainFrontier
from ckplan.solving.covers import chain_of, find_covers
from ckplan.solving.menu import Menus
from ckplan.solving.solution import Floor, Solution

_Found: TypeAlias = tuple[Timeline, tuple[Region, ...]]
_Tidy: TypeAlias = Callable[[tuple[Region, ...]], list[Region]]

_MOST_REPLAYS = 32  # of points that the chain thought would fit


def solve(graph: Graph, budget_bytes: int) -> Solution:
    """Find the cheapest plan whose simulated peak is within a budget.

    Every plan considered is replayed in exact bytes before it is accepted, so no plan
    leaves here whose simulated peak exceeds the budget.

    Args:
        graph: The recorded step.
        budget_bytes: Limit on the total allocated peak of the step.

    Raises:
        InfeasibleError: No plan found fits; the floor and its owner are named.
    """
    simulator = Simulator(graph)
    menus = Menus(simulator)
    unplanned = simulator.run()
    covers = find_covers(graph, menus)
    chains = [chain_of(simulator, menus, cover) for cover in covers]
    tidies = [partial(menus.tidy, cover=cover) for cover in covers]
    floor = _floor(simulator, chains, tidies)
    best, regions = unplanned, tuple[Region, ...]()
    if unplanned.peak_bytes > budget_bytes:
        plans = (
            _cheapest(simulator, chain, tidy, budget_bytes)
            for chain, tidy in zip(chains, tidies, strict=True)
        )
        found = [plan for plan in plans if plan is not None]
        if not found:
            raise _nothing_fits(graph, budget_bytes, floor)
        best, regions = min(found, key=_rank)
    return Solution(
        budget_bytes=budget_bytes,
        regions=regions,
        timeline=best,
        unplanned=unplanned,
        floor=floor,
        bound_overhead=lower_bound(simulator, budget_bytes),
        baselines=baselines(simulator, menus, budget_bytes),
    )


def solve_plan(graph: Graph, budget: str | int) -> Plan:
    """The same for a budget as people write it: ``"12GiB"``, ``"80%"`` or bytes."""
    peak_bytes = Simulator(graph).run().peak_bytes
    return to_plan(graph, solve(graph, units.parse_budget(budget, peak_bytes)))


def to_plan(graph: Graph, solution: Solution) -> Plan:
    """A solution as the plan file says it."""
    timeline = solution.timeline
    return Plan(
        model=graph.model,
        fingerprint=plan_fingerprint(graph.fingerprint),
        budget_bytes=solution.budget_bytes,
        predicted=Prediction(
            peak_bytes=timeline.peak_bytes,
            peak_at=timeline.peak_at,
            overhead=timeline.overhead,
            unplanned_peak_bytes=solution.unplanned.peak_bytes,
        ),
        bound={"any_schedule": solution.bound_overhead},
        regions=describe(graph, solution.regions),
    )


def _cheapest(
    simulator: Simulator, chain: ChainFrontier, tidy: _Tidy, budget_bytes: int
) -> _Found | None:
    """The cheapest plan of a chain whose replay fits."""
    for plan in islice(chain.cheapest_first(budget_bytes), _MOST_REPLAYS):
        for timeline, regions in _replays(simulator, plan, tidy):
            if timeline.peak_bytes <= budget_bytes:
                return timeline, regions
    return None


def _replays(
    simulator: Simulator, plan: tuple[Region, ...], tidy: _Tidy
) -> Iterator[_Found]:
    """A plan tidied, and as it is."""
    tidied = tuple(tidy(plan))
    with suppress(PlanError):  # a call may have lost an input that one like it has
        yield simulator.run(tidied), tidied
    yield simulator.run(plan), plan


def _rank(found: _Found) -> tuple[float, int]:
    return found[0].recompute_seconds, found[0].peak_bytes


def _floor(
    simulator: Simulator, chains: Sequence[ChainFrontier], tidies: Sequence[_Tidy]
) -> Floor:
    """The smallest peak of all plans, and what owns it."""
    timelines = [simulator.run()]
    for chain, tidy in zip(chains, tidies, strict=True):
        plan = next(chain.cheapest_first(chain.least_bytes))
        timelines += (timeline for timeline, _ in _replays(simulator, plan, tidy))
    smallest = min(timelines, key=lambda timeline: timeline.peak_bytes)
    by_kind = smallest.peak_by_kind
    owner = max(by_kind, key=lambda kind: (by_kind[kind], kind))
    return Floor(smallest.peak_bytes, smallest.peak_at, owner)


def _nothing_fits(graph: Graph, budget_bytes: int, floor: Floor) -> InfeasibleError:
    budget, least = map(units.format_bytes, (budget_bytes, floor.peak_bytes))
    return InfeasibleError(
        f"no plan fits {budget}: the floor of {graph.model} is {least}",
        needed=f"at least {floor.peak_bytes} bytes; most of the floor is of kind "
        f"'{floor.owner}', in {floor.peak_at}",
        hint=_remedy(floor.owner),
    )


def _remedy(owner: str) -> str:
    if owner == "optimizer":
        return "an optimizer with less state: ckplan profile --optimizer sgd"
    if owner in ("parameter", "gradient", "buffer"):
        return "a smaller model, or parameters in 16 bits: no plan can drop them"
    return "a smaller batch: ckplan profile model.py --set batch=..."
