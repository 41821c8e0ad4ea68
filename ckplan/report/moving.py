"""What a way of copies is like, in words."""

from __future__ import annotations

from ckplan import units
from ckplan.simulating.moving import Link

_MIB = 2**20


def link_words(link: Link) -> str:
    """The rate of a link, its spread, and what copies take from ops.

    >>> link_words(Link(2 * 2**30, busy_seconds_per_byte=1e-9, slowest=Link(2**30)))
    '2.00 GiB per second beside kernels (1.00 GiB at its slower times); ops lose
    2.10 ms to every MiB there and back, and 0 s to every tensor'
    """
    rate = units.format_bytes(int(link.bytes_per_second))
    spread = ""
    if link.slowest is not None:
        slow = units.format_bytes(int(link.slowest.bytes_per_second))
        spread = f" ({slow} at its slower times)"
    lost = units.format_seconds(2 * _MIB * link.busy_seconds_per_byte)
    each = units.format_seconds(link.seconds_per_move)
    return (
        f"{rate} per second beside kernels{spread}; ops lose {lost} to every MiB there "
        f"and back, and {each} to every tensor"
    )
