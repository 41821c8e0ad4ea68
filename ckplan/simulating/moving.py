"""Offloaded values: when they are copied out and back, and what waits for that.

The order of copies follows the order of ops alone, as ``applying/moving`` carries it
out, so bytes do not depend on the speed of a disk:

- A moved value is copied out as soon as its op has run. It is freed when the
  ``IN_FLIGHT``-th one after it is handed over, or when the model's forward ends. If the
  plan encodes it as well, its encoded form is made at once and moves in its place.
- When backward first asks a region for a dropped tensor, the last values that the
  region moved begin to come back, as many as ``IN_FLIGHT``. Whenever one of its values
  is wanted, the last ones still away follow, until as many are on their way again.
- When the last moved value of a region is wanted, the region before it begins.

Copies take time beside the ops: to a disk one at a time, to the host memory of a GPU
one each way at once. Forward waits for a copy out where the value is to be freed;
backward waits for a copy back where the value is wanted: the stalls. On a GPU, the
device waits, and ``queues.py`` has its clock. Copies to a disk also take time from the
ops themselves, as long as nobody waits: a part of the processor, and the engine's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ckplan.graph.graph import Graph
from ckplan.graph.records import OUTSIDE_CALLS
from ckplan.simulating.effect import ENCODED, RETURNED, Effect, Interval
from ckplan.simulating.queues import Copies, CopyEvent

STAGING_BYTES = 8 * 2**20
"""Of pinned memory, between a GPU and a file."""

HOST_SPARE = 64
"""Of so many bytes of host memory, one is left over between tensors."""


@dataclass(frozen=True, slots=True)
class Link:
    """The way to a disk, or to host memory: copies of moved values."""

    bytes_per_second: float
    both_ways: bool = False  # copies out and back do not slow each other
    busy_seconds_per_byte: float = 0.0  # that ops lose to a copy beside them, one way
    seconds_per_move: float = 0.0  # of the engine, out and back together
    slowest: Link | None = None  # the same way at its worst, as it was measured
    to_file: bool = False  # of a GPU, behind the host; else to the host itself

    @staticmethod
    def of(graph: Graph, bytes_per_second: float) -> Link:
        """The link of a step's device: to host memory on a GPU, else to a disk."""
        return Link(bytes_per_second, both_ways=is_on_gpu(graph))

    def busy_seconds(self, num_bytes: int, moves: int = 1) -> float:
        """Seconds that ops are slower for moves, out and back, if nothing waits."""
        copying = 2 * self.busy_seconds_per_byte * num_bytes
        return copying + self.seconds_per_move * moves


def is_on_gpu(graph: Graph) -> bool:
    """Whether values move to host memory, and not to a disk."""
    return str(graph.fingerprint.get("device", "cpu")).startswith("cuda")


def host_bytes_for(moved_bytes: int) -> int:
    """Bytes of pinned host memory for tensors of so many bytes in all."""
    return moved_bytes + moved_bytes // HOST_SPARE


@dataclass(frozen=True, slots=True)
class Moves:
    """What the moved values of all regions change in a step."""

    holds: dict[int, int] = field(default_factory=dict)  # storage -> until half moment
    leaving: tuple[Interval, ...] = ()  # encoded forms on their way out
    early: tuple[Interval, ...] = ()  # back before their region was first asked
    stall_seconds: float = 0.0
    busy_seconds: float = 0.0  # that copies take from ops, on the CPU
    moved_bytes: int = 0  # out; the same come back
    host_bytes: int = 0  # of pinned memory, on a GPU
    copies: tuple[CopyEvent, ...] = ()  # in the order of events, on a GPU


NO_MOVES = Moves()

IN_FLIGHT = 2
"""Most tensors on their way out, and of each region on their way back."""


_OUT, _IN = "out", "in"


def find_moves(
    graph: Graph, effects: Sequence[Effect], link: Link | None = None
) -> Moves:
    """Find how long moved values stay, when they return, and the stalls.

    Args:
        graph: The step.
        effects: Of the regions.
        link: The way of the copies; without it, there are no stalls.
    """
    moving = [effect for effect in effects if effect.moved]
    if not moving:
        return NO_MOVES
    ops = dict(chain(*(one.moved.items() for one in moving)))
    small = dict(chain(*(one.small.items() for one in moving)))
    sizes = {one: small.get(one, graph.storages[one].bytes) for one in ops}
    holds = _holds(graph, sorted(ops.items()))
    early, begun = _early(moving, sizes)
    leaving = tuple(
        Interval(2 * ops[one] + 1, holds[one], size, storage=one, form=ENCODED)
        for one, size in small.items()
    )
    held = {one: until for one, until in holds.items() if one not in small}
    events: list[CopyEvent] = []
    busy, moved_bytes = 0.0, sum(sizes.values())
    if link is not None:
        found = _events(moving, sizes, holds, begun, link)
        events = sorted(found, key=lambda one: (one.moment, one.order))
        busy = link.busy_seconds(moved_bytes, len(sizes))
    host_bytes = 0
    if is_on_gpu(graph):
        to_file = link is not None and link.to_file
        host_bytes = STAGING_BYTES if to_file else host_bytes_for(moved_bytes)
    bytes_ = moved_bytes, host_bytes
    if graph.is_launched:
        return Moves(held, leaving, early, 0.0, 0.0, *bytes_, tuple(events))
    stalls = _stalls(graph, effects, events)
    return Moves(held, leaving, early, stalls, busy, *bytes_)


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
    moving: Sequence[Effect], sizes: Mapping[int, int]
) -> tuple[tuple[Interval, ...], dict[int, int]]:
    """Returns that begin before their region is asked; storage -> gap of each."""
    asked_ones = (effect for effect in moving if effect.asked >= 0)
    left = sorted(asked_ones, key=lambda effect: max(effect.moved.values()))
    begun: set[int] = set()
    intervals: list[Interval] = []
    begins: dict[int, int] = {}
    asked = sorted([(e.asked, 0, id(e), 0) for e in left] + _exhausted(left))
    for gap, exhausted, number, tick in asked:
        if not exhausted:
            begun.add(number)
            continue
        following = next((e for e in reversed(left) if id(e) not in begun), None)
        if following is None:
            continue
        begun.add(id(following))
        last = following.asked - 1
        for storage, _ in following.returns[: following.begun]:
            begins[storage] = gap
            if gap <= last:
                size = sizes[storage]
                again = Interval(gap, last, size, tick, storage=storage, form=RETURNED)
                intervals.append(again)
    return tuple(intervals), begins


def _exhausted(effects: Sequence[Effect]) -> list[tuple[int, int, int, int]]:
    found = (one for one in effects if one.exhausted >= 0)
    return [(one.exhausted, 1, id(one), one.exhausted_tick) for one in found]


def _events(
    moving: Sequence[Effect],
    sizes: Mapping[int, int],
    holds: dict[int, int],
    begun: dict[int, int],
    link: Link,
) -> Iterator[CopyEvent]:
    op_of = {s: op for effect in moving for s, op in effect.moved.items()}

    def event(
        moment: int, order: int, kind: str, storage: int, begins: bool
    ) -> CopyEvent:
        seconds = sizes[storage] / link.bytes_per_second
        queue = kind if link.both_ways else ""
        copy = kind, storage
        return CopyEvent(moment, order, queue, copy, seconds if begins else None)

    for number, storage in enumerate(holds):  # in the order of copies
        yield event(2 * op_of[storage] + 1, 2 * number, _OUT, storage, True)
        yield event(holds[storage], 2 * number + 1, _OUT, storage, False)
    for effect in moving:
        for storage, gap in effect.returns:
            yield event(min(gap, begun.get(storage, gap)), 0, _IN, storage, True)
        for storage, gap in effect.wants:
            yield event(gap, 1, _IN, storage, False)


def _stalls(
    graph: Graph, effects: Sequence[Effect], events: Sequence[CopyEvent]
) -> float:
    """Seconds that ops of the CPU wait for copies beside them."""
    until = _clock(graph, effects)
    copies, late = Copies(), 0.0  # how late ops are by now
    for event in events:
        now = until[event.moment] + late
        late += copies.meet(event, now) - now
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
