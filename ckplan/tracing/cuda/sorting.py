"""The workspace of sorting on CUDA, by ``DeviceRadixSort`` of CUB.

The sort makes one pass over the keys per 8 bits. In a pass, each block of threads
counts the digits of a tile for the next block. All passes except the last write into
copies of keys and values.
"""

from __future__ import annotations

from ckplan.tracing.cuda.translation import Capability
from ckplan.units import in_blocks, round_up

_BITS = 8
_IN_ONE_BLOCK = 2304  # pairs that a single block of threads sorts
_TILES = {(9, 0): 4608, (8, 0): 3840, (0, 0): 2816}  # least capability -> pairs
_PAIR_BYTES = 8  # keys and values are integers of this size
_TOTALS_BYTES = 8 << _BITS  # counts of all digits in a pass
_COUNTS_BYTES = 4 << _BITS  # counts of all digits in a tile
_ALIGNED = 256


def sorting_bytes(count: int, largest: int, capability: Capability) -> int:
    """Bytes of the block that sorting indices and their positions needs.

    Args:
        count: Number of indices.
        largest: Largest possible index.
        capability: Compute capability of the GPU.

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
