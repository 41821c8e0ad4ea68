"""A model of PyTorch's CUDA caching allocator: requests in, reserved bytes out.

Follows ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch, on one stream, with its
default settings:

- Sizes are rounded up to 512 bytes. Requests up to 1 MiB use the small pool, whose
  segments have 2 MiB. Larger requests use the large pool.
- The smallest free block that is large enough serves a request. Among blocks of equal
  size, the first one of the oldest segment does (PyTorch 2.11 compared addresses only).
  The remainder is split off if it has at least 512 bytes in the small pool, or more
  than 1 MiB in the large pool.
- If no block is large enough, a segment is reserved: 20 MiB for a request under 10 MiB,
  else the size rounded up to 2 MiB.
- A freed block merges with free neighbours of its segment. Segments are kept until
  the card has no room for another one. Then the segments that are free are released.

With ``expandable_segments``, each pool is one segment of pages of 2 MiB or 20 MiB. The
segment has addresses for 9/8 of the card; the pool opens another one if they run out.
It grows at the lowest address with enough room, including free blocks before and after.
Remainders of 512 bytes are split off in both pools. A block that can grow counts with
the size that it can grow to. If the card has no room, free pages are released.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from ckplan.units import MIN_BLOCK_BYTES, in_blocks, round_up

SMALL_BYTES = 1 << 20  # the largest request of the small pool
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
MIN_OWN_SEGMENT_BYTES = 10 << 20  # a larger block gets a segment of its size
SEGMENT_STEP_BYTES = 2 << 20
_ADDRESSES = 1 << 60


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment, linked to its neighbours."""

    address: int
    bytes: int
    pool: _Pool = field(repr=False)
    segment: int = 0  # number of segments created before it
    free: bool = False
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)
    mapped: bool = True  # False: addresses without memory (expandable segment)


class NoRoomError(Exception):
    """The card has no room for a request, even after free memory is released."""


class CachingAllocator:
    """Allocates and frees blocks; ``reserved_bytes`` is the memory of its segments."""

    def __init__(
        self, *, expandable: bool = False, capacity_bytes: int | None = None
    ) -> None:
        """Start with nothing reserved.

        Args:
            expandable: As ``PYTORCH_ALLOC_CONF=expandable_segments:True``.
            capacity_bytes: Memory of the card; None for no limit.
        """
        pool = _ExpandablePool if expandable else _Pool
        self._card = _Card(math.inf if capacity_bytes is None else capacity_bytes)
        self._small, self._large = (pool(self._card, small=s) for s in (True, False))
        self.was_full = False  # segments were released for a request
        self.allocated_bytes = 0  # of blocks: rounded, with unsplit remainders

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments."""
        return self._card.taken_bytes

    @property
    def reserved_peak_bytes(self) -> int:
        """Most bytes of segments since ``reset_peak``: a full card releases some."""
        return self._card.most_bytes

    def reset_peak(self) -> None:
        """Begin the peak of reserved bytes with what is reserved now."""
        self._card.most_bytes = self._card.taken_bytes

    def allocate(self, num_bytes: int) -> Block:
        """Return a block of at least ``num_bytes`` (one or more).

        Raises:
            NoRoomError: The card is full, and no free block is large enough.
        """
        rounded = in_blocks(num_bytes)
        pool = self._small if rounded <= SMALL_BYTES else self._large
        try:
            block = pool.take(rounded)
        except NoRoomError:
            self.was_full = True
            self._large.release()
            self._small.release()
            block = pool.take(rounded)
        self.allocated_bytes += block.bytes
        return block

    def free(self, block: Block) -> None:
        """Free a block.

        Raises:
            ValueError: The block is free already.
        """
        if block.free:
            raise ValueError("the block is free")
        self.allocated_bytes -= block.bytes
        block.pool.give_back(block)


class _Card:
    """Memory and addresses of the card; the lowest free addresses are used first."""

    def __init__(self, capacity_bytes: float) -> None:
        self.capacity_bytes = capacity_bytes
        self.taken_bytes = self.most_bytes = 0
        self._num_segments = 0
        self._gaps = [(0, _ADDRESSES)]  # free address ranges [start, stop)

    def take(self, num_bytes: int) -> None:
        if self.taken_bytes + num_bytes > self.capacity_bytes:
            raise NoRoomError
        self.taken_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.taken_bytes)

    def give_back(self, num_bytes: int) -> None:
        self.taken_bytes -= num_bytes

    def map(self, num_bytes: int) -> tuple[int, int]:
        """Reserve addresses; returns the first one and the number of the segment."""
        gaps = enumerate(self._gaps)
        place, (start, stop) = next(
            (place, gap) for place, gap in gaps if gap[1] - gap[0] >= num_bytes
        )
        self._gaps[place] = start + num_bytes, stop
        self._num_segments += 1
        return start, self._num_segments - 1

    def unmap(self, address: int, num_bytes: int) -> None:
        """Make addresses available again."""
        start, stop = address, address + num_bytes
        place = bisect_left(self._gaps, (start, stop))
        if self._gaps[place][0] == stop:
            stop = self._gaps.pop(place)[1]
        if place and self._gaps[place - 1][1] == start:
            place -= 1
            start = self._gaps.pop(place)[0]
        self._gaps.insert(place, (start, stop))


class _Pool:
    """Segments of one kind and their free blocks, by size, segment and address."""

    def __init__(self, card: _Card, *, small: bool) -> None:
        self._card = card
        self._small = small
        self._free: list[tuple[int, int, int, Block]] = []

    def take(self, num_bytes: int) -> Block:
        block = self._best(num_bytes) or self._reserve(num_bytes)
        remaining = block.bytes - num_bytes
        if remaining and self._worth_splitting(remaining):
            self._add_free(self._split(block, num_bytes))
        return block

    def give_back(self, block: Block) -> Block:
        """Free a block and merge it with its free neighbours."""
        if block.before is not None and block.before.free:
            block = self._merge(block.before, block)
        if block.after is not None and block.after.free:
            block = self._merge(block, block.after)
        self._add_free(block)
        return block

    def release(self) -> None:
        """Release the segments that are free."""
        for block in [free[-1] for free in self._free]:
            if block.before is None and block.after is None:
                self._remove_free(self._place(block))
                self._card.give_back(block.bytes)
                self._card.unmap(block.address, block.bytes)

    def _best(self, num_bytes: int) -> Block | None:
        place = bisect_left(self._free, (num_bytes, 0, 0))
        return self._remove_free(place) if place < len(self._free) else None

    def _reserve(self, num_bytes: int) -> Block:
        if self._small:
            size = SMALL_SEGMENT_BYTES
        elif num_bytes < MIN_OWN_SEGMENT_BYTES:
            size = LARGE_SEGMENT_BYTES
        else:
            size = round_up(num_bytes, SEGMENT_STEP_BYTES)
        self._card.take(size)
        address, segment = self._card.map(size)
        return Block(address, size, self, segment)

    def _worth_splitting(self, remaining: int) -> bool:
        if self._small:
            return remaining >= MIN_BLOCK_BYTES
        return remaining > SMALL_BYTES

    def _split(self, block: Block, num_bytes: int) -> Block:
        """Cut a block to ``num_bytes``; returns the remainder."""
        remaining = block.bytes - num_bytes
        start = block.address + num_bytes
        rest = Block(start, remaining, self, block.segment, before=block)
        block.bytes = num_bytes
        rest.after, block.after = block.after, rest
        if rest.after is not None:
            rest.after.before = rest
        return rest

    def _add_free(self, block: Block) -> None:
        block.free = True
        insort(self._free, (block.bytes, block.segment, block.address, block))

    def _place(self, block: Block) -> int:
        return bisect_left(self._free, (block.bytes, block.segment, block.address))

    def _remove_free(self, place: int) -> Block:
        block = self._free.pop(place)[-1]
        block.free = False
        return block

    def _merge(self, first: Block, second: Block) -> Block:
        """Merge two neighbours; removes free ones from the list of free blocks."""
        for block in (first, second):
            if block.free:
                self._remove_free(self._place(block))
        first.bytes += second.bytes
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        return first


class _ExpandablePool(_Pool):
    """Expandable segments, usually one: blocks on pages, and holes without pages."""

    def __init__(self, card: _Card, *, small: bool) -> None:
        super().__init__(card, small=small)
        self._page = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        self._holes: list[Block] = []  # by address

    def release(self) -> None:
        for block in [free[-1] for free in self._free]:
            start = round_up(block.address, self._page)
            stop = (block.address + block.bytes) // self._page * self._page
            if start < stop:
                self._unmap(block, start, stop)

    def _best(self, num_bytes: int) -> Block | None:
        place = bisect_left(self._free, (num_bytes, 0, 0))
        while place + 1 < len(self._free) and self._grows_to_less(place + 1, place):
            place += 1
        return self._remove_free(place) if place < len(self._free) else None

    def _grows_to_less(self, place: int, other: int) -> bool:
        """Whether a free block can grow to less than another one can."""
        blocks = self._free[place][-1], self._free[other][-1]
        first, second = map(_largest_bytes, blocks)
        return first < second

    def _reserve(self, num_bytes: int) -> Block:
        block = self._with_room(num_bytes)
        if not block.mapped:
            block = self._map(block, num_bytes)
        while block.bytes < num_bytes:
            if block.after is None:
                raise NoRoomError
            block = self._map(block.after, num_bytes - block.bytes)
        return self._remove_free(self._place(block))

    def _with_room(self, num_bytes: int) -> Block:
        """The first of adjacent free blocks and holes with enough bytes together."""
        for hole in self._holes:
            first = hole.before if hole.before and hole.before.free else hole
            found = 0
            place: Block | None = first
            while place and found < num_bytes and (place.free or not place.mapped):
                found, place = found + place.bytes, place.after
            if found >= num_bytes:
                return first
        return self._new_segment()

    def _new_segment(self) -> Block:
        """Open a segment with addresses for 9/8 of the card; returns its hole."""
        capacity_bytes = min(self._card.capacity_bytes, _ADDRESSES // 8)
        size = round_up(int(capacity_bytes) * 9 // 8, self._page)
        address, segment = self._card.map(size + self._page)
        start = round_up(address, self._page)
        hole = Block(start, size, self, segment, mapped=False)
        insort(self._holes, hole, key=lambda one: one.address)
        return hole

    def _map(self, hole: Block, num_bytes: int) -> Block:
        """Map pages at the start of a hole; returns the free block there."""
        size = min(round_up(num_bytes, self._page), hole.bytes)
        self._card.take(size)
        self._holes.remove(hole)
        hole.mapped = True
        if size < hole.bytes:
            self._add_hole(self._split(hole, size))
        return self.give_back(hole)

    def _unmap(self, block: Block, start: int, stop: int) -> None:
        """Unmap the pages ``[start, stop)`` of a free block."""
        self._remove_free(self._place(block))
        if start > block.address:
            block, before = self._split(block, start - block.address), block
            self._add_free(before)
        if stop < block.address + block.bytes:
            self._add_free(self._split(block, stop - block.address))
        self._card.give_back(block.bytes)
        self._add_hole(block)

    def _add_hole(self, hole: Block) -> None:
        """Turn unmapped addresses into a hole and merge it with neighbouring holes."""
        hole.mapped = False
        if hole.before is not None and not hole.before.mapped:
            self._holes.remove(hole.before)
            hole = self._merge(hole.before, hole)
        if hole.after is not None and not hole.after.mapped:
            self._holes.remove(hole.after)
            hole = self._merge(hole, hole.after)
        insort(self._holes, hole, key=lambda one: one.address)

    def _worth_splitting(self, remaining: int) -> bool:
        return remaining >= MIN_BLOCK_BYTES


def _largest_bytes(block: Block) -> int:
    """Bytes of a free block together with the hole after it."""
    hole = block.after if block.after and not block.after.mapped else None
    return block.bytes + (hole.bytes if hole else 0)
