"""A timeline as the allocator sees it: blocks allocated and freed, in order.

``simulate`` defines the peaks. This module sorts its intervals into the order in which
a step allocates and frees them. Within an op, the order is: copies of the op's inputs,
its outputs and the tensors that regions keep, then the rest of its workspace. Blocks
that nothing holds any more are freed at the end of the op.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

from ckplan.graph.graph import Graph
from ckplan.graph.records import BEFORE_STEP, MULTIPLIES, NO_WORKSPACE
from ckplan.simulating.caching_allocator import Block, CachingAllocator, NoRoomError
from ckplan.simulating.effect import AFTER_MOMENT, BEFORE_OP, RETURNED
from ckplan.simulating.simulate import Timeline

_BEFORE, _OUTPUT, _WORKSPACE, _ENCODING, _GONE = range(5)  # order in a half moment


class Replayed(NamedTuple):
    """Predicted peaks of the caching allocator, once steps repeat."""

    allocated_bytes: int  # peak, including the unsplit remainders of blocks
    reserved_bytes: int


class Reserved(NamedTuple):
    """Predicted allocated and reserved bytes of PyTorch's allocator on a GPU."""

    allocated_bytes: int
    bytes: int
    expandable_bytes: int  # with PYTORCH_ALLOC_CONF=expandable_segments:True


class Level(NamedTuple):
    """Most bytes of PyTorch's allocator at one half moment, once steps repeat."""

    allocated_bytes: int
    reserved_bytes: int


class Event(NamedTuple):
    """A block is allocated or freed; events sort in order of time."""

    moment: int  # half moments, as in ``simulate``
    phase: int
    tick: int  # order within the recomputation of a region
    block: int
    bytes: int  # requested; 0 when the block is freed


def events(timeline: Timeline) -> list[Event]:
    """Return the events of every block of a step, in order of time.

    Blocks that exist before the step begin at half moment 0. The number of a storage is
    also the number of its block.
    """
    end = 2 * len(timeline.graph.ops)
    found: list[Event] = []
    for block, span in enumerate(_spans(timeline)):
        phase, start, stop, num_bytes, start_tick, stop_tick = span
        if not num_bytes or stop < start:
            continue
        found.append(Event(start, phase, start_tick, block, num_bytes))
        if stop < end:
            if stop_tick == AFTER_MOMENT:
                phase, stop_tick = _GONE, 0
            elif phase == _BEFORE:
                phase = _WORKSPACE
            found.append(Event(stop, phase, stop_tick, block, 0))
    found.sort()
    return found


_Span: TypeAlias = tuple[int, int, int, int, int, int]
"""A phase, then the first fields of an ``Interval``, which takes longer to make."""


def _spans(timeline: Timeline) -> Iterator[_Span]:
    graph, stops, ticks = timeline.graph, timeline.stops, timeline.freed_ticks
    for number, storage in enumerate(graph.storages):
        start = 0 if storage.maker == BEFORE_STEP else 2 * storage.maker + 1
        stop_tick = ticks.get(number, AFTER_MOMENT)
        yield _OUTPUT, start, stops[number], storage.bytes, 0, stop_tick
    yield from _workspaces(graph)
    for interval in timeline.moves.leaving:
        yield _OUTPUT, *interval[:5]
    early = {one.storage: one for one in timeline.moves.early}
    for effect in timeline.effects:
        for interval in effect.allocated:
            if interval.form == RETURNED and interval.storage in early:
                begun = early[interval.storage]
                interval = interval._replace(
                    start=begun.start, start_tick=begun.start_tick
                )
            phase = _BEFORE if interval.start_tick == BEFORE_OP else _OUTPUT
            yield phase, *interval[:5]
        for interval in effect.workspaces:
            yield _OUTPUT, *interval[:5]
        for half_moment, beyond in effect.encoding.items():
            workspace_bytes = graph.ops[half_moment // 2].workspace.bytes + beyond
            yield _ENCODING, half_moment, half_moment, workspace_bytes, 0, 1


def _workspaces(graph: Graph) -> Iterator[_Span]:
    for moment, op in enumerate(graph.ops):
        if op.workspace is not NO_WORKSPACE:
            half_moment = 2 * moment + 1
            for phase, blocks in zip((_BEFORE, _WORKSPACE), op.workspace, strict=True):
                for size in blocks:
                    yield phase, half_moment, half_moment, size, 0, 1


def reserved_bytes(timeline: Timeline, *, expandable: bool = False) -> int:
    """Bytes that PyTorch's CUDA allocator has reserved, once steps repeat."""
    return replayed(timeline, expandable=expandable).reserved_bytes


def replayed(
    timeline: Timeline,
    *,
    expandable: bool = False,
    capacity_bytes: int | None = None,
    levels: list[Level] | None = None,
) -> Replayed:
    """Replay two steps on a model of PyTorch's CUDA allocator.

    Parameters, buffers and inputs are allocated first. A cuBLAS workspace is allocated
    with the first op that needs it. Optimizer state is allocated with the first update,
    in the free blocks that the first step leaves. If gradients accumulate, those of the
    first batch stay. Memory that only the second step reserves also counts.

    Args:
        timeline: The step, planned or not.
        expandable: With ``PYTORCH_ALLOC_CONF=expandable_segments:True``.
        capacity_bytes: Memory of the device; None for no limit.
        levels: Output: the level at each half moment, if a list is given.

    Raises:
        NoRoomError: The step needs more than ``capacity_bytes``.
    """
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=capacity_bytes)
    most = _run_two_steps(timeline, allocator, levels)
    return Replayed(most, allocator.reserved_peak_bytes)


def _run_two_steps(
    timeline: Timeline, allocator: CachingAllocator, levels: list[Level] | None = None
) -> int:
    """Replay two steps; returns the most bytes allocated in the second one."""
    graph, replay = timeline.graph, _Replay(allocator)
    blocks = replay.blocks
    step = events(timeline)
    before = [event for event in step if event.moment == 0 and event.bytes]
    during, update = step[len(before) :], 2 * graph.backward_stop
    batch = [event for event in during if event.moment < update]
    first_use = {event.block: event for event in _cublas_workspaces(before, timeline)}
    state = {
        number
        for number, storage in enumerate(graph.storages)
        if storage.kind == "optimizer" and timeline.stops[number] >= update
    }
    added = added_to_gradients(graph)
    later = {*first_use, *state, *added.values()}
    replay.run([event for event in before if event.block not in later])
    replay.run(sorted([*batch, *first_use.values()]), added)
    if added:
        replay.run(batch)
    replay.run([event for event in before if event.block in state])
    replay.run([event for event in during if event.moment >= update])
    exist = {event.block for event in before} - {*added.values()}
    for block in [block for block in blocks if block not in exist]:
        allocator.free(blocks.pop(block))  # gradients, freed before the next step
    gone = exist - blocks.keys()
    replay.run([event for event in before if event.block in gone])
    allocator.reset_peak()
    if added:
        replay.run(batch, added)
    most = replay.run(during, levels=levels)
    if levels is not None:
        replay.fill(levels, len(timeline.live_bytes))
    return most


class _Replay:
    """The blocks of a step in an allocator."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self.blocks: dict[int, Block] = {}

    def run(
        self,
        sequence: Iterable[Event],
        kept_as: Mapping[int, int] | None = None,
        levels: list[Level] | None = None,
    ) -> int:
        """Allocate and free; returns the most bytes allocated.

        Args:
            sequence: The events.
            kept_as: Block -> the number that it goes on with in place of being freed.
            levels: Output: the level at each half moment, if a list is given.
        """
        allocator, blocks = self._allocator, self.blocks
        most = allocator.allocated_bytes
        for moment, _, _, block, num_bytes in sequence:
            if levels is not None:
                self.fill(levels, moment + 1)
            if num_bytes:
                blocks[block] = allocator.allocate(num_bytes)
                if allocator.allocated_bytes > most:
                    most = allocator.allocated_bytes
            elif kept_as and block in kept_as:
                blocks[kept_as[block]] = blocks.pop(block)
            else:
                allocator.free(blocks.pop(block))
            if levels is not None:
                levels[-1] = Level(*map(max, levels[-1], self._level))
        return most

    def fill(self, levels: list[Level], num_moments: int) -> None:
        """Repeat the level of now up to a number of half moments."""
        levels += [self._level] * (num_moments - len(levels))

    @property
    def _level(self) -> Level:
        return Level(self._allocator.allocated_bytes, self._allocator.reserved_bytes)


def has_room(timeline: Timeline, capacity_bytes: int, *, expandable: bool) -> bool:
    """Whether the step runs in ``capacity_bytes`` without running out of memory.

    If a smaller card was never full, a larger one allocates the same blocks. Expandable
    segments are as large as the card, so there every size is replayed.
    """
    key, known = (capacity_bytes, expandable), timeline.rooms
    if key not in known and not expandable:
        for (smaller, other), (fits, was_full) in known.items():
            if smaller <= capacity_bytes and not other and fits and not was_full:
                return True
    if key not in known:
        allocator = CachingAllocator(
            expandable=expandable, capacity_bytes=capacity_bytes
        )
        try:
            _run_two_steps(timeline, allocator)
            known[key] = True, allocator.was_full
        except NoRoomError:
            known[key] = False, True
    return known[key][0]


def added_to_gradients(graph: Graph) -> Mapping[int, int]:
    """New gradient -> the accumulated gradient that it is added to first."""
    first: dict[int, int] = {}  # accumulated gradient -> first new one
    for op in graph.ops[graph.num_forward : graph.backward_stop]:
        for storage in op.writes:
            one = graph.storages[storage]
            if one.kind == "gradient" and one.maker == BEFORE_STEP:
                for made in op.reads:
                    if made != storage and graph.storages[made].bytes == one.bytes:
                        first.setdefault(storage, made)
    return {made: storage for storage, made in first.items()}


def _cublas_workspaces(before: Sequence[Event], timeline: Timeline) -> Iterator[Event]:
    """The cuBLAS workspaces at their first use: of forward, then of backward."""
    graph = timeline.graph
    multiplies = [op.name in MULTIPLIES for op in graph.ops]
    moments = [2 * op + 1 for op, does in enumerate(multiplies) if does]
    backward = [moment for moment in moments if moment > 2 * graph.num_forward]
    backward += (
        min(effect.gap_peaks)
        for effect in timeline.effects
        if effect.gap_peaks and any(multiplies[step] for step in effect.steps)
    )
    threads = [moments[:1], [min(backward)] if backward else []]
    held = (e for e in before if graph.storages[e.block].kind == "temporary")
    for event, moment in zip(held, chain.from_iterable(threads), strict=False):
        yield event._replace(moment=moment, phase=_OUTPUT, tick=1)


def is_on_card(graph: Graph) -> bool:
    """Whether the step runs on a GPU."""
    device = str(graph.fingerprint.get("device", ""))
    return device.startswith("cuda") or "gpu" in graph.options


def reserved_on_card(
    timeline: Timeline, levels: list[Level] | None = None
) -> Reserved | None:
    """Predict both allocator settings; None for a step that runs on no GPU.

    Args:
        timeline: The step, planned or not.
        levels: Output: the level at each half moment, with the default settings.
    """
    if not is_on_card(timeline.graph):
        return None
    found = replayed(timeline, levels=levels)
    return Reserved(*found, replayed(timeline, expandable=True).reserved_bytes)
