"""Two queues of a step on a GPU: the CPU launches kernels, the device runs them.

A kernel starts when it has been launched and the kernel before it is done; launches
wait for nothing. At the end, the CPU waits for the device:

    cpu_i    = cpu_(i-1) + launch_i
    device_i = max(device_(i-1), cpu_i) + kernel_i

In the algebra of max and plus, that is a linear map of the pair of clocks, so a part of
a step is three numbers, and parts join and repeat without running through their ops
again (Baccelli, Cohen, Olsder, Quadrat, "Synchronization and Linearity", 1992, ch. 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import sub
from typing import NamedTuple


class Span(NamedTuple):
    """A part of a step: what it does to the clocks of both queues."""

    launch_seconds: float  # the CPU is busy
    device_seconds: float  # the device is busy
    seconds: float  # from an idle start of both to the end of the device

    def then(self, other: Span) -> Span:
        """This part and the next."""
        return Span(
            self.launch_seconds + other.launch_seconds,
            self.device_seconds + other.device_seconds,
            max(
                self.seconds + other.device_seconds,
                self.launch_seconds + other.seconds,
            ),
        )

    def times(self, count: int) -> Span:
        """This part, ``count`` times, at least once, without a wait between."""
        launch, device, seconds = self
        more = (count - 1) * max(launch, device)
        return Span(count * launch, count * device, seconds + more)


NOTHING = Span(0.0, 0.0, 0.0)


def span(launches: Sequence[float], kernels: Sequence[float]) -> Span:
    """A part of a step, from the seconds of every op in order.

    The device ends with the kernels from the last one that waited for its launch:
    ``seconds = max_i (launches of 0..i + kernels of i..n)``.

    >>> span([1, 1], [5, 5]), span([5, 5], [1, 1])
    (Span(launch_seconds=2, device_seconds=10, seconds=11), Span(launch_seconds=10, \
device_seconds=2, seconds=11))
    """
    if not launches:
        return NOTHING
    launched, ran = accumulate(launches), accumulate(kernels, initial=0)
    device_seconds = sum(kernels)
    waits = max(map(sub, launched, ran))
    return Span(sum(launches), device_seconds, device_seconds + waits)


def spans(parts: Iterable[Span]) -> Span:
    """Parts one after the other."""
    found = NOTHING
    for part in parts:
        found = found.then(part)
    return found


def visible_share(
    kernels: Sequence[float],
    launches: Sequence[float],
    halves: tuple[int, int],
    saves: Sequence[int],
    costs: tuple[float, float],
) -> float:
    """Share of the engine's CPU time that no kernel hides, if all of forward reruns.

    Args:
        kernels: Seconds of the device of every op.
        launches: Seconds of the CPU of every op.
        halves: The first op after forward, and the first one after backward.
        saves: For every saved tensor, the number of ops that had run.
        costs: Seconds of the engine per saved tensor and per op that reruns.
    """
    start, stop = halves
    watch, rerun = costs
    whole = watch * len(saves) + rerun * start
    if not whole or stop == start:
        return 0.0
    seconds = []
    for engine in (0.0, 1.0):
        watched = [0.0] * (start + 1)
        for place in saves:
            watched[min(place, start)] += engine * watch
        cpu = [one + more for one, more in zip(launches, watched, strict=False)][:start]
        device = [*kernels[:start]]
        for number in range(start, stop):  # the last ops of forward rerun first
            high, low = (start * (stop - number - k) // (stop - start) for k in (0, 1))
            cpu += [one + engine * rerun for one in launches[low:high]]
            device += kernels[low:high]
            cpu.append(launches[number])
            device.append(kernels[number])
        seconds.append(span(cpu, device).seconds)
    return (seconds[1] - seconds[0]) / whole
