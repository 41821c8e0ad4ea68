"""A head and its loss in tiles, without the logits."""

from ckplan.applying.tiling.bits import Bits, check_bits
from ckplan.applying.tiling.cross_entropy import tiled_cross_entropy
from ckplan.applying.tiling.heads import TiledHead, tile_head

__all__ = ["Bits", "TiledHead", "check_bits", "tile_head", "tiled_cross_entropy"]
