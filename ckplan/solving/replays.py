"""Replays: plans of a chain simulated in exact bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import TypeAlias

from ckplan.errors import PlanError
from ckplan.plan.region import Region
from ckplan.simulating.simulate import Simulator, Timeline
from ckplan.solving.chain import ChainFrontier, UnitChoice, regions_of
from ckplan.solving.menu import Menus

ReplayedPlan: TypeAlias = tuple[Timeline, tuple[Region, ...]]

_FEW_PLANS = 4  # the smallest of a chain, tried for its floor


class Replays:
    """Simulates the plans of chains, and remembers the smallest of each chain."""

    def __init__(self, simulator: Simulator, menus: Menus) -> None:
        self._simulator = simulator
        self._menus = menus
        self._smallest: dict[ChainFrontier, ReplayedPlan] = {}

    def of(self, plan: Sequence[UnitChoice]) -> Iterator[ReplayedPlan]:
        """Simulate a plan in canonical form, then as it is."""
        regions = regions_of(plan)
        if not any(region.inner for region in regions):
            units = [unit for unit, _ in plan]
            tidied = tuple(self._menus.canonicalize(regions, units))
            with suppress(PlanError):  # a similar call can lack an input
                yield self._simulator.run(tidied), tidied
        yield self._simulator.run(regions), regions

    def smallest(self, chains: Iterable[ChainFrontier]) -> ReplayedPlan:
        """The smallest of the first plans of chains, and of the unplanned step."""
        unplanned = self._simulator.run(), ()
        return min([unplanned, *map(self.smallest_of, chains)], key=peak_of)

    def smallest_of(self, chain: ChainFrontier) -> ReplayedPlan:
        """The smallest of a chain's first plans."""
        if chain not in self._smallest:
            plans = islice(chain.smallest_first(), _FEW_PLANS)
            replays = [one for plan in plans for one in self.of(plan)]
            self._smallest[chain] = min(replays, key=peak_of)
        return self._smallest[chain]


def peak_of(found: ReplayedPlan) -> int:
    """The peak of a simulated plan, in bytes."""
    return found[0].peak_bytes
