"""Candidates: plans of chains by the figures that searches compare.

Searches for the budgets of one step come to the same plans again and again. Each is
simulated once; then its peak and its seconds are known. Only figures are kept: the
bytes of all moments of a step would soon fill the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ckplan.plan.region import Region
from ckplan.simulating.simulate import Simulator
from ckplan.solving.chain import ChainFrontier
from ckplan.solving.replays import ReplayedPlan, Replays

Rank = tuple[float, int]
"""Seconds and bytes of a plan: the least is the best."""


@dataclass(slots=True)
class Candidate:
    """A simulated plan."""

    regions: tuple[Region, ...]
    peak_bytes: int
    _simulator: Simulator
    _seconds: float | None = None  # of recomputation, once they are asked for

    @property
    def rank(self) -> Rank:
        """Its seconds and its bytes."""
        if self._seconds is None:
            self._seconds = self.replayed()[0].recompute_seconds
        return self._seconds, self.peak_bytes

    def replayed(self) -> ReplayedPlan:
        """The same plan with the step under it."""
        return self._simulator.run(self.regions), self.regions


@dataclass(slots=True)
class _Variants:
    """The variants of one plan, simulated as far as one was looked for."""

    left: Iterator[ReplayedPlan]
    known: list[Candidate] = field(default_factory=list)


class Candidates:
    """The candidates of the chains of one step."""

    def __init__(self, simulator: Simulator, replays: Replays) -> None:
        self._simulator, self._replays = simulator, replays
        self._variants: dict[tuple[ChainFrontier, int], _Variants] = {}

    def cheapest(
        self, chain: ChainFrontier, target_bytes: int, budget_bytes: int
    ) -> Candidate:
        """The cheapest plan of a chain within a target, which the chain estimates.

        It is the first variant of that plan whose peak is within a budget, or the one
        with the smallest peak.
        """
        key = chain, chain.place_of(target_bytes)
        if key not in self._variants:
            plan = next(chain.cheapest_first(target_bytes))
            self._variants[key] = _Variants(self._replays.of(plan))
        variants = self._variants[key]
        for one in variants.known:
            if one.peak_bytes <= budget_bytes:
                return one
        for timeline, regions in variants.left:
            one = Candidate(regions, timeline.peak_bytes, self._simulator)
            variants.known.append(one)
            if one.peak_bytes <= budget_bytes:
                return one
        return min(variants.known, key=lambda one: one.peak_bytes)
