"""Search spaces: chains of units, and wider spaces where they help.

Very small steps are solved exhaustively. Larger steps are searched as chains of calls.
Chains of runs of calls and nested regions are added if the smallest plans of these
spaces free enough more memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import islice
from typing import TypeAlias

from ckplan.errors import PlanError
from ckplan.plan.region import Region
from ckplan.simulating.simulate import Simulator, Timeline
from ckplan.solving.baselines import StandardBaselines, can_recompute
from ckplan.solving.bound import LowerBound, gap
from ckplan.solving.chain import ChainFrontier, UnitChoice, regions_of
from ckplan.solving.exhaustive import try_all
from ckplan.solving.menu import Menus, Option, Unit
from ckplan.solving.nesting import Nesting
from ckplan.solving.segmentation import (
    CallNode,
    candidate_units,
    full_call_tree,
    pruned_call_tree,
    segmentation_frontier,
    tree_frontier,
    uniform_segmentations,
)

ReplayedPlan: TypeAlias = tuple[Timeline, tuple[Region, ...]]

_FEW_PLANS = 4  # smallest plans of a chain that are simulated to find its floor
_WORTH_FREED = 0.02  # least gain of a wider space, as a share of droppable bytes
_WORTH_PEAK = 0.1  # the same, as a share of the peak; the smaller one applies
_MOST_GAP = 0.02  # gap to the bound below which no wider search is needed
_PEAK_ROUNDS = 2  # rounds of searching for peaks
_PLANS_FOR_PEAKS, _OPS_FOR_PEAKS = 8, 9_000  # limits on plans, and on plans times ops
_LONGEST_RUN = 2.5  # as a multiple of the square root of the number of calls
_POWERS = (1 / 4, 1 / 3, 1 / 2, 2 / 3, 4 / 5)
"""Exponents for the number of calls: lengths of runs with nested regions. Longer runs
keep fewer tensors between them and need more levels."""
_FEW_OPS, _FEW_CALLS = 64, 12
"""Most ops and innermost calls of a small step. A small step is searched with every set
of saved values, every run of calls and nested regions everywhere."""


class SearchSpaces:
    """The chains that a planner searches, each with the smallest plan it reaches."""

    def __init__(self, simulator: Simulator) -> None:
        """Build no space yet: each is built at its first use."""
        graph = self.graph = simulator.graph
        self.simulator = simulator
        innermost = sum(not graph.children[call] for call in range(len(graph.calls)))
        self._is_small = len(graph.ops) <= _FEW_OPS and innermost <= _FEW_CALLS
        self.menus = Menus(self.simulator, small=self._is_small)
        self.unplanned = self.simulator.run()
        self._reached: dict[ChainFrontier, ReplayedPlan] = {}  # smallest plan

    @cached_property
    def bound(self) -> LowerBound:
        """The lower bound on the overhead of any schedule."""
        smallest, _ = self._least_of(self._plain)
        return LowerBound(self.simulator, [smallest.peak_moment // 2])

    @cached_property
    def smallest_plan(self) -> ReplayedPlan:
        """The plan that reaches the floor."""
        return self._least_of(self.chains)

    def _least_of(self, chains: Iterable[ChainFrontier]) -> ReplayedPlan:
        tried = [*self.exhaustive_plans, *self.standard_baselines.plans]
        return min([self._smallest(chains), *tried], key=peak_of)

    @cached_property
    def _nodes(self) -> tuple[CallNode, ...]:
        if self._is_small:
            return full_call_tree(self.graph)
        return pruned_call_tree(self.graph, self.menus)

    @cached_property
    def _tree(self) -> ChainFrontier:
        options = self._nesting.options if self._is_small else self.menus.options
        return tree_frontier(self.simulator, self._nodes, options, runs=self._is_small)

    @cached_property
    def _outermost_chain(self) -> ChainFrontier:
        """The chain of outermost calls, each as one unit."""
        units = [node.unit for node in self._nodes]
        return segmentation_frontier(self.simulator, units, self._nesting.options)

    @cached_property
    def exhaustive_plans(self) -> list[ReplayedPlan]:
        """The non-dominated plans of a small step; empty for other steps."""
        return self._all_nested or self._all(nested=False)

    @cached_property
    def _all_nested(self) -> list[ReplayedPlan]:
        return self._all(nested=True)

    def _all(self, *, nested: bool) -> list[ReplayedPlan]:
        if not self._is_small:
            return []
        return try_all(self.simulator, self.menus, self._nodes, nested=nested)

    @cached_property
    def chains(self) -> list[ChainFrontier]:
        """All chains that are searched."""
        return [*self._common, *self._peak_chains]

    @cached_property
    def _common(self) -> list[ChainFrontier]:
        """The chains that do not depend on the moment of the peak."""
        return [
            *self._plain,
            *([self._near_floor_tree] if self._bound_leaves_room else ()),
        ]

    @cached_property
    def _plain(self) -> list[ChainFrontier]:
        """The basic chains; wider spaces are among them if they free much more."""
        if self.exhaustive_plans:
            return [] if self._all_nested else [self._tree]
        found = [self._tree, *([self._outermost_chain] if self._is_small else ())]
        found += self._run_chains if self._runs_pay else ()
        return [*found, *(self._nested_chains if self._nesting_pays else ())]

    @cached_property
    def _bound_leaves_room(self) -> bool:
        """Whether the bound leaves room for plans much better than the smallest one."""
        if self._all_nested:
            return False
        least, _ = self._smallest(self._plain)
        return gap(least.overhead, self.bound.overhead(least.peak_bytes)) > _MOST_GAP

    @cached_property
    def _near_floor_tree(self) -> ChainFrontier:
        return tree_frontier(
            self.simulator, self._nodes, self._nesting.near_floor_options
        )

    @cached_property
    def _peak_chains(self) -> list[ChainFrontier]:
        """Chains with options for peaks within the backward of a unit, if any.

        The unit's other options may already have rebuilt their tensors at that peak.
        """
        found: list[ChainFrontier] = []
        moments: set[int] = set()
        for _ in range(0 if self._all_nested else _PEAK_ROUNDS):
            peaks = self._peaks([*self._common, *found]) - moments
            if not peaks:
                break
            moments |= peaks
            backward_peak_regions = self._backward_peak_regions(sorted(moments))
            if any(backward_peak_regions.values()):
                options = partial(self._options_with, backward_peak_regions)
                found = [tree_frontier(self.simulator, self._nodes, options)]
        return found

    def _peaks(self, chains: Sequence[ChainFrontier]) -> set[int]:
        """Peak moments of some plans, from the smallest plan to the unplanned step."""
        found = [self.unplanned, self._least_of(chains)[0]]
        count = min(_OPS_FOR_PEAKS // len(self.graph.ops), _PLANS_FOR_PEAKS)
        for chain in {chains[0], chains[-1]}:
            plans = chain.evenly_spaced(count)
            found += (next(self.replays(plan))[0] for plan in plans)
        return {timeline.peak_moment for timeline in found}

    def _backward_peak_regions(
        self, moments: Iterable[int]
    ) -> dict[Unit, list[Region]]:
        """Regions that drop tensors which backward needs after some moments."""
        backward_peak_regions = self.menus.backward_peak_regions
        return {
            unit: [
                region
                for moment in moments
                for region in backward_peak_regions(unit, moment)
            ]
            for unit in candidate_units(self._nodes)
        }

    def _options_with(
        self, more: Mapping[Unit, Sequence[Region]], unit: Unit
    ) -> list[Option]:
        """The menu of a unit with more regions added."""
        found = self.menus.options(unit)
        if not more[unit]:
            return found
        regions = [option.region for option in found if option.region]
        return self.menus.as_options(unit, dict.fromkeys([*regions, *more[unit]]))

    def _smallest(self, chains: Iterable[ChainFrontier]) -> ReplayedPlan:
        found = [(self.unplanned, ()), *map(self._smallest_of, chains)]
        return min(found, key=peak_of)

    def _smallest_of(self, chain: ChainFrontier) -> ReplayedPlan:
        if chain not in self._reached:
            plans = islice(chain.smallest_first(), _FEW_PLANS)
            candidates = [one for plan in plans for one in self.replays(plan)]
            self._reached[chain] = min(candidates, key=peak_of)
        return self._reached[chain]

    @cached_property
    def _uniform_segmentations(self) -> dict[int, list[tuple[Unit, ...]]]:
        return uniform_segmentations(self.graph, self.menus)

    @cached_property
    def _run_chains(self) -> list[ChainFrontier]:
        longest = _LONGEST_RUN * max(self._uniform_segmentations, default=0) ** 0.5
        return [
            segmentation_frontier(self.simulator, segmentation, self.menus.options)
            for length, covers in self._uniform_segmentations.items()
            for segmentation in covers
            if length <= longest
        ]

    @cached_property
    def _runs_pay(self) -> bool:
        """Whether dropping tensors between calls frees much more.

        Runs whose length is about the square root of the number of calls free the most.
        """
        least = self._smallest([self._tree])[0].peak_bytes
        regions = (
            [Region(call, last=last) for call, last in segmentation]
            for segmentation in self._segmentations_near_power(1 / 2)
        )
        return any(self._frees_more(plan, than_bytes=least) for plan in regions)

    @cached_property
    def _nesting_pays(self) -> bool:
        """Whether nested regions inside runs free more while the runs are rebuilt."""
        flat = [self._tree, *(self._run_chains if self._runs_pay else ())]
        least = self._smallest(flat)[0].peak_bytes
        regions = (
            [self._nesting.drop_all_nested(unit) for unit in segmentation]
            for power in (1 / 2, 2 / 3)
            for segmentation in self._segmentations_near_power(power)
        )
        return any(self._frees_more(plan, than_bytes=least) for plan in regions)

    @cached_property
    def _nesting(self) -> Nesting:
        return Nesting(self.simulator, self.menus, small=self._is_small)

    @cached_property
    def _nested_chains(self) -> list[ChainFrontier]:
        covers = dict.fromkeys(
            segmentation
            for power in _POWERS
            for segmentation in self._segmentations_near_power(power)
        )
        options = self._nesting.options
        return [
            segmentation_frontier(self.simulator, segmentation, options)
            for segmentation in covers
        ]

    def _segmentations_near_power(self, power: float) -> list[tuple[Unit, ...]]:
        """Segmentations into runs of about ``calls ** power`` calls."""
        covers = self._uniform_segmentations
        if not covers:
            return []
        target = max(covers) ** power
        return covers[min(covers, key=lambda length: abs(length - target))]

    def _frees_more(self, plan: Iterable[Region], than_bytes: int) -> bool:
        possible = [r for r in plan if can_recompute(self.simulator, r)]
        peak = self.simulator.run(possible).peak_bytes
        freed = self.unplanned.peak_bytes - peak
        least_gain = min(_WORTH_FREED * freed, _WORTH_PEAK * than_bytes)
        return than_bytes - peak > least_gain

    def replays(self, plan: Sequence[UnitChoice]) -> Iterator[ReplayedPlan]:
        """Simulate a plan in canonical form, then as it is."""
        regions = regions_of(plan)
        if not any(region.inner for region in regions):
            tidied = tuple(self.menus.canonicalize(regions, [unit for unit, _ in plan]))
            with suppress(PlanError):  # a similar call can lack an input
                yield self.simulator.run(tidied), tidied
        yield self.simulator.run(regions), regions

    @cached_property
    def standard_baselines(self) -> StandardBaselines:
        """Common strategies on whole layers; those that are plans are candidates."""
        return StandardBaselines(self.simulator, self.menus, self.unplanned)


def peak_of(found: ReplayedPlan) -> int:
    """The peak of a simulated plan, in bytes."""
    return found[0].peak_bytes
