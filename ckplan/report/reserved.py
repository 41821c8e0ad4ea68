"""Memory that a card's allocator reserves, which differs from allocated bytes."""

from __future__ import annotations

from typing import Any

from ckplan import units
from ckplan.simulating.allocations import Reserved


def reserved_facts(reserved: Reserved | None) -> list[tuple[str, str]]:
    """Lines to show with a peak of tensors; empty for a step on the CPU."""
    if reserved is None:
        return []
    default = units.format_bytes(reserved.bytes)
    expandable = units.format_bytes(reserved.expandable_bytes)
    both = f"{default} by PyTorch's allocator, {expandable} with expandable_segments"
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
