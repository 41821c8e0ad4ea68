"""Most bytes of the two passes over the tiles of a head, moment by moment.

Each function lists the moments of a pass at which something else is alive, in the order
of ``applying/tiling/passes.py``; change both together. Scratch memory is that of the
whole step's kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckplan.plan.tiles import Tiles
from ckplan.simulating.heads import HeadOps

STATISTIC_BYTES = 4  # of a row: float32
INDEX_BYTES = 8


@dataclass(frozen=True, slots=True)
class Scratch:
    """Bytes that kernels of the whole head take while they run."""

    product: int
    loss: int  # log-softmax
    backward: int  # of log-softmax
    hidden: int  # gradient of the hidden state
    weight: int  # gradient of the weight
    bias: int  # gradient of the bias
    cap: int  # any op of the soft cap


def row_bytes(head: HeadOps) -> int:
    """Bytes that a row keeps until backward: statistics and expected gradients."""
    return 2 * STATISTIC_BYTES + (1 + 2 * head.has_sums) * head.log_bytes


def forward_bytes(head: HeadOps, tiles: Tiles, scratch: Scratch) -> int:
    """Most bytes of the pass over tokens, without what it leaves."""
    cuts = tiles.of_tokens(head.tokens)
    rows = max(one.stop - one.start for one in cuts)
    item, log = head.item_bytes, head.log_bytes
    logits = rows * head.words
    capped = head.is_capped * logits * item  # one tensor of a tile, capped softly
    before = capped * (len(cuts) > 1)  # tangents of the tile before
    loss = capped if head.upcast else 2 * capped  # tangents; capped logits, not cast
    moments = [
        before + scratch.product,
        2 * capped + before + scratch.cap,
        loss + scratch.loss,
        loss + logits * _wide_bytes(head),
        loss + 2 * rows * log,  # the logarithm of the sum, and its negative
        capped + 3 * head.has_sums * rows * (head.words + 1) * log,  # sums by row
        capped + scratch.backward,
        3 * capped + scratch.cap,
        2 * capped + scratch.hidden,
    ]
    buffers = logits * (item + (log if head.upcast else 0) + 2 * log)
    values = head.tokens * (1 + head.has_sums) * log
    ignored = head.tokens  # whether each row is
    shifted = 0
    if head.is_shifted:  # targets padded in front, then behind
        shifted = INDEX_BYTES * (2 * head.tokens + head.sequences)
    most: int = buffers + max(moments) + values + ignored + shifted
    return most


def backward_bytes(head: HeadOps, tiles: Tiles, scratch: Scratch) -> int:
    """Most bytes of the pass over the vocabulary, without the gradients it makes."""
    cuts = tiles.of_vocabulary(head.words)
    words = max(one.stop - one.start for one in cuts)
    item, log = head.item_bytes, head.log_bytes
    logits = head.tokens * words
    capped = head.is_capped * logits * item
    places = INDEX_BYTES * head.tokens  # column of each target
    masks = 3 * head.tokens  # of targets outside the tile
    bias = words * item + scratch.bias
    moments = [
        scratch.product,
        2 * capped + scratch.cap,
        2 * capped + logits * _wide_bytes(head),
        capped + places + masks,
        capped + places + scratch.backward,
        3 * capped + places + scratch.cap,
        2 * capped + places + scratch.weight,
        2 * capped + places + head.has_bias * bias,
    ]
    buffers = logits * item + 3 * head.tokens * (words + 1) * log
    given = head.tokens * (1 + head.has_sums) * log
    most: int = buffers + max(moments) + given
    return most


def _wide_bytes(head: HeadOps) -> int:
    """Bytes by logit while 16-bit log-probabilities are made in float32."""
    return 2 * STATISTIC_BYTES if head.is_close else 0
