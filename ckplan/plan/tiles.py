"""Tiles of a head and its loss, an MLP or an attention: how many, where they are cut.

A matrix product is cut along its outputs, never along the sum. Cuts lie where kernels
take the same path as for the whole product: narrow or unaligned tiles are computed by
other kernels, with other bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf

from ckplan.errors import PlanError
from ckplan.units import is_count

SAME_BITS, CLOSE_BITS = "same", "close"
"""``bits`` of a region by tiles: loss and gradients are bit for bit the plain ones, or
rounded in another place."""

ELEMENTWISE = frozenset(
    {"gelu", "relu", "silu", "mish", "elu", "leaky_relu", "hardswish", "tanh"}
    | {"hardtanh", "sigmoid", "erf", "neg", "mul", "add", "sub", "div", "pow"}
)
"""Ops that treat every element apart; an MLP runs them between its products."""

DROPOUT = frozenset({"empty_like", "bernoulli_", "div_", "mul", "native_dropout"})
"""Ops of dropout; an MLP runs them after its last product, on the whole output."""

BEFORE_PRODUCTS = (
    frozenset({"native_layer_norm", "native_group_norm", "_fused_rms_norm"})
    | {"mean", "var", "var_mean", "sqrt", "rsqrt", "add_"}  # of norms in parts
    | {"_to_copy", "clone", "convolution"}
    | DROPOUT
    | ELEMENTWISE
)
"""Ops that an MLP may run before its first product, on the whole input."""

IN_NORMS = ELEMENTWISE | {"sqrt", "rsqrt", "reciprocal", "_to_copy"}
"""Ops of a norm that is written out, beside the sums of its rows."""

STATISTICS = frozenset({"mean", "sum", "var"})
"""Ops that sum up a row of a norm's input."""

_ROWS = 32  # smallest tile of tokens, or of rows; cuts lie at multiples
_COLUMNS = 64  # same, for the vocabulary, or for columns
# Same, for samples of convolutions and for heads: kernels for one may be others.
_SAMPLES = _HEADS = 2


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
        _check(self, "tokens", "vocabulary")

    def __str__(self) -> str:
        """Read as: the tokens in 16 tiles, the vocabulary in 16, with the same bits."""
        counts = f"tokens in {self.tokens} tiles, vocabulary in {self.vocabulary}"
        return f"{counts}, {_bits_of(self)}"

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of tiles each way."""
        return self.tokens, self.vocabulary

    def of_tokens(self, size: int) -> list[slice]:
        """Cut ``size`` tokens.

        >>> Tiles(tokens=2).of_tokens(100)
        [slice(0, 64, None), slice(64, 100, None)]
        """
        return _cut(size, self.tokens, _ROWS)

    def of_vocabulary(self, size: int) -> list[slice]:
        """Cut ``size`` words."""
        return _cut(size, self.vocabulary, _COLUMNS)


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Tiles of a call whose rows are apart, such as an MLP: of rows, and of columns.

    Columns are those of its hidden values: gradients of weights are made by tiles of
    columns with all rows in each. Rows of 1x1 convolutions are samples, and those of an
    attention, which has no use for columns, are heads of all samples. Fewer tiles are
    made where they would be too narrow.

    Raises:
        PlanError: A number is below 1, or the bits are neither.
    """

    rows: int = 8
    columns: int = 8
    bits: str = SAME_BITS
    difference: float = 0.0  # as of ``Tiles``

    def __post_init__(self) -> None:
        """Check the numbers, and round as the file does."""
        _check(self, "rows", "columns")

    def __str__(self) -> str:
        """Read as: the rows in 8 tiles, the columns in 8, with the same bits."""
        return f"rows in {self.rows} tiles, columns in {self.columns}, {_bits_of(self)}"

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of tiles each way."""
        return self.rows, self.columns

    def of_rows(self, size: int) -> list[slice]:
        """Cut ``size`` rows."""
        return _cut(size, self.rows, _ROWS)

    def of_samples(self, size: int) -> list[slice]:
        """Cut ``size`` samples of a batch, the rows of a 1x1 convolution.

        >>> RowTiles(rows=8).of_samples(5)
        [slice(0, 2, None), slice(2, 5, None)]
        """
        return _cut(size, self.rows, _SAMPLES)

    def of_heads(self, samples: int, heads: int) -> list[slice]:
        """Cut the heads of all samples, the rows of an attention.

        A tile has the heads of whole samples, or heads of one.

        >>> RowTiles(rows=4).of_heads(2, 5)
        [slice(0, 2, None), slice(2, 5, None), slice(5, 7, None), slice(7, 10, None)]
        """
        if samples >= self.rows:
            whole = _cut(samples, self.rows, _HEADS if heads == 1 else 1)
            return [slice(one.start * heads, one.stop * heads) for one in whole]
        parts = _cut(heads, -(-self.rows // samples), _HEADS)
        return [
            slice(n * heads + one.start, n * heads + one.stop)
            for n in range(samples)
            for one in parts
        ]

    def of_columns(self, size: int) -> list[slice]:
        """Cut ``size`` columns.

        >>> RowTiles(columns=2).of_columns(200)
        [slice(0, 128, None), slice(128, 200, None)]
        """
        return _cut(size, self.columns, _COLUMNS)


def _check(tiles: Tiles | RowTiles, *names: str) -> None:
    """Check numbers and bits, and round the difference as the file does."""
    check_bits(tiles.bits)
    if not 0 <= tiles.difference < inf:
        raise PlanError(
            f"cannot read the difference {tiles.difference}",
            needed="a fraction of the largest value of a tensor, 0 or more",
            hint="difference: 1.2e-03",
        )
    if tiles.difference and tiles.bits == SAME_BITS:
        raise PlanError(
            f"cannot have a difference of {tiles.difference} with the same bits",
            needed=f"bits: {CLOSE_BITS}, or no difference",
            hint=f"bits: {CLOSE_BITS}",
        )
    object.__setattr__(tiles, "difference", float(f"{tiles.difference:.1e}"))
    for name in names:
        count = getattr(tiles, name)
        if not is_count(count):
            raise PlanError(
                f"cannot cut the {name} into {count!r} tiles",
                needed="a whole number of tiles, 1 or more",
                hint=f"tiles: {{{', '.join(f'{one}: 16' for one in names)}}}",
            )


def _bits_of(tiles: Tiles | RowTiles) -> str:
    at = f", {tiles.difference:.1e}" if tiles.difference else ""
    return f"bits {tiles.bits}{at}"


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
