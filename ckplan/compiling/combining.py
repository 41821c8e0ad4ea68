"""Plans of all graphs of one step together, and the replays of these.

Choices for the graphs are combined at rates of exchange of seconds and bytes, the same
for all. Which combinations there are depends on estimates alone, not on a budget, so
more budget never costs more. What they take, a replay of each graph's code tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

from ckplan.compiling.estimating import rounded_up
from ckplan.compiling.partition import Saved
from ckplan.compiling.proposing import Candidate
from ckplan.compiling.replay import Replayed
from ckplan.compiling.replays import Replays

Measure: TypeAlias = Callable[[Candidate], int]


@dataclass(frozen=True)
class Combination:
    """A choice for each graph; like a ``Candidate``, one of the whole step."""

    choices: Mapping[str, Candidate]  # by key of a graph
    overhead: float  # estimated, as a fraction of the unplanned step, in steps
    simulated_peak_bytes: int
    saved_bytes: int

    @property
    def saved(self) -> tuple[tuple[str, Saved], ...]:
        """What each graph saves, as it is replayed."""
        return tuple((key, one.saved) for key, one in self.choices.items())

    @property
    def size_bytes(self) -> int:
        """What tells which of two replays at more; see ``Candidate``."""
        return self.simulated_peak_bytes + self.saved_bytes


@dataclass(frozen=True)
class JointPeak:
    """What all graphs together take."""

    peak_bytes: int


@dataclass(frozen=True)
class JointReplays:
    """The replays of all graphs together, from those of each."""

    replays: Mapping[str, Replays]  # by key of a graph
    peak_of: Callable[[Mapping[str, Replayed]], int]

    def known(self, saved: tuple[tuple[str, Saved], ...]) -> JointPeak | None:
        """What is known of a combination, if all of its graphs' code was replayed."""
        found = {key: self.replays[key].known(one) for key, one in saved}
        known = {key: one for key, one in found.items() if one is not None}
        return JointPeak(self.peak_of(known)) if len(known) == len(found) else None

    def of_first(self, some: Sequence[tuple[tuple[str, Saved], ...]]) -> JointPeak:
        """The first of several, and meanwhile others, if that can be."""
        every = [dict(one) for one in some]
        found = {}
        for key, replays in self.replays.items():
            wanted = dict.fromkeys(one[key] for one in every)
            found[key] = replays.of_first([*wanted])
        return JointPeak(self.peak_of(found))


def all_combinations(
    options: Mapping[str, Sequence[Candidate]],
    also: Iterable[Mapping[str, Candidate]],
    seconds: Mapping[str, float],
    simulated_peak_of: Callable[[Mapping[str, Candidate]], int],
) -> list[Combination]:
    """Choices for all graphs at every rate of exchange, the cheapest first.

    Args:
        options: By key of a graph, its candidates.
        also: More combinations, such as one without a plan.
        seconds: By key, of an unplanned step.
        simulated_peak_of: The peak of choices, by simulation.
    """
    whole = sum(seconds.values())

    def seconds_of(key: str, one: Candidate) -> float:
        return one.overhead * seconds[key]

    def combined(choices: Mapping[str, Candidate]) -> Combination:
        more = sum(seconds_of(key, one) for key, one in choices.items())
        saved_bytes = sum(one.saved_bytes for one in choices.values())
        peak_bytes = simulated_peak_of(choices)
        return Combination(choices, rounded_up(more / whole), peak_bytes, saved_bytes)

    measures: tuple[Measure, ...] = (
        lambda one: one.saved_bytes,
        lambda one: one.simulated_peak_bytes,
    )
    priced = [
        {
            key: [_Option(one, seconds_of(key, one), of(one)) for one in some]
            for key, some in options.items()
        }
        for of in measures
    ]
    found = [
        {key: _best(some, rate).candidate for key, some in every.items()}
        for every in priced
        for rate in _rates(every.values())
    ]
    all_found = [combined(choices) for choices in (*also, *found)]
    unique = {one.saved: one for one in reversed(all_found)}
    return sorted(unique.values(), key=_cheapest_first)


def _cheapest_first(one: Combination) -> tuple[float, bool, int]:
    """Of those that cost the same, torch's own choice, then those that take more."""
    has_plan = any(choice.regions for choice in one.choices.values())
    return one.overhead, has_plan, -one.size_bytes


@dataclass(frozen=True)
class _Option:
    candidate: Candidate
    seconds: float  # more than unplanned
    num_bytes: int


def _rates(options: Iterable[list[_Option]]) -> Iterator[float]:
    """Seconds per byte at which any graph's best option changes, and the two ends."""
    rates = {0.0}
    for some in options:
        for one, other in combinations(some, 2):
            saved = one.num_bytes - other.num_bytes
            if saved:
                rates.add(max((other.seconds - one.seconds) / saved, 0.0))
    yield from sorted(rates)
    yield 2 * max(rates) + 1.0


def _best(some: list[_Option], rate: float) -> _Option:
    return min(
        some, key=lambda one: (one.seconds + rate * one.num_bytes, one.num_bytes)
    )
