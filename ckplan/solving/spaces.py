"""Search spaces: chains of units, and wider spaces where they help.

Very small steps are solved exhaustively. Larger steps are searched as chains of calls.
Chains of runs of calls and nested regions are added if the smallest plans of these
spaces free enough more memory. Local search improves the plans of all chains. The floor
is searched by bytes alone (``floor_search.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial

from ckplan.plan.region import Region
from ckplan.simulating.simulate import Simulator
from ckplan.solving.baselines import StandardBaselines
from ckplan.solving.bound import LowerBound, gap
from ckplan.solving.chain import ChainFrontier, regions_of
from ckplan.solving.floor_search import FloorSearch
from ckplan.solving.local_search import LocalSearch
from ckplan.solving.menu import Menus, Option
from ckplan.solving.nesting import Nesting
from ckplan.solving.replays import ReplayedPlan, Replays, peak_of
from ckplan.solving.segmentation import (
    candidate_units,
    segmentation_frontier,
    tree_frontier,
)
from ckplan.solving.unit_bytes import Unit

_MOST_GAP = 0.02  # to the bound: below it, no wider search is needed
_TIMES_PEAKS = 2  # rounds of looking for peaks
_PLANS_FOR_PEAKS, _OPS_FOR_PEAKS = 8, 9_000  # most plans; plans times ops
_FEW_OPS, _FEW_CALLS = 64, 12
"""Most ops and innermost calls of a small step. A small step is searched with every set
of saved values, every run of calls and nested regions everywhere."""


class SearchSpaces:
    """The chains that a planner searches, and the plans that local search adds."""

    def __init__(self, simulator: Simulator) -> None:
        """Build no space yet: each is built at its first use."""
        graph = self.graph = simulator.graph
        self.simulator = simulator
        innermost = sum(not graph.children[call] for call in range(len(graph.calls)))
        self._is_small = len(graph.ops) <= _FEW_OPS and innermost <= _FEW_CALLS
        self.menus = Menus(self.simulator, small=self._is_small)
        self.unplanned = self.simulator.run()
        self.replays = Replays(self.simulator, self.menus)
        self._floor = FloorSearch(
            self.simulator, self.menus.bytes, small=self._is_small
        )
        self._nodes = self._floor.nodes

    @cached_property
    def bound(self) -> LowerBound:
        """The lower bound on the overhead of any schedule."""
        smallest, _ = self._least_of(self._plain)
        return LowerBound(self.simulator, [smallest.peak_moment // 2])

    @cached_property
    def smallest_plan(self) -> ReplayedPlan:
        """The plan that reaches the floor."""
        return self._floor.smallest_plan

    @property
    def exhaustive_plans(self) -> list[ReplayedPlan]:
        """The non-dominated plans of a small step; empty for other steps."""
        return self._floor.exhaustive_plans

    @property
    def standard_baselines(self) -> StandardBaselines:
        """Common strategies on whole layers; those that are plans are candidates."""
        return self._floor.standard_baselines

    @cached_property
    def improved_plans(self) -> list[ReplayedPlan]:
        """Non-dominated plans of all chains, improved by local search."""
        if self.exhaustive_plans:
            return []
        search = LocalSearch(self.simulator, self.menus, self._floor.units)
        search.offer(())
        for _, regions in self._floor.plans:
            search.offer(regions)
        for chain in self.chains:
            plans = chain.evenly_spaced(search.num_left // (4 * len(self.chains)))
            for plan in map(regions_of, plans):
                search.offer(plan)
        return search.run()

    def _least_of(self, chains: Iterable[ChainFrontier]) -> ReplayedPlan:
        tried = [*self.exhaustive_plans, *self.standard_baselines.plans]
        return min([self.replays.smallest(chains), *tried], key=peak_of)

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
            return [] if self._floor.all_nested else [self._tree]
        found = [self._tree, *([self._outermost_chain] if self._is_small else ())]
        wide, simulator = self._floor.wide, self.simulator
        if self._floor.runs_pay:
            found += wide.run_chains(simulator, self.menus.options)
        if self._floor.nesting_pays:
            found += wide.nested_chains(simulator, self._nesting.options)
        return found

    @cached_property
    def _bound_leaves_room(self) -> bool:
        """Whether the bound leaves room for plans much better than the smallest one."""
        if self._floor.all_nested:
            return False
        least, _ = self.replays.smallest(self._plain)
        return gap(least.overhead, self.bound.overhead(least.peak_bytes)) > _MOST_GAP

    @cached_property
    def _near_floor_tree(self) -> ChainFrontier:
        options = self._nesting.near_floor_options
        return tree_frontier(self.simulator, self._nodes, options)

    @cached_property
    def _peak_chains(self) -> list[ChainFrontier]:
        """Chains with options for peaks within the backward of a unit, if any.

        The unit's other options may already have rebuilt their tensors at that peak.
        """
        found: list[ChainFrontier] = []
        moments: set[int] = set()
        for _ in range(0 if self._floor.all_nested else _TIMES_PEAKS):
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
            found += (next(self.replays.of(plan))[0] for plan in plans)
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

    @cached_property
    def _nesting(self) -> Nesting:
        return Nesting(self.simulator, self.menus, small=self._is_small)
