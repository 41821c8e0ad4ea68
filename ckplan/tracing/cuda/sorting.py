"""What sorting takes on CUDA, as ``DeviceRadixSort`` of CUB does it.

One pass over the keys for every 8 of their bits. Each block of threads counts digits of
a tile for the next one, and passes but the last write into copies of keys and values.
"""

from __future__ import annotations

from ckplan.tracing.cuda.translation import Capability
from ckplan.units import in_blocks, round_up

_BITS = 8
_IN_ONE_BLOCK = 2304  # pairs that a single block of threads sorts by itself
_TILES = {(9, 0): 4608, (8, 0): 3840, (0, 0): 2816}  # from a capability on, pairs
_PAIR_BYTES = 8  # keys and values are integers of this size
_TOTALS_BYTES = 8 << _BITS  # counts of all digits, in a pass
_COUNTS_BYTES = 4 << _BITS  # of a tile
_ALIGNED = 256


def sorting_bytes(count: int, largest: int, capability: Capability) -> int:
    """The block that sorting indices and their places takes beside both.

    Args:
        count: Of indices.
        largest: That an index can be.
        capability: Of the GPU.

    >>> sorting_bytes(10_000, 70_000, (8, 0)), sorting_bytes(10_000, 255, (8, 0))
    (169984, 5632)
    """
    if count <= _IN_ONE_BLOCK:
        return in_blocks(1)
    passes = -(-largest.bit_length() // _BITS)
    tile = next(size for since, size in _TILES.items() if capability >= since)
    tables = passes * _TOTALS_BYTES + -(-count // tile) * _COUNTS_BYTES + _ALIGNED
    copies = 2 * round_up(count * _PAIR_BYTES, _ALIGNED) if passes > 1 else 0
    return in_blocks(tables + copies)
