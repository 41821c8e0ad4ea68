"""Tiles of a head and its loss: how many, and where they are cut.

A matrix product is cut along its outputs, never along the sum. Cuts lie where kernels
take the same path as for the whole product: narrow or unaligned tiles are computed by
other kernels, with other bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf

from ckplan.errors import PlanError

SAME_BITS, CLOSE_BITS = "same", "close"
"""``bits`` of a region by tiles: loss and gradients are bit for bit the plain ones, or
rounded in another place."""

_ROWS = 32  # smallest tile of tokens; cuts lie at multiples
_COLUMNS = 64  # same, for the vocabulary


@dataclass(frozen=True, slots=True)
class Tiles:
    """Numbers of tiles; fewer are made where they would be too narrow.

    Raises:
        PlanError: A number is below 1, or the bits are neither.
    """

    tokens: int = 16
    vocabulary: int = 16
    bits: str = SAME_BITS
    # Of close bits: the most that loss and gradients may differ by, relative to the
    # largest value of their tensor; 0 if it is not known.
    difference: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers, and round as the file does."""
        check_bits(self.bits)
        if not 0 <= self.difference < inf:
            raise PlanError(
                f"cannot read the difference {self.difference}",
                needed="a fraction of the largest value of a tensor, 0 or more",
                hint="difference: 1.2e-03",
            )
        if self.difference and self.bits == SAME_BITS:
            raise PlanError(
                f"cannot have a difference of {self.difference} with the same bits",
                needed=f"bits: {CLOSE_BITS}, or no difference",
                hint=f"bits: {CLOSE_BITS}",
            )
        object.__setattr__(self, "difference", float(f"{self.difference:.1e}"))
        for name in ("tokens", "vocabulary"):
            count = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise PlanError(
                    f"cannot cut the {name} into {count!r} tiles",
                    needed="a whole number of tiles, 1 or more",
                    hint="tiles: {tokens: 16, vocabulary: 16}",
                )

    def __str__(self) -> str:
        """Read as: the tokens in 16 tiles, the vocabulary in 16, with the same bits."""
        at = f", {self.difference:.1e}" if self.difference else ""
        counts = f"tokens in {self.tokens} tiles, vocabulary in {self.vocabulary}"
        return f"{counts}, bits {self.bits}{at}"

    def of_tokens(self, size: int) -> list[slice]:
        """Cut ``size`` tokens.

        >>> Tiles(tokens=2).of_tokens(100)
        [slice(0, 64, None), slice(64, 100, None)]
        """
        return _cut(size, self.tokens, _ROWS)

    def of_vocabulary(self, size: int) -> list[slice]:
        """Cut ``size`` words."""
        return _cut(size, self.vocabulary, _COLUMNS)


def _cut(size: int, count: int, unit: int) -> list[slice]:
    """At most ``count`` slices, at multiples of ``unit``, none narrower than it."""
    width = -(-size // count)
    width = max(1, -(-width // unit)) * unit
    edges = [*range(0, size, width), size]
    if len(edges) > 2 and edges[-1] - edges[-2] < unit:
        del edges[-2]
    return [slice(a, b) for a, b in pairwise(edges)]


def check_bits(text: str) -> str:
    """Return ``text`` if a plan may say it of the bits of tiles.

    Raises:
        PlanError: It may not.
    """
    if text in (SAME_BITS, CLOSE_BITS):
        return text
    raise PlanError(
        f"cannot promise bits {text!r}",
        needed=f"bits: {SAME_BITS} or bits: {CLOSE_BITS}",
        hint="ckplan verify, which compares every bit",
    )
