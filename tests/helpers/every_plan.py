"""All plans of a small step, with the peak and seconds of each.

A unit is a call or a run of siblings; an option is one way to make it a region: which
of its values stay, which stay in a smaller form, and (for the smallest steps) which
regions are inside, each with at most one value kept. Every option is walked alone by
``oracles.walk``, while a witness writes down until when the region holds what others
made, and how many bytes of its own are alive. Plans are sets of options on units that
do not overlap. Regions meet only in what they hold, so the bytes of a plan are those of
the step with every storage alive until the last of its holders lets go, and with the
own bytes of all regions added. Where a region lets go in the midst of a gap and only
others decide whether that is the end, the plan is walked instead. ``confirm`` walks a
plan as a whole. Nothing of the package is called, but by ``compare``, which puts the
planner beside.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations, islice, product
from math import inf
from random import Random
from unittest.mock import patch

import numpy
import oracles
from oracles import CannotRebuildError, Content, Kept, Nest, Span

from ckplan.graph import file as trace_file
from ckplan.graph.graph import Graph
from ckplan.graph.records import OUTSIDE_CALLS
from ckplan.plan.file import dumps
from ckplan.plan.region import Region
from ckplan.solving import spaces
from ckplan.solving.planner import Planner
from ckplan.solving.solve import to_plan

MOST_OPTIONS = 250
MOST_NESTS = 3000
MOST_PLANS = 60_000
SCALE = 1000
_ASKED_AGAIN = 4  # one step of so many
TOLERANCE = 1e-6  # of seconds, which are whole numbers here
NONE: Kept = frozenset()


class TooManyError(Exception):
    """The step has too many plans to enumerate."""


@dataclass(frozen=True)
class Way:
    """One way to make a unit a region."""

    span: Span
    kept: Kept = NONE
    encoded: Kept = NONE
    inner: tuple[tuple[Span, tuple[Kept, Nest]], ...] = ()

    def nest(self) -> Nest:
        return dict(self.inner)


@dataclass(frozen=True)
class _Effect:
    """What a region does to the step, by storage, saved tensor and half moment."""

    held_until: numpy.ndarray
    dropped: numpy.ndarray
    own_bytes: numpy.ndarray
    seconds: float
    freed_in_gap: Mapping[int, tuple[int, bool]]


class _Witness(oracles.Memory):
    """Records until when regions hold storages of the step."""

    def __init__(self, num_storages: int) -> None:
        super().__init__()
        self.now = 0
        self.held_until = numpy.full(num_storages, -1)
        self.freed_in_gap: dict[
            int, tuple[int, bool]
        ] = {}  # storage -> gap, whether it goes
        self.step_bytes: list[int] = []  # of what is not made again, by half moment
        self._step_bytes = 0

    def begin(self, moment: int) -> None:
        self.now = moment
        self.step_bytes.append(self._step_bytes)

    def make(self, block: Hashable, num_bytes: int, holder: Hashable) -> None:
        super().make(block, num_bytes, holder)
        if isinstance(block, int):
            self._count(num_bytes)

    def let_go(self, block: Hashable, holder: Hashable) -> None:
        if isinstance(block, int) and block in self._size:
            by_region = isinstance(holder, tuple) and holder[0] in ("watch", "region")
            if by_region:
                self.held_until[block] = max(self.held_until[block], self.now)
            size = self._size[block]
            super().let_go(block, holder)
            if by_region and self.now % 2 == 0:
                self.freed_in_gap[block] = self.now, block not in self._size
            if block not in self._size:
                self._step_bytes -= size
        else:
            super().let_go(block, holder)

    def _count(self, num_bytes: int) -> None:
        self._step_bytes += num_bytes
        if self.step_bytes:  # made while the half moment lasts
            self.step_bytes[-1] = self._step_bytes


@dataclass(frozen=True)
class _Plans:
    """Many plans, one in every row."""

    chosen: list[tuple[int, ...]]  # options
    held_until: numpy.ndarray
    dropped: numpy.ndarray
    own_bytes: numpy.ndarray
    seconds: numpy.ndarray

    def either(self, others: _Plans) -> _Plans:
        """These, and others."""
        return _Plans(
            self.chosen + others.chosen,
            numpy.concatenate([self.held_until, others.held_until]),
            numpy.concatenate([self.dropped, others.dropped]),
            numpy.concatenate([self.own_bytes, others.own_bytes]),
            numpy.concatenate([self.seconds, others.seconds]),
        )

    def beside(self, others: _Plans) -> _Plans:
        """Each of these together with each of others."""
        a = numpy.repeat(numpy.arange(len(self.chosen)), len(others.chosen))
        b = numpy.tile(numpy.arange(len(others.chosen)), len(self.chosen))
        return _Plans(
            [one + other for one, other in product(self.chosen, others.chosen)],
            numpy.maximum(self.held_until[a], others.held_until[b]),
            self.dropped[a] | others.dropped[b],
            self.own_bytes[a] + others.own_bytes[b],
            self.seconds[a] + others.seconds[b],
        )

    def none_of(self) -> _Plans:
        """The empty plan."""
        return _Plans(
            [],
            self.held_until[:0],
            self.dropped[:0],
            self.own_bytes[:0],
            self.seconds[:0],
        )


class EveryPlan:
    """All plans of one step."""

    def __init__(self, graph: Graph, *, nesting: bool = False) -> None:
        """Walk every option, then value every plan.

        Args:
            graph: A small step.
            nesting: Whether there may be regions inside regions.

        Raises:
            TooManyError: There are more than ``MOST_OPTIONS`` or ``MOST_PLANS``.
        """
        self.graph = graph
        self.ways: list[Way] = []
        self._going: list[Mapping[int, tuple[int, bool]]] = []  # for every way
        self._choices_of: dict[Span, list[tuple[Kept, Kept]]] = {}
        self._nests_in: dict[Span, list[Mapping[Span, tuple[Kept, Nest]]]] = {}
        storages, saved = graph.storages, graph.saved
        self._start = numpy.array([max(2 * s.maker + 1, 0) for s in storages])
        natural = numpy.array([2 * s.last + 1 for s in storages])
        self._natural = numpy.maximum(natural, self._start)
        self._sizes = numpy.array([s.bytes for s in storages])
        self._done = numpy.array([2 * s.last_held + 1 for s in saved], dtype=int)
        self._storage_of = numpy.array([s.storage for s in saved], dtype=int)
        self._unplanned = self._effect(None)
        self._nesting = nesting
        self._find()

    def _find(self) -> None:
        for unit in self._units():
            self._choices(unit)  # which says if they are too many, before any walk
        plans = self._nothing()
        for call in self.graph.children[OUTSIDE_CALLS]:
            plans = self._beside(plans, self._of_call(call))
        self.plans = plans.chosen
        self.seconds = plans.seconds
        stops = numpy.maximum(self._natural, plans.held_until)
        for j, storage in enumerate(self._storage_of):
            holds = numpy.where(plans.dropped[:, j], -1, self._done[j])
            stops[:, storage] = numpy.maximum(stops[:, storage], holds)
        num_moments = 2 * len(self.graph.ops) + 1
        live = numpy.tile(self._unplanned.own_bytes, (len(stops), 1)) + plans.own_bytes
        change = numpy.zeros((len(stops), num_moments + 1), dtype=int)
        rows = numpy.arange(len(stops))
        for storage, size in enumerate(self._sizes):
            change[:, min(self._start[storage], num_moments)] += size
            ends = numpy.minimum(stops[:, storage] + 1, num_moments)
            numpy.subtract.at(change, (rows, ends), size)
        live += change.cumsum(axis=1)[:, :num_moments]
        self.peaks = live.max(axis=1)
        for plan, chosen in enumerate(self.plans):
            if self._goes_otherwise(chosen, stops[plan]):
                self.peaks[plan] = self.walk(self.ways_of(plan)).peak_bytes

    def _goes_otherwise(self, chosen: Iterable[int], stops: numpy.ndarray) -> bool:
        """Whether others decide if what goes in the midst of a gap ends there."""
        return any(
            goes != (stops[storage] == gap)
            for way in chosen
            for storage, (gap, goes) in self._going[way].items()
        )

    def _units(self) -> Iterator[Span]:
        for call in range(len(self.graph.calls)):
            yield call, call
            yield from combinations(self.graph.children[call], 2)

    def _of_call(self, call: int) -> _Plans:
        """All that can be done with a call: nothing, a region, or regions inside."""
        inside = self._of_siblings(self.graph.children[call])
        return inside.either(self._of_unit((call, call)))

    def _of_siblings(self, calls: Sequence[int]) -> _Plans:
        """All that can be done with siblings from the first on."""
        after = [self._nothing()]
        for place in reversed(range(len(calls))):
            found = self._beside(self._of_call(calls[place]), after[0])
            for last in range(place + 1, len(calls)):
                run = self._of_unit((calls[place], calls[last]))
                found = found.either(self._beside(run, after[last - place]))
            after.insert(0, found)
        return after[0]

    def _nothing(self) -> _Plans:
        width = 2 * len(self.graph.ops) + 1
        return _Plans(
            [()],
            numpy.full((1, len(self.graph.storages)), -1),
            numpy.zeros((1, len(self.graph.saved)), dtype=bool),
            numpy.zeros((1, width), dtype=int),
            numpy.zeros(1),
        )

    def _beside(self, some: _Plans, others: _Plans) -> _Plans:
        if len(some.chosen) * len(others.chosen) > MOST_PLANS:
            raise TooManyError
        return some.beside(others)

    def _of_unit(self, span: Span) -> _Plans:
        effects: list[_Effect] = []
        for way in self._ways_of_unit(span):
            with suppress(CannotRebuildError):
                effects.append(self._effect(way))
                self.ways.append(way)
                self._going.append(effects[-1].freed_in_gap)
            if len(self.ways) > MOST_OPTIONS:
                raise TooManyError
        if not effects:
            return self._nothing().none_of()
        numbers = range(len(self.ways) - len(effects), len(self.ways))
        return _Plans(
            [(number,) for number in numbers],
            numpy.array([effect.held_until for effect in effects]),
            numpy.array([effect.dropped for effect in effects]),
            numpy.array([effect.own_bytes for effect in effects]),
            numpy.array([effect.seconds for effect in effects]),
        )

    def _ways_of_unit(self, span: Span) -> Iterable[Way]:
        choices = self._choices(span)
        if not self._nesting:
            return [Way(span, *choice) for choice in choices]
        known: dict[Hashable, Way] = {}
        nests = [tuple(nest.items()) for nest in self._nests(span)]
        if len(nests) * len(choices) > MOST_NESTS:
            raise TooManyError
        for nest, (kept, encoded) in product(nests, choices):
            way = Way(span, kept, encoded, nest)
            known.setdefault(self._key(way), way)
        known.pop(None, None)
        return known.values()

    def _choices(self, span: Span) -> list[tuple[Kept, Kept]]:
        """All effective choices of outputs to keep and outputs to encode.

        From the last op back, a value has choices only if backward or a recomputed op
        needs it.
        """
        if span not in self._choices_of:
            found = list(islice(self._choose(span), MOST_OPTIONS + 1))
            self._choices_of[span] = found
            if sum(map(len, self._choices_of.values())) > MOST_OPTIONS:
                raise TooManyError
        return self._choices_of[span]

    def _choose(self, span: Span) -> Iterator[tuple[Kept, Kept]]:
        whole = self._program(Way(span))
        wanted = frozenset(whole._content[j] for j in whole.dropped)
        if not wanted:
            return
        stack = [(whole.stop - 1, wanted, NONE, NONE)]
        while stack:
            op, wanted, kept, encoded = stack.pop()
            if op < whole.start:
                yield kept, encoded
                continue
            mine = sorted(whole._makes[op] & wanted)
            ways = [self._hows(whole, op, content) for content in mine]
            for hows in product(*ways):
                again = whole._reads[op] if None in hows else frozenset()
                keep = {how[1] for how in hows if how and how[0] == "keep"}
                code = {how[1] for how in hows if how and how[0] == "encode"}
                stack.append((op - 1, wanted | again, kept | keep, encoded | code))

    def _hows(
        self, whole: oracles._Program, op: int, content: Content
    ) -> list[tuple[str, tuple[int, int]] | None]:
        """Ways to restore a value; None: its op is recomputed."""
        found: list[tuple[str, tuple[int, int]] | None] = [None]
        places = [(op, m) for m, c in enumerate(whole.outputs[op]) if c == content]
        if places and whole._final[content[0]] == content[1]:
            found.append(("keep", places[0]))
        forms = {(form.op, form.output) for form in self.graph.encodings}
        found += (("encode", place) for place in places if place in forms)
        return found

    def _nests(self, span: Span) -> list[Mapping[Span, tuple[Kept, Nest]]]:
        """Every set of regions inside of a unit."""
        if span not in self._nests_in:
            siblings = self.graph.children[self.graph.calls[span[0]].parent]
            calls = [call for call in siblings if span[0] <= call <= span[1]]
            if len(calls) == 1:
                calls = self.graph.children[span[0]]
            found = list(islice(self._nests_of(calls, span), MOST_NESTS + 1))
            if len(found) > MOST_NESTS:
                raise TooManyError
            self._nests_in[span] = found
        return self._nests_in[span]

    def _nests_of(
        self, calls: Sequence[int], around: Span
    ) -> Iterator[Mapping[Span, tuple[Kept, Nest]]]:
        if not calls:
            yield {}
            return
        for end in range(len(calls)):
            span = (calls[0], calls[end])
            mine: list[Mapping[Span, tuple[Kept, Nest]]] = []
            if end == 0:
                mine += self._nests(span)
            if span != around:
                kept_sets = [NONE, *(frozenset([one]) for one in self._useful(span))]
                mine += (
                    {span: (kept, nest)}
                    for nest, kept in product(self._nests(span), kept_sets)
                )
            for rest, one in product(self._nests_of(calls[end + 1 :], around), mine):
                yield {**one, **rest}

    def _useful(self, span: Span) -> list[tuple[int, int]]:
        """Outputs that recomputing a unit may need."""
        graph = self.graph
        needed = {graph.saved[j].storage for j in oracles.saves_of(graph, span)}
        start, stop = graph.calls[span[0]].start, graph.calls[span[1]].stop
        found: list[tuple[int, int]] = []
        for number in reversed(range(start, stop)):
            op = graph.ops[number]
            made = [m for m, s in enumerate(op.outputs) if s in needed]
            found += ((number, m) for m in made)
            if made:
                needed.update(op.reads, op.writes)
        return sorted(found)

    def _key(self, way: Way) -> Hashable | None:
        """Equal for options that do the same; None for those that do nothing new."""
        program = self._program(way)
        forms = {(form.op, form.output) for form in program._encodings.values()}
        used = {program._encodings[content] for content in program._decodes}
        if not program.dropped or len(forms) != len(used):
            return None
        levels: dict[Hashable, int] = {}
        stack = [program]
        while stack:
            one = stack.pop()
            if one._uses:
                held, decodes = frozenset(one._held), frozenset(one._decodes)
                uses = frozenset(one._uses.items())
                levels[one.span, held, decodes, uses] = len(levels)
            stack += one._inner
        rebuilt_by = frozenset((j, one.span) for j, one in program._level.items())
        return rebuilt_by, tuple(levels)

    def _program(self, way: Way) -> oracles._Program:
        nothing = oracles.Memory()
        kept, encoded, inside = way.kept, way.encoded, way.nest()
        return oracles._Program(
            self.graph, nothing, way.span, kept, encoded, inside, strict=False
        )

    def _effect(self, way: Way | None) -> _Effect:
        witness = _Witness(len(self.graph.storages))
        seen = self.walk([way] if way else [], witness)
        own = numpy.array(seen.live_bytes) - numpy.array(witness.step_bytes)
        dropped = numpy.zeros(len(self.graph.saved), dtype=bool)
        dropped[list(seen.dropped)] = True
        if way is not None:
            own -= self._unplanned.own_bytes
        freed_in_gap = witness.freed_in_gap
        return _Effect(witness.held_until, dropped, own, seen.seconds, freed_in_gap)

    def walk(
        self, ways: Sequence[Way], memory: oracles.Memory | None = None
    ) -> oracles.Walk:
        """Walk a plan as a whole."""
        return oracles.walk(
            self.graph,
            {way.span: way.kept for way in ways},
            encoded={way.span: way.encoded for way in ways},
            inner={way.span: way.nest() for way in ways},
            memory=memory,
        )

    def ways_of(self, plan: int) -> list[Way]:
        """The options of a plan."""
        return [self.ways[number] for number in self.plans[plan]]

    def confirm(self, plan: int) -> None:
        """Walk a plan as a whole and compare."""
        seen = self.walk(self.ways_of(plan))
        assert seen.peak_bytes == self.peaks[plan], (self.ways_of(plan), seen)
        assert abs(seen.seconds - self.seconds[plan]) < 1e-6

    def num_nested(self, best: Iterable[int]) -> int:
        """How many of some plans need regions inside regions to be that good."""
        if not self._nesting:
            return 0
        flat = [all(not self.ways[w].inner for w in plan) for plan in self.plans]
        peaks, seconds = self.peaks[flat], self.seconds[flat] - TOLERANCE
        pairs = ((self.peaks[plan], self.seconds[plan]) for plan in best)
        return sum(not ((peaks <= p) & (seconds <= s)).any() for p, s in pairs)

    def best(self) -> list[int]:
        """Pareto-optimal plans by peak and seconds, the smallest peak first."""
        kept: list[int] = []
        for plan in numpy.lexsort((self.seconds, self.peaks)):
            if not kept or self.seconds[plan] < self.seconds[kept[-1]] - 1e-9:
                kept.append(int(plan))
        return kept


# -- the planner beside it -------------------------------------------------------------


@dataclass
class Outcome:
    """Results of the planner on one step."""

    num_plans: int
    num_budgets: int = 0  # at which some plan fits
    equal: int = 0
    dearer: list[float] = field(default_factory=list)  # a planned step to the best one
    missed: int = 0  # nothing found though some plan fits
    cheaper: int = 0  # than all that was enumerated, with regions inside regions
    nested: int = 0  # only regions inside regions are best
    floor_excess: float = 0.0  # of the planner's floor over the least peak
    wrong: list[str] = field(default_factory=list)  # what must never be

    @property
    def is_best(self) -> bool:
        """Whether the planner always matched the best plan."""
        return not self.dearer and not self.missed and not self.wrong


def search_alone(graph: Graph) -> Planner:
    """A planner that searches as in larger steps, where it cannot try every plan."""
    with patch.object(spaces, "_FEW_OPS", -1):
        return Planner(graph)


def compare(
    graph: Graph,
    rng: Random,
    *,
    nesting: bool = False,
    planner_of: Callable[[Graph], Planner] = Planner,
) -> Outcome:
    """Ask the planner for the budgets at which the best plan changes.

    Args:
        graph: A small step.
        rng: Chooses plans to confirm, and the budget at which bytes are scaled.
        nesting: Whether to enumerate regions inside regions.
        planner_of: Makes the planner of a graph.

    Raises:
        TooManyError: It has too many plans.
    """
    every = EveryPlan(graph, nesting=nesting)
    best = every.best()
    for plan in (*best, *(rng.randrange(len(every.plans)) for _ in range(3))):
        every.confirm(plan)
    planner = planner_of(graph)
    outcome = Outcome(len(every.plans), nested=every.num_nested(best))
    before = 0.0
    for plan in reversed(best):
        budget, least = int(every.peaks[plan]), float(every.seconds[plan])
        seconds = _ask(every, planner, budget, least, outcome)
        if seconds < before - TOLERANCE:
            outcome.wrong.append(f"{budget} B costs less than a larger budget")
        before = max(before, seconds)
    _ask_below(planner, int(every.peaks[best[0]]), outcome)
    if rng.randrange(_ASKED_AGAIN) == 0:
        budget = int(every.peaks[rng.choice(best)])
        if planner.within(budget) is not None:
            _ask_again(graph, planner_of, budget, outcome)
    return outcome


def _ask(
    every: EveryPlan, planner: Planner, budget: int, least: float, outcome: Outcome
) -> float:
    """What the planner needs within a budget, in seconds beyond the step's."""
    outcome.num_budgets += 1
    found = planner.within(budget)
    if found is None:
        outcome.missed += 1
        return inf
    timeline, regions = found
    seen = oracles.walk_plan(every.graph, regions)
    if seen.peak_bytes > budget or seen.peak_bytes != timeline.peak_bytes:
        outcome.wrong.append(f"at {budget} B the walk sees {seen.peak_bytes} B")
    if abs(seen.seconds - timeline.recompute_seconds) > TOLERANCE:
        outcome.wrong.append(f"at {budget} B the walk sees {seen.seconds} s")
    step = every.graph.step_seconds
    if seen.seconds > least + TOLERANCE:
        outcome.dearer.append((step + seen.seconds) / (step + least) - 1)
    elif seen.seconds < least - TOLERANCE:
        outcome.cheaper += 1
        if max(map(_depth, regions)) == 1:
            outcome.wrong.append(f"at {budget} B the enumeration lacks {regions}")
    else:
        outcome.equal += 1
    return seen.seconds


def _ask_below(planner: Planner, least_peak: int, outcome: Outcome) -> None:
    """One byte below the least peak; and at and below the planner's own floor.

    The floor is searched by bytes alone; the search by seconds may find less.
    """
    floor = planner.floor.peak_bytes
    outcome.floor_excess = max(floor / max(least_peak, 1) - 1, 0.0)
    found = planner.within(least_peak - 1)
    if found is not None and max(map(_depth, found[1]), default=1) == 1:
        outcome.wrong.append(f"a plan fits {least_peak - 1} B, and none can")
    lower = planner.within(floor - 1)
    if planner.within(floor) is None or (lower and lower[0].peak_bytes >= floor):
        outcome.wrong.append(f"the floor is not {floor} B")


def _ask_again(
    graph: Graph,
    planner_of: Callable[[Graph], Planner],
    budget: int,
    outcome: Outcome,
) -> None:
    """The same of the graph's file, and of the graph with all bytes scaled."""
    again = trace_file.loads(trace_file.dumps(graph), "again")
    texts = [dumps(to_plan(g, planner_of(g).solve(budget))) for g in (graph, again)]
    if texts[0] != texts[1]:
        outcome.wrong.append(f"at {budget} B another plan the second time")
    bare = without_states(graph)
    found = planner_of(bare).within(budget)
    scaled = planner_of(scale(bare, SCALE)).within(SCALE * budget)
    if found is None or scaled is None or scaled[1] != found[1]:
        outcome.wrong.append(f"at {budget} B another plan if all bytes are scaled")


def without_states(graph: Graph) -> Graph:
    """The same step where random states, which have one size, take no bytes."""
    return replace(graph, fingerprint={**graph.fingerprint, "device": "cuda"})


def scale(graph: Graph, by: int) -> Graph:
    """The same step with larger tensors."""
    return replace(
        graph,
        storages=tuple(replace(s, bytes=by * s.bytes) for s in graph.storages),
        ops=tuple(
            replace(o, workspace=o.workspace.map(lambda size: by * size))
            for o in graph.ops
        ),
        encodings=tuple(
            replace(
                e,
                bytes=by * e.bytes,
                encode_workspace_bytes=by * e.encode_workspace_bytes,
                decode_workspace_bytes=by * e.decode_workspace_bytes,
            )
            for e in graph.encodings
        ),
    )


def _depth(region: Region) -> int:
    return 1 + max(map(_depth, region.inner), default=0)
