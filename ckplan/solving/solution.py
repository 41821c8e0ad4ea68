"""What solving hands on: the plan, what it costs, and what stands beside it."""

from __future__ import annotations

from dataclasses import dataclass

from ckplan.plan.region import Region
from ckplan.simulating.simulate import Timeline
from ckplan.solving.bound import gap
from ckplan.solving.memory_limit import MemoryLimit


@dataclass(frozen=True, slots=True)
class Baseline:
    """What everyday practice would reach, by the same simulator."""

    name: str  # "none", "every call", "chen" and so on
    peak_bytes: int
    overhead: float
    fits: bool

    @classmethod
    def of(cls, name: str, timeline: Timeline, limit: MemoryLimit) -> Baseline:
        """What a replay says of it."""
        peak_bytes, fits = timeline.peak_bytes, limit.allows(timeline)
        return cls(name, peak_bytes, timeline.overhead, fits)


@dataclass(frozen=True, slots=True)
class Floor:
    """The smallest peak that any plan found reaches."""

    peak_bytes: int
    peak_at: str
    owner: str  # kind that owns most of it


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One plan of the frontier: no plan found needs less and costs less."""

    peak_bytes: int
    overhead: float
    bound_overhead: float  # no schedule of ops within this peak costs less
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class ExactResult:
    """What an exact search for the cheapest schedule of ops found in its time."""

    optimal: bool  # it came to its end
    overhead: float | None  # of the best schedule found; None if none was
    bound_overhead: float  # no schedule costs less


@dataclass(frozen=True)
class Solution:
    """The cheapest plan found that fits a budget."""

    budget_bytes: int  # of tensors
    limit: MemoryLimit  # of all
    regions: tuple[Region, ...]
    timeline: Timeline
    unplanned: Timeline
    floor: Floor
    bound_overhead: float  # no schedule of ops under this budget costs less
    baselines: tuple[Baseline, ...]
    exact: ExactResult | None = None  # if one was asked for

    @property
    def fragmentation_bytes(self) -> int:
        """What is left to the gaps of a card's allocator, beside the budget."""
        return self.limit.bytes - self.budget_bytes

    @property
    def as_baseline(self) -> Baseline:
        """The plan as a row beside the others."""
        return Baseline.of("this plan", self.timeline, self.limit)

    @property
    def gap(self) -> float:
        """How much longer the planned step may take than the best."""
        return gap(self.timeline.overhead, self.bound_overhead)
