"""PyTorch's CUDA caching allocator, on numbers: what it reserves for what is asked.

Follows ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch, on one stream, with its
default settings and memory that never runs out:

- Sizes are rounded up to 512 bytes. Up to 1 MiB they come from the small pool, whose
  segments are of 2 MiB; others from the large pool.
- A block is taken from the smallest free one of the pool that is large enough, the one
  of lowest address among those. What remains is split off if it is worth it: at least
  512 bytes in the small pool, more than 1 MiB in the large one.
- Without such a block a segment is reserved: 20 MiB for less than 10 MiB, else the size
  rounded up to 2 MiB.
- A freed block merges with free neighbours of its segment. Segments are kept.

With ``expandable_segments`` each pool is one segment that grows by pages of 2 MiB or of
20 MiB, its free end included; 512 bytes are worth splitting off in both pools, and the
end, which can grow, is taken only when nothing else fits.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from ckplan.units import round_up

MIN_BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20  # the largest of the small pool
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
MIN_OWN_SEGMENT_BYTES = 10 << 20  # from here on a segment is as large as its block
SEGMENT_STEP_BYTES = 2 << 20
_APART = 1 << 50  # addresses between pools


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment, between its neighbours there."""

    address: int
    bytes: int
    pool: _Pool = field(repr=False)
    free: bool = False
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)


class CachingAllocator:
    """Takes and gives blocks; ``reserved_bytes`` is what it took from the card."""

    def __init__(self, *, expandable: bool = False) -> None:
        """Begin with nothing reserved.

        Args:
            expandable: As ``PYTORCH_ALLOC_CONF=expandable_segments:True``.
        """
        pool = _ExpandablePool if expandable else _Pool
        self._small, self._large = pool(small=True), pool(small=False)
        self.allocated_bytes = 0  # rounded as blocks are, unsplit remainders included

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments."""
        return self._small.reserved_bytes + self._large.reserved_bytes

    def allocate(self, num_bytes: int) -> Block:
        """Give a block of at least so many bytes; one or more."""
        rounded = in_blocks(num_bytes)
        pool = self._small if rounded <= SMALL_BYTES else self._large
        block = pool.take(rounded)
        self.allocated_bytes += block.bytes
        return block

    def free(self, block: Block) -> None:
        """Take a block back.

        Raises:
            ValueError: It is free already.
        """
        if block.free:
            raise ValueError("the block is free")
        self.allocated_bytes -= block.bytes
        block.pool.give_back(block)


class _Pool:
    """Segments of one kind and their free blocks, by size and address."""

    def __init__(self, *, small: bool) -> None:
        self.reserved_bytes = 0
        self._small = small
        self._free: list[tuple[int, int, Block]] = []
        self._next_address = 0 if small else _APART

    def take(self, num_bytes: int) -> Block:
        block = self._best(num_bytes) or self._reserve(num_bytes)
        if self._worth_splitting(block.bytes - num_bytes):
            self._put(self._split(block, num_bytes))
        return block

    def give_back(self, block: Block) -> None:
        if block.before is not None and block.before.free:
            block = self._merge(block.before, block)
        if block.after is not None and block.after.free:
            self._merge(block, block.after)
        self._put(block)

    def _best(self, num_bytes: int) -> Block | None:
        place = bisect_left(self._free, (num_bytes, 0))
        return self._pick(place) if place < len(self._free) else None

    def _reserve(self, num_bytes: int) -> Block:
        if self._small:
            size = SMALL_SEGMENT_BYTES
        elif num_bytes < MIN_OWN_SEGMENT_BYTES:
            size = LARGE_SEGMENT_BYTES
        else:
            size = round_up(num_bytes, SEGMENT_STEP_BYTES)
        return self._grow(size)

    def _worth_splitting(self, remaining: int) -> bool:
        if self._small:
            return remaining >= MIN_BLOCK_BYTES
        return remaining > SMALL_BYTES

    def _grow(self, num_bytes: int) -> Block:
        block = Block(self._next_address, num_bytes, self)
        self._next_address += num_bytes
        self.reserved_bytes += num_bytes
        return block

    def _split(self, block: Block, num_bytes: int) -> Block:
        """Cut a block; returns what remains."""
        remaining = block.bytes - num_bytes
        rest = Block(block.address + num_bytes, remaining, self, before=block)
        block.bytes = num_bytes
        rest.after, block.after = block.after, rest
        if rest.after is not None:
            rest.after.before = rest
        return rest

    def _put(self, block: Block) -> None:
        block.free = True
        insort(self._free, (block.bytes, block.address, block))

    def _pick(self, place: int) -> Block:
        block = self._free.pop(place)[2]
        block.free = False
        return block

    def _merge(self, first: Block, second: Block) -> Block:
        """Make one of two neighbours, of which those that are free are picked."""
        for block in (first, second):
            if block.free:
                self._pick(bisect_left(self._free, (block.bytes, block.address)))
        first.bytes += second.bytes
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        return first


class _ExpandablePool(_Pool):
    """One segment that grows at its end."""

    def __init__(self, *, small: bool) -> None:
        super().__init__(small=small)
        self._last: Block | None = None

    def _best(self, num_bytes: int) -> Block | None:
        place = bisect_left(self._free, (num_bytes, 0))
        if place + 1 < len(self._free) and self._free[place][2].after is None:
            place += 1  # the end could grow: rather the next larger one
        return self._pick(place) if place < len(self._free) else None

    def _reserve(self, num_bytes: int) -> Block:
        end = self._last
        page = SMALL_SEGMENT_BYTES if self._small else LARGE_SEGMENT_BYTES
        missing = num_bytes - (end.bytes if end is not None and end.free else 0)
        block = self._grow(round_up(missing, page))
        if end is not None:
            block.before, end.after = end, block
            if end.free:
                block = self._merge(end, block)
        self._last = block
        return block

    def _worth_splitting(self, remaining: int) -> bool:
        return remaining >= MIN_BLOCK_BYTES

    def _split(self, block: Block, num_bytes: int) -> Block:
        rest = super()._split(block, num_bytes)
        self._last = rest if rest.after is None else self._last
        return rest

    def _merge(self, first: Block, second: Block) -> Block:
        merged = super()._merge(first, second)
        self._last = merged if merged.after is None else self._last
        return merged


def in_blocks(num_bytes: int) -> int:
    """Bytes that the allocator takes for a request.

    >>> in_blocks(0), in_blocks(1), in_blocks(512), in_blocks(513)
    (0, 512, 512, 1024)
    """
    return round_up(num_bytes, MIN_BLOCK_BYTES)
