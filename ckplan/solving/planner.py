"""Plans of one graph: one search answers every budget."""

from __future__ import annotations

from functools import cached_property

from ckplan import units
from ckplan.errors import CkplanError, InfeasibleError
from ckplan.graph.graph import Graph
from ckplan.plan.region import Region
from ckplan.simulating.alive import peak_tensors
from ckplan.simulating.simulate import Simulator, Timeline
from ckplan.solving.baselines import StandardBaselines
from ckplan.solving.candidates import Candidate, Candidates, Rank
from ckplan.solving.chain import ChainFrontier
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.remedies import Remedy, remedies
from ckplan.solving.replays import ReplayedPlan, peak_of
from ckplan.solving.solution import Floor, FrontierPoint, Solution
from ckplan.solving.spaces import SearchSpaces

_MOST_REPLAYS = 16  # most simulations per chain and budget
_SMALLEST_STEP = 2000  # divisor of the budget: first step down after a misfit
_MOST_NAMED = 3  # tensors of the floor
_MOST_BELOW = 16  # plans found below the floor, one by one
_MOST_HINTS = 3
_HALVINGS = 12  # bisection steps of a search for a budget


class Planner:
    """The plans of one graph: one search answers every budget.

    Every candidate plan is simulated in exact bytes before it is accepted. No returned
    plan has a simulated peak above the budget.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.simulator = Simulator(graph)
        self._spaces = SearchSpaces(self.simulator)
        self.menus = self._spaces.menus
        self._candidates = Candidates(self.simulator, self._spaces.replays)
        self._within: dict[int, Candidate | ReplayedPlan | None] = {}  # by budget
        self.unplanned = self._spaces.unplanned

    @property
    def standard_baselines(self) -> StandardBaselines:
        """Common strategies that recompute whole layers."""
        return self._spaces.standard_baselines

    def solve(self, budget_bytes: int, limit: MemoryLimit | None = None) -> Solution:
        """Find the cheapest plan whose simulated peak is within a budget.

        Args:
            budget_bytes: Limit on the bytes of all tensors.
            limit: Total memory limit, which the baselines are compared with. The
                default is the budget.

        Raises:
            InfeasibleError: No plan found fits; the floor and its owner are named.
        """
        found = self.within(budget_bytes)
        if found is None:
            raise self._nothing_fits(budget_bytes)
        timeline, regions = found
        limit = limit or MemoryLimit(budget_bytes)
        return Solution(
            budget_bytes=budget_bytes,
            limit=limit,
            regions=regions,
            timeline=timeline,
            unplanned=self.unplanned,
            floor=self._floor_for(timeline),
            bound_overhead=self.bound(budget_bytes),
            baselines=self.standard_baselines.baselines(limit),
        )

    def least_memory(self, max_overhead: float) -> Solution:
        """Find the smallest peak whose overhead is at most a fraction of the step."""
        low, high = self.floor.peak_bytes, self.unplanned.peak_bytes
        best: ReplayedPlan = (self.unplanned, ())
        for _ in range(_HALVINGS):
            if low >= high:
                break
            middle = (low + high) // 2
            found = self.within(middle)
            if found is not None and found[0].overhead <= max_overhead:
                best, high = found, min(middle, found[0].peak_bytes)
            else:
                low = middle + 1
        return self.solve(best[0].peak_bytes)

    def knee(self) -> Solution:
        """Find the knee: beyond it, further savings cost much more time.

        Both axes of the frontier are scaled to [0, 1]. The knee is the point farthest
        below the line between the two ends: V. Satopaa, J. Albrecht, D. Irwin,
        B. Raghavan, "Finding a Kneedle in a Haystack", 2011.
        """
        points = self.frontier()
        first, last = points[0], points[-1]
        width = max(last.peak_bytes - first.peak_bytes, 1)
        height = max(first.overhead - last.overhead, 1e-12)

        def below(point: FrontierPoint) -> float:
            saved = (last.peak_bytes - point.peak_bytes) / width
            return saved - (point.overhead - last.overhead) / height

        return self.solve(max(points, key=below).peak_bytes)

    def frontier(self, count: int = 24) -> tuple[FrontierPoint, ...]:
        """Non-dominated plans, smallest peak first, the unplanned step last.

        Args:
            count: Number of budgets, evenly spaced from the smallest peak that is
                found to the unplanned one.

        Raises:
            CkplanError: ``count`` is no whole number from one on.
        """
        if not units.is_count(count):
            raise CkplanError(
                f"cannot make a frontier of {count!r} budgets",
                needed="a whole number, one or more",
                hint="ckplan.frontier(graph, 24)",
            )
        low, high = self.least.peak_bytes, self.unplanned.peak_bytes
        points: dict[int, FrontierPoint] = {}
        for place in range(count):
            budget_bytes = low + (high - low) * place // max(count - 1, 1)
            found = self.within(budget_bytes)
            if found is not None:
                timeline, regions = found
                peak_bytes = timeline.peak_bytes
                bound = self.bound(peak_bytes)
                points[peak_bytes] = FrontierPoint(
                    peak_bytes, timeline.overhead, bound, regions
                )
        kept: list[FrontierPoint] = []
        for point in sorted(points.values(), key=lambda p: (p.peak_bytes, p.overhead)):
            if not kept or point.overhead < kept[-1].overhead:
                kept.append(point)
        return tuple(kept)

    def bound(self, budget_bytes: int) -> float:
        """Least overhead of any schedule of the graph's ops under a budget.

        Compiled code runs other schedules, of which the known ones alone tell: the
        cheapest may cost less than the step as torch compiles it.
        """
        known = self.graph.generated
        if known:
            return min(0.0, *(code.overhead for code in known))
        return self._spaces.bound.overhead(budget_bytes)

    @cached_property
    def floor(self) -> Floor:
        """The smallest peak of all plans, and the tensors that own most of it."""
        return _floor_at(self.smallest[0])

    @cached_property
    def least(self) -> Timeline:
        """The smallest plan that is found: at the floor, or below it.

        The search by seconds has other options than that of the floor, by bytes alone.
        """
        least = self.smallest[0]
        for _ in range(_MOST_BELOW):
            found = self.within(least.peak_bytes - 1)
            if found is None:
                break
            least, _ = found
        return least

    @property
    def smallest(self) -> ReplayedPlan:
        """The plan that reaches the floor, searched by bytes alone."""
        if self.graph.generated:
            return min(self._generated, key=peak_of)
        return self._spaces.smallest_plan

    @cached_property
    def _generated(self) -> list[ReplayedPlan]:
        """The known plans of a compiled step, the cheapest first."""
        plans = (tuple(map(Region.of, one.regions)) for one in self.graph.generated)
        return [(self.simulator.run(regions), regions) for regions in plans]

    def _floor_for(self, timeline: Timeline) -> Floor:
        """The floor; a plan below it is its own."""
        below = timeline.peak_bytes < self.floor.peak_bytes
        return _floor_at(timeline) if below else self.floor

    def within(self, budget_bytes: int) -> ReplayedPlan | None:
        """The cheapest plan that fits, as its timeline and its regions.

        The search by seconds may find a peak below the floor, which is searched by
        bytes alone.
        """
        if self.unplanned.peak_bytes <= budget_bytes:
            return self.unplanned, ()
        if self.graph.generated:
            return next((p for p in self._generated if _fits(p, budget_bytes)), None)
        if budget_bytes not in self._within:
            self._within[budget_bytes] = self._search(budget_bytes)
        found = self._within[budget_bytes]
        return found.replayed() if isinstance(found, Candidate) else found

    def _search(self, budget_bytes: int) -> Candidate | ReplayedPlan | None:
        chosen = (self._cheapest(chain, budget_bytes) for chain in self._spaces.chains)
        found: list[Candidate | ReplayedPlan]
        found = [plan for plan in chosen if plan is not None]
        tried = [*self._spaces.exhaustive_plans, *self._spaces.improved_plans]
        tried.append(self._spaces.smallest_plan)
        tried += self.standard_baselines.plans
        found += (one for one in tried if _fits(one, budget_bytes))
        return min(found, key=_rank, default=None)

    def _nothing_fits(self, budget_bytes: int) -> InfeasibleError:
        """The error, whose hints are the remedies that fit, in order of cost."""
        budget = units.format_bytes(budget_bytes)
        least = units.format_bytes(self.least.peak_bytes)
        otherwise = "a smaller model: no plan can drop its parameters"
        if self.graph.generated:
            otherwise = "a smaller batch, or ckplan.apply, uncompiled"
        return InfeasibleError(
            f"no plan fits {budget}: the floor of {self.graph.model} is {least}",
            needed=self.needed(),
            hint=self.remedies_within(budget_bytes) or otherwise,
        )

    def needed(self) -> str:
        """The least peak, where it is reached, and the tensors that own most of it."""
        floor = _floor_at(self.least)
        least = f"{units.format_bytes(floor.peak_bytes)} ({floor.peak_bytes} B)"
        return f"at least {least}; in {floor.peak_at}, {'; '.join(floor.largest)}"

    def remedies(self, budget_bytes: int) -> tuple[Remedy, ...]:
        """What lowers the smallest peak, in order of cost, and whether it fits then."""
        _, regions = self.smallest
        others = [plan for _, plan in self.standard_baselines.every_call]
        return remedies(self.graph, regions, budget_bytes, _floor_bytes, others)

    def remedies_within(self, budget_bytes: int) -> str:
        """What would make the step fit, in order of cost; empty if nothing is known."""
        found = self.remedies(budget_bytes)
        hints = [one for one in found if one.fits]
        start = "" if hints else "several changes together, as none alone is enough: "
        listed = "; or ".join(map(str, (hints or found)[:_MOST_HINTS]))
        return f"{start}{listed}" if listed else ""

    def _cheapest(self, chain: ChainFrontier, budget_bytes: int) -> Candidate | None:
        """The cheapest plan of a chain whose simulated peak fits, or None.

        Units that share a tensor free less together than the sum of both, so the
        chain's estimate can be too low. If the simulated peak exceeds the budget, the
        chain's target is lowered by the excess. Once a plan fits, the target is
        bisected between it and the last one that did not fit.
        """
        best: Candidate | None = None
        low, high = chain.least_bytes, budget_bytes  # as the chain estimates
        target, step = high, budget_bytes // _SMALLEST_STEP
        for _ in range(_MOST_REPLAYS):
            if not low <= target <= high:
                break
            found = self._candidates.cheapest(chain, target, budget_bytes)
            excess = found.peak_bytes - budget_bytes
            if excess <= 0:
                best = min(best or found, found, key=_rank)
                low = target + 1
            else:
                high = target - 1
            target = (low + high) // 2 if best else target - max(excess, step)
            step *= 2
        return best


def _floor_bytes(graph: Graph) -> int:
    return Planner(graph).floor.peak_bytes


def _fits(found: ReplayedPlan, budget_bytes: int) -> bool:
    return found[0].peak_bytes <= budget_bytes


def _rank(found: Candidate | ReplayedPlan) -> Rank:
    if isinstance(found, Candidate):
        return found.rank
    return found[0].recompute_seconds, found[0].peak_bytes


def _floor_at(smallest: Timeline) -> Floor:
    by_kind = smallest.peak_by_kind
    owner = max(by_kind, key=lambda kind: (by_kind[kind], kind))
    largest = tuple(map(str, peak_tensors(smallest, _MOST_NAMED)))
    return Floor(smallest.peak_bytes, smallest.peak_at, owner, largest)
