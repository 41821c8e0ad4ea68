"""How far measured seconds can be trusted: their spread, and the machine's load."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

_T = TypeVar("_T")
_SPARE_LOAD = 0.5  # of the system itself


class Quartiles(NamedTuple):
    """The quartiles of a figure over rounds."""

    low: float
    median: float
    high: float


class Load(NamedTuple):
    """How busy the machine was before the steps."""

    running: float  # processes that ran or waited, over the last minute
    cores: int

    @property
    def is_high(self) -> bool:
        """Whether the steps have to share the cores."""
        return self.running > self.cores + _SPARE_LOAD


NO_LOAD = Load(0.0, 1)


def machine_load() -> Load:
    """The load average of the last minute; none where the system keeps none."""
    try:
        return Load(os.getloadavg()[0], os.cpu_count() or 1)
    except (AttributeError, OSError):
        return NO_LOAD


def quartiles(values: Sequence[float]) -> Quartiles | None:
    """The quartiles, interpolated; None for no values.

    >>> quartiles([0.3, 0.1, 0.2])
    Quartiles(low=0.15000000000000002, median=0.2, high=0.25)
    """
    if not values:
        return None
    if len(values) == 1:
        return Quartiles(*values, *values, *values)
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def undisturbed(seconds: Sequence[float]) -> float:
    """The mean of the faster half: what disturbs a step makes it longer.

    >>> undisturbed([2.0, 9.0, 1.0])
    1.5
    """
    return statistics.fmean(sorted(seconds)[: (len(seconds) + 1) // 2])


def standard_error(
    rounds: Sequence[_T], estimate: Callable[[Sequence[_T]], float]
) -> float:
    """How far off an estimate from such rounds is; infinite for fewer than two.

    The jackknife (Efron, "The Jackknife, the Bootstrap and Other Resampling Plans",
    1982, chapter 3): from the estimates that leave out one round each.
    """
    count = len(rounds)
    if count < 2:
        return math.inf
    without = [estimate([*rounds[:i], *rounds[i + 1 :]]) for i in range(count)]
    return math.sqrt((count - 1) * statistics.pvariance(without))
