"""A timeline as what an allocator sees: blocks asked for and given back, in order.

Peaks are those of ``simulate``; this puts its intervals in the order in which a step
would allocate and free them. Within an op come copies of what it reads, its outputs and
what regions keep, then the rest of its workspace; what nobody holds any longer goes at
the end of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from ckplan.graph.graph import Graph
from ckplan.graph.records import BEFORE_STEP, MULTIPLIES
from ckplan.simulating.caching_allocator import Block, CachingAllocator, NoRoomError
from ckplan.simulating.effect import FIRST, LATER, Interval
from ckplan.simulating.simulate import Timeline

_BEFORE, _OUTPUT, _WORKSPACE, _ENCODING, _GONE = range(5)  # phases of a half moment


class Replayed(NamedTuple):
    """What the caching allocator does with a step, once steps repeat."""

    allocated_bytes: int  # most at once, what is left of blocks not split included
    reserved_bytes: int


class Reserved(NamedTuple):
    """What PyTorch's allocator is predicted to hand out and to reserve on a card."""

    allocated_bytes: int
    bytes: int
    expandable_bytes: int  # with PYTORCH_ALLOC_CONF=expandable_segments:True


class Event(NamedTuple):
    """A block begins or ends; events are sorted as they happen."""

    moment: int  # half moments, as in ``simulate``
    phase: int
    tick: int  # of a region's replay
    block: int
    bytes: int  # asked for; 0 when the block is given back


def events(timeline: Timeline) -> list[Event]:
    """Every block of a step; those that exist before it begin at half moment 0.

    Storages are blocks by their own numbers.
    """
    end = 2 * len(timeline.graph.ops)
    found: list[Event] = []
    for block, (phase, interval) in enumerate(_intervals(timeline)):
        if not interval.bytes or interval.stop < interval.start:
            continue
        found.append(Event(interval.start, phase, interval.born, block, interval.bytes))
        over = _WORKSPACE if phase == _BEFORE else phase
        last = (over, interval.died) if interval.died != LATER else (_GONE, 0)
        if interval.stop < end:
            found.append(Event(interval.stop, *last, block, 0))
    return sorted(found)


def _intervals(timeline: Timeline) -> Iterator[tuple[int, Interval]]:
    graph = timeline.graph
    for number, storage in enumerate(graph.storages):
        start = 0 if storage.maker == BEFORE_STEP else 2 * storage.maker + 1
        stop, died = timeline.stops[number], timeline.gone.get(number, LATER)
        yield _OUTPUT, Interval(start, stop, storage.bytes, died=died)
    for moment, op in enumerate(graph.ops):
        at = 2 * moment + 1
        for phase, blocks in zip((_BEFORE, _WORKSPACE), op.workspace, strict=True):
            yield from ((phase, Interval(at, at, size, 0, 1)) for size in blocks)
    for effect in timeline.effects:
        for interval in effect.made:
            yield _BEFORE if interval.born == FIRST else _OUTPUT, interval
        yield from ((_OUTPUT, interval) for interval in effect.workspaces)
        for at, beyond in effect.encoding.items():
            workspace_bytes = graph.ops[at // 2].workspace.bytes + beyond
            yield _ENCODING, Interval(at, at, workspace_bytes, 0, 1)


def reserved_bytes(timeline: Timeline, *, expandable: bool = False) -> int:
    """What PyTorch's CUDA allocator has reserved once steps repeat."""
    return replayed(timeline, expandable=expandable).reserved_bytes


def replayed(
    timeline: Timeline, *, expandable: bool = False, capacity_bytes: int | None = None
) -> Replayed:
    """What PyTorch's CUDA allocator does with two steps.

    Parameters, buffers and inputs come first. A workspace of cuBLAS comes with the
    first op that needs it, the optimizer's state with the first update, into the gaps
    that the first step leaves. Where gradients accumulate, the first batch's stay. What
    a second step still adds counts, too.

    Args:
        timeline: The step, planned or not.
        expandable: With ``PYTORCH_ALLOC_CONF=expandable_segments:True``.
        capacity_bytes: What there is for it; None if memory abounds.

    Raises:
        NoRoomError: That is not enough.
    """
    graph = timeline.graph
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=capacity_bytes)
    blocks: dict[int, Block] = {}

    def replay(sequence: list[Event], stays: Mapping[int, int] | None = None) -> int:
        most = allocator.allocated_bytes
        for event in sequence:
            if event.bytes:
                blocks[event.block] = allocator.allocate(event.bytes)
                most = max(most, allocator.allocated_bytes)
            elif stays and event.block in stays:
                blocks[stays[event.block]] = blocks.pop(event.block)
            else:
                allocator.free(blocks.pop(event.block))
        return most

    step = events(timeline)
    before = [event for event in step if event.moment == 0 and event.bytes]
    during, update = step[len(before) :], 2 * graph.backward_stop
    batch = [event for event in during if event.moment < update]
    late = {event.block: event for event in _of_cublas(before, timeline)}
    state = {
        number
        for number, storage in enumerate(graph.storages)
        if storage.kind == "optimizer" and timeline.stops[number] >= update
    }
    added = added_to_gradients(graph)
    later = {*late, *state, *added.values()}
    replay([event for event in before if event.block not in later])
    replay(sorted([*batch, *late.values()]), added)
    if added:
        replay(batch)
    replay([event for event in before if event.block in state])
    replay([event for event in during if event.moment >= update])
    exist = {event.block for event in before} - {*added.values()}
    for block in [block for block in blocks if block not in exist]:
        allocator.free(blocks.pop(block))  # gradients that the next step begins without
    replay([event for event in before if event.block in exist - blocks.keys()])
    if added:
        replay(batch, added)
    return Replayed(replay(during), allocator.reserved_bytes)


def has_room(timeline: Timeline, capacity_bytes: int, *, expandable: bool) -> bool:
    """Whether PyTorch's allocator can take so much without failing."""
    try:
        replayed(timeline, expandable=expandable, capacity_bytes=capacity_bytes)
    except NoRoomError:
        return False
    return True


def added_to_gradients(graph: Graph) -> Mapping[int, int]:
    """What is added to gradients of earlier batches -> those, as which it began."""
    first: dict[int, int] = {}  # gradient -> what is added to it first
    for op in graph.ops[graph.num_forward : graph.backward_stop]:
        for storage in op.writes:
            one = graph.storages[storage]
            if one.kind == "gradient" and one.maker == BEFORE_STEP:
                for made in op.reads:
                    if made != storage and graph.storages[made].bytes == one.bytes:
                        first.setdefault(storage, made)
    return {made: storage for storage, made in first.items()}


def _of_cublas(before: Sequence[Event], timeline: Timeline) -> Iterator[Event]:
    """Its workspaces, when the first step asks for them: forward's, then backward's."""
    graph = timeline.graph
    multiplies = [op.name in MULTIPLIES for op in graph.ops]
    moments = [2 * op + 1 for op, does in enumerate(multiplies) if does]
    backward = [moment for moment in moments if moment > 2 * graph.num_forward]
    backward += (
        min(effect.spikes)
        for effect in timeline.effects
        if effect.spikes and any(multiplies[step] for step in effect.steps)
    )
    threads = [moments[:1], [min(backward)] if backward else []]
    held = (e for e in before if graph.storages[e.block].kind == "temporary")
    for event, moment in zip(held, chain.from_iterable(threads), strict=False):
        yield event._replace(moment=moment, phase=_BEFORE)


def is_on_card(graph: Graph) -> bool:
    """Whether the step is one of a GPU."""
    device = str(graph.fingerprint.get("device", ""))
    return device.startswith("cuda") or "gpu" in graph.options


def reserved_on_card(timeline: Timeline) -> Reserved | None:
    """The same in both ways of reserving; None for a step that runs on no card."""
    if not is_on_card(timeline.graph):
        return None
    found = replayed(timeline)
    return Reserved(*found, replayed(timeline, expandable=True).reserved_bytes)
