"""A timeline as what an allocator sees: blocks asked for and given back, in order.

Peaks are those of ``simulate``; this puts its intervals in the order in which a step
would allocate and free them. Within an op outputs come first, and what regions keep,
then its workspace; what nobody holds any longer goes at the end of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckplan.caching_allocator import Block, CachingAllocator
from ckplan.effect import LATER, Interval
from ckplan.records import BEFORE_STEP
from ckplan.simulate import Timeline

_OUTPUT, _WORKSPACE, _ENCODING, _GONE = range(4)  # phases of a half moment


class Reserved(NamedTuple):
    """What PyTorch's allocator is predicted to reserve on a card."""

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
        last = (phase, interval.died) if interval.died != LATER else (_GONE, 0)
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
        yield _WORKSPACE, Interval(at, at, op.workspace_bytes, 0, 1)
    for effect in timeline.effects:
        yield from ((_OUTPUT, interval) for interval in effect.made)
        yield from ((_OUTPUT, interval) for interval in effect.workspaces)
        for at, beyond in effect.encoding.items():
            workspace_bytes = graph.ops[at // 2].workspace_bytes + beyond
            yield _ENCODING, Interval(at, at, workspace_bytes, 0, 1)


def reserved_bytes(timeline: Timeline, *, expandable: bool = False) -> int:
    """What PyTorch's CUDA allocator has reserved once steps repeat, if memory abounds.

    Parameters, buffers and inputs come first. The optimizer's state comes with the
    first update, into the gaps that the first step leaves. What a second step still
    adds counts, too.

    Args:
        timeline: The step, planned or not.
        expandable: With ``PYTORCH_ALLOC_CONF=expandable_segments:True``.
    """
    graph = timeline.graph
    allocator = CachingAllocator(expandable=expandable)
    blocks: dict[int, Block] = {}

    def replay(sequence: list[Event]) -> None:
        for event in sequence:
            if event.bytes:
                blocks[event.block] = allocator.allocate(event.bytes)
            else:
                allocator.free(blocks.pop(event.block))

    step = events(timeline)
    before = [event for event in step if event.moment == 0 and event.bytes]
    during, update = step[len(before) :], 2 * graph.backward_stop
    state = {
        number
        for number, storage in enumerate(graph.storages)
        if storage.kind == "optimizer" and timeline.stops[number] >= update
    }
    replay([event for event in before if event.block not in state])
    replay([event for event in during if event.moment < update])
    replay([event for event in before if event.block in state])
    replay([event for event in during if event.moment >= update])
    exist = {event.block for event in before}
    for block in [block for block in blocks if block not in exist]:
        allocator.free(blocks.pop(block))  # gradients that the next step begins without
    replay([event for event in before if event.block not in blocks])
    replay(during)
    return allocator.reserved_bytes


def reserved_on_card(timeline: Timeline) -> Reserved | None:
    """The same in both ways of reserving; None for a step that runs on no card."""
    graph = timeline.graph
    device = str(graph.fingerprint.get("device", ""))
    if not device.startswith("cuda") and "gpu" not in graph.options:
        return None
    return Reserved(reserved_bytes(timeline), reserved_bytes(timeline, expandable=True))
