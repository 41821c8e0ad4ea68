"""The searches of all ways to train, each begun when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from ckplan.errors import CkplanError
from ckplan.graph.graph import Graph
from ckplan.graph.sharding import Sharding, Traffic, sharded, traffic_of
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.tuning.ahead import Ahead, Asked
from ckplan.tuning.batches import Batches, probe_rows
from ckplan.tuning.plan_levers import has_plan_levers, without_plan_levers
from ckplan.tuning.ranks import Ranks
from ckplan.tuning.search import WaySearch
from ckplan.tuning.settings import Setting, Way

Record = Callable[[Way, int, int], Graph]
"""Records a step: the way, rows of the micro-batch, micro-batches."""
Tell = Callable[[str], None]


@dataclass
class Recorder:
    """Records every step once, or anew where its seconds are in doubt.

    Args:
        record: Records a step: the way, rows, micro-batches, and how often this step
            was recorded before.
        learn: Learns of a step that a copy of this process recorded; whether it may be
            taken.
        prepare: Called first in every copy; without it, none is made.
    """

    record: Callable[[Way, int, int, int], Graph]
    learn: Callable[[Way, int, int, Graph], bool] = lambda *step: True
    prepare: Callable[[], None] | None = None
    _known: dict[Asked, list[Graph]] = field(default_factory=dict)
    _ahead: Ahead | None = None

    def __call__(self, way: Way, rows: int, accumulate: int) -> Graph:
        """The step, recorded if it was not."""
        step = way, rows, accumulate
        if step not in self._known and self._ahead is not None:
            found = self._ahead.take(step)
            if found is not None and self.learn(*step, found):
                self._known[step] = [found]
        known = self._known.get(step)
        return known[-1] if known else self.again(*step)

    def again(self, way: Way, rows: int, accumulate: int) -> Graph:
        """The step, recorded anew."""
        known = self._known.setdefault((way, rows, accumulate), [])
        known.append(self.record(way, rows, accumulate, len(known)))
        return known[-1]

    def begin(self, steps: Iterable[Asked]) -> bool:
        """Have steps that will be asked for recorded by copies of this process.

        Returns:
            Whether any copy is at work.
        """
        if self.prepare is None:
            return False
        self._ahead = self._ahead or Ahead(self._in_copy, self.prepare)
        return self._ahead.begin(step for step in steps if step not in self._known)

    def end(self) -> None:
        """Stop all copies."""
        if self._ahead is not None:
            self._ahead.end()

    def _in_copy(self, way: Way, rows: int, accumulate: int) -> Graph:
        self._ahead = None
        return self(way, rows, accumulate)


@dataclass
class Searches:
    """The settings of every way to train."""

    record: Record
    limit: MemoryLimit
    way: Way  # before any lever is pulled
    rows: int  # of the batch that the workload has: where searches begin
    accumulate: int = 1  # micro-batches per step of the optimizer, without `total`
    total: int | None = None  # rows per step of the optimizer, to be kept
    tell: Tell = lambda what: None  # told what is being done
    refused: dict[Way, str] = field(default_factory=dict)  # way -> why
    _known: dict[Way, WaySearch] = field(default_factory=dict)
    _traffic: dict[Way, Traffic] = field(default_factory=dict)  # of ways with ranks

    def of(self, way: Way) -> WaySearch:
        """The settings of a way to train."""
        if way not in self._known and has_plan_levers(way):
            base = self.of(without_plan_levers(way))
            self._known[way] = replace(
                base, way=way, like=None, bare=base, _settings={}, _lever_plans={}
            )
        if way not in self._known:
            like = self._like(way)
            probes, record = probe_rows(self.rows), partial(self._recorded, way)
            again = partial(self._recorded_again, way)
            of_like = None if like is None else like.one
            one = Batches(record, probes, again=again, like=of_like)
            # Accumulating adds ops to a step, as another optimizer does.
            several = Batches(record, probes, again=again, accumulates=True, like=one)
            self._known[way] = WaySearch(
                way,
                one,
                several,
                self.limit,
                self.accumulate,
                self.total,
                self.rows,
                like,
                ranks=Ranks(partial(self._traffic.get, way)),
            )
        return self._known[way]

    def begun(self) -> list[WaySearch]:
        """The searches of ways that the model does not refuse."""
        return [one for one in self._known.values() if one.way not in self.refused]

    @property
    def recorded_batches(self) -> int:
        """Micro-batches of the steps that are recorded."""
        return recorded_batches(self.accumulate, self.total)

    def begin(self, steps: Iterable[Asked]) -> bool:
        """Have steps recorded beside the search; whether any is, now."""
        if not isinstance(self.record, Recorder):
            return False
        return self.record.begin((_of_all(way), n, many) for way, n, many in steps)

    def begin_probes(self, ways: Iterable[Way]) -> None:
        """The same for the first batches of ways."""
        probes, many = probe_rows(self.rows), self.recorded_batches
        of_card = self.of(self.way).batches_of(self.rows).is_of_card
        for way in ways:
            if not (way.compiled or has_plan_levers(way)):
                alike = of_card and self._like(way) is not None
                few = probes[:1] if alike else probes
                self.begin((way, rows, many) for rows in few)

    def _like(self, way: Way) -> WaySearch | None:
        """The search of a way that differs in its optimizer alone, if there is one."""
        known = (
            one
            for one in self._known.values()
            if one.like is None and not has_plan_levers(one.way)
        )
        same = replace(way, optimizer=None)
        return next((o for o in known if replace(o.way, optimizer=None) == same), None)

    def _recorded(self, way: Way, rows: int, accumulate: int) -> Graph:
        self.tell(f"profiling {way.title} at batch {rows}")
        like = self._like(way)
        if like is not None and like.one.is_of_card:
            # The update is taken into that step: ops have the order of other batches.
            self.record(_of_all(like.way), rows, accumulate)
        return self._of_rank(way, self.record(_of_all(way), rows, accumulate))

    def _recorded_again(self, way: Way, rows: int, accumulate: int) -> Graph:
        self.tell(f"profiling {way.title} at batch {rows} once more")
        again = self.record.again if isinstance(self.record, Recorder) else self.record
        return self._of_rank(way, again(_of_all(way), rows, accumulate))

    def _of_rank(self, way: Way, graph: Graph) -> Graph:
        """The step of one rank, if the way has several."""
        if way.shard is None:
            return graph
        sharding = Sharding(way.shard, way.ranks)
        self._traffic[way] = traffic_of(graph, sharding)
        return sharded(graph, sharding)

    def best_of(self, way: Way) -> Setting | None:
        """The best setting of a way; None if the model refuses it or nothing fits."""
        if way in self.refused:
            return None
        try:
            if has_plan_levers(way):
                self.of(way).plans_at(self.rows)  # refused here, if at all
            return self.of(way).best()
        except CkplanError as error:
            if way == self.way:
                raise
            self.refused[way] = error.what
            return None


def recorded_batches(accumulate: int, total: int | None) -> int:
    """Micro-batches of the steps that are recorded: all but the first are alike."""
    return 1 if accumulate == 1 and total is None else 2


def _of_all(way: Way) -> Way:
    """The same way in one process, which is recorded."""
    return replace(way, shard=None, ranks=1)
