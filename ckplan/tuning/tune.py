"""``tune``: the most samples per second within a memory limit, over all levers.

Every lever is searched alone, at all batches. Then the one that gains most is kept, and
the others are searched on top of it, until none gains. The chosen batch is recorded;
if its bytes or seconds differ from those drawn, they replace them and the search is
done again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ckplan.errors import CkplanError
from ckplan.graph.records import MEASURED
from ckplan.simulating.alive import peak_tensors
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.tuning.batch_dims import dims_and_doubt
from ckplan.tuning.batches import probe_rows
from ckplan.tuning.lever_rows import (
    row_of,
    row_of_accumulation,
    row_of_expandable_segments,
    row_of_plan,
)
from ckplan.tuning.plan_levers import without_plan_levers
from ckplan.tuning.searches import Record, Searches, Tell
from ckplan.tuning.settings import (
    Lever,
    Setting,
    Way,
    conflict,
    grouped_update,
    kernel_of,
    levers_of,
)
from ckplan.tuning.tuned import (
    Alternative,
    Tuned,
    all_refused,
    gives_up,
    nothing_fits,
    pays_over,
)
from ckplan.units import format_bytes

_MOST_CHECKS = 4
_WORTH = 1.01  # what a drawn setting gains at least, where another is recorded
_MOST_NAMED = 3  # tensors at the peak


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
        allow: str | Sequence[str] = (),
        ranks: int = 1,
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
            allow: Names of levers that are not pulled without a word.
            ranks: Processes to shard over, if a scheme is allowed.
            tell: Told what is being done.

        Raises:
            CkplanError: A name in ``allow`` is unknown, or ``total`` is below 1.
        """
        if total is not None and (type(total) is not int or total < 1):
            raise CkplanError(
                f"cannot keep a total batch of {total!r} samples",
                needed="a whole number, 1 or more",
                hint="--total-batch 512",
            )
        self.searches = Searches(record, limit, way, rows, accumulate, total, tell)
        self.search, self.best_of = self.searches.of, self.searches.best_of
        self._way, self._rows, self._total, self._limit = way, rows, total, limit
        self.levers = levers_of(way, allow, ranks)
        self._notes: list[str] = []
        self._unlike = False  # a recorded step was not like the drawn one

    def run(self) -> Tuned:
        """Search.

        Raises:
            InfeasibleError: Not one row fits, with any plan or lever.
            CkplanError: The model cannot be trained as given.
        """
        self.levers = self._without_own_kernel()
        self.searches.begin_probes(lever.pulled(self._way) for lever in self.levers)
        best, on_top = self._checked_climb()
        alone = {lever: self.best_of(lever.pulled(self._way)) for lever in self.levers}
        base = self.best_of(self._way)
        if best is None:
            raise self._nothing_fits()
        way = best.way
        self.searches.tell("comparing levers")
        search = self.search(way)
        curve = search.curve()  # where every batch is profiled, one here can be faster
        recorded = (one for row in curve for one in row[1:] if one and one.profiled)
        best = max((best, *recorded), key=lambda one: one.samples_per_second)
        dims, doubt = dims_and_doubt(self.search(self._way))
        self._notes += filter(None, [doubt])
        for batches in (search.one, search.several):
            if batches.not_linear:
                self._notes.append(f"every batch is profiled: {batches.not_linear}")
        graph = search.graph_at(best.batch)
        timeline = search.simulator(graph).run(best.regions)
        if way.shard is not None:
            self._notes.append(_note_of_ranks(best))
        cautions = (one.caution for one in self.levers if one.is_in(way))
        self._notes += filter(None, cautions)
        owner = max(timeline.peak_by_kind.items(), key=lambda item: item[1])[0]
        rows = [row_of_plan(self.searches, best)]
        rows += [
            row_of(self.searches, lever, alone[lever], best, on_top)
            for lever in self.levers
        ]
        if self.searches.recorded_batches == 1:
            with suppress(CkplanError):  # traces hold no other number of them
                rows.insert(1, row_of_accumulation(self.searches))
        if self._limit.of_reserved and not self._limit.expandable:
            rows.insert(1, row_of_expandable_segments(self.searches, best))
        return Tuned(
            best=best,
            graph=graph,
            limit=self._limit,
            base=base,
            next=self._next(best),
            levers=tuple(rows),
            largest_unplanned=search.largest_unplanned,
            largest_planned=search.largest_planned,
            curve=tuple(curve),
            peak_at=timeline.peak_at,
            peak_owner=owner,
            at_peak=peak_tensors(timeline, _MOST_NAMED),
            notes=tuple(dict.fromkeys(self._notes)),
            batch_dims=dims,
        )

    def _without_own_kernel(self) -> tuple[Lever, ...]:
        """The levers less the kernel that the step has already, but with its groups.

        An optimizer that the workload brings itself has no other kernels.
        """
        graph = self.search(self._way).graph_at(probe_rows(self._rows)[0])
        kernel = kernel_of(graph)
        others = [
            one
            for one in self.levers
            if one.kernel is None or (kernel and one.kernel != kernel)
        ]
        groups = grouped_update(self._way, graph)
        return (*others, *([] if groups is None else [groups]))

    def _climb(self) -> tuple[Way, dict[Lever, Setting | None]]:
        """The way reached by pulling one lever at a time, the best one first.

        Returns:
            The way, and each lever -> the best setting with it on top of that way.
        """
        way, pulled = self._way, list[Lever]()
        while True:
            now = self.best_of(way)
            if way == self._way and now is not None:
                self._begin_likely(now)
            on_top = self._on_top(way, pulled)
            found = {one: s for one, s in on_top.items() if s is not None}
            best = max(
                found, key=lambda one: found[one].samples_per_second, default=None
            )
            if best is None or not pays_over(found[best], now):
                return way, on_top
            way = best.pulled(way)
            pulled.append(best)

    def _on_top(self, way: Way, pulled: Sequence[Lever]) -> dict[Lever, Setting | None]:
        """Each lever that goes with those pulled -> the best setting with it, too."""
        return {
            lever: self.best_of(lever.pulled(way))
            for lever in self.levers
            if conflict(pulled, lever) is None and not lever.is_in(way)
        }

    def _begin_likely(self, best: Setting) -> None:
        """Record beside the search where ways with other kernels are likely best, too.

        Meanwhile the largest planned batch is searched, near which theirs is.
        """
        many = self.searches.recorded_batches
        if self.searches.begin([(best.way, best.batch, many)]):
            _ = self.search(best.way).largest_planned

    def _checked_climb(self) -> tuple[Setting | None, dict[Lever, Setting | None]]:
        """The best setting, recorded, and every lever on top of it.

        If the step recorded there is not like the drawn one, all ways are recorded
        there, too, and compared again. For a card that is quick: ways have but updates
        of their own. So they are recorded wherever one was not like its drawn step.
        """
        way, on_top = self._climb()
        if self.searches.recorded_batches == 1:
            self.searches.begin([(self._way, probe_rows(self._rows)[0], 2)])
        best = self._checked(way)
        if best is None:
            return None, on_top
        if not self._unlike:
            return self._or_with_fewer(best, on_top)
        found = self.search(best.way).batches_of(best.batch)
        where = [] if found.any_recorded.costs == MEASURED else found.corrected
        for search in self.searches.begun():
            for rows in dict.fromkeys((*where, best.batch)):
                search.check(rows)
        way, on_top = self._climb()
        best = self._checked(way)
        return (None, on_top) if best is None else self._or_with_fewer(best, on_top)

    def _or_with_fewer(
        self, best: Setting, on_top: dict[Lever, Setting | None]
    ) -> tuple[Setting, dict[Lever, Setting | None]]:
        """The best setting, or one with fewer levers if that is recorded as no slower.

        A setting may be recorded as slower than it was drawn, and than others are; and
        beside a lever that was pulled later, an earlier one may not pay any more.
        """
        given = self._way
        new = [one for one in self.levers if not one.is_in(given)]
        own = [one for one in new if one.is_in(best.way)]
        ways = [given, *(one.pulled(given) for one in own)]
        ways += [one.left_out(best.way, given) for one in own]
        drawn = [self.best_of(way) for way in dict.fromkeys(ways) if way != best.way]
        found = (one for one in drawn if one is not None)
        other = max(found, key=lambda one: one.samples_per_second, default=None)
        if other is None or pays_over(best, other):
            return best, on_top
        real = self._checked(other.way)
        if real is None or pays_over(best, real):
            return best, on_top
        pulled = [one for one in own if one.is_in(real.way)]
        return real, self._on_top(real.way, pulled)

    def _checked(self, way: Way) -> Setting | None:
        """The best setting of a way, at a batch that is recorded."""
        search, known = self.search(way), None
        for _ in range(_MOST_CHECKS):
            best = self.best_of(way)
            if best is None or best.profiled:
                return best
            worth = _WORTH * known.samples_per_second if known else 0.0
            if best.samples_per_second <= worth:
                return known  # what was drawn so near to it is not known to be faster
            alike = search.check(best.batch)
            if not alike:
                self._unlike = True
                for other in self.searches.begun():
                    if other.one is search.one:  # of plan levers, which share steps
                        other.forget()
            if best.batch in search.refused:
                why = search.refused[best.batch]
                self._notes.append(f"the model refuses batch {best.batch}: {why}")
                continue
            real = search.setting(best.batch)
            if alike and real is not None:
                return real  # others are drawn: what is left between them is noise
            known = real if real is not None and real.profiled else known
            if not alike and (real is None or real.peak_bytes != best.peak_bytes):
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
        search, found = self.search(self._way), dict[int, str]()
        for one in self.searches.begun():
            found |= one.refused
        if found:
            known = search.graph_at(probe_rows(self._rows)[0])
            return all_refused(known, found, self._total)
        return nothing_fits(search.graph_at(1), self._limit)

    def _next(self, best: Setting) -> tuple[Alternative, ...]:
        """The best setting of two other kinds: another way, or without a plan."""
        found: list[Setting] = []
        for search in self.searches.begun():
            kinds = search.best(), search.best(planned=False)
            others = (one for one in kinds if one and _kind_of(one) != _kind_of(best))
            found.extend(others)
        halved = self.search(best.way).setting(max(best.batch // 2, 1))
        if self._total is None and halved is not None and best.batch > 1:
            found.append(halved)
        # What was drawn and not recorded is not known to be faster.
        most = best.samples_per_second
        found = [one for one in found if one.samples_per_second <= most]
        found.sort(key=lambda one: -one.samples_per_second)
        apart: dict[tuple[Way, bool, int], Setting] = {}
        for one in found:
            apart.setdefault((*_kind_of(one), one.batch), one)
        return tuple(
            Alternative(one, gives_up(one, best)) for one in [*apart.values()][:2]
        )


def _kind_of(one: Setting) -> tuple[Way, bool]:
    """How it trains, and whether with a plan; levers of plans need one."""
    planned = bool(one.regions)
    return one.way if planned else without_plan_levers(one.way), planned


def _note_of_ranks(best: Setting) -> str:
    """What samples per second of several ranks are, and are not."""
    note = f"samples per second of all {best.way.ranks} ranks"
    sent = best.communication
    if sent is None:
        return f"{note}, without communication: the rate between cards is not known"
    return (
        f"{note}, of one machine: rings at {sent.rate / 1e9:g} GB/s each way, beside "
        "forward and backward; only what takes longer than these counts"
    )
