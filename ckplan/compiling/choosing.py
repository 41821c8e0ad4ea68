"""Which of many candidates a budget gets, with few of them replayed.

A replay takes seconds, and of a large step a minute. Candidates of equal cost are in
the order of what they take by simulation, the most first, so where one fits, those
after it mostly do. The last of equal ones tells whether they are worth a search, and
halving finds the first of them that fits. What is simulated to take far more than the
budget is not replayed. More budget never makes that dearer: what fits still does, and
of equal ones the same or earlier ones are found.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any, Protocol, TypeAlias, TypeVar

Fits: TypeAlias = Callable[[Sequence[int]], bool]
"""Whether the first of some places fits. The others may be asked for next."""


class Choice(Protocol):
    """A ``Candidate`` of one graph, or a ``Combination`` of several."""

    @property
    def saved(self) -> Any:
        """What is replayed."""

    @property
    def overhead(self) -> float:
        """Estimated, in steps, so that several are equal."""

    @property
    def simulated_peak_bytes(self) -> int:
        """Of the step, by simulation."""

    @property
    def saved_bytes(self) -> int:
        """Alive between forward and backward."""

    @property
    def size_bytes(self) -> int:
        """What tells best which of two replays at more."""


class HasPeak(Protocol):
    """What is known of a replayed step."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once."""


class AnyReplays(Protocol):
    """``Replays`` of one graph, or ``JointReplays`` of several."""

    def known(self, saved: Any) -> HasPeak | None:
        """What was replayed."""

    def of_first(self, some: Sequence[Any]) -> HasPeak:
        """The first of several, and meanwhile others, if that can be."""


_Choice = TypeVar("_Choice", bound=Choice)
_ASKED_NEXT = 8  # more than are tried at a time
_SURELY_OVER = 1.2
"""A candidate whose simulated peak exceeds a budget by this factor is not replayed. Of
graphs of several layers, replayed peaks are 0.90 to 1.2 of the simulated ones. Of tiny
graphs some are less: such a plan is missed, unless no other fits."""
_NEAR = 1.03
"""Equal candidates whose sizes are within this factor are not told apart."""
_FEW, _FAR = 8, 1.1
"""Of those with the smallest simulated peaks, so many are always replayed; if none is
within this factor of a budget, no other is expected to fit. Of 28 graphs, one of the
first four replayed at most 1.023 times the smallest of all."""


def cheapest_within(
    some: Sequence[_Choice],
    replays: AnyReplays,
    budget_bytes: int,
    held_bytes: int,
    tell: Callable[[int, int], object],
) -> _Choice | None:
    """The cheapest candidate that is found to fit a budget, or that is known to.

    Args:
        some: All candidates, in their order.
        replays: Of these, as far as they are known; others are made.
        budget_bytes: Limit on the replayed peak.
        held_bytes: Of it, parameters and batch. What saves more than the rest is not
            replayed.
        tell: Told the place of a candidate that is replayed, and how many there are.
    """
    left = budget_bytes - held_bytes

    def may_fit(place: int) -> bool:
        one = some[place]
        over = one.simulated_peak_bytes > _SURELY_OVER * budget_bytes
        return one.saved_bytes <= left and not over

    def fits(places: Sequence[int]) -> bool:
        first, *others = places
        if not may_fit(first):
            return False
        tell(first, len(some))
        wanted = [some[place].saved for place in (first, *filter(may_fit, others))]
        return replays.of_first(wanted).peak_bytes <= budget_bytes

    costs = [one.overhead for one in some]
    place = cheapest_that_fits(costs, [one.size_bytes for one in some], fits)
    found = None if place is None else some[place]
    for one in some[:place]:
        known = replays.known(one.saved)
        if known is not None and known.peak_bytes <= budget_bytes:
            return one
    return found


def try_the_smallest(
    some: Sequence[_Choice],
    replays: AnyReplays,
    budget_bytes: int,
    tell: Callable[[int, int], object],
) -> None:
    """Replay all, those with the smallest simulated peaks first, unless none will fit.

    Args:
        some: Of ``cheapest_within``, like the others: none was found.
        replays: As there.
        budget_bytes: As there.
        tell: As there.
    """
    ordered = sorted(some, key=lambda one: one.simulated_peak_bytes)
    wanted, least_bytes = [one.saved for one in ordered], math.inf
    for place in range(len(wanted)):
        tell(place, len(wanted))
        meanwhile = wanted[place:_FEW] or wanted[place:]
        least_bytes = min(least_bytes, replays.of_first(meanwhile).peak_bytes)
        if place + 1 >= _FEW and least_bytes > _FAR * budget_bytes:
            return


def cheapest_that_fits(
    costs: Sequence[float], sizes: Sequence[int], fits: Fits
) -> int | None:
    """The place of one that fits, of those of least cost that were found to.

    Args:
        costs: In ascending order.
        sizes: Which of two takes more; of equal costs, in descending order.
        fits: Tries them.
    """
    equal = [[*places] for _, places in groupby(range(len(costs)), costs.__getitem__)]
    lasts = [places[-1] for places in equal]
    for number, ((first, *_), last) in enumerate(zip(equal, lasts, strict=True)):
        next_one = lasts[number + 1 : number + 2]
        if fits([last, *next_one, *islice(_halves(first, last), _ASKED_NEXT)]):
            return _first_that_fits(first, last, sizes, fits)
    return None


def _first_that_fits(low: int, high: int, sizes: Sequence[int], fits: Fits) -> int:
    """The first of some places that fits, where ``high`` does; found by halving."""
    while sizes[low] > _NEAR * sizes[high]:
        if fits([*islice(_halves(low, high), _ASKED_NEXT)]):
            high = (low + high) // 2
        else:
            low = (low + high) // 2 + 1
    return high


def _halves(low: int, high: int) -> Iterator[int]:
    """Middles of places before ``high``, and of the halves left and right of them."""
    todo = deque([(low, high)])
    while todo:
        low, high = todo.popleft()
        if low < high:
            middle = (low + high) // 2
            yield middle
            todo += [(low, middle), (middle + 1, high)]
