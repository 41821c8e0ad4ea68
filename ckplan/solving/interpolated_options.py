"""Options between hull vertices, for units of many equal parts.

Equal parts have equal prices, so every vertex of the hull treats all of them alike.
Just above the floor that is too coarse: either all values between layers are kept,
which is too much, or none are, and all layers are rebuilt at once in one burst. One
such value kept in the middle halves the burst. To pay for its bytes, some of the masks,
which are cheapest to drop, can be dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import TypeAlias

from ckplan.plan.region import Region

_Outputs: TypeAlias = frozenset[tuple[int, int]]  # op, output

_KEPT = (1, 2, 3)  # counts of values that a vertex keeps and the next does not
_SHIFTS = (-2, 0, 2)  # places from the middle
_SHARES = (1.0, 0.75, 0.5, 0.25)  # of values that only the larger vertex encodes


def between(hull: Sequence[Region]) -> list[Region]:
    """Regions that keep slightly more than the last vertices of a hull.

    Args:
        hull: Regions on one unit, most kept bytes first.
    """
    at, values = _last_step(hull)
    encodes = [
        *_steps(one.encode for one in hull[at:]),
        *(one.encode for one in hull[-1:]),
    ]
    return [
        replace(hull[at], save=hull[at].save | _evenly(values, count), encode=encode)
        for count, encode in product(_KEPT if values else (), encodes)
    ]


def around_middle(hull: Sequence[Region]) -> list[Region]:
    """The same with a single value, in the middle or beside it.

    Of equal parts, neighbours of the value in the middle are other values of its part.
    """
    at, values = _last_step(hull)
    evenly = (_evenly(values, 1, shift) for shift in _SHIFTS if values)
    return [
        replace(hull[at], save=hull[at].save | kept, encode=hull[-1].encode)
        for kept in evenly
    ]


def _last_step(hull: Sequence[Region]) -> tuple[int, _Outputs]:
    """The last vertex that keeps many values less than the one before, and these."""
    for at in range(len(hull) - 1, 0, -1):
        values = hull[at - 1].save - hull[at].save
        if len(values) > max(_KEPT):
            return at, values
    return 0, frozenset()


def _steps(sets: Iterable[_Outputs]) -> Iterator[_Outputs]:
    """Each set but the last, and its subsets on the way to the next set."""
    for before, after in pairwise(dict.fromkeys(sets)):
        lacked = before - after
        for share in _SHARES:
            yield after | _evenly(lacked, round(share * len(lacked)))


def _evenly(values: _Outputs, count: int, shift: int = 0) -> _Outputs:
    """A number of evenly spaced values, half a spacing away from both ends."""
    places = (len(values) * (2 * i + 1) // (2 * count) + shift for i in range(count))
    ordered = sorted(values)
    return frozenset(ordered[min(max(at, 0), len(ordered) - 1)] for at in places)
