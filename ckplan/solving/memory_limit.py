"""What a step may take: of tensors alone, or with the gaps of a card's allocator."""

from __future__ import annotations

from dataclasses import dataclass

from ckplan.simulating.allocations import has_room
from ckplan.simulating.simulate import Timeline


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """So many bytes."""

    bytes: int
    of_reserved: bool = False  # for all that PyTorch's allocator reserves
    expandable: bool = False  # with PYTORCH_ALLOC_CONF=expandable_segments:True

    def allows(self, timeline: Timeline) -> bool:
        """Whether a step keeps to it."""
        if timeline.peak_bytes > self.bytes or not self.of_reserved:
            return timeline.peak_bytes <= self.bytes
        return has_room(timeline, self.bytes, expandable=self.expandable)
