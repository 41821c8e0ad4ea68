"""What moves to a disk cost, measured beside kernels and kept with the costs of ops.

A disk that nobody waits for is no disk in a step: there, copies share the processor and
its memory with kernels. So tensors are copied while kernels of a step's kind run in the
main thread. Three figures are taken, in several rounds each: the seconds of the copies;
what kernels lose by them; and what the engine takes for a move of few bytes.

Seconds are those of the kernels' clock, as profiles have them: on one thread CPU
seconds, of which other programs take none. So a copy is as long as the kernels that
hide it. Kernels lose the CPU seconds of the copying threads where they run on every
core themselves, and on one thread, whose steps are timed as CPU seconds of the process.
There, what kernels take longer beside copies, for they share caches and memory, is
added.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ckplan.applying.moving.moved import FILE, Group, Moved
from ckplan.applying.moving.mover import Mover
from ckplan.applying.moving.spill_file import THREADS, SpillFile, wait
from ckplan.simulating.moving import Link
from ckplan.tracing.costs.cost_cache import cost_cache
from ckplan.tracing.costs.spread import quartiles

PROBE_BYTES = 32 * 2**20
ROUNDS = 5
_PIECES = 16  # tensors that the engine moves
_SMALL_BYTES = 64 * 2**10
_KERNELS_ALONE = 16
_ROWS, _WIDTH = 128, 384  # of a kernel of milliseconds


class Price(NamedTuple):
    """What one round took."""

    copying: float  # of kernels, until PROBE_BYTES are copied, the slower way
    losing: float  # that kernels lost to copies of as many bytes, one way
    moving: float  # of the engine, for one move of few bytes out and back


def spill_rate(folder: str | Path, *, fresh: bool = False) -> float:
    """Bytes per second that tensors move at beside kernels, to a folder's disk or back.

    It is the slower of both ways; ``spill_link`` tells what else moves cost.
    """
    return spill_link(folder, fresh=fresh).bytes_per_second


def spill_link(folder: str | Path, *, fresh: bool = False) -> Link:
    """What moves to a folder's disk and back cost, beside kernels.

    Each folder is measured once for each number of threads; the figures are kept beside
    the measured costs of ops.

    Args:
        folder: Where the file is, for a moment.
        fresh: Whether to measure again.

    Raises:
        ApplyError: The folder cannot be written, or has too little room.
    """
    folder = Path(folder)
    file = SpillFile(folder)
    cache = cost_cache(torch.device("cpu"), fresh=fresh)
    where = f"{folder.stat().st_dev} {folder.resolve()} {PROBE_BYTES} {THREADS}"
    keys = [f"spill beside kernels {name} {where}" for name in Price._fields]
    kept = [cache.known_runs(key) for key in keys]
    if not all(kept):
        with torch.inference_mode(mode=False), torch.no_grad():
            kept = [*zip(*_measure(folder, file), strict=True)]
        cache.learn_runs(dict(zip(keys, kept, strict=True)))
    return link_of(*kept)


def link_of(
    copying: Sequence[float], losing: Sequence[float], moving: Sequence[float]
) -> Link:
    """The link of several rounds: as in most of them, and as in its slower ones.

    Args:
        copying: Seconds of each, as ``Price`` has them; so are the others.
        losing: What kernels lost.
        moving: What the engine took.
    """
    found = [quartiles(one) for one in (copying, losing, moving)]
    usual = Price(*(one.median for one in found if one))
    slower = Price(*(one.high for one in found if one))
    return replace(_link(usual), slowest=_link(slower))


def _link(price: Price) -> Link:
    return Link(
        PROBE_BYTES / price.copying,
        busy_seconds_per_byte=price.losing / PROBE_BYTES,
        seconds_per_move=price.moving,
    )


def _measure(folder: Path, file: SpillFile) -> list[Price]:
    kernels, memory = _Kernels(), torch.ones(PROBE_BYTES, dtype=torch.uint8)
    offset = file.allocate(PROBE_BYTES)
    wait(file.write(memory, offset))  # the first copies make buffers
    return [_round(folder, file, kernels, memory, offset) for _ in range(ROUNDS)]


def _round(
    folder: Path, file: SpillFile, kernels: _Kernels, memory: torch.Tensor, offset: int
) -> Price:
    alone = kernels.run(_KERNELS_ALONE) / _KERNELS_ALONE
    copying, lost = 0.0, 0.0
    for copy in (file.write, file.read):
        before = file.processor_seconds
        jobs = copy(memory, offset)
        count, taken = 1, kernels.run(1)
        while not all(job.done() for job in jobs):
            taken += kernels.run(1)
            count += 1
        wait(jobs)
        copying = max(copying, taken)
        lost += lost_seconds(
            threads=torch.get_num_threads(),
            cores=num_cores(),
            longer=taken - count * alone,
            copies=file.processor_seconds - before,
        )
    return Price(copying, lost / 2, _move_seconds(folder))


def lost_seconds(*, threads: int, cores: int, longer: float, copies: float) -> float:
    """What kernels lose to copies beside them.

    Args:
        threads: Of the kernels.
        cores: Of the processor.
        longer: Seconds that the kernels took more beside copies.
        copies: CPU seconds of the threads that copy.
    """
    if threads == 1:
        return copies + max(longer, 0.0)
    return copies if threads >= cores else 0.0


def num_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def _move_seconds(folder: Path) -> float:
    """CPU seconds of this thread for a move of few bytes, out and back."""
    mover = Mover(folder, _PIECES * _SMALL_BYTES)
    tensors = [torch.zeros(_SMALL_BYTES // 4) for _ in range(_PIECES)]
    start = time.thread_time()
    moved = [mover.encode(FILE, one) for one in tensors]
    group = Group([one for one in moved if isinstance(one, Moved)])
    group.ask()
    for one in reversed(moved):
        assert isinstance(one, Moved), "internal error: a plain tensor did not move"
        one.decode()
    return (time.thread_time() - start) / _PIECES


class _Kernels:
    """Kernels of a step's kind: a product, and an op of each element."""

    def __init__(self) -> None:
        ones = partial(torch.ones, dtype=torch.float32, device="cpu")
        self._left, self._right = ones(_ROWS, _WIDTH), ones(_WIDTH, 4 * _WIDTH)
        one_thread = torch.get_num_threads() == 1
        self._clock = time.thread_time if one_thread else time.perf_counter

    def run(self, count: int) -> float:
        """Run them a few times; returns their seconds."""
        start = self._clock()
        for _ in range(count):
            torch.nn.functional.gelu(self._left @ self._right)
        return self._clock() - start
