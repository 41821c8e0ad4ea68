"""Wide spaces: chains of runs of calls, and of nested regions, where they pay.

Runs drop the tensors between calls. Nested regions drop tensors again while a run is
rebuilt. Both take long to search and are worth it where their smallest plans free
enough more memory than those of single calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from ckplan.plan.region import Region
from ckplan.simulating.simulate import Simulator
from ckplan.solving.baselines import can_recompute
from ckplan.solving.chain import ChainFrontier
from ckplan.solving.menu import Menus, Option
from ckplan.solving.nesting import Nesting
from ckplan.solving.segmentation import segmentation_frontier, uniform_segmentations
from ckplan.solving.unit_bytes import Unit

_WORTH_FREED = 0.02  # share of droppable bytes: least gain of a wider space
_WORTH_PEAK = 0.1  # or share of the peak
_TIMES_ROOT = 2.5  # of the number of calls: longest run
_POWERS = (1 / 4, 1 / 3, 1 / 2, 2 / 3, 4 / 5)
"""Exponents for the number of calls: lengths of runs with nested regions. Longer runs
keep less between them and need more levels."""


_Options: TypeAlias = Callable[[Unit], Sequence[Option]]


class WideSpaces:
    """Uniform segmentations of one graph into runs of calls."""

    def __init__(self, simulator: Simulator, menus: Menus) -> None:
        """Find the segmentations.

        Args:
            simulator: The simulator of the graph.
            menus: The menus of the graph.
        """
        self._simulator = simulator
        self._covers = uniform_segmentations(simulator.graph, menus)
        self._unplanned_peak = max(simulator.unplanned_bytes, default=0)

    def runs_pay(self, least_bytes: int) -> bool:
        """Whether runs free much more than a plan that needs ``least_bytes``.

        Runs whose length is about the square root of the number of calls free the most.
        """
        regions = (
            [Region(call, last=last) for call, last in segmentation]
            for segmentation in self._near_power(1 / 2)
        )
        return any(self._frees_more(plan, least_bytes) for plan in regions)

    def nesting_pays(self, nesting: Nesting, least_bytes: int) -> bool:
        """Whether nested regions inside runs free much more while these are rebuilt."""
        regions = (
            [nesting.drop_all_nested(unit) for unit in segmentation]
            for power in (1 / 2, 2 / 3)
            for segmentation in self._near_power(power)
        )
        return any(self._frees_more(plan, least_bytes) for plan in regions)

    def run_chains(
        self, simulator: Simulator, options: _Options
    ) -> Iterator[ChainFrontier]:
        """The chains of runs that are not too long."""
        longest = _TIMES_ROOT * max(self._covers, default=0) ** 0.5
        for length, covers in self._covers.items():
            for segmentation in covers if length <= longest else ():
                yield segmentation_frontier(simulator, segmentation, options)

    def nested_chains(
        self, simulator: Simulator, options: _Options
    ) -> Iterator[ChainFrontier]:
        """The chains of runs with nested regions."""
        covers = (found for power in _POWERS for found in self._near_power(power))
        for segmentation in dict.fromkeys(covers):
            yield segmentation_frontier(simulator, segmentation, options)

    def _near_power(self, power: float) -> list[tuple[Unit, ...]]:
        """Segmentations into runs of about ``calls ** power`` calls."""
        if not self._covers:
            return []
        wanted = max(self._covers) ** power
        return self._covers[min(self._covers, key=lambda length: abs(length - wanted))]

    def _frees_more(self, plan: Iterable[Region], than_bytes: int) -> bool:
        done = [r for r in plan if can_recompute(self._simulator, r)]
        peak = self._simulator.run(done).peak_bytes
        freed = self._unplanned_peak - peak
        worth = min(_WORTH_FREED * freed, _WORTH_PEAK * than_bytes)
        return than_bytes - peak > worth
