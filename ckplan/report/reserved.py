"""Memory that a card's allocator reserves, which differs from allocated bytes."""

from __future__ import annotations

from typing import Any

from ckplan import units
from ckplan.simulating.allocations import Reserved
from ckplan.simulating.simulate import Timeline
from ckplan.solving.memory_limit import MemoryLimit


def reserved_facts(
    reserved: Reserved | None,
    limit: MemoryLimit | None = None,
    timeline: Timeline | None = None,
) -> list[tuple[str, str]]:
    """Lines to show with a peak of tensors; empty for a step on the CPU.

    Args:
        reserved: Of the step, on a card without a limit.
        limit: Of a card, within which the allocator frees what it caches.
        timeline: The step.
    """
    if reserved is None:
        return []
    default = units.format_bytes(reserved.bytes)
    expandable = units.format_bytes(reserved.expandable_bytes)
    both = f"{default} by PyTorch's allocator, {expandable} with expandable_segments"
    if limit is not None and timeline is not None and not limit.expandable:
        within_bytes = limit.reserved_bytes(timeline, reserved.bytes)
        if within_bytes is not None and within_bytes < reserved.bytes:
            within = units.format_bytes(within_bytes)
            both += f"; on the card {within}: when it is full, cached blocks are freed"
    allocated = units.format_bytes(reserved.allocated_bytes)
    return [
        ("allocated", f"{allocated} at most, as in torch.cuda.max_memory_allocated"),
        ("reserved", both),
    ]


def reserved_json(reserved: Reserved | None) -> dict[str, Any]:
    """Reserved memory as JSON; values are null for a step on the CPU."""
    values = (None, None, None) if reserved is None else reserved
    keys = (
        "allocated_peak_bytes",
        "reserved_peak_bytes",
        "reserved_peak_bytes_expandable_segments",
    )
    return dict(zip(keys, values, strict=True))
