"""Which room of a file or of pinned memory is free."""

from __future__ import annotations

from bisect import bisect_left


class Room:
    """Free ranges of bytes, in whole blocks; neighbours are joined."""

    def __init__(self, block: int) -> None:
        """Nothing is free.

        Args:
            block: Bytes that offsets and lengths are multiples of.
        """
        self._block = block
        self._holes: list[tuple[int, int]] = []  # (offset, bytes) that are free

    def rounded(self, num_bytes: int) -> int:
        """Bytes in whole blocks."""
        return -(-num_bytes // self._block) * self._block

    def take(self, num_bytes: int) -> int | None:
        """Reserve the smallest range that fits; returns its offset, if there is one."""
        needed = self.rounded(num_bytes)
        fits = [(size, at) for at, size in self._holes if size >= needed]
        if not fits:
            return None
        size, offset = min(fits)
        self._holes.remove((offset, size))
        if size > needed:
            self.free(offset + needed, size - needed)
        return offset

    def free(self, offset: int, num_bytes: int) -> None:
        """Give a range back, for later tensors."""
        start, stop = offset, offset + self.rounded(num_bytes)
        place = bisect_left(self._holes, (start, 0))
        if place < len(self._holes) and self._holes[place][0] == stop:
            stop += self._holes.pop(place)[1]
        if place and sum(self._holes[place - 1]) == start:
            start = self._holes.pop(place - 1)[0]
            place -= 1
        self._holes.insert(place, (start, stop - start))
