"""A head and its loss, MLPs, attentions and norms in tiles: nothing in it is whole."""

from ckplan.applying.tiling.bits import Bits, check_bits
from ckplan.applying.tiling.cross_entropy import tiled_cross_entropy
from ckplan.applying.tiling.heads import TiledHead, tile_head
from ckplan.applying.tiling.row_bits import (
    check_attention_bits,
    check_norm_bits,
    check_row_bits,
)
from ckplan.applying.tiling.row_calls import TiledRows, tile_rows

__all__ = [
    "Bits",
    "TiledHead",
    "TiledRows",
    "check_attention_bits",
    "check_bits",
    "check_norm_bits",
    "check_row_bits",
    "tile_head",
    "tile_rows",
    "tiled_cross_entropy",
]
