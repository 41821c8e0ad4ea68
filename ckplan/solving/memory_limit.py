"""Memory limit of a step: tensors alone, or with gaps of a card's allocator."""

from __future__ import annotations

from dataclasses import dataclass

from ckplan.simulating.allocations import has_room, replayed
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

    def reserved_bytes(self, timeline: Timeline) -> int | None:
        """What PyTorch's allocator reserves; None if the limit is on tensors alone.

        A step that fits is replayed within the limit: the allocator frees segments
        that it caches before it fails.
        """
        if not self.of_reserved:
            return None
        within = self.bytes if self.allows(timeline) else None
        return replayed(
            timeline, expandable=self.expandable, capacity_bytes=within
        ).reserved_bytes
