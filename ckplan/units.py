"""Read and print bytes, seconds, FLOPs and percent.

Sizes are whole bytes everywhere in the code. Only this file defines units and
prefixes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

from ckplan.errors import UnitError, did_you_mean

KIB = 2**10
MIB = 2**20
GIB = 2**30

_BYTES_PER_UNIT = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": 2**40,
}
MOST_BYTES = 10**18
"""Largest size accepted in a graph or as a budget."""
_QUANTITY = re.compile(
    r"((?:[0-9]{0,30}\.)?[0-9]{1,30}(?:e[+-]?[0-9]{1,3})?)\s*([a-z]*|%)",
    re.ASCII | re.IGNORECASE,
)
_SECONDS_SCALES = ((1e-9, "ns"), (1e-6, "us"), (1e-3, "ms"), (1.0, "s"))
_JOULES_SCALES = ((1e-3, "mJ"), (1.0, "J"), (1e3, "kJ"))
_FLOPS_SCALES = tuple(
    (10.0**power, f"{prefix}FLOP")
    for power, prefix in ((0, ""), (3, "k"), (6, "M"), (9, "G"), (12, "T"), (15, "P"))
)


def parse_bytes(size: str | int) -> int:
    """Read a size, such as ``12GB`` (12e9), ``12GiB`` (12 * 2^30) or ``64`` (bytes).

    Args:
        size: A number with a unit, in any case; a number alone means bytes, and an
            integer is taken as it is.

    Returns:
        The size in bytes, computed exactly; a fraction of a byte is rounded down.

    Raises:
        UnitError: ``size`` is not a size, or its unit is ambiguous.

    >>> parse_bytes("0.1 GB"), parse_bytes("1.5GiB")
    (100000000, 1610612736)
    """
    return _parse(size, _BYTES_PER_UNIT, noun="size")


def parse_budget(budget: str | int, unplanned_peak_bytes: int) -> int:
    """Read a budget: a size, or a share of the unplanned peak such as ``80%``.

    Args:
        budget: Anything that ``parse_bytes`` reads, or a percentage.
        unplanned_peak_bytes: The size that ``100%`` stands for.

    Returns:
        The budget in bytes, rounded down and at least 1.

    Raises:
        UnitError: ``budget`` cannot be read, is zero, or is text of a small number
            without a unit.

    >>> parse_budget("80%", unplanned_peak_bytes=1001)
    800
    """
    _check_has_unit(budget)
    share = Fraction(unplanned_peak_bytes, 100)
    budget_bytes = _parse(budget, {**_BYTES_PER_UNIT, "%": share}, noun="budget")
    if budget_bytes == 0:
        peak = format_bytes(unplanned_peak_bytes)
        meant = re.fullmatch(r"0*\.([0-9]+)", str(budget).strip())
        percent = f"{100 * float(meant[0]):g}%" if meant else ""
        raise UnitError(
            f"cannot plan for the budget {budget!r}: it is 0 bytes",
            needed=f"more than 0 bytes (the unplanned peak is {peak})",
            hint=f"did you mean '{percent}'?"
            if percent not in ("", "0%")
            else "`ckplan frontier` lists the peaks that plans reach",
        )
    return budget_bytes


def _check_has_unit(budget: str | int) -> None:
    """Refuse text such as ``80``, which hardly means bytes."""
    text = str(budget).strip()
    alone = re.fullmatch(r"[0-9]{1,7}(\.[0-9]*)?", text)
    if isinstance(budget, str) and alone and 1 <= float(text) < MIB:
        percent = f" or '{text}%'" if float(text) <= 100 else ""
        raise UnitError(
            f"cannot read the budget '{text}': {text} of what?",
            needed="a size with its unit, or a percentage of the unplanned peak",
            hint=f"'{text}GB'{percent}; '{text}B' for bytes",
        )


def parse_percent(text: str) -> float:
    """Read a percentage as a fraction.

    Raises:
        UnitError: ``text`` is not a percentage of zero or more.

    >>> parse_percent("5%"), parse_percent("12.5 %")
    (0.05, 0.125)
    """
    number = text.strip().removesuffix("%").strip()
    if not re.fullmatch(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", number) or "%" not in text:
        raise UnitError(
            f"cannot read the overhead '{text}'",
            needed="a percentage of the unplanned step, such as 5%",
            hint="--max-overhead 5%",
        )
    return float(number) / 100


def parse_overhead(overhead: float | str) -> float:
    """Read ``"5%"``, or a fraction of the step, such as 0.05.

    Raises:
        UnitError: It is no percentage, or a number above 1.
    """
    if isinstance(overhead, str):
        return parse_percent(overhead)
    if isinstance(overhead, bool) or not isinstance(overhead, (int, float)):
        raise UnitError(
            f"cannot read the overhead {overhead!r}",
            needed="a fraction of the step, such as 0.05, or a percentage as text",
            hint="max_overhead='5%'",
        )
    if overhead > 1:
        raise UnitError(
            f"cannot read the overhead {overhead}",
            needed="a fraction of the step, such as 0.05, or a percentage as text",
            hint=f"did you mean '{overhead:g}%'?",
        )
    return overhead


def format_bytes(num_bytes: int) -> str:
    """Print a size with two decimals, in GiB unless it is smaller than that.

    >>> format_bytes(1_717_986_918), format_bytes(5_452_595), format_bytes(192)
    ('1.60 GiB', '5.20 MiB', '192 B')
    """
    if abs(num_bytes) < KIB:
        return f"{num_bytes} B"
    for scale, unit in ((KIB, "KiB"), (MIB, "MiB")):
        number = f"{num_bytes / scale:.2f}"
        if abs(float(number)) < KIB:
            return f"{number} {unit}"
    return f"{num_bytes / GIB:.2f} GiB"


def format_seconds(seconds: float) -> str:
    """Print a time with three digits.

    >>> format_seconds(353e-6), format_seconds(1.234), format_seconds(0)
    ('353 us', '1.23 s', '0 s')
    """
    return _format_scaled(seconds, _SECONDS_SCALES) if seconds else "0 s"


def format_flops(num_flops: int) -> str:
    """Print a number of floating-point operations with three digits.

    >>> format_flops(1_234_000_000_000), format_flops(64)
    ('1.23 TFLOP', '64 FLOP')
    """
    if abs(num_flops) < 1000:
        return f"{num_flops} FLOP"
    return _format_scaled(num_flops, _FLOPS_SCALES)


def format_joules(joules: float) -> str:
    """Print an energy with three digits.

    >>> format_joules(0.0123), format_joules(12.34), format_joules(5_000)
    ('12.3 mJ', '12.3 J', '5.00 kJ')
    """
    return _format_scaled(joules, _JOULES_SCALES)


def format_percent(fraction: float, *, sign: bool = False) -> str:
    """Print a fraction as percent with one decimal, with a plus sign if wanted.

    >>> format_percent(0.031), format_percent(0.031, sign=True)
    ('3.1 %', '+3.1 %')
    """
    percent = round(100 * fraction, 1) + 0.0  # no "-0.0"
    return f"{percent:+.1f} %" if sign else f"{percent:.1f} %"


def _parse(
    quantity: str | int, bytes_per_unit: Mapping[str, Fraction | int], *, noun: str
) -> int:
    """Read a number with one of the units given, rounded down to whole bytes."""
    if type(quantity) is int and 0 <= quantity <= MOST_BYTES:
        return quantity
    text = str(quantity).strip()
    found = _QUANTITY.fullmatch(text)
    if not found:
        raise _unreadable(text, bytes_per_unit, noun, "not a number with a unit")
    number, unit = found.groups()
    if unit.lower() in {"k", "m", "g", "t"}:
        raise _ambiguous(text, number, unit, noun)
    scales = {name.lower(): scale for name, scale in bytes_per_unit.items()}
    scale = scales.get(unit.lower() or "b")
    if scale is None:
        raise _unreadable(text, bytes_per_unit, noun, f"unknown unit {unit!r}", unit)
    size = Fraction(number) * scale
    if size > MOST_BYTES:
        raise _unreadable(text, bytes_per_unit, noun, "too large")
    return int(size)


def _unreadable(
    text: str, units: Mapping[str, object], noun: str, reason: str, unit: str = ""
) -> UnitError:
    *first, last = units
    near = did_you_mean(unit, units)
    return UnitError(
        f"cannot read the {noun} {text!r}: {reason}",
        needed=f"a number from 0 to 1000000TB with {', '.join(first)} or {last}",
        hint=f"did you mean {near!r}?" if near else "12GB (12e9) or 12GiB (12 x 2^30)",
    )


def _ambiguous(text: str, number: str, unit: str, noun: str) -> UnitError:
    decimal, binary = f"{number}{unit.upper()}B", f"{number}{unit.upper()}iB"
    return UnitError(
        f"cannot read the {noun} {text!r}: {unit!r} does not say which unit is meant",
        needed=f"{decimal} (powers of 1000) or {binary} (powers of 1024)",
        hint=f"{binary}, if this is the memory of a card",
    )


def round_up(number: int, step: int) -> int:
    """Return the next multiple of a step.

    >>> round_up(0, 512), round_up(1, 512), round_up(512, 512)
    (0, 512, 512)
    """
    return -(-number // step) * step


def _format_scaled(value: float, scales: Sequence[tuple[float, str]]) -> str:
    """Print three digits in the smallest unit that keeps the number under 1000."""
    for scale, unit in scales:
        number = _three_digits(value / scale)
        if abs(float(number)) < 1000:
            return f"{number} {unit}"
    return f"{number} {unit}"


def _three_digits(value: float) -> str:
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f}"


MIN_BLOCK_BYTES = 512  # of PyTorch's CUDA allocator


def is_count(value: object) -> bool:
    """Whether it is a whole number from one on.

    >>> [is_count(value) for value in (3, 0, 1.5, "3", True)]
    [True, False, False, False, False]
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_above_zero(value: object) -> bool:
    """Whether it is a number above zero, and finite.

    >>> [is_above_zero(value) for value in (0.5, 1, 0, float("nan"), math.inf, "1")]
    [True, True, False, False, False, False]
    """
    return isinstance(value, (int, float)) and 0 < value < math.inf


def in_blocks(num_bytes: int) -> int:
    """Bytes that the CUDA allocator uses for a request: a multiple of 512.

    >>> in_blocks(0), in_blocks(1), in_blocks(512), in_blocks(513)
    (0, 512, 512, 1024)
    """
    return round_up(num_bytes, MIN_BLOCK_BYTES)
