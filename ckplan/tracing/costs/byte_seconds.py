"""Seconds that a kernel takes to read or write a byte, measured once.

Kernels that Inductor generates wait for memory as torch's own elementwise ones do: both
divide their tensors among the threads, and more threads move more until the memory
gives no more. So a sum that writes to memory that is there stands for all of them.
"""

from __future__ import annotations

from functools import partial
from statistics import median

import torch

from ckplan.tracing.costs.cost_cache import MOST_RUNS, cost_cache
from ckplan.tracing.costs.timing import seconds_of

KEY = "to move a byte of cold memory in an elementwise kernel"
"""Name in the cost cache."""
_CPU = torch.device("cpu")
_NUMBERS, _COPIES = 1 << 21, 6  # 24 MiB for each: more than caches hold
_ROUNDS = 6


def byte_seconds() -> float:
    """The seconds on this machine, with the threads that torch has."""
    cache = cost_cache(_CPU)
    kept = cache.known_runs(KEY)
    if not kept:
        kept = _measured()
        cache.learn_runs({KEY: kept})
    return median(kept)


def _measured() -> tuple[float, ...]:
    """The fastest runs: others waited for the rest of the machine."""
    copies = [[torch.ones(_NUMBERS) for _ in range(3)] for _ in range(_COPIES)]
    with torch.no_grad():
        runs = [
            seconds_of(partial(torch.add, one, other, out=out), _CPU)[0]
            for _ in range(_ROUNDS)
            for one, other, out in copies
        ]
    moved_bytes = 3 * copies[0][0].nbytes
    return tuple(seconds / moved_bytes for seconds in sorted(runs)[:MOST_RUNS])
