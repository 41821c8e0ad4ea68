"""``tune``: the most samples per second within a memory limit, over all levers.

Every lever is searched alone, at all batches. Then the one that gains most is kept, and
the others are searched on top of it, until none gains. The chosen batch is recorded;
if its bytes or seconds differ from those drawn, they replace them and the search is
done again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ckplan.errors import CkplanError
from ckplan.graph.graph import Graph
from ckplan.simulating.simulate import Simulator
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.tuning.batches import Batches
from ckplan.tuning.search import WaySearch, crossover
from ckplan.tuning.settings import SAME, Lever, Setting, Way, conflict, levers_of
from ckplan.tuning.tuned import (
    Alternative,
    LeverRow,
    Tuned,
    gives_up,
    nothing_fits,
    pays_over,
)
from ckplan.units import format_bytes

RECOMPUTE = "recompute"
ACCUMULATE = "accumulate"
Record = Callable[[Way, int, int], Graph]
"""Records a step: the way, rows of the micro-batch, micro-batches."""
Tell = Callable[[str], None]
_MOST_CHECKS = 4
_MANY = 4  # micro-batches of the row 'accumulate'


class Tuning:
    """One search over all levers."""

    def __init__(
        self,
        record: Record,
        limit: MemoryLimit,
        *,
        way: Way,
        rows: int,
        accumulate: int = 1,
        total: int | None = None,
        allow: Sequence[str] = (),
        tell: Tell = lambda what: None,
    ) -> None:
        """Search nothing yet.

        Args:
            record: Records a step.
            limit: Memory of the step.
            way: How the step trains before any lever is pulled.
            rows: Rows of the batch that the workload has: where searches begin.
            accumulate: Micro-batches per step of the optimizer, without ``total``.
            total: Rows per step of the optimizer, to be kept.
            allow: Names of levers that change the numbers of training.
            tell: Told what is being done.

        Raises:
            CkplanError: A name in ``allow`` is unknown, or ``total`` is below 1.
        """
        if total is not None and total < 1:
            raise CkplanError(
                f"cannot keep a total batch of {total} samples",
                needed="1 or more",
                hint="--total-batch 512",
            )
        self._record, self._limit, self._tell = record, limit, tell
        self._way, self._rows, self._total = way, rows, total
        self._accumulate = accumulate
        self.levers = levers_of(way, allow)
        self._searches: dict[Way, WaySearch] = {}
        self._refused: dict[Way, str] = {}
        self._notes: list[str] = []
        self._unlike = False  # a recorded step was not like the drawn one

    def search(self, way: Way) -> WaySearch:
        """The settings of a way to train."""
        if way not in self._searches:
            few = max(self._rows // 2, 1)
            probes = self._rows, few if few != self._rows else 2
            record = partial(self._recorded, way)
            self._searches[way] = WaySearch(
                way,
                Batches(record, probes, accumulates=False),
                Batches(record, probes, accumulates=True),
                self._limit,
                self._accumulate,
                self._total,
                self._rows,
            )
        return self._searches[way]

    def _recorded(self, way: Way, rows: int, accumulate: int) -> Graph:
        self._tell(f"profiling {way.title} at batch {rows}")
        return self._record(way, rows, accumulate)

    def best_of(self, way: Way) -> Setting | None:
        """The best setting of a way; None if the model refuses it or nothing fits."""
        if way in self._refused:
            return None
        search = self.search(way)
        try:
            return search.best()
        except CkplanError as error:
            if way == self._way:
                raise
            self._refused[way] = error.what
            return None

    def run(self) -> Tuned:
        """Search.

        Raises:
            InfeasibleError: Not one row fits, with any plan or lever.
            CkplanError: The model cannot be trained as given.
        """
        best, on_top = self._checked_climb()
        alone = {lever: self.best_of(lever.pulled(self._way)) for lever in self.levers}
        base = self.best_of(self._way)
        if best is None:
            raise self._nothing_fits()
        way = best.way
        self._tell("comparing levers")
        search = self.search(way)
        for batches in (search.one, search.several):
            if batches.not_linear:
                self._notes.append(f"every batch is profiled: {batches.not_linear}")
        graph = search.graph_at(best.batch)
        timeline = Simulator(graph).run(best.regions)
        owner = max(timeline.peak_by_kind.items(), key=lambda item: item[1])[0]
        rows = [self._row_of_plan(best)]
        rows += [self._row(lever, alone[lever], best, on_top) for lever in self.levers]
        if self._total is None and self._accumulate == 1:
            rows.insert(1, self._row_of_accumulation())
        return Tuned(
            best=best,
            graph=graph,
            limit=self._limit,
            base=base,
            next=self._next(best),
            levers=tuple(rows),
            largest_unplanned=search.largest_unplanned,
            largest_planned=search.largest_planned,
            curve=tuple(search.curve()),
            peak_at=timeline.peak_at,
            peak_owner=owner,
            notes=tuple(self._notes),
        )

    def _climb(self) -> tuple[Way, dict[Lever, Setting | None]]:
        """The way reached by pulling one lever at a time, the best one first.

        Returns:
            The way, and each lever -> the best setting with it on top of that way.
        """
        way, pulled = self._way, list[Lever]()
        while True:
            now = self.best_of(way)
            on_top = {
                lever: self.best_of(lever.pulled(way))
                for lever in self.levers
                if conflict(pulled, lever) is None and not lever.is_in(way)
            }
            found = {one: s for one, s in on_top.items() if s is not None}
            best = max(
                found, key=lambda one: found[one].samples_per_second, default=None
            )
            if best is None or (
                now is not None
                and found[best].samples_per_second <= now.samples_per_second
            ):
                return way, on_top
            way = best.pulled(way)
            pulled.append(best)

    def _checked_climb(self) -> tuple[Setting | None, dict[Lever, Setting | None]]:
        """The best setting, recorded, and every lever on top of it.

        If the step recorded there is not like the drawn one, all ways are recorded
        there, too, and compared again.
        """
        way, on_top = self._climb()
        best = self._checked(way)
        if best is None or not self._unlike:
            return best, on_top
        for search in [*self._searches.values()]:
            if search.way not in self._refused:
                search.check(best.batch)
        way, on_top = self._climb()
        return self._checked(way), on_top

    def _checked(self, way: Way) -> Setting | None:
        """The best setting of a way, at a batch that is recorded."""
        search = self.search(way)
        for _ in range(_MOST_CHECKS):
            best = self.best_of(way)
            if best is None or best.profiled:
                return best
            self._unlike = not search.check(best.batch) or self._unlike
            if best.batch in search.refused:
                why = search.refused[best.batch]
                self._notes.append(f"the model refuses batch {best.batch}: {why}")
                continue
            real = search.setting(best.batch)
            if real is None or real.peak_bytes != best.peak_bytes:
                found = (
                    "does not fit" if real is None else format_bytes(real.peak_bytes)
                )
                self._notes.append(
                    f"batch {best.batch}: profiled peak {found}, drawn "
                    f"{format_bytes(best.peak_bytes)}; the profiled one is used"
                )
        recorded = [*search.one.recorded, *search.several.recorded]
        found_there = (search.setting(n) for n in recorded)
        settings = [one for one in found_there if one is not None and one.profiled]
        return max(settings, key=lambda one: one.samples_per_second, default=None)

    def _nothing_fits(self) -> CkplanError:
        search = self.search(self._way)
        if search.refused and self._total is not None:
            refused = ", ".join(f"{n} ({why})" for n, why in search.refused.items())
            return CkplanError(
                f"no micro-batch that fits divides the total batch {self._total}: the "
                f"model refuses {refused}",
                needed="a total batch with more divisors",
                hint=f"--total-batch {2 ** self._total.bit_length()}",
            )
        return nothing_fits(search.graph_at(1), self._limit)

    def _row(
        self,
        lever: Lever,
        alone: Setting | None,
        best: Setting,
        on_top: dict[Lever, Setting | None],
    ) -> LeverRow:
        way = lever.pulled(self._way)
        base = self.search(self._way)
        refused = self._refused.get(way)
        without = base.best()
        in_best = lever.is_in(best.way) and not lever.is_in(self._way)
        other = on_top.get(lever)
        if in_best:
            fields = {key: getattr(self._way, key) for key, _ in lever.sets}
            other = self.best_of(replace(best.way, **fields))
        saved = None
        if refused is None:
            rows = self._rows
            peaks = [
                Simulator(one.graph_at(rows)).run().peak_bytes
                for one in (base, self.search(way))
            ]
            saved = peaks[0] - peaks[1]
        pays = pays_over(alone, without)
        return LeverRow(
            name=lever.name,
            bits=lever.bits,
            saved_bytes=saved,
            seconds_per_sample=alone.seconds_per_sample if alone else None,
            pays=pays,
            crossover=crossover(base, self.search(way)) if refused is None else None,
            on_best_seconds_per_sample=other.seconds_per_sample if other else None,
            in_best=in_best,
            refused=refused,
        )

    def _row_of_plan(self, best: Setting) -> LeverRow:
        search = self.search(self._way)
        without, planned = search.best(planned=False), search.best()
        forced = search.planned_settings()
        best_planned = min(forced, key=lambda s: s.seconds_per_sample, default=None)
        planner = Planner(search.graph_at(self._rows))
        saved = planner.unplanned.peak_bytes - planner.floor.peak_bytes
        pays = planned is not None and bool(planned.regions)
        bare = self.search(best.way).best(planned=False)
        least = None if without is None else without.seconds_per_sample
        first = min(
            (s.batch for s in forced if least is None or s.seconds_per_sample < least),
            default=None,
        )
        return LeverRow(
            name=RECOMPUTE,
            bits=SAME,
            saved_bytes=saved,
            seconds_per_sample=best_planned.seconds_per_sample
            if best_planned
            else None,
            pays=pays,
            crossover=first,
            on_best_seconds_per_sample=(
                (bare.seconds_per_sample if bare else None)
                if best.regions
                else best.seconds_per_sample
            ),
            in_best=bool(best.regions),
        )

    def _row_of_accumulation(self) -> LeverRow:
        """``_MANY`` micro-batches without a plan: they share one optimizer step."""
        base = self.search(self._way)
        way_search = replace(base, accumulate=_MANY, _settings={})
        way_search.start = max(base.largest_unplanned, 1)
        alone, without = way_search.best(planned=False), base.best(planned=False)
        peaks = [
            Simulator(one.graph_at(self._rows)).run().peak_bytes
            for one in (base, way_search)
        ]
        pays = pays_over(alone, without)
        return LeverRow(
            name=f"{ACCUMULATE} {_MANY}",
            bits="close",
            saved_bytes=peaks[0] - peaks[1],
            seconds_per_sample=alone.seconds_per_sample if alone else None,
            pays=pays,
            crossover=alone.batch * _MANY if pays and alone else None,
            on_best_seconds_per_sample=None,
            in_best=False,
        )

    def _next(self, best: Setting) -> tuple[Alternative, ...]:
        """The best setting of two other kinds: another way, or without a plan."""
        found: list[Setting] = []
        for way, search in self._searches.items():
            if way in self._refused:
                continue
            kinds = search.best(), search.best(planned=False)
            for one in filter(None, kinds):
                same = one.way == best.way and bool(one.regions) == bool(best.regions)
                # What was drawn and not recorded is not known to be faster.
                if not same and one.samples_per_second <= best.samples_per_second:
                    found.append(one)
        halved = self.search(best.way).setting(max(best.batch // 2, 1))
        if self._total is None and halved is not None and best.batch > 1:
            found.append(halved)
        found.sort(key=lambda one: -one.samples_per_second)
        return tuple(
            Alternative(one, gives_up(one, best))
            for one in list(dict.fromkeys(found))[:2]
        )
