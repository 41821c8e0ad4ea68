"""The allocator on numbers: sequences worked by hand, and what always holds."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from random import Random
from typing import Any

import graphs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckplan.errors import PlanError
from ckplan.graph.records import Workspace
from ckplan.plan.region import PROGRAM, RERUN, Region
from ckplan.simulating import caching_allocator as model
from ckplan.simulating.allocations import Level, events, replayed, reserved_bytes
from ckplan.simulating.caching_allocator import Block, CachingAllocator, NoRoomError
from ckplan.simulating.ledger import random_state_bytes
from ckplan.simulating.simulate import Timeline, simulate

KIB, MIB = 2**10, 2**20


def after(
    *requests: int, expandable: bool = False, capacity_mib: int | None = None
) -> int:
    """MiB reserved after some requests; -n frees the n-th block asked for."""
    capacity_bytes = None if capacity_mib is None else capacity_mib * MIB
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=capacity_bytes)
    blocks: list[Block] = []
    for request in requests:
        if request > 0:
            blocks.append(allocator.allocate(request))
        else:
            allocator.free(blocks[-request - 1])
    return allocator.reserved_bytes // MIB


def test_constants_are_those_of_the_installed_torch() -> None:
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    if not header.is_file():
        pytest.skip("this torch comes without its headers")
    text = header.read_text()
    found = dict(re.findall(r"constexpr size_t (k\w+) = (\d+);", text))
    large = re.search(r"large_segment_size_\{(\d+)\}", text)
    if "kMinBlockSize" not in found or large is None:
        pytest.skip("this torch has them elsewhere")
    assert [int(found[k]) for k in ("kMinBlockSize", "kSmallSize", "kSmallBuffer")] == [
        model.MIN_BLOCK_BYTES,
        model.SMALL_BYTES,
        model.SMALL_SEGMENT_BYTES,
    ]
    assert int(found["kMinLargeAlloc"]) == model.MIN_OWN_SEGMENT_BYTES
    assert int(found["kRoundLarge"]) == model.SEGMENT_STEP_BYTES
    assert int(large.group(1)) == model.LARGE_SEGMENT_BYTES


# Every line can be followed with the rules in the module's docstring alone.
@pytest.mark.parametrize(
    ("requests", "mib"),
    [
        ((1,), 2),  # a small segment for one byte
        ((MIB, MIB), 2),  # two blocks of 1 MiB fill one
        ((MIB, MIB, 1), 4),
        ((MIB + 1,), 20),  # large
        ((9 * MIB, 9 * MIB), 20),  # the second from what the first left
        ((9 * MIB, 9 * MIB, 3 * MIB), 40),  # 2 MiB are left: too small
        ((10 * MIB,), 10),  # a segment of its own
        ((10 * MIB + 1,), 12),  # rounded up
        ((21 * MIB, -1, 20 * MIB), 22),  # reused whole: 2 MiB would remain ...
        ((21 * MIB, -1, 20 * MIB, 2 * MIB - 512), 22),  # ... which is split off
        ((11 * MIB, -1, 10 * MIB + 512, 1 * MIB + 512), 12),  # from 2 MiB - 512
        ((11 * MIB, -1, 10 * MIB + 512, 2 * MIB), 12 + 20),  # too much for those
        ((30 * MIB, 12 * MIB, -1, -2, 11 * MIB, 29 * MIB), 42),  # the smallest fits
        ((2 * MIB, 2 * MIB, 2 * MIB, -1, -3, 4 * MIB), 20),  # room at the end
        ((6 * MIB, 6 * MIB, 6 * MIB, -1, -2, 12 * MIB), 20),  # neighbours merge
        ((6 * MIB, 6 * MIB, 6 * MIB, -1, -3, 12 * MIB), 32),  # these are none
        ((512 * KIB, 512 * KIB, 512 * KIB, 512 * KIB, -2, -3, MIB), 2),
        ((512 * KIB, 512 * KIB, 512 * KIB, 512 * KIB, -1, -3, MIB), 4),
    ],
)
def test_reserved_bytes_are_those_worked_out_by_hand(
    requests: tuple[int, ...], mib: int
) -> None:
    assert after(*requests) == mib


@pytest.mark.parametrize(
    ("requests", "mib"),
    [
        ((1,), 2),
        ((MIB + 1,), 20),
        ((50 * MIB,), 60),  # three pages
        ((50 * MIB, 10 * MIB), 60),  # the rest of the third
        ((50 * MIB, 11 * MIB), 80),  # one page more: the end grows, 1 of 21 MiB
        ((50 * MIB, 11 * MIB, 19 * MIB), 80),
        ((30 * MIB, -1, 40 * MIB, -2, 41 * MIB), 60),  # nothing is stranded
        ((8 * MIB, 8 * MIB, -1, 3 * MIB, 4 * MIB), 20),  # a gap before the end
    ],
)
def test_expandable_segments_grow_by_pages(requests: tuple[int, ...], mib: int) -> None:
    assert after(*requests, expandable=True) == mib


@pytest.mark.parametrize(
    ("requests", "expandable", "mib"),
    [
        ((30 * MIB, -1, 40 * MIB), False, 40),  # the first segment goes back
        ((9 * MIB, 9 * MIB, -1, -2, 50 * MIB), False, 50),  # merged, it is free, too
        ((9 * MIB, 9 * MIB, -1, 41 * MIB), False, None),  # half of it is in use
        ((MIB, -1, 60 * MIB), False, 60),  # of the small ones, too
        ((50 * MIB, 11 * MIB), False, None),
        ((50 * MIB, 10 * MIB, -1, 40 * MIB), False, 60),  # it fits where the first was
        ((30 * MIB, 30 * MIB, -1, 40 * MIB), True, None),  # a page is shared
        ((20 * MIB, 20 * MIB, 20 * MIB, -1, -3, 40 * MIB), True, 60),  # behind it
        ((40 * MIB, 2 * MIB, -1, 59 * MIB), True, None),  # no 59 MiB side by side
        ((40 * MIB, 2 * MIB, -1, 38 * MIB, 18 * MIB, 3 * MIB), True, None),
        ((20 * MIB, 21 * MIB, -1, 38 * MIB), True, 60),  # 19 MiB, and a page behind
        ((61 * MIB,), True, None),
    ],
)
def test_what_is_free_goes_back_where_the_card_has_no_room(
    requests: tuple[int, ...], expandable: bool, mib: int | None
) -> None:
    """Of 60 MiB; None where they are not enough."""
    if mib is not None:
        assert after(*requests, expandable=expandable, capacity_mib=60) == mib
        return
    with pytest.raises(NoRoomError):
        after(*requests, expandable=expandable, capacity_mib=60)
    after(*requests[:-1], expandable=expandable, capacity_mib=60)


def test_what_was_reserved_before_it_went_back_is_in_the_peak() -> None:
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    for block in [allocator.allocate(20 * MIB), allocator.allocate(16 * MIB)]:
        allocator.free(block)
    allocator.allocate(24 * MIB)  # both go back
    found = allocator.reserved_bytes, allocator.reserved_peak_bytes
    assert found == (24 * MIB, 36 * MIB)
    allocator.reset_peak()
    assert allocator.reserved_peak_bytes == 24 * MIB


def test_a_gap_that_fits_is_taken_before_the_end_that_can_grow() -> None:
    allocator = CachingAllocator(expandable=True)
    gap = allocator.allocate(12 * MIB)
    allocator.allocate(2 * MIB)  # the end has 6 MiB: the smaller one, but it can grow
    allocator.free(gap)
    assert allocator.allocate(5 * MIB).address == gap.address


def test_a_block_is_given_back_once() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(1)
    allocator.free(block)
    with pytest.raises(ValueError, match="free"):
        allocator.free(block)


SIZES = st.one_of(
    st.integers(1, 3000), st.integers(1, 3 * MIB), st.integers(1, 40 * MIB)
)


@given(
    st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 10**6)), max_size=60),
    st.booleans(),
)
def test_blocks_are_apart_and_merge_when_all_are_free(
    actions: list[tuple[bool, int, int]], expandable: bool
) -> None:
    allocator = CachingAllocator(expandable=expandable)
    live: list[tuple[Block, int]] = []
    most_asked = 0
    for gives_back, size, which in actions:
        if gives_back and live:
            allocator.free(live.pop(which % len(live))[0])
        else:
            live.append((allocator.allocate(size), size))
        asked = sum(-(-size // 512) * 512 for _, size in live)
        most_asked = max(most_asked, asked)
        assert asked <= allocator.allocated_bytes <= allocator.reserved_bytes
        assert most_asked <= allocator.reserved_bytes
        spans = sorted((block.address, block.bytes) for block, _ in live)
        for (low, length), (high, _) in pairwise(spans):
            assert low + length <= high
        assert all(block.bytes >= size for block, size in live)
    for block, _ in live:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    free = [one[-1] for p in (allocator._small, allocator._large) for one in p._free]
    assert sum(block.bytes for block in free) == allocator.reserved_bytes
    for block in free:
        assert not any(one and one.mapped for one in (block.before, block.after))
    assert not expandable or len(free) <= 2


class Naive:
    """The same rules on plain lists of [size, free?], one a segment: no addresses."""

    def __init__(self, capacity_bytes: float) -> None:
        self.segments: dict[bool, list[list[list[Any]]]] = {True: [], False: []}
        self.capacity_bytes = capacity_bytes

    def allocate(self, num_bytes: int) -> list[Any]:
        size = (num_bytes + 511) // 512 * 512
        small = size <= MIB
        pool = self.segments[small]
        fitting = [p for segment in pool for p in segment if p[1] and p[0] >= size]
        if not fitting:
            whole = 2 * MIB if small else 20 * MIB
            if size >= 10 * MIB:
                whole = (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            if self.reserved_bytes + whole > self.capacity_bytes:
                for segments in self.segments.values():
                    segments[:] = [s for s in segments if not (len(s) == 1 and s[0][1])]
            if self.reserved_bytes + whole > self.capacity_bytes:
                raise NoRoomError
            fitting = [[whole, True]]
            pool.append(fitting[:])
        chosen = min(fitting, key=lambda piece: piece[0])  # the first of the smallest
        (segment,) = (s for s in pool if any(piece is chosen for piece in s))
        rest = chosen[0] - size
        if rest >= 512 if small else rest > MIB:
            place = next(i for i, piece in enumerate(segment) if piece is chosen)
            segment.insert(place + 1, [rest, True])
            chosen[0] = size
        chosen[1] = False
        return chosen

    def free(self, piece: list[Any]) -> None:
        piece[1] = True
        for pool in self.segments.values():
            for segment in pool:
                merged: list[list[Any]] = []
                for size, free in segment:
                    if merged and merged[-1][1] and free:
                        merged[-1][0] += size
                    else:
                        merged.append([size, free])
                if len(merged) < len(segment):  # the rest keeps its identity
                    kept = iter([p for p in segment if not p[1]])
                    segment[:] = [p if p[1] else next(kept) for p in merged]

    @property
    def reserved_bytes(self) -> int:
        pieces = (p for pool in self.segments.values() for s in pool for p in s)
        return sum(piece[0] for piece in pieces)


@given(
    st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 10**6)), max_size=80),
    st.one_of(st.none(), st.integers(20 * MIB, 300 * MIB)),
)
def test_reserved_bytes_are_those_of_a_naive_allocator(
    actions: list[tuple[bool, int, int]], capacity_bytes: int | None
) -> None:
    real = CachingAllocator(capacity_bytes=capacity_bytes)
    naive = Naive(capacity_bytes or math.inf)
    live: list[tuple[Block, list[Any]]] = []
    for gives_back, size, which in actions:
        if gives_back and live:
            block, piece = live.pop(which % len(live))
            real.free(block)
            naive.free(piece)
        else:
            try:
                piece = naive.allocate(size)
            except NoRoomError:
                with pytest.raises(NoRoomError):
                    real.allocate(size)
                continue
            live.append((real.allocate(size), piece))
            assert live[-1][0].bytes == live[-1][1][0]
        assert real.reserved_bytes == naive.reserved_bytes


# -- under a timeline ------------------------------------------------------------------


def levels(timeline: Timeline) -> list[int]:
    """Most bytes alive at every half moment, by the events alone."""
    level, sizes = 0, dict[int, int]()
    most = [0] * (2 * len(timeline.graph.ops) + 1)
    by_moment = {
        moment: list(found)
        for moment, found in groupby(events(timeline), key=lambda event: event.moment)
    }
    for moment in range(len(most)):
        most[moment] = level
        for event in by_moment.get(moment, ()):
            level += event.bytes or -sizes.pop(event.block)
            if event.bytes:
                assert event.block not in sizes
                sizes[event.block] = event.bytes
            most[moment] = max(most[moment], level)
    return most


@pytest.mark.parametrize("seed", range(150))
def test_events_reach_the_live_bytes_of_the_replay(seed: int) -> None:
    rng = Random(seed)
    graph = graphs.random_step(rng)
    regions = graphs.random_regions(graph, rng)
    try:
        timeline = simulate(graph, regions)
    except PlanError:
        timeline = simulate(graph)
    found, live = levels(timeline), timeline.live_bytes
    assert all(reached <= bytes_ for reached, bytes_ in zip(found, live, strict=True))
    if not any(region.encode for region in regions):  # one form at a time, not both
        gaps = {moment for effect in timeline.effects for moment in effect.gap_peaks}
        several = sum(len(effect.gap_peaks) for effect in timeline.effects) > len(gaps)
        assert several or found == live


@pytest.mark.parametrize("by", [None, PROGRAM, RERUN])
def test_kernels_take_blocks_before_their_outputs_and_after(by: str | None) -> None:
    forward = graphs.Forward()
    (x,) = forward.op("neg", [forward.given(1, "parameter")], makes=[11])
    with forward.call("layer"):
        (made,) = forward.op(
            "native_layer_norm", [x], makes=[22], workspace=Workspace((33,), (44, 55))
        )
        (y,) = forward.op("exp", [made], makes=[66], saves=[made])
    forward.op("sum", [y], makes=[1])
    graph = forward.graph()
    regions = [Region(0, by=by)] if by else []
    asked = [event.bytes for event in events(simulate(graph, regions))]
    at, taken = asked.index(33), [33, 22, 44, 55]
    state = random_state_bytes(graph)
    assert asked[at - 1 : at + 4] == [state if by == RERUN else 11, *taken]
    assert [size for size in asked if size in taken] == [*taken * (2 if by else 1), 22]


@pytest.mark.parametrize("by", ["program", RERUN])
@pytest.mark.parametrize("expandable", [False, True])
def test_reserved_is_at_least_the_peak_and_regions_lower_it(
    by: str, expandable: bool
) -> None:
    graph = graphs.chain(6, width_bytes=7 * MIB, hidden_bytes=9 * MIB)
    blocks = [i for i, call in enumerate(graph.calls) if call.fqn.count(".") == 1]
    whole = simulate(graph)
    planned = simulate(graph, [Region(block, by) for block in blocks])
    for timeline in (whole, planned):
        assert reserved_bytes(timeline, expandable=expandable) >= timeline.peak_bytes
    before = reserved_bytes(whole, expandable=expandable)
    assert reserved_bytes(planned, expandable=expandable) < before


@pytest.mark.parametrize("seed", [2, 3, 7])
def test_a_full_card_reserves_at_least_the_peak_of_the_tensors(seed: int) -> None:
    rng, graph = Random(seed), graphs.chain(4)
    storages = [
        replace(one, bytes=rng.randrange(10, 200) * MIB) for one in graph.storages
    ]
    timeline = simulate(replace(graph, storages=tuple(storages)))
    peak_bytes, released = timeline.peak_bytes, 0
    for capacity_bytes in range(peak_bytes, reserved_bytes(timeline), 8 * MIB):
        levels: list[Level] = []
        with suppress(NoRoomError):
            found = replayed(timeline, capacity_bytes=capacity_bytes, levels=levels)
            assert peak_bytes <= found.reserved_bytes <= capacity_bytes
            released += levels[-1].reserved_bytes < peak_bytes
    assert released  # segments went back before the step's end


def test_state_that_goes_before_the_update_is_there_from_the_start() -> None:
    graph = graphs.chain(2)
    used = next(s for op in graph.ops[: graph.num_forward] for s in op.reads)
    storages = list(graph.storages)
    storages[used] = replace(storages[used], kind="optimizer", last=0)
    timeline = simulate(replace(graph, storages=tuple(storages)))
    assert reserved_bytes(timeline) >= timeline.peak_bytes
