"""The chain: choose an option for every unit so that every moment fits.

Calls ``0..L-1`` run forward in order and backward in reverse. While call ``i`` runs, in
either direction, every earlier call has dropped the bytes that its option frees, so
only the sum of the bytes that calls ``k < i`` free matters:

    F(L)    = { (top, 0) }
    F(i)    = non-dominated { (max(gap_i, need_o, b - freed_o), s + seconds_o) :
                              option o of call i, (b, s) in F(i + 1) }

    need_o   live bytes of call i's own moments under o if no earlier call frees any
    gap_i    most live bytes between the moments of calls i - 1 and i, likewise; ``top``
             is the gap between the last call's forward and its backward
    (b, s)   with b bytes of budget, calls i, i + 1, ... cost s seconds

F(0) is the whole frontier, in exact bytes. This is the recurrence of Beaumont,
Eyraud-Dubois, Herrmann, Joly and Shilova ("Optimal checkpointing for heterogeneous
chains", 2019) with a menu per block, without nested recomputation, and with whole-step
accounting in place of activations only. If a call can be divided, F is the better of
both: the call as one unit, and its children as several. Lists longer than
``MOST_POINTS`` are thinned: every remaining point is still a plan, exact in bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckplan.plan.region import Region
from ckplan.solving.menu import Option
from ckplan.solving.unit_bytes import Unit

MOST_POINTS = 256

_Point = tuple[int, float, int, int]  # bytes, seconds, choice, point of F(i + 1)


@dataclass(frozen=True, slots=True)
class Link:
    """One unit of a chain."""

    unit: Unit
    options: Sequence[Option]
    between_bytes: (
        int  # most live bytes between the previous unit's moments and its own
    )


class UnitChoice(NamedTuple):
    """The choice for one unit."""

    unit: Unit
    region: Region | None  # None: everything is kept


class ChainFrontier:
    """F(i): the frontier of the units from i on, and the plan behind each point."""

    __slots__ = ("_link", "_most_points", "_points", "_tails")

    def __init__(
        self,
        points: list[_Point],
        link: Link | None = None,
        tails: Sequence[ChainFrontier] = (),
        most_points: int | None = None,
    ) -> None:
        """Keep the points; ``end``, ``before`` and ``either`` make frontiers.

        Args:
            points: Non-dominated points, fewest bytes first.
            link: The unit whose options the points choose; if None, they choose a tail.
            tails: F(i + 1), or several F(i) without a link.
            most_points: Most points of frontiers made of this one (``MOST_POINTS``).
        """
        self._most_points = most_points
        self._points = points
        self._link = link
        self._tails = tails

    @classmethod
    def end(cls, top_bytes: int, most_points: int | None = None) -> ChainFrontier:
        """F(L), with the live bytes between the last forward and the first backward."""
        return cls([(top_bytes, 0.0, -1, -1)], most_points=most_points)

    def before(self, link: Link) -> ChainFrontier:
        """F(i) from F(i + 1)."""
        points: list[_Point] = []
        for number, option in enumerate(link.options):
            least = max(link.between_bytes, option.need_bytes)
            freed, own = option.freed_bytes, option.seconds
            # Of the points within the bytes needed here anyway, the last is best.
            first = max(_last_within(self._points, least + freed), 0)
            bytes_, seconds, _, _ = self._points[first]
            points.append((max(least, bytes_ - freed), own + seconds, number, first))
            points += [
                (bytes_ - freed, own + seconds, number, place)
                for place, (bytes_, seconds, _, _) in enumerate(
                    self._points[first + 1 :], first + 1
                )
            ]
        return self._made(points, link)

    def _made(self, points: list[_Point], link: Link | None) -> ChainFrontier:
        """A frontier whose points continue with those of this one."""
        best = _best(points, self._most_points)
        return ChainFrontier(best, link, [self], self._most_points)

    def raised_to(self, between_bytes: int) -> ChainFrontier:
        """The same frontier with more live bytes between two units."""
        points = [
            (max(between_bytes, point[0]), point[1], 0, place)
            for place, point in enumerate(self._points)
        ]
        return self._made(points, None)

    @staticmethod
    def either(ways: Sequence[ChainFrontier]) -> ChainFrontier:
        """The non-dominated points of several frontiers of the same calls."""
        points = [
            (bytes_, seconds, number, place)
            for number, way in enumerate(ways)
            for place, (bytes_, seconds, _, _) in enumerate(way._points)
        ]
        most_points = ways[0]._most_points
        return ChainFrontier(_best(points, most_points), None, ways, most_points)

    @property
    def least_bytes(self) -> int:
        """The smallest budget that any plan of this chain needs."""
        return self._points[0][0]

    def place_of(self, budget_bytes: int) -> int:
        """The number of the cheapest plan that fits a budget; -1 if none does."""
        return _last_within(self._points, budget_bytes)

    def cheapest_first(self, budget_bytes: int) -> Iterator[tuple[UnitChoice, ...]]:
        """Plans that fit a budget, cheapest first, as a choice for every unit."""
        for place in range(self.place_of(budget_bytes), -1, -1):
            yield tuple(self._choices(place))

    def smallest_first(self) -> Iterator[tuple[UnitChoice, ...]]:
        """All plans, fewest bytes first."""
        for place in range(len(self._points)):
            yield tuple(self._choices(place))

    def evenly_spaced(self, count: int) -> Iterator[tuple[UnitChoice, ...]]:
        """At most ``count`` plans from the whole frontier, fewest bytes first."""
        last = len(self._points) - 1
        places = {round(i * last / max(count - 1, 1)) for i in range(count)}
        for place in sorted(places):
            yield tuple(self._choices(place))

    def _choices(self, place: int) -> Iterator[UnitChoice]:
        found = self
        while found._tails:
            _, _, number, place = found._points[place]
            if found._link is None:
                found = found._tails[number]
            else:
                yield UnitChoice(found._link.unit, found._link.options[number].region)
                (found,) = found._tails


def solve_chain(
    links: Sequence[Link], top_bytes: int, most_points: int | None = None
) -> ChainFrontier:
    """The frontier of units in the order of their forward.

    Args:
        links: The units, in forward order.
        top_bytes: Most live bytes between the last forward and the first backward.
        most_points: Most points of a frontier (``MOST_POINTS``).
    """
    found = ChainFrontier.end(top_bytes, most_points)
    for link in reversed(links):
        found = found.before(link)
    return found


def regions_of(plan: Sequence[UnitChoice]) -> tuple[Region, ...]:
    """The regions of a plan, in the order of their calls."""
    return tuple(choice.region for choice in plan if choice.region is not None)


def _last_within(points: Sequence[_Point], budget_bytes: int) -> int:
    return bisect_right(points, budget_bytes, key=lambda point: point[0]) - 1


def _best(points: list[_Point], most_points: int | None) -> list[_Point]:
    points.sort()
    return _thin(_non_dominated(points), most_points or MOST_POINTS)


def _non_dominated(points: Sequence[_Point]) -> list[_Point]:
    """Of points sorted by bytes, those that cost less than all earlier ones."""
    kept: list[_Point] = []
    for point in points:
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def _thin(points: list[_Point], most_points: int) -> list[_Point]:
    """Keep at most so many points, including the first and the last.

    If a point is removed, budgets from it to the next one use the point before it. The
    points with the smallest such loss are removed first, one of two neighbours at a
    time.
    """
    while (excess := len(points) - most_points) > 0:
        losses = [
            (before[1] - point[1]) * (after[0] - point[0])
            for before, point, after in zip(
                points, points[1:], points[2:], strict=False
            )
        ]
        most = sorted(losses)[min(excess, len(losses)) - 1]
        out = {-1}
        for place, loss in enumerate(losses, 1):
            if loss <= most and place - 1 not in out and len(out) <= excess:
                out.add(place)
        points = [point for place, point in enumerate(points) if place not in out]
    return points
