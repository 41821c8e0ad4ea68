"""Memory limit of a step: tensors alone, or with gaps of a card's allocator."""

from __future__ import annotations

from dataclasses import dataclass

from ckplan.simulating.allocations import has_room, replayed, reserved_bytes
from ckplan.simulating.caching_allocator import NoRoomError
from ckplan.simulating.simulate import Timeline


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit in bytes."""

    bytes: int
    of_reserved: bool = False  # it limits memory that PyTorch's allocator reserves
    expandable: bool = False  # with PYTORCH_ALLOC_CONF=expandable_segments:True

    def allows(self, timeline: Timeline) -> bool:
        """Whether a step stays within the limit."""
        if timeline.peak_bytes > self.bytes or not self.of_reserved:
            return timeline.peak_bytes <= self.bytes
        return has_room(timeline, self.bytes, expandable=self.expandable)

    def reserved_bytes(
        self, timeline: Timeline, unlimited_bytes: int | None = None
    ) -> int | None:
        """What PyTorch's allocator reserves; None if the limit is on tensors alone.

        A step that fits is replayed within the limit: the allocator frees segments
        that it caches before it fails.
        """
        if not self.of_reserved:
            return None
        needed_bytes = unlimited_bytes
        if needed_bytes is None:
            needed_bytes = reserved_bytes(timeline, expandable=self.expandable)
        if needed_bytes <= self.bytes or timeline.peak_bytes > self.bytes:
            return needed_bytes
        try:
            return replayed(
                timeline, expandable=self.expandable, capacity_bytes=self.bytes
            ).reserved_bytes
        except NoRoomError:
            return needed_bytes
