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

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, count, pairwise

from ckplan.errors import PlanError
from ckplan.graph import BEFORE_STEP, KINDS, Call, Encoding, Graph, Saved
from ckplan.hazards import refuse_hazards
from ckplan.program import Flow, Part, Program, Rebuild, compile_program

PROGRAM, RERUN = "program", "rerun"
LATER = -1
RANDOM_STATE_BYTES = 5056
"""What replaying a random op on CPU keeps: torch's whole generator state."""
GATHER = "all_gather"
"""Op that brings in the parameters of a module, to be let go when it is through."""


def random_state_bytes(graph: Graph) -> int:
    """What replaying a random op keeps in the memory of the graph's device."""
    on_cpu = graph.fingerprint.get("device", "cpu") == "cpu"
    return RANDOM_STATE_BYTES if on_cpu else 0  # a GPU's is small, and on the CPU


@dataclass(frozen=True, slots=True)
class Region:
    """A call whose activations are dropped after forward, but for what it saves."""

    call: int  # index in Graph.calls
    by: str = PROGRAM  # or RERUN, which runs the whole module again
    save: frozenset[tuple[int, int]] = frozenset()  # (op, output) kept
    last: int | None = None  # last of a run of sibling calls that begins at `call`
    encode: frozenset[tuple[int, int]] = frozenset()  # kept in a smaller form
    # Regions inside: what they save stays only when this one is rebuilt.
    inner: tuple[Region, ...] = ()

    def moved(self, calls: int, ops: int) -> Region:
        """The same region on another call, so many calls and ops later."""
        return Region(
            self.call + calls,
            self.by,
            frozenset([(op + ops, output) for op, output in self.save]),
            None if self.last is None else self.last + calls,
            frozenset([(op + ops, output) for op, output in self.encode]),
            tuple([inner.moved(calls, ops) for inner in self.inner]),
        )


@dataclass(frozen=True, slots=True)
class Interval:
    """Bytes alive over the half moments ``[start, stop]``.

    Within a gap, ticks of the region's replay say what came first. What ends at
    ``LATER`` outlives all that its last half moment allocates.
    """

    start: int
    stop: int
    bytes: int
    born: int = 0  # ticks
    died: int = LATER


@dataclass(slots=True)
class Effect:
    """What one region does to the unplanned step."""

    dropped: set[int] = field(default_factory=set)  # indices of saved tensors
    holds: dict[int, int] = field(default_factory=dict)  # storage -> half moment
    # What it allocates: what is rebuilt, random states and encoded forms.
    made: list[Interval] = field(default_factory=list)
    workspaces: list[Interval] = field(default_factory=list)  # of what runs again
    # Of a gap: most bytes alive until something held goes, until the next goes, ...
    spikes: dict[int, list[int]] = field(default_factory=dict)
    # Of a gap: held storages that go in its midst, in order, and their ticks.
    going: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    encoding: dict[int, int] = field(default_factory=dict)  # half moment -> workspace
    seconds: float = 0.0  # on the busier side of the step: device or launching
    other_seconds: float = 0.0  # on the other side
    steps: list[int] = field(default_factory=list)  # ops that run again, in order

    def hold(self, storage: int, until: int) -> None:
        """Keep a storage alive at least to a half moment."""
        self.holds[storage] = max(self.holds.get(storage, -1), until)

    def let_go(self, storage: int, gap: int, tick: int, alive_bytes: int) -> None:
        """Hold a storage no longer, in the midst of a gap."""
        self.hold(storage, gap)
        self.going.setdefault(gap, []).append((storage, tick))
        self.spikes.setdefault(gap, [alive_bytes]).append(0)

    def excess(self, gone: Mapping[int, int]) -> dict[int, int]:
        """Most bytes alive at a half moment beyond what is counted there.

        Args:
            gone: Storages that nobody holds once this region lets them go, and their
                bytes, which count in the whole gap.
        """
        moments = sorted(self.spikes)
        level = [0] * (len(moments) + 1)
        for interval in self.made:
            level[bisect_left(moments, interval.start)] += interval.bytes
            level[bisect_right(moments, interval.stop)] -= interval.bytes
        counted = zip(moments, accumulate(level), strict=False)
        spikes = {at: self.spike(at, gone)[0] - sum_ for at, sum_ in counted}
        return {**self.encoding, **spikes}  # one at odd moments, one at even ones

    def spike(self, gap: int, gone: Mapping[int, int]) -> tuple[int, int]:
        """Most bytes alive in a gap, what went before counted off; how many went."""
        found, before, went_bytes = self.spikes.get(gap, (0,))[0], 0, 0
        for number, (storage, _) in enumerate(self.going.get(gap, ()), 1):
            went_bytes += gone.get(storage, 0)
            most = self.spikes[gap][number] - went_bytes
            if most > found:
                found, before = most, number
        return found, before

    def made_bytes(self, moment: int, part: int) -> int:
        """Bytes of what it made; in a gap, no more than are alive there at once."""
        alive = sum(i.bytes for i in self.made if i.start <= moment <= i.stop)
        return min(alive, self.spikes[moment][part] if moment in self.spikes else alive)


@dataclass(frozen=True)
class Timeline:
    """Live bytes of a step at every half moment."""

    graph: Graph
    live_bytes: list[int]
    effects: tuple[Effect, ...]
    stops: list[int]  # storage -> last half moment it is alive
    gone: Mapping[int, int]  # those that go in the midst of a gap, and their ticks

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
        other = sum(effect.other_seconds for effect in self.effects)
        idle = self.graph.step_seconds - sum(self.graph.other_seconds)
        return max(busier, other - idle)

    @property
    def overhead(self) -> float:
        """Extra seconds as a fraction of the unplanned step."""
        step = self.graph.step_seconds
        return self.recompute_seconds / step if step else 0.0

    @cached_property
    def peak_by_kind(self) -> dict[str, int]:
        """Bytes alive at the peak by kind; what regions make counts as activation."""
        moment, storages = self.peak_moment, self.graph.storages
        gone = {s: storages[s].bytes for s in self.gone}
        total = dict.fromkeys(KINDS, 0)
        for storage, stop in zip(storages, self.stops, strict=True):
            if 2 * storage.maker + 1 <= moment <= stop:
                total[storage.kind] += storage.bytes
        for effect in self.effects:
            part = effect.spike(moment, gone)[1]
            total["activation"] += effect.made_bytes(moment, part)
            for went, _ in effect.going.get(moment, ())[:part]:
                total[storages[went].kind] -= gone.get(went, 0)
        total["temporary"] += self.peak_bytes - sum(total.values())
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
        self._saved_of: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for index, saved in enumerate(graph.saved):
            self._saved_of[saved.storage].append((index, 2 * saved.done + 1))
        self._stops: list[int] = []
        level = [0] * (self._end + 2)
        for storage, found in enumerate(graph.storages):
            start, natural = self._start_and_natural_stop(storage)
            until = (done for _, done in self._saved_of.get(storage, ()))
            self._stops.append(min(max((natural, *until)), self._end))
            level[start] += found.bytes
            level[self._stops[-1] + 1] -= found.bytes
        self.unplanned_bytes = list(accumulate(level))[:-1]
        for moment, op in enumerate(graph.ops):
            self.unplanned_bytes[2 * moment + 1] += op.workspace_bytes

    def view(self, call: int, last: int | None = None) -> RegionView:
        """The values and saved tensors of a call, or of a run of sibling calls."""
        key = (call, call if last is None else last)
        if key not in self._views:
            self._views[key] = RegionView(self.graph, *key)
        return self._views[key]

    def effect(self, region: Region) -> Effect:
        """What one region alone changes."""
        if region not in self._effects:
            compute = _program_effect if region.by == PROGRAM else _rerun_effect
            refuse_hazards(self.graph, region)
            view = self.view(region.call, region.last)
            self._check_parameters(view)
            self._effects[region] = compute(view, region)
        return self._effects[region]

    def run(self, regions: Iterable[Region] = ()) -> Timeline:
        """Replay the step under regions of which none lies inside another."""
        regions = sorted(regions, key=lambda region: region.call)
        check_apart(self.graph, regions)
        effects = tuple(self.effect(region) for region in regions)
        moved = self._moved_stops(effects)
        excess = Counter[int]()
        gone = self._gone(effects, moved)
        sizes = {storage: self.graph.storages[storage].bytes for storage in gone}
        for effect in effects:
            excess.update(effect.excess(sizes))
        changes = self._changes(moved, effects)
        live = self._replay(changes, excess, 0, len(self.unplanned_bytes) - 1)
        stops = [moved.get(s, stop) for s, stop in enumerate(self._stops)]
        return Timeline(self.graph, live, effects, stops, gone)

    def live_within(
        self, region: Region, windows: Iterable[tuple[int, int]]
    ) -> list[list[int]]:
        """Live bytes under one region, over windows of half moments [first, last]."""
        effects = (self.effect(region),)
        moved = self._moved_stops(effects)
        changes = list(self._changes(moved, effects))
        gone = self._gone(effects, moved)
        excess = effects[0].excess({s: self.graph.storages[s].bytes for s in gone})
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
        live = [b + d for b, d in zip(window, accumulate(delta), strict=False)]
        for moment, more_bytes in excess.items():
            if start <= moment <= stop:
                live[moment - start] += more_bytes
        return live

    def _moved_stops(self, effects: Sequence[Effect]) -> dict[int, int]:
        """When the storages that regions drop or hold end now."""
        dropped = set().union(*(effect.dropped for effect in effects))
        holds: dict[int, int] = {}
        for effect in effects:
            for storage, until in effect.holds.items():
                holds[storage] = max(holds.get(storage, -1), until)
        stops: dict[int, int] = {}
        for storage in {*holds, *(self.graph.saved[i].storage for i in dropped)}:
            kept = (d for i, d in self._saved_of[storage] if i not in dropped)
            natural = self._start_and_natural_stop(storage)[1]
            until = max(natural, holds.get(storage, -1), *kept)
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
        natural = self._start_and_natural_stop(storage)[1]
        saved = [(done, index) for index, done in self._saved_of.get(storage, ())]
        return [(natural, -1), *saved]

    def _start_and_natural_stop(self, storage: int) -> tuple[int, int]:
        """Half moments that a storage lives for, were it not for saved tensors."""
        found = self.graph.storages[storage]
        start = 0 if found.maker == BEFORE_STEP else 2 * found.maker + 1
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
            if inside and number != view.unit[0]:
                raise PlanError(
                    f"cannot rebuild {view.name}: the parameters of {call} are there "
                    "for that call alone",
                    needed="regions inside of what is gathered as one",
                    hint="a region for every such call, or --unit for larger ones",
                )


class RegionView:
    """The forward of one call as values, and its saved tensors."""

    def __init__(self, graph: Graph, call: int, last: int) -> None:
        self.graph = graph
        self.unit = call, None if last == call else last
        self.name = str(graph.calls[call])
        if last != call:
            self.name += f" to {graph.calls[last]}"
        self.start = graph.calls[call].start
        self.stop = graph.calls[last].stop
        self.flow = Flow()
        self.saves: list[Saved] = []
        self.packed: list[tuple[int, Saved, int]] = []  # those made inside; with values
        self.saved_stop = self.start  # ops that must run to remake all saved tensors
        at = self.start
        for index in graph.saved_in(call, last):
            saved = graph.saved[index]
            for op in graph.ops[at : saved.at]:
                self.flow.add(op)
            self.saved_stop = at = max(at, saved.at)
            self.saves.append(saved)
            if self.inside(saved.storage):
                self.packed.append((index, saved, self.flow.value(saved.storage)))
        for op in graph.ops[at : self.stop]:
            self.flow.add(op)

    def inside(self, storage: int) -> bool:
        """Whether the region makes the storage."""
        return self.start <= self.graph.storages[storage].maker < self.stop

    def forward_window(self) -> tuple[int, int]:
        """Half moments, first and last, of its forward."""
        return 2 * self.start, 2 * self.stop - 1

    def backward_window(self) -> tuple[int, int]:
        """Half moments from the first wanted saved tensor on.

        If none is wanted, those at which backward drops what was made inside; (-1, -1)
        if there is nothing of the kind, either.
        """
        spans = [(s.wanted, s.done) for s in self.saves if s.wanted >= 0]
        if not spans:
            spans = [(s.done, s.done) for _, s, _ in self.packed]
        first = min((start for start, _ in spans), default=-1)
        last = max((stop for _, stop in spans), default=-1)
        return (2 * first, 2 * last + 1) if spans else (-1, -1)

    def external(self) -> set[int]:
        """Storages that the call reads, did not make, and that die during the step."""
        storages = self.graph.storages
        return {
            storage
            for storage in self.flow.current
            if not self.inside(storage) and storages[storage].maker != BEFORE_STEP
        }

    def buffers(self) -> list[int]:
        """Storages of buffers that the call reads or changes."""
        storages = self.graph.storages
        return [s for s in self.flow.current if storages[s].kind == "buffer"]

    def changed_inputs(self, before: int) -> set[int]:
        """Those among ``external()`` that are not what they were when forward began."""
        graph = self.graph
        return {s for s in self.external() if graph.is_changed(s, self.start, before)}

    def kept_values(self, region: Region) -> set[int]:
        """The values that a region's saves name."""
        returned = self.flow.returned
        return {returned[op - self.start][output] for op, output in region.save}

    def encoded_values(self, region: Region) -> dict[int, Encoding]:
        """The values that a region keeps in a smaller form."""
        returned = self.flow.returned
        return {
            returned[op - self.start][output]: self.graph.encoding_of[op, output]
            for op, output in sorted(region.encode)
        }

    def parts(self, region: Region) -> tuple[list[Part], dict[int, int]]:
        """The regions inside, as a program knows them; of saved tensors, their part.

        Raises:
            PlanError: One is not inside, overlaps another, or cannot be nested.
        """
        parts: list[Part] = []
        part_of: dict[int, int] = {}
        stack = [(one, region, 0) for one in _in_order(region)]
        while stack:
            one, around, outer = stack.pop()
            self._check_nested(one, around)
            last = one.call if one.last is None else one.last
            kept = frozenset(self.kept_values(one))
            start, stop = self.graph.calls[one.call].start, self.graph.calls[last].stop
            parts.append(Part(start - self.start, stop - self.start, kept, outer))
            number = len(parts)
            part_of.update(dict.fromkeys(self.graph.saved_in(one.call, last), number))
            stack += ((inner, one, number) for inner in _in_order(one))
        return parts, part_of

    def _check_nested(self, one: Region, around: Region) -> None:
        graph = self.graph
        if one.by != PROGRAM or around.by != PROGRAM or one.encode:
            raise PlanError(
                f"cannot nest {graph.calls[one.call]} in {graph.calls[around.call]}",
                needed="by: program for both, and no encode for the inner one",
                hint="encode in the outer region, or take the inner one out",
            )
        last = one.call if one.last is None else one.last
        same = (one.call, one.last) == (around.call, around.last)
        inside = graph.is_inside(one.call, around.call, around.last)
        if same or not inside or not graph.is_inside(last, around.call, around.last):
            call, outer = graph.calls[one.call], graph.calls[around.call]
            raise _overlap(call, outer, "is to be inside, and is not inside,")
        check_apart(graph, around.inner)

    def program(self, region: Region) -> tuple[Program, dict[int, int]]:
        """The region's program; the saved tensors that it rebuilds, with their part."""
        kept = self.kept_values(region)
        current = self.flow.is_current
        dropped = [
            (index, value)
            for index, _, value in self.packed
            if not (value in kept and current(value))
        ]
        parts, part_of = self.parts(region)
        wanted = [(value, part_of.get(index, 0)) for index, value in dropped]
        encoded = self.encoded_values(region)
        program = compile_program(self.flow, wanted, kept, encoded, parts)
        indices = {index: part_of.get(index, 0) for index, _ in dropped}
        stop = max((s.wanted for i, s, _ in self.packed if i in indices), default=-1)
        storage_of = self.flow.storage_of
        late = {
            value
            for value in program.holds
            if self.graph.is_changed(storage_of[value], self.stop, stop)
        }
        return replace(program, lost=program.lost | late), indices


def _program_effect(view: RegionView, region: Region) -> Effect:
    program, dropped = view.program(region)
    if program.lost:
        lost = {view.flow.storage_of[value] for value in program.lost}
        raise _not_rebuildable(view, lost)
    effect = Effect(dropped={*dropped})
    held = (view.flow.storage_of[value] for value in program.holds)
    for storage in (*view.external(), *held):
        effect.hold(storage, 2 * view.stop - 1)
    ledger = _Ledger(view, program, effect, view.encoded_values(region))
    rebuild = Rebuild(program, _Tally(ledger, program.holds))
    events = [(s, v, dropped[i]) for i, s, v in view.packed if i in dropped]
    for saved, value, part in sorted(events, key=lambda event: event[0].wanted):
        if saved.wanted >= 0:
            ledger.enter(2 * saved.wanted)
            level = rebuild.level(value, part)
            level.want(value)
            ledger.put_back()
            level.machine.unpack(value, 2 * saved.done + 1)
            level.release(value)
    ledger.enter(max((2 * s.done + 1 for s, _, _ in events), default=0))
    rebuild.machine.close()
    ledger.close()
    _count_seconds(view.graph, effect)
    return effect


def _count_seconds(graph: Graph, effect: Effect) -> None:
    effect.seconds += sum(graph.busier_seconds[op] for op in effect.steps)
    effect.other_seconds += sum(graph.other_seconds[op] for op in effect.steps)


class _Ledger:
    """What a rebuild does to the step: bytes in place of kernels."""

    def __init__(
        self,
        view: RegionView,
        program: Program,
        effect: Effect,
        encodings: Mapping[int, Encoding],
    ) -> None:
        self.flow = program.flow
        self.effect = effect
        self.moment = 0
        self._view = view
        self._runs = program.runs()  # still to come
        self._leaving: list[tuple[int, int]] = []  # (half moment, bytes), a heap
        self._bytes = 0
        self._ticks = count()
        self._state_bytes = random_state_bytes(view.graph)
        self._as_found: Interval | None = None  # random state that is to be put back
        self._states = {  # before random steps
            step: self._begin(self._state_bytes, 2 * (view.start + step) + 1)
            for step in self._runs
            if view.graph.ops[view.start + step].random
        }
        self._encoded: dict[int, tuple[Encoding, Interval]] = {}
        for value, encoding in encodings.items():
            self._encode(encoding)
            moment = 2 * encoding.op + 1
            if value in program.decodes:
                form = self._begin(encoding.bytes, moment)
                self._encoded[value] = encoding, form
            else:  # nobody will want it: gone when forward is over
                form = Interval(moment, 2 * view.stop - 1, encoding.bytes)
                effect.made.append(form)

    def enter(self, moment: int) -> None:
        """Enter the gap in which steps now run."""
        self.moment = moment
        while self._leaving and self._leaving[0][0] < moment:
            self._bytes -= heappop(self._leaving)[1]

    def allocate(self, value: int) -> Interval:
        """Make room for a value, which lives from now on."""
        size = self._view.graph.storages[self.flow.storage_of[value]].bytes
        return self._begin(size, self.moment)

    def let_go(self, born: Interval, stop: int) -> None:
        """A value lives until a half moment, now or later."""
        died = LATER
        if stop > self.moment or self.moment % 2:
            heappush(self._leaving, (stop, born.bytes))
        else:
            self._bytes -= born.bytes
            died = next(self._ticks)
        self.effect.made.append(replace(born, stop=stop, died=died))

    def let_go_held(self, value: int, stop: int) -> None:
        """The same of a value that is held since forward."""
        storage = self.flow.storage_of[value]
        if stop > self.moment or self.moment % 2:
            self.effect.hold(storage, stop)
        else:
            self.effect.let_go(storage, stop, next(self._ticks), self._bytes)

    def note(self, step: int) -> int:
        """A step runs; returns the workspace that it needs."""
        number = self._view.start + step
        op = self._view.graph.ops[number]
        self.effect.steps.append(number)
        self._runs[step] -= 1
        if op.random:
            self._draw_again(step)
        return op.workspace_bytes

    def _draw_again(self, step: int) -> None:
        if self._as_found is None:
            self._as_found = self._begin(self._state_bytes, self.moment)
            self._see(self._bytes)
        if not self._runs[step]:
            self.let_go(self._states.pop(step), self.moment)

    def put_back(self) -> None:
        """The random state is again as it was before steps ran."""
        if self._as_found is not None:
            self.let_go(self._as_found, self.moment)
            self._as_found = None

    def decode(self, value: int) -> int:
        """Begin to decode; returns the workspace that it needs."""
        encoding, _ = self._encoded[value]
        self.effect.seconds += encoding.decode_seconds
        return encoding.decode_workspace_bytes

    def decoded(self, value: int) -> None:
        """The encoded form goes."""
        _, form = self._encoded.pop(value)
        self.let_go(form, self.moment)

    def spike(self, workspace_bytes: int) -> None:
        """What is alive while a step runs."""
        self._see(self._bytes + workspace_bytes)
        ticks = next(self._ticks), next(self._ticks)
        workspace = Interval(self.moment, self.moment, workspace_bytes, *ticks)
        self.effect.workspaces.append(workspace)

    def close(self) -> None:
        """What was never decoded, or run again, goes."""
        forms = (form for _, form in self._encoded.values())
        for left in (*forms, *self._states.values()):
            self.let_go(left, self.moment)

    def _encode(self, encoding: Encoding) -> None:
        """Right after its op, while what the op read is still there."""
        op = self._view.graph.ops[encoding.op]
        beyond = encoding.encode_workspace_bytes - op.workspace_bytes
        moment, most = 2 * encoding.op + 1, self.effect.encoding
        most[moment] = max(most.get(moment, 0), beyond)
        self.effect.seconds += encoding.encode_seconds

    def _see(self, alive_bytes: int) -> None:
        parts = self.effect.spikes.setdefault(self.moment, [0])
        parts[-1] = max(parts[-1], alive_bytes)

    def _begin(self, num_bytes: int, moment: int) -> Interval:
        self._bytes += num_bytes
        return Interval(moment, moment, num_bytes, next(self._ticks))


class _Tally:
    """A machine that counts the bytes of one region."""

    def __init__(self, ledger: _Ledger, holds: Collection[int]) -> None:
        self._ledger = ledger
        self._holds = set(holds)  # since forward
        self._born: dict[int, Interval] = {}  # values alive, since when
        self._unpacked: dict[int, int] = {}  # value -> half moment: backward's last
        self._inner: list[_Tally] = []

    def within(self) -> _Tally:
        self._inner.append(_Tally(self._ledger, ()))
        return self._inner[-1]

    def unpack(self, value: int, until: int) -> None:
        """Hand a value to backward, which holds it whoever else lets it go."""
        self._unpacked[value] = max(self._unpacked.get(value, 0), until)

    def run(self, step: int, copies: Collection[int], keep: Collection[int]) -> None:
        ledger, flow = self._ledger, self._ledger.flow
        workspace_bytes = ledger.note(step)
        made = {
            new: ledger.allocate(new) if old in copies else self._born.pop(old)
            for old, new in flow.overwrites[step].items()
        }
        for value in flow.outputs[step]:
            if value not in made:
                made[value] = ledger.allocate(value)
        ledger.spike(workspace_bytes)
        for value, born in made.items():
            if value in keep:
                self._born[value] = born
            else:
                ledger.let_go(born, ledger.moment)

    def decode(self, value: int) -> None:
        workspace_bytes = self._ledger.decode(value)
        self._born[value] = self._ledger.allocate(value)
        self._ledger.spike(workspace_bytes)
        self._ledger.decoded(value)

    def fetch(self, value: int) -> None:
        """It is the outer region's."""

    def free(self, value: int) -> None:
        stop = max(self._ledger.moment, self._unpacked.get(value, 0))
        if value in self._holds:
            self._ledger.let_go_held(value, stop)
            self._holds.discard(value)
        elif value in self._born:
            self._ledger.let_go(self._born.pop(value), stop)

    def close(self) -> None:
        """The region's state goes: whatever it still holds ends here."""
        for inner in self._inner:
            inner.close()
        for value in (*self._holds, *self._born):
            self.free(value)


def _rerun_effect(view: RegionView, region: Region) -> Effect:
    """Run the call's ops again, whole, up to the last saved tensor (early stop)."""
    view.parts(region)  # which refuses those inside
    effect = Effect(dropped={index for index, _, _ in view.packed})
    last = max((saved.done for saved in view.saves), default=-1)
    for storage in view.external() if view.saves else ():
        effect.hold(storage, 2 * last + 1)
    effect.made += _world(view, 2 * last + 1)
    wanted = [saved.wanted for saved in view.saves if saved.wanted >= 0]
    if wanted:
        lost = view.changed_inputs(min(wanted))
        if lost:
            raise _not_rebuildable(view, lost)
        _run_again(view, min(wanted), effect)
    return effect


def _world(view: RegionView, until: int) -> Iterator[Interval]:
    """Copies of what a forward may change, to be put back before it runs again.

    What it did change is kept until a half moment, else until forward is over.
    """
    ops, (_, over) = view.graph.ops[view.start : view.stop], view.forward_window()
    begin = 2 * view.start + 1
    drew = any(op.random for op in ops)
    state_bytes = random_state_bytes(view.graph)
    yield Interval(begin, max(until, over) if drew else over, state_bytes)
    for storage in view.buffers():
        changed = view.graph.is_changed(storage, view.start, view.stop)
        size = view.graph.storages[storage].bytes
        yield Interval(begin, max(until, over) if changed else over, size)


def _run_again(view: RegionView, first: int, effect: Effect) -> None:
    """Run all ops at once, in the gap before op ``first``."""
    graph = view.graph
    until: dict[int, int] = {}
    for _, saved, _ in view.packed:
        if saved.done >= first:
            until[saved.storage] = max(until.get(saved.storage, 0), saved.done)
    gap = 2 * first
    found = random_state_bytes(graph) + sum(
        graph.storages[storage].bytes for storage in view.buffers()
    )
    effect.made.append(Interval(gap, gap, found))  # to be put back afterwards
    alive = sum(one.bytes for one in effect.made if one.start <= gap <= one.stop)
    most_bytes = alive
    born: dict[int, Interval] = {}  # storages that nobody wants: gone with the gap
    ticks = count()
    for moment in range(view.start, view.saved_stop):
        op = graph.ops[moment]
        for storage in op.creates:
            size = graph.storages[storage].bytes
            alive += size
            made = Interval(gap, gap, size, next(ticks))
            if storage in until:
                stop_at = 2 * until[storage] + 1
                effect.made.append(replace(made, stop=stop_at))
            else:
                born[storage] = made
        most_bytes = max(most_bytes, alive + op.workspace_bytes)
        both = next(ticks), next(ticks)
        effect.workspaces.append(Interval(gap, gap, op.workspace_bytes, *both))
        for storage in [s for s in born if graph.storages[s].last == moment]:
            gone = replace(born.pop(storage), died=next(ticks))
            alive -= gone.bytes
            effect.made.append(gone)
        effect.steps.append(moment)
    effect.made += born.values()
    _count_seconds(graph, effect)
    effect.spikes[gap] = [most_bytes]


def check_apart(graph: Graph, regions: Iterable[Region]) -> None:
    """Refuse regions that share a call.

    Raises:
        PlanError: Two of them overlap.
    """
    calls = graph.calls
    for first, second in pairwise(sorted(regions, key=lambda region: region.call)):
        last = first.call if first.last is None else first.last
        inside = graph.within(second.call, first.call)
        if inside or calls[second.call].start < calls[last].stop:
            raise _overlap(calls[second.call], calls[first.call], "is inside")


def _in_order(region: Region) -> list[Region]:
    """The regions inside, the last one first."""
    return sorted(region.inner, key=lambda one: -one.call)


def _overlap(second: Call, first: Call, how: str) -> PlanError:
    return PlanError(
        f"regions overlap: {second} {how} {first}",
        needed="regions apart, or one among the inner regions of the other",
        hint="remove one of the two",
    )


def _not_rebuildable(view: RegionView, lost: Collection[int]) -> PlanError:
    names = sorted({op.name for op in view.graph.ops if {*lost} & {*op.writes}})
    return PlanError(
        f"cannot rebuild {view.name}: {', '.join(names)} changes its input in place",
        needed="regions whose inputs are still there in backward",
        hint="leave this call out of the plan, or name a smaller one",
    )
