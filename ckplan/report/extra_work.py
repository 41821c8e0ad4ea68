"""What a plan adds to the work of a step, per sample: in words and for scripts."""

from __future__ import annotations

from ckplan import units
from ckplan.simulating.extra_work import ExtraWork


def extra_work_words(extra: ExtraWork) -> str:
    """Operations and moved bytes of a sample.

    >>> extra_work_words(ExtraWork(3_000_000_000, 1 << 20, 0))
    '3.00 GFLOP and 1.00 MiB moved on the device per sample'
    """
    flops, moved = units.format_flops(extra.flops), units.format_bytes
    words = f"{flops} and {moved(extra.device_bytes)} moved on the device"
    if extra.link_bytes:
        words += f", {moved(extra.link_bytes)} over the link"
    return f"{words} per sample"


def extra_work_json(extra: ExtraWork) -> dict[str, int]:
    """The same numbers for scripts."""
    return {
        "extra_flops_per_sample": extra.flops,
        "extra_device_bytes_per_sample": extra.device_bytes,
        "extra_link_bytes_per_sample": extra.link_bytes,
    }
