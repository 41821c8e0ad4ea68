"""Offloaded values: when they are copied out and back, and what waits for that.

The order of copies follows the order of ops alone, as ``applying/moving`` carries it
out, so bytes do not depend on the speed of a disk:

- A moved value is copied out as soon as its op has run. It is freed when the
  ``IN_FLIGHT``-th one after it is handed over, or when the model's forward ends.
- When backward first asks a region for a dropped tensor, the last values that the
  region moved begin to come back, as many as ``IN_FLIGHT``. Whenever one of its values
  is wanted, the last ones still away follow, until as many are on their way again.
- When the last moved value of a region is wanted, the region before it begins.

Copies take time beside the ops. Forward waits for a copy out where the value is to be
freed; backward waits for a copy back where the value is wanted: the stalls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ckplan.graph.graph import Graph
from ckplan.graph.records import OUTSIDE_CALLS
from ckplan.simulating.effect import RETURNED, Effect, Interval


@dataclass(frozen=True, slots=True)
class Moves:
    """What the moved values of all regions change in a step."""

    holds: dict[int, int] = field(default_factory=dict)  # storage -> until half moment
    early: tuple[Interval, ...] = ()  # back before their region was first asked
    stall_seconds: float = 0.0
    moved_bytes: int = 0  # out; the same come back


NO_MOVES = Moves()

IN_FLIGHT = 2
"""Most tensors on their way out, and of each region on their way back."""


@dataclass(frozen=True, slots=True)
class _Event:
    """A copy begins or is waited for, at a half moment."""

    moment: int
    order: int  # within the half moment
    storage: int
    kind: str  # _OUT or _IN
    begins: bool


_OUT, _IN = "out", "in"


def find_moves(
    graph: Graph, effects: Sequence[Effect], bytes_per_second: float | None = None
) -> Moves:
    """Find how long moved values stay, when they return, and the stalls.

    Args:
        graph: The step.
        effects: Of the regions.
        bytes_per_second: Rate of the copies; without it, there are no stalls.
    """
    moving = [effect for effect in effects if effect.moved]
    if not moving:
        return NO_MOVES
    holds = _holds(graph, sorted(chain(*(one.moved.items() for one in moving))))
    early, begun = _early(graph, moving)
    sizes = [graph.storages[storage].bytes for one in moving for storage in one.moved]
    stalls = 0.0
    if bytes_per_second:
        events = _events(moving, holds, begun)
        stalls = _stalls(graph, effects, events, bytes_per_second)
    return Moves(holds, early, stalls, sum(sizes))


def _holds(graph: Graph, moved: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Storage -> half moment at which its copy out must be over."""
    roots = [call for call in graph.calls if call.parent == OUTSIDE_CALLS]
    by_op = sorted((op, storage) for storage, op in moved)
    later = [*(op for op, _ in by_op[IN_FLIGHT:]), *[graph.num_forward] * IN_FLIGHT]
    found: dict[int, int] = {}
    for (op, storage), following in zip(by_op, later, strict=False):
        stop = next((c.stop for c in roots if c.start <= op < c.stop), following)
        found[storage] = min(2 * stop - 1, 2 * following + 1)
    return found


def _early(
    graph: Graph, moving: Sequence[Effect]
) -> tuple[tuple[Interval, ...], dict[int, int]]:
    """Returns that begin before their region is asked; storage -> gap of each."""
    asked_ones = (effect for effect in moving if effect.asked >= 0)
    left = sorted(asked_ones, key=lambda effect: max(effect.moved.values()))
    begun: set[int] = set()
    intervals: list[Interval] = []
    begins: dict[int, int] = {}
    asked = sorted([(e.asked, 0, id(e)) for e in left] + _exhausted(left))
    for gap, exhausted, number in asked:
        if not exhausted:
            begun.add(number)
            continue
        following = next((e for e in reversed(left) if id(e) not in begun), None)
        if following is None:
            continue
        begun.add(id(following))
        last = following.asked - 1
        for storage, _ in following.returns[: following.begun]:
            size = graph.storages[storage].bytes
            begins[storage] = gap
            if gap <= last:
                early = Interval(gap, last, size, storage=storage, form=RETURNED)
                intervals.append(early)
    return tuple(intervals), begins


def _exhausted(effects: Sequence[Effect]) -> list[tuple[int, int, int]]:
    return [(e.exhausted, 1, id(e)) for e in effects if e.exhausted >= 0]


def _events(
    moving: Sequence[Effect], holds: dict[int, int], begun: dict[int, int]
) -> Iterator[_Event]:
    op_of = {s: op for effect in moving for s, op in effect.moved.items()}
    for number, storage in enumerate(holds):  # in the order of copies
        yield _Event(2 * op_of[storage] + 1, 2 * number, storage, _OUT, begins=True)
        yield _Event(holds[storage], 2 * number + 1, storage, _OUT, begins=False)
    for effect in moving:
        for storage, gap in effect.returns:
            start = min(gap, begun.get(storage, gap))
            yield _Event(start, 0, storage, _IN, begins=True)
        for storage, gap in effect.wants:
            yield _Event(gap, 1, storage, _IN, begins=False)


def _stalls(
    graph: Graph,
    effects: Sequence[Effect],
    events: Iterator[_Event],
    bytes_per_second: float,
) -> float:
    """Seconds that ops wait, with one copy at a time beside them."""
    until = _clock(graph, effects)
    free = late = 0.0  # when the link is free, and how late ops are by now
    over: dict[tuple[str, int], float] = {}  # copy -> when it is over
    for event in sorted(events, key=lambda e: (e.moment, e.order)):
        now = until[event.moment] + late
        key = event.kind, event.storage
        if event.begins:
            seconds = graph.storages[event.storage].bytes / bytes_per_second
            over[key] = free = max(now, free) + seconds
        else:
            late += max(0.0, over[key] - now)
    return late


def _clock(graph: Graph, effects: Sequence[Effect]) -> list[float]:
    """Seconds at each half moment: when a gap begins, and when an op is over."""
    rebuilt: dict[int, float] = {}
    for effect in effects:
        for gap, op in zip(effect.gaps, effect.steps, strict=True):
            seconds = graph.recompute_op_seconds[op]
            rebuilt[gap] = rebuilt.get(gap, 0.0) + seconds
    now, found = 0.0, []
    for moment, seconds in enumerate(graph.critical_seconds):
        found.append(now)
        now += rebuilt.get(2 * moment, 0.0) + seconds
        found.append(now)
    return [*found, now]


class Returns:
    """The moved values of one region on their way back, as a rebuild wants them."""

    def __init__(self, effect: Effect, moved: Sequence[tuple[int, int]]) -> None:
        """Nothing was asked for yet.

        Args:
            effect: Of the region; what happens is noted there.
            moved: (value, storage) of those that backward wants, in the order of ops.
        """
        self._effect = effect
        self._away = list(moved)
        self._ahead: list[int] = []  # values on their way back, not wanted yet
        self._storage_of = dict(moved)

    def ask(self, gap: int) -> list[int]:
        """Ask for a dropped tensor; returns the values that begin to return."""
        if self._effect.asked >= 0 or not self._away:
            return []
        self._effect.asked = gap
        found = self._follow(gap)
        self._effect.begun = len(found)
        return found

    def want(self, value: int, gap: int) -> list[int]:
        """A value is wanted; the values that begin to come back, in order."""
        found = []
        pair = value, self._storage_of[value]
        if pair in self._away:
            self._away.remove(pair)
            self._effect.returns.append((pair[1], gap))
            found.append(value)
        elif value in self._ahead:
            self._ahead.remove(value)
        self._effect.wants.append((pair[1], gap))
        found += self._follow(gap)
        if not self._ahead and self._effect.exhausted < 0:
            self._effect.exhausted = gap
        return found

    def _follow(self, gap: int) -> list[int]:
        found = []
        while self._away and len(self._ahead) < IN_FLIGHT:
            value, storage = self._away.pop()
            self._effect.returns.append((storage, gap))
            self._ahead.append(value)
            found.append(value)
        return found
