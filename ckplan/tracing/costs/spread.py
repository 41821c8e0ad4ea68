"""How far measured seconds can be trusted: their spread, and the machine's load."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

_T = TypeVar("_T")
_SPARE_LOAD = 0.5  # of the system itself
_SPARE_SHARE = 0.1  # of all cores: the system, and what always runs
_LEAST_SECONDS = 0.3  # Linux counts in hundredths
_STAT = Path("/proc/stat")


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


class _Clocks(NamedTuple):
    """Seconds until a moment."""

    wall: float
    all_programs: float  # in which cores were busy
    own: float  # of this process and those that it waited for


class OtherPrograms:
    """What else runs on this machine, from the moment on in which this is made."""

    def __init__(self) -> None:
        self._begin = _clocks()

    def are_busy(self) -> bool:
        """Whether they kept more than a tenth of all cores busy.

        False where the system does not say, and for times too short to tell.
        """
        if self._begin is None or (now := _clocks()) is None:
            return False
        pairs = zip(now, self._begin, strict=True)
        wall, everything, own = (one - other for one, other in pairs)
        cores = (os.cpu_count() or 1) * wall
        return wall >= _LEAST_SECONDS and everything - own > _SPARE_SHARE * cores


def _clocks() -> _Clocks | None:
    """Clocks of this moment, on Linux."""
    try:
        words = _STAT.read_text().split(maxsplit=9)[1:9]
        user, nice, system, _, _, *more = (int(word) for word in words)
        ticks = user + nice + system + sum(more)  # all but idle, and waiting for disks
        seconds = ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
    return _Clocks(time.monotonic(), seconds, sum(os.times()[:4]))


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
