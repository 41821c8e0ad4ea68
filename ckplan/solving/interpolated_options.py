"""Options between those of the hull, for units of many parts that are alike.

Such parts have like prices, so every vertex of the hull does with all of them what it
does with one. Just above the floor that is too coarse: all of what lies between layers
is kept, and more than fits, or none, and all layers are rebuilt at once, in one burst.
One such value kept in the middle halves the burst; and for its bytes some of the masks,
which cost least to give up, can go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import TypeAlias

from ckplan.plan.region import Region

_Outputs: TypeAlias = frozenset[tuple[int, int]]  # op, output

_KEPT = (1, 2, 3)  # of the values that a vertex keeps and the next one does not
_SHARES = (1.0, 0.75, 0.5, 0.25)  # of what a vertex encodes and the next one does not


def between(hull: Sequence[Region]) -> list[Region]:
    """Regions that keep little, but more than the last vertices of a hull.

    Args:
        hull: Regions on one unit, those that keep the most first.
    """
    for at in range(len(hull) - 1, 0, -1):
        less = hull[at]
        values = hull[at - 1].save - less.save
        if len(values) > max(_KEPT):
            encodes = [*_steps(one.encode for one in hull[at:]), hull[-1].encode]
            return [
                replace(less, save=less.save | _evenly(values, count), encode=encode)
                for count, encode in product(_KEPT, encodes)
            ]
    return []


def _steps(sets: Iterable[_Outputs]) -> Iterator[_Outputs]:
    """Each set but the last, and it without some of what the next one lacks."""
    for before, after in pairwise(dict.fromkeys(sets)):
        lacked = before - after
        for share in _SHARES:
            yield after | _evenly(lacked, round(share * len(lacked)))


def _evenly(values: _Outputs, count: int) -> _Outputs:
    """So many of them, evenly spaced, and half as far from both ends."""
    places = (len(values) * (2 * i + 1) // (2 * count) for i in range(count))
    ordered = sorted(values)
    return frozenset(ordered[place] for place in places)
