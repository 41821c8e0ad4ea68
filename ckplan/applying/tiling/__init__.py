"""A head and its loss in tiles, without the logits."""

from ckplan.applying.tiling.bits import Bits, check_bits
from ckplan.applying.tiling.cross_entropy import tiled_cross_entropy

__all__ = ["Bits", "check_bits", "tiled_cross_entropy"]
