"""Dropout of scores that are never whole: its mask is bits, and is drawn in pieces.

A CPU draws one number after the other, so pieces have the numbers of the whole, and
leave the generator as the whole does. It is tried once in a process, since a build of
torch may draw in parallel. A GPU draws by place in the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from math import prod

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ckplan import encodings

_TRIED, _CUT = 3001, 1000  # numbers, and where they are cut


def draw_mask(
    shape: tuple[int, ...], keep: float, parts: Iterable[slice], device: torch.device
) -> Tensor:
    """Draw what dropout keeps of scores, as bits.

    Args:
        shape: Of the scores, [..., Q, K].
        keep: The chance of each to stay.
        parts: Tiles of heads, in order, whose numbers are drawn at once.
        device: One that ``draws_in_order``.

    Returns:
        int64 [..., 1, W]: the bits of Q x K scores in W words.
    """
    *heads, queries, keys = shape
    size = queries * keys
    words = torch.empty(
        prod(heads), encodings.num_words(size), dtype=torch.int64, device=device
    )
    for part in parts:
        drawn = torch.empty(
            part.stop - part.start, size, dtype=torch.bool, device=device
        )
        words[part] = encodings.pack_rows(drawn.bernoulli_(keep))
    return words.view(*heads, 1, -1)


def drop(scores: Tensor, mask: Tensor, keep: float) -> Tensor:
    """Dropout as torch applies it, with the numbers of ``draw_mask``.

    Args:
        scores: [..., Q, K].
        mask: Its bits, [..., 1, W].
        keep: The chance of each to stay.
    """
    size = scores.shape[-2] * scores.shape[-1]
    bits = encodings.unpack_rows(mask.flatten(0, -2), size)
    noise = bits.to(scores.dtype).view(scores.shape)
    del bits
    return scores * noise.div_(keep)


@cache
def draws_in_order(device_type: str) -> bool:
    """Whether numbers that are drawn in pieces are those of the whole."""
    if device_type != "cpu":
        return False
    with unset_fake_temporarily():
        whole, pieces = (torch.Generator().manual_seed(0) for _ in range(2))
        drawn = torch.empty(_TRIED).bernoulli_(0.9, generator=whole)
        parts = [
            torch.empty(size, dtype=torch.bool).bernoulli_(0.9, generator=pieces)
            for size in (_CUT, _TRIED - _CUT)
        ]
        is_same = torch.equal(drawn.bool(), torch.cat(parts))
        return is_same and torch.equal(whole.get_state(), pieces.get_state())
