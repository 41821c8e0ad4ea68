"""Seconds that generated kernels take to read or write a byte.

They wait for memory as torch's own elementwise kernels do: both divide their tensors
among the threads, and more threads move more until the memory gives no more. How much
more is measured once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch

from ckplan.tracing.costs.cost_cache import MOST_RUNS, cost_cache
from ckplan.tracing.costs.spread import OtherPrograms
from ckplan.tracing.costs.timing import seconds_of

KEY = "to move a byte of cold memory, to the same with one thread"
"""Name in the cost cache."""
_OF_ONE_CORE = 1 / 25e9
"""In training steps on an AMD EPYC, as the profiler of torch shows them: some of what a
kernel reads is still in a cache, and most is not."""
_CPU = torch.device("cpu")
_NUMBERS, _COPIES = 1 << 21, 6  # 24 MiB for each: more than caches hold
_ROUNDS = 6


def byte_seconds() -> float:
    """The seconds with the threads that torch has."""
    if torch.get_num_threads() == 1:
        return _OF_ONE_CORE
    cache = cost_cache(_CPU)
    kept = cache.known_runs(KEY)
    if not kept:
        others = OtherPrograms()
        kept = _measured()
        cache.learn_runs({KEY: kept}, busy=others.are_busy())
    return _OF_ONE_CORE * median(kept)


def _measured() -> tuple[float, ...]:
    """Seconds with these threads, divided by those of one."""
    threads = _fastest()
    with _one_thread():
        one = median(_fastest())
    return tuple(min(seconds / one, 1.0) for seconds in threads)


def _fastest() -> list[float]:
    """Seconds of the fastest runs: others waited for the rest of the machine."""
    copies = [[torch.ones(_NUMBERS) for _ in range(3)] for _ in range(_COPIES)]
    with torch.no_grad():
        runs = [
            seconds_of(partial(torch.add, one, other, out=out), _CPU)[0]
            for _ in range(_ROUNDS)
            for one, other, out in copies
        ]
    return sorted(runs)[:MOST_RUNS]


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
