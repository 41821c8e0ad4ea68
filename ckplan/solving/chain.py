"""The chain: choose an option for every call so that every moment fits.

Calls ``0..L-1`` run forward in order and backward in reverse. While call ``i`` runs, in
either direction, every earlier call has dropped what its option frees, so only the sum
of what calls ``k < i`` free matters to it:

    F(L)    = { (top, 0) }
    F(i)    = non-dominated { (max(gap_i, need_o, b - freed_o), s + seconds_o) :
                              option o of call i, (b, s) in F(i + 1) }

    need_o   live bytes of call i's own moments under o, nothing earlier being freed
    gap_i    most live bytes between the moments of calls i - 1 and i, likewise; ``top``
             is the gap between the last call's forward and its backward
    (b, s)   with b bytes of budget, the calls from i on cost s seconds

F(0) is the whole frontier, in exact bytes. This is the recurrence of Beaumont,
Eyraud-Dubois, Herrmann, Joly and Shilova ("Optimal checkpointing for heterogeneous
chains", 2019) with a menu per block, without nested recomputation, and with whole-step
accounting in place of activations only. Lists longer than ``MOST_POINTS`` are thinned:
every point left is still a plan, exact in bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckplan.simulate import Region
from ckplan.solving.menu import Option

MOST_POINTS = 256

_Point = tuple[int, float, int, int]  # bytes, seconds, option, point of F(i + 1)


@dataclass(frozen=True, slots=True)
class Link:
    """One call of a chain."""

    options: Sequence[Option]
    gap_bytes: int  # most live bytes between the previous call's moments and its own


class ChainFrontier:
    """The frontier of a chain of calls, and the plan behind each of its points."""

    def __init__(self, links: Sequence[Link], top_bytes: int) -> None:
        """Solve for every budget at once.

        Args:
            links: The calls in the order of their forward.
            top_bytes: Most live bytes between the last forward and the first backward.
        """
        self._links = links
        self._tables: list[list[_Point]] = [[(top_bytes, 0.0, -1, -1)]]
        for link in reversed(links):
            self._tables.append(_extend(link, self._tables[-1]))
        self._tables.reverse()

    @property
    def least_bytes(self) -> int:
        """The smallest budget that any plan of this chain needs."""
        return self._tables[0][0][0]

    def cheapest_first(self, budget_bytes: int) -> Iterator[tuple[Region, ...]]:
        """Plans that fit a budget, the cheapest first."""
        points = self._tables[0]
        for place in range(_last_within(points, budget_bytes), -1, -1):
            yield tuple(self._regions(place))

    def spread(self, count: int) -> Iterator[tuple[Region, ...]]:
        """At most so many plans from end to end of the frontier, the smallest first."""
        last = len(self._tables[0]) - 1
        places = {round(i * last / max(count - 1, 1)) for i in range(count)}
        for place in sorted(places):
            yield tuple(self._regions(place))

    def _regions(self, place: int) -> Iterator[Region]:
        for link, table in zip(self._links, self._tables, strict=False):
            _, _, option, place = table[place]
            region = link.options[option].region
            if region is not None:
                yield region


def _last_within(points: Sequence[_Point], budget_bytes: int) -> int:
    return bisect_right(points, budget_bytes, key=lambda point: point[0]) - 1


def _extend(link: Link, tail: Sequence[_Point]) -> list[_Point]:
    """F(i) from F(i + 1)."""
    points: list[_Point] = []
    for number, option in enumerate(link.options):
        least = max(link.gap_bytes, option.need_bytes)
        freed, seconds = option.freed_bytes, option.seconds
        points += (
            (max(least, bytes_ - freed), more + seconds, number, place)
            for place, (bytes_, more, _, _) in enumerate(tail)
        )
    points.sort()
    return _thin(_non_dominated(points))


def _non_dominated(points: Sequence[_Point]) -> list[_Point]:
    """Of points sorted by bytes, those that cost less than all before."""
    kept: list[_Point] = []
    for point in points:
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def _thin(points: list[_Point]) -> list[_Point]:
    """At most ``MOST_POINTS``, evenly by position, first and last among them."""
    if len(points) <= MOST_POINTS:
        return points
    last = len(points) - 1
    places = {round(i * last / (MOST_POINTS - 1)) for i in range(MOST_POINTS)}
    return [points[place] for place in sorted(places)]
