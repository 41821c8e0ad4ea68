"""The floor: the least peak, searched by bytes alone.

Seconds are nominal here (``nominal_seconds.py``), so the same step has the same floor
whatever its ops and encodings cost. Units whose backward is at the peak of the smallest
plan get more options, which may move the peak; this is repeated a few times. Local
search improves the smallest plans of all chains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import cached_property, partial

from ckplan.simulating.simulate import Simulator
from ckplan.solving.baselines import StandardBaselines
from ckplan.solving.chain import ChainFrontier
from ckplan.solving.exhaustive import try_all
from ckplan.solving.local_search import LocalSearch
from ckplan.solving.menu import Menus, Option
from ckplan.solving.nesting import Nesting
from ckplan.solving.nominal_seconds import NominalSimulator
from ckplan.solving.replays import ReplayedPlan, Replays, peak_of
from ckplan.solving.segmentation import (
    ALL_RUN_LENGTHS_MAX_OPS,
    CallNode,
    all_units,
    candidate_units,
    full_call_tree,
    pruned_call_tree,
    tree_frontier,
)
from ckplan.solving.unit_bytes import Unit, UnitBytes
from ckplan.solving.wide_spaces import WideSpaces

_MOST_CUTS = 3  # vertices of a hull, besides the fastest and the smallest
_MOST_POINTS = 32  # of a chain's frontier
_MOST_PEAKS = 4  # moments of peaks for which units get more options


class FloorSearch:
    """The plans near the floor of one graph."""

    def __init__(
        self, simulator: Simulator, unit_bytes: UnitBytes, *, small: bool
    ) -> None:
        """Build no space yet: each is built at its first use.

        Args:
            simulator: The simulator of the graph.
            unit_bytes: Bytes of its units.
            small: Whether the step is small enough to try every plan.
        """
        self._graph = simulator.graph
        self._measured = simulator
        self._simulator = NominalSimulator(simulator)
        self.is_small = small
        self.menus = Menus(
            self._simulator, small=small, most_cuts=_MOST_CUTS, unit_bytes=unit_bytes
        )
        self.nesting = Nesting(self._simulator, self.menus, small=self.is_small)
        self._replays = Replays(self._simulator, self.menus)

    @cached_property
    def smallest_plan(self) -> ReplayedPlan:
        """The plan that reaches the floor, with the seconds of the graph."""
        tried = [*self.exhaustive_plans, *self.standard_baselines.plans]
        _, regions = min([*self.plans, *tried], key=peak_of)
        return self._measured.run(regions), regions

    @cached_property
    def plans(self) -> list[ReplayedPlan]:
        """Plans that no other dominates, with equal seconds, smallest peak first."""
        chains = [*self._chains, *self._peak_trees]
        smallest = [self._replays.smallest([]), *map(self._replays.smallest_of, chains)]
        if self.exhaustive_plans:
            return sorted(smallest, key=peak_of)
        search = LocalSearch(self._simulator, self.menus, self.units)
        for _, regions in [*smallest, *self.standard_baselines.plans]:
            search.offer(regions)
        return search.run()

    @cached_property
    def nodes(self) -> tuple[CallNode, ...]:
        """The calls that chains divide the step into."""
        if self.is_small:
            return full_call_tree(self._graph)
        return pruned_call_tree(self._graph, self.menus)

    @cached_property
    def units(self) -> list[Unit]:
        """The calls and runs of calls whose regions local search changes."""
        if len(self._graph.ops) <= ALL_RUN_LENGTHS_MAX_OPS:
            return list(all_units(self._graph))
        return list(candidate_units(self.nodes))

    @cached_property
    def exhaustive_plans(self) -> list[ReplayedPlan]:
        """The non-dominated plans of a small step; empty for other steps."""
        return self.all_nested or self._all(nested=False)

    @cached_property
    def all_nested(self) -> list[ReplayedPlan]:
        """The same with every nested region; empty if these are too many."""
        return self._all(nested=True)

    def _all(self, *, nested: bool) -> list[ReplayedPlan]:
        if not self.is_small:
            return []
        return try_all(self._measured, self.menus, self.nodes, nested=nested)

    @cached_property
    def standard_baselines(self) -> StandardBaselines:
        """Common strategies on whole layers; those that are plans are candidates."""
        unplanned = self._measured.run()
        return StandardBaselines(self._measured, self.menus, unplanned)

    @cached_property
    def _chains(self) -> list[ChainFrontier]:
        if self.all_nested:
            return []
        found = [self._tree]
        found += self._run_chains if self.runs_pay else ()
        if self.nesting_pays:
            found += self.wide.nested_chains(self._simulator, self.nesting.options)
        return found

    @cached_property
    def _peak_trees(self) -> list[ChainFrontier]:
        """Trees with more options for units in backward at a peak, and for equal ones.

        Each tree adds the peak of the smallest plan so far.
        """
        found: list[ChainFrontier] = []
        moments: set[int] = set()
        signatures: set[str] = set()
        for _ in range(0 if self.is_small else _MOST_PEAKS):
            smallest, _ = self._replays.smallest([*self._chains, *found])
            if smallest.peak_moment in moments:
                break
            moments.add(smallest.peak_moment)
            more = self._signatures_at(smallest.peak_moment) - signatures
            if not more:
                break
            signatures |= more
            options = partial(self._options_with, frozenset(signatures))
            found.append(self._tree_of(options))
        return found

    def _signatures_at(self, moment: int) -> set[str]:
        """Signatures of the units whose backward is at a half moment."""
        units = list(candidate_units(self.nodes))
        windows = (self._simulator.view(*unit).backward_window() for unit in units)
        return {
            self.menus.signature(unit)
            for unit, (first, last) in zip(units, windows, strict=True)
            if first <= moment <= last
        }

    def _options_with(self, signatures: Set[str], unit: Unit) -> list[Option]:
        if self.menus.signature(unit) in signatures:
            return self.nesting.near_floor_options(unit, few=True)
        return self.menus.options(unit)

    @cached_property
    def _run_chains(self) -> list[ChainFrontier]:
        return list(self.wide.run_chains(self._simulator, self.menus.options))

    @cached_property
    def _tree(self) -> ChainFrontier:
        options = self.nesting.options if self.is_small else self.menus.options
        return self._tree_of(options)

    def _tree_of(self, options: Callable[[Unit], Sequence[Option]]) -> ChainFrontier:
        return tree_frontier(
            self._simulator,
            self.nodes,
            options,
            runs=self.is_small,
            most_points=_MOST_POINTS,
        )

    @cached_property
    def wide(self) -> WideSpaces:
        """The segmentations into runs of calls."""
        return WideSpaces(self._simulator, self.menus)

    @cached_property
    def runs_pay(self) -> bool:
        """Whether dropping tensors between calls frees much more."""
        return self.wide.runs_pay(self._least_of_tree)

    @cached_property
    def nesting_pays(self) -> bool:
        """Whether nested regions inside runs free much more while runs are rebuilt."""
        runs = self._run_chains if self.runs_pay else ()
        least = self._replays.smallest([self._tree, *runs])
        return self.wide.nesting_pays(self.nesting, peak_of(least))

    @property
    def _least_of_tree(self) -> int:
        return peak_of(self._replays.smallest_of(self._tree))
