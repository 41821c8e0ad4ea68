"""The rate of a disk, as copies of offloaded tensors have it; measured once."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from ckplan.applying.moving.spill_file import THREADS, SpillFile, wait
from ckplan.tracing.costs.cost_cache import Cost, cost_cache

PROBE_BYTES = 64 * 2**20


def spill_rate(folder: str | Path, *, fresh: bool = False) -> float:
    """Bytes per second that tensors move at, to a folder's disk or back.

    It is the slower of both ways, over a file of 64 MiB. Disks are measured once; the
    rate is kept beside the measured costs of ops.

    Args:
        folder: Where the file is, for a moment.
        fresh: Whether to measure again.

    Raises:
        ApplyError: The folder cannot be written, or has too little room.
    """
    file = SpillFile(Path(folder))
    cache = cost_cache(torch.device("cpu"), fresh=fresh)
    key = f"spill {Path(folder).stat().st_dev} {PROBE_BYTES} {THREADS}"
    known = cache.known([key])
    if not known:
        cost = Cost(_seconds(file), PROBE_BYTES, PROBE_BYTES, measured=True)
        known = cache.learn({key: cost})
    return PROBE_BYTES / known[key].seconds


def _seconds(file: SpillFile) -> float:
    memory = torch.zeros(PROBE_BYTES, dtype=torch.uint8)
    offset = file.allocate(PROBE_BYTES)
    times = []
    for copy in (file.write, file.read):
        start = time.perf_counter()
        wait(copy(memory, offset))
        times.append(time.perf_counter() - start)
    return max(times)
