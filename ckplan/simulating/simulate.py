"""The one definition of peak: replay a graph under a plan, exact in bytes.

Time is counted in half moments: ``2 t`` is the gap before op ``t``, where recomputation
happens; ``2 t + 1`` is while op ``t`` runs. A storage lives from the op that makes it
to the last moment that anything holds it: the program itself, a saved tensor, or a
region that will rebuild from it.

A region changes three things. Its dropped saved tensors no longer hold their storages.
It holds what it rebuilds from. And in backward it rebuilds: steps that allocate, hold
and free, in the order that ``program.Rebuild`` fixes for simulator and engine alike.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import add

from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.graph.records import BEFORE_STEP, GATHER, KINDS
from ckplan.plan.hazards import refuse_hazards
from ckplan.plan.region import Region, check_apart
from ckplan.simulating.effect import Effect, Interval
from ckplan.simulating.recomputing import find_effect
from ckplan.simulating.view import RegionView

"""Op that brings in the parameters of a module, to be let go when it is through."""


@dataclass(frozen=True)
class Timeline:
    """Live bytes of a step at every half moment."""

    graph: Graph
    live_bytes: list[int]
    effects: tuple[Effect, ...]
    unplanned_stops: Sequence[int]  # storage -> last half moment it is alive
    moved_stops: Mapping[int, int]  # of those storages that regions drop or hold
    gone: Mapping[int, int]  # those that go in the midst of a gap, and their ticks

    @cached_property
    def stops(self) -> list[int]:
        """The last half moment that each storage is alive."""
        moved = self.moved_stops
        return [moved.get(s, stop) for s, stop in enumerate(self.unplanned_stops)]

    @cached_property
    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return max(self.live_bytes, default=0)

    @cached_property
    def peak_moment(self) -> int:
        """First half moment of the peak."""
        return self.live_bytes.index(self.peak_bytes) if self.live_bytes else 0

    @property
    def peak_at(self) -> str:
        """Where the peak is, for people."""
        if not self.graph.ops:
            return "nowhere"
        place = self.graph.place(self.peak_moment // 2)
        recomputing = any(self.peak_moment in e.spikes for e in self.effects)
        return f"recomputation in {place}" if recomputing else place

    @cached_property
    def recompute_seconds(self) -> float:
        """Extra seconds of recomputation.

        The other side of the step, device or launching, counts once it is longer.
        """
        busier = sum(effect.seconds for effect in self.effects)
        other = sum(effect.hidden_seconds for effect in self.effects)
        idle = self.graph.step_seconds - sum(self.graph.hidden_seconds)
        return max(busier, other - idle)

    @property
    def engine_overhead(self) -> float:
        """What of the overhead is the engine's own work; 0 where the CPU has time."""
        if not (self.graph.step_seconds and self.graph.engine_is_critical):
            return 0.0
        taken = sum(effect.engine_seconds for effect in self.effects)
        return taken / self.graph.step_seconds

    @property
    def overhead(self) -> float:
        """Extra seconds as a fraction of the unplanned step."""
        step = self.graph.step_seconds
        return self.recompute_seconds / step if step else 0.0

    @cached_property
    def peak_by_kind(self) -> dict[str, int]:
        """Bytes alive at the peak by kind."""
        return self.bytes_by_kind(self.peak_moment)

    def alive(self, moment: int) -> list[int]:
        """Storages of the unplanned step that are alive at a half moment."""
        return [
            number
            for number, (one, stop) in enumerate(
                zip(self.graph.storages, self.stops, strict=True)
            )
            if 2 * one.maker + 1 <= moment <= stop
        ]

    def bytes_by_kind(self, moment: int) -> dict[str, int]:
        """Bytes alive at a half moment by kind; they add up to ``live_bytes``.

        Memory that regions allocate counts as activation; the rest, such as workspaces,
        as temporary.
        """
        storages, moved = self.graph.storages, self.moved_stops
        gone = {s: storages[s].bytes for s in self.gone if moved[s] == moment}
        total = dict.fromkeys(KINDS, 0)
        for storage in self.alive(moment):
            total[storages[storage].kind] += storages[storage].bytes
        for effect in self.effects:
            part = effect.spike(moment, gone)[1]
            total["activation"] += effect.made_bytes(moment, part)
            for went, _ in effect.going.get(moment, ())[:part]:
                total[storages[went].kind] -= gone.get(went, 0)
        total["temporary"] += self.live_bytes[moment] - sum(total.values())
        return total


def simulate(graph: Graph, regions: Iterable[Region] = ()) -> Timeline:
    """Replay one training step under a plan.

    Args:
        graph: The recorded step.
        regions: Regions on calls of which none lies inside another.

    Returns:
        The timeline of live bytes and the extra seconds.

    Raises:
        PlanError: Regions overlap, or one cannot be rebuilt.
    """
    return Simulator(graph).run(regions)


class Simulator:
    """Replays one graph under many plans, remembering what calls look like."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._views: dict[tuple[int, int], RegionView] = {}
        self._effects: dict[Region, Effect] = {}
        self._end = 2 * len(graph.ops)
        self._saved_of = {
            storage: [(index, 2 * graph.saved[index].done + 1) for index in saved]
            for storage, saved in graph.saved_of.items()
        }
        self._natural_stops: list[int] = []  # were it not for saved tensors
        self._stops: list[int] = []
        level = [0] * (self._end + 2)
        for storage, found in enumerate(graph.storages):
            start, natural = self._start_and_natural_stop(storage)
            until = (done for _, done in self._saved_of.get(storage, ()))
            self._natural_stops.append(natural)
            self._stops.append(min(max((natural, *until)), self._end))
            level[start] += found.bytes
            level[self._stops[-1] + 1] -= found.bytes
        self.unplanned_bytes = list(accumulate(level))[:-1]
        for moment, op in enumerate(graph.ops):
            self.unplanned_bytes[2 * moment + 1] += op.workspace.bytes

    def view(self, call: int, last: int | None = None) -> RegionView:
        """The values and saved tensors of a call, or of a run of sibling calls."""
        key = (call, call if last is None else last)
        if key not in self._views:
            self._views[key] = RegionView(self.graph, *key)
        return self._views[key]

    def effect(self, region: Region) -> Effect:
        """What one region alone changes."""
        if region not in self._effects:
            refuse_hazards(self.graph, region)
            view = self.view(region.call, region.last)
            self._check_parameters(view)
            self._effects[region] = find_effect(view, region)
        return self._effects[region]

    def run(self, regions: Iterable[Region] = ()) -> Timeline:
        """Replay the step under regions that do not overlap."""
        regions = sorted(regions, key=lambda region: region.call)
        check_apart(self.graph, regions)
        effects = tuple(self.effect(region) for region in regions)
        moved = self._moved_stops(effects)
        excess = Counter[int]()
        gone = self._gone(effects, moved)
        sizes = self._gone_bytes(gone, moved)
        for effect in effects:
            excess.update(effect.excess(sizes))
        changes = self._changes(moved, effects)
        live = self._replay(changes, excess, 0, len(self.unplanned_bytes) - 1)
        return Timeline(self.graph, live, effects, self._stops, moved, gone)

    def live_within(
        self, region: Region, windows: Iterable[tuple[int, int]]
    ) -> list[list[int]]:
        """Live bytes under one region, over windows of half moments [first, last]."""
        effects = (self.effect(region),)
        moved = self._moved_stops(effects)
        changes = list(self._changes(moved, effects))
        gone = self._gone(effects, moved)
        excess = effects[0].excess(self._gone_bytes(gone, moved))
        return [self._replay(changes, excess, *window) for window in windows]

    def _replay(
        self,
        changes: Iterable[Interval],
        excess: Mapping[int, int],
        start: int,
        stop: int,
    ) -> list[int]:
        """The unplanned bytes over a window, with what regions change added."""
        delta = [0] * (stop - start + 2)
        for change in changes:
            first, last = max(change.start, start), min(change.stop, stop)
            if first <= last:
                delta[first - start] += change.bytes
                delta[last - start + 1] -= change.bytes
        window = self.unplanned_bytes[start : stop + 1]
        live = list(map(add, window, accumulate(delta)))
        for moment, more_bytes in excess.items():
            if start <= moment <= stop:
                live[moment - start] += more_bytes
        return live

    def _moved_stops(self, effects: Sequence[Effect]) -> dict[int, int]:
        """When the storages that regions drop or hold end now."""
        dropped = set().union(*(effect.dropped for effect in effects))
        retained: dict[int, int] = {}
        for effect in effects:
            for storage, until in effect.retained.items():
                retained[storage] = max(retained.get(storage, -1), until)
        stops: dict[int, int] = {}
        for storage in {*retained, *(self.graph.saved[i].storage for i in dropped)}:
            until = max(self._natural_stops[storage], retained.get(storage, -1))
            for index, done in self._saved_of.get(storage, ()):
                if done > until and index not in dropped:
                    until = done
            stops[storage] = min(until, self._end)
        return stops

    def _gone(
        self, effects: Iterable[Effect], moved: Mapping[int, int]
    ) -> dict[int, int]:
        """Storages that nobody holds once a region lets them go in the midst of a gap.

        With their ticks. Of several regions in one gap it is not known who is last.
        """
        found: dict[int, int] = {}
        several: set[int] = set()
        for effect in effects:
            for gap, going in effect.going.items():
                for storage, tick in going:
                    if moved[storage] == gap:
                        several |= {storage} & found.keys()
                        found[storage] = tick
        return {storage: found[storage] for storage in found.keys() - several}

    def _gone_bytes(
        self, gone: Iterable[int], moved: Mapping[int, int]
    ) -> dict[int, dict[int, int]]:
        """Of gaps the storages that go there; another region may go on holding them."""
        found: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for storage in gone:
            found[moved[storage]][storage] = self.graph.storages[storage].bytes
        return found

    def _changes(
        self, moved: Mapping[int, int], effects: Sequence[Effect]
    ) -> Iterator[Interval]:
        """What regions add to the unplanned bytes, as signed intervals."""
        for storage, new in moved.items():
            old, size = self._stops[storage], self.graph.storages[storage].bytes
            if new < old:
                yield Interval(new + 1, old, -size)
            elif new > old:
                yield Interval(old + 1, new, size)
        for effect in effects:
            yield from effect.made

    def ends(self, storage: int) -> list[tuple[int, int]]:
        """Half moments until which a storage is needed, and by which saved tensor.

        The program itself comes first, as -1.
        """
        natural = self._natural_stops[storage]
        saved = [(done, index) for index, done in self._saved_of.get(storage, ())]
        return [(natural, -1), *saved]

    def _start_and_natural_stop(self, storage: int) -> tuple[int, int]:
        """Half moments that a storage lives for, were it not for saved tensors."""
        found = self.graph.storages[storage]
        start = 0 if found.maker == BEFORE_STEP else 2 * found.maker + 1
        if storage in self.graph.unused_workspaces:
            return start, start - 1
        return start, max(start, min(2 * found.last + 1, self._end))

    @cached_property
    def _gathered(self) -> list[int]:
        """Calls whose parameters are there for them alone."""
        found = (op.call for op in self.graph.ops if op.name == GATHER)
        return [call for call in dict.fromkeys(found) if call >= 0]

    def _check_parameters(self, view: RegionView) -> None:
        """Parameters that come and go inside a region are not there to rebuild it."""
        for number in self._gathered:
            call = self.graph.calls[number]
            inside = view.start <= call.start and call.stop <= view.stop
            if inside and view.unit != (number, None):
                raise PlanError(
                    f"cannot rebuild {view.name}: the parameters of {call} are "
                    "gathered for that call only",
                    needed="regions inside one gathered unit",
                    hint="a region for every such call, or --unit for larger ones",
                )
