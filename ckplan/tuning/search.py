"""The setting with the most samples per second, of one way to train.

Samples per second rise with the batch while the step has constant costs (launches, the
optimizer), and fall once plans must recompute. Unplanned steps are compared first,
without solving. No plan makes a step faster, and plans of larger batches cost no
smaller part of it. So the unplanned step and the last plan bound every batch, and only
batches whose bound is better than the best setting so far are solved for. They are
tried in steps, and then the neighbourhood of the best is halved, until no batch in it
can be better by more than ``_CLOSE``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from ckplan.errors import CkplanError, WorkloadError
from ckplan.graph.graph import Graph
from ckplan.plan.region import Region
from ckplan.simulating.extra_work import extra_work
from ckplan.simulating.simulate import Simulator
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.solving.replays import ReplayedPlan
from ckplan.solving.reserved_limit import Plans, plan_within
from ckplan.tuning.batches import ALL_TRIED, NEAR, Batches, grid
from ckplan.tuning.largest import largest_batch, same_forward
from ckplan.tuning.plan_levers import LeverPlans, has_plan_levers, simulator_of
from ckplan.tuning.ranks import Ranks
from ckplan.tuning.settings import Setting, Way, better
from ckplan.tuning.transfer import TransferredPlans, transferred

_STEPS = 32  # most batches beyond the largest unplanned one, each 1/8 larger
_POINTS = 3  # of the curve, beyond the largest unplanned batch
_CLOSE = 1e-3  # relative gain that is not worth another batch
_WORTH = 1 + _CLOSE
_NEAR_ENOUGH = 8  # divisor of a batch: steps that are profiled one by one


@dataclass
class WaySearch:
    """The settings of one way to train."""

    way: Way
    one: Batches  # no accumulation
    several: Batches  # accumulates
    limit: MemoryLimit
    accumulate: int = 1  # micro-batches per step of the optimizer
    total: int | None = None  # rows per step of the optimizer, if they are given
    start: int = 8  # batch where searches begin
    like: WaySearch | None = None  # of the same forward and backward
    bare: WaySearch | None = None  # of the same steps, whose plans only recompute
    ranks: Ranks = field(default_factory=Ranks)
    refused: dict[int, str] = field(default_factory=dict)  # batch -> why
    _lever_plans: dict[int, LeverPlans | TransferredPlans] = field(default_factory=dict)
    _settings: dict[tuple[int, bool], Setting | None] = field(default_factory=dict)

    @cached_property
    def largest_unplanned(self) -> int:
        """Largest micro-batch without a plan; 0 if not one row fits."""
        if self.bare is not None:
            return self.bare.largest_unplanned
        return self._largest(planned=False)[0]

    @cached_property
    def largest_planned(self) -> int:
        """Largest micro-batch with some plan; 0 if not one row fits."""
        bare = self.bare
        least = self.largest_unplanned if bare is None else bare.largest_planned
        return max(self._farthest[0], least)

    @cached_property
    def _farthest(self) -> tuple[int, tuple[Region, ...]]:
        """The largest micro-batch of all plans, and its plan."""
        return self._largest(planned=True)

    def _largest(self, *, planned: bool) -> tuple[int, tuple[Region, ...]]:
        most = {} if self.total is None else {"most": self._own_total}
        start, likely, like = self.start, 0, self.like
        if like is not None:
            start = max(like.largest_unplanned, 1)
            likely = like.__dict__.get("largest_planned", 0)
        return largest_batch(
            self.graph_at,
            self.limit,
            self.plans_at if planned else None,
            start=start,
            unplanned=self.largest_unplanned if planned else None,
            likely=likely,
            simulator=self.simulator,
            **most,
        )

    @property
    def _own_total(self) -> int:
        """Rows of one rank per step of the optimizer, where all have a given total."""
        assert self.total is not None
        own, left = divmod(self.total, self.way.ranks)
        if left:
            raise CkplanError(
                f"{self.way.ranks} ranks do not divide the total batch {self.total}",
                needed="as many samples on every rank",
                hint=f"--total-batch {(own + 1) * self.way.ranks}",
            )
        return own

    def simulator(self, graph: Graph) -> Simulator:
        """Replays a step under the plans of this way."""
        return simulator_of(self.way, graph)

    def accumulation(self, rows: int) -> int:
        """Micro-batches of a step of the optimizer."""
        if self.total is None:
            return self.accumulate
        return max(self._own_total // rows, 1)

    def batches_of(self, rows: int) -> Batches:
        """The steps among which that of a micro-batch is."""
        return self.one if self.accumulation(rows) == 1 else self.several

    def graph_at(self, rows: int) -> Graph:
        """The step at a micro-batch."""
        return self.batches_of(rows).at(rows, self.accumulation(rows))

    def planner_at(self, rows: int) -> Planner:
        """The plans at a micro-batch."""
        return self.batches_of(rows).planner(rows, self.accumulation(rows))

    def plans_at(self, rows: int) -> Plans:
        """The same, in a large drawn step those of a near batch if these are known."""
        if not has_plan_levers(self.way):
            return self.batches_of(rows).plans(rows, self.accumulation(rows))
        if rows not in self._lever_plans:
            self._lever_plans[rows] = self._with_levers(rows)
        return self._lever_plans[rows]

    def _with_levers(self, rows: int) -> LeverPlans | TransferredPlans:
        """Searched, in a drawn step those of the nearest batch that was searched."""
        searched = {
            max(n, rows) / min(n, rows): plans
            for n, plans in self._lever_plans.items()
            if isinstance(plans, LeverPlans)
        }
        near = min(searched, default=NEAR + 1)
        found = None
        if rows not in self.batches_of(rows).recorded and near <= NEAR:
            found = transferred(searched[near], self.simulator(self.graph_at(rows)))
        return found or LeverPlans(self.planner_at(rows), self.way)

    def setting(self, rows: int, *, planned: bool = True) -> Setting | None:
        """The fastest setting at a micro-batch; None if none fits.

        Where the unplanned step fits, it is the same one with plans and without.
        """
        planned = planned and rows > self.largest_unplanned
        key = rows, planned
        if key not in self._settings:
            try:
                found = None if rows in self.refused else self._find(rows, planned)
            except WorkloadError as error:  # such as batch norm of a single row
                self.refused[rows], found = error.what, None
            self._settings[key] = found
        return self._settings[key]

    def _find(self, rows: int, planned: bool) -> Setting | None:
        bare = None if self.bare is None else self.bare.setting(rows, planned=planned)
        found = bare and replace(bare, way=self.way)
        plan = self._plan_at(rows) if planned else None
        if found is None and rows <= self.largest_unplanned:
            plan = Simulator(self.graph_at(rows)).run(), ()
        return better(found, plan and self._setting_of(rows, plan))

    def _plan_at(self, rows: int) -> ReplayedPlan | None:
        """The cheapest plan that fits, until the step is recorded that of ``like``."""
        found = self._plan_of_like(rows)
        found = found or plan_within(self.plans_at(rows), self.limit)
        found = found or plan_within(self.planner_at(rows), self.limit)
        if found is None and self.__dict__.get("_farthest", (0, ()))[0] == rows:
            # A plan of another batch, of which the allocator holds fewer bytes.
            regions = self._farthest[1]
            return self.simulator(self.graph_at(rows)).run(regions), regions
        return found

    def _plan_of_like(self, rows: int) -> ReplayedPlan | None:
        """A plan of ``like`` that fits, unless plans of a nearer batch are known."""
        batches, like = self.batches_of(rows), self.like
        near = batches.searched_near(rows, self.accumulation(rows))
        is_own = near is not None and near[0] is batches
        if like is None or rows in batches.recorded or is_own:
            return None
        twin, graph = like.setting(rows), self.graph_at(rows)
        if not (twin and twin.regions and same_forward(like.graph_at(rows), graph)):
            return None
        simulator = Simulator(graph)
        timeline = simulator.run(twin.regions)
        if self.limit.allows(timeline):
            return timeline, twin.regions
        return plan_within(TransferredPlans(like.plans_at(rows), simulator), self.limit)

    def _setting_of(self, rows: int, found: ReplayedPlan) -> Setting:
        timeline, regions = found
        return Setting(
            way=self.way,
            batch=rows,
            accumulate=self.accumulation(rows),
            regions=regions,
            peak_bytes=timeline.peak_bytes,
            step_seconds=self.ranks.seconds(timeline),
            overhead=self.ranks.overhead(timeline),
            profiled=rows in self.batches_of(rows).recorded,
            extra=extra_work(timeline, rows),
            communication=self.ranks.communication(timeline),
        )

    def best(self, *, planned: bool = True) -> Setting | None:
        """The setting with the most samples per second; None if not one row fits."""
        best = None
        for rows in self.first_batches(self.largest_unplanned):
            best = better(best, self.setting(rows, planned=False))
        best = self._refined(best, planned=False)
        overhead = unplanned = 0.0  # a larger batch must free more: it costs no less
        for rows in self._beyond() if planned else ():
            before, unplanned = unplanned, self._bound(rows)
            bound = unplanned / (1 + overhead)
            if best is None or bound > best.samples_per_second * _WORTH:
                one = self.setting(rows)
                if one is None and rows not in self.refused:
                    break
                overhead = max(overhead, one.overhead if one else 0.0)
                best = better(best, one)
            elif unplanned < before and self.batches_of(rows).not_linear:
                break  # each is recorded, and larger ones are slower still
        if best is not None and best.regions:
            best = self._refined(best, planned=True)
        return best

    def first_batches(self, most: int) -> list[int]:
        """Batches up to the largest one that are tried first; none if it is 0."""
        if self.total is not None:
            return [n for n in range(1, most + 1) if self._own_total % n == 0]
        return grid(most) if most > 0 else []

    def _beyond(self) -> Iterator[int]:
        """Batches larger than the largest unplanned one, in growing steps."""
        rows = self.largest_unplanned
        if self.total is not None:
            more = range(rows + 1, self._own_total + 1)
            yield from (n for n in more if self._own_total % n == 0)
            return
        for _ in range(_STEPS):
            rows += 1 if rows < ALL_TRIED else rows // 8
            yield rows

    def _refined(self, best: Setting | None, *, planned: bool) -> Setting | None:
        while best is not None and self.total is None:
            for (_, plan), known in self._settings.items():
                best = better(best, known) if plan == planned else best
            rows = self._next(best, planned) if best is not None else None
            if rows is None:
                break
            best = better(best, self.setting(rows, planned=planned))
        return best

    def _next(self, best: Setting, planned: bool) -> int | None:
        """A batch between the best and a neighbour that may be better yet."""
        kinds = {n for n, plan in self._settings if plan == planned}
        known = sorted(kinds | {best.batch, self.largest_unplanned})
        place = known.index(best.batch)
        near = known[max(place - 1, 0) : place + 2]
        for low, high in sorted(pairwise(near), key=lambda gap: gap[0] - gap[1]):
            if self.batches_of(high).not_linear:  # nothing bounds what is between
                if high - low > max(low // _NEAR_ENOUGH, 1):
                    return (low + high) // 2
                continue
            at_low = self._settings.get((low, planned))
            overhead = 1 + (at_low.overhead if at_low else 0.0)
            least = best.samples_per_second * _WORTH * overhead
            if high - low > 1 and self._bound(high) > least:
                return (low + high) // 2
        return None

    def _bound(self, rows: int) -> float:
        """Samples per second of the unplanned step, whether it fits or not."""
        many, batches = self.accumulation(rows), self.batches_of(rows)
        samples = rows * many * self.way.ranks
        seconds = batches.step_seconds(rows, many)
        return samples / self.ranks.least_seconds(batches.any_recorded, seconds, many)

    def with_limit(self, limit: MemoryLimit) -> WaySearch:
        """The same steps within another limit."""
        bare = self.bare and self.bare.with_limit(limit)
        return replace(
            self, limit=limit, like=None, bare=bare, _settings={}, _lever_plans={}
        )

    def planned_settings(self) -> list[Setting]:
        """The settings with a plan that were tried; at least one, if one fits."""
        found = [one for one in self._settings.values() if one and one.regions]
        if not found:
            one = self.setting(next(self._beyond(), self.largest_unplanned))
            found = [one] if one is not None and one.regions else []
        return found

    def curve(self) -> list[tuple[int, Setting | None, Setting | None]]:
        """(batch, setting without a plan, with the best plan), smallest batch first."""
        least, most = self.largest_unplanned, self.largest_planned
        rows = {*self.first_batches(least), least, most} | {
            n for n, _ in self._settings
        }
        if self.total is None and most > least:
            ratio = most / max(least, 1)
            rows |= {
                round(max(least, 1) * ratio ** (k / _POINTS)) for k in range(_POINTS)
            }
        elif self.total is not None:
            own = self._own_total
            rows = {n for n in rows | {*range(1, most + 1)} if n and not own % n}
        return [
            (n, self.setting(n, planned=False), self.setting(n))
            for n in sorted(rows)
            if 0 < n <= most and self.setting(n) is not None
        ]

    def check(self, rows: int) -> bool:
        """Record the step at a batch; whether it is like the drawn one.

        Settings found on drawn steps are forgotten, unless the drawn step at this batch
        is like the recorded one.
        """
        try:
            alike = self.batches_of(rows).check(rows)
        except WorkloadError as error:
            self.refused[rows], alike = error.what, False
        self._lever_plans.pop(rows, None)
        if alike:
            for one in filter(None, (self, self.bare)):
                for planned in (False, True):
                    one._settings.pop((rows, planned), None)
        else:
            self.forget()
        return alike

    def forget(self) -> None:
        """Forget what was found on steps that are drawn otherwise now."""
        self._settings.clear()
        self._lever_plans.clear()
        for name in ("largest_unplanned", "largest_planned", "_farthest"):
            self.__dict__.pop(name, None)
