"""Results of solving: the plan, its cost, the bound and the baselines."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ckplan.plan.plan import DECIMALS
from ckplan.plan.region import Region
from ckplan.simulating.simulate import Timeline
from ckplan.solving.bound import gap
from ckplan.solving.memory_limit import MemoryLimit


@dataclass(frozen=True, slots=True)
class Baseline:
    """The result of a common strategy in the same simulator."""

    name: str  # "none", "every call", "chen" and so on
    peak_bytes: int
    overhead: float
    fits: bool
    reserved_bytes: int | None = None  # by PyTorch's allocator, if the limit is on it

    @classmethod
    def of(cls, name: str, timeline: Timeline, limit: MemoryLimit) -> Baseline:
        """Build the baseline of a simulated timeline."""
        peak_bytes, reserved_bytes = timeline.peak_bytes, limit.reserved_bytes(timeline)
        fits = max(peak_bytes, reserved_bytes or 0) <= limit.bytes
        return cls(name, peak_bytes, timeline.overhead, fits, reserved_bytes)


@dataclass(frozen=True, slots=True)
class Floor:
    """The smallest peak that any plan found reaches."""

    peak_bytes: int
    peak_at: str
    owner: str  # kind of tensor that owns most of the peak
    largest: tuple[str, ...] = ()  # the tensors at the peak, in words


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One plan of the frontier: no plan found needs less and costs less."""

    peak_bytes: int
    overhead: float
    bound_overhead: float  # no schedule of ops within this peak costs less
    regions: tuple[Region, ...] = field(repr=False)
    # of a search with levers, which may change the step
    timeline: Timeline | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ExactResult:
    """Result of a time-limited exact search for the cheapest schedule of ops."""

    optimal: bool  # the search completed
    overhead: float | None  # of the best schedule found; None if none was
    bound_overhead: float  # no schedule costs less


@dataclass(frozen=True, slots=True)
class WithoutTiles:
    """What the best plans of the same search without tiles are."""

    floor_bytes: int
    overhead: float | None  # within the same limit; None if no such plan fits


@dataclass(frozen=True)
class Solution:
    """The cheapest plan found that fits a budget."""

    budget_bytes: int  # limit on the bytes of all tensors
    limit: MemoryLimit  # total memory limit
    regions: tuple[Region, ...]
    timeline: Timeline
    unplanned: Timeline
    floor: Floor
    bound_overhead: float  # no schedule of ops under this budget costs less
    baselines: tuple[Baseline, ...]
    exact: ExactResult | None = None  # of an exact search, if one was requested
    without_tiles: WithoutTiles | None = None  # if tiles were allowed

    @property
    def fragmentation_bytes(self) -> int:
        """Bytes of the limit that are left for gaps of a card's allocator."""
        return self.limit.bytes - self.budget_bytes

    @property
    def as_baseline(self) -> Baseline:
        """The plan as a baseline, for tables beside the others."""
        found = Baseline.of("this plan", self.timeline, self.limit)
        return replace(found, overhead=round(found.overhead, DECIMALS))

    @property
    def gap(self) -> float:
        """Most extra time of the planned step over the bound, as a fraction."""
        return gap(self.timeline.overhead, self.bound_overhead)
