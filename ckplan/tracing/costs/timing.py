"""Measure the seconds of one op or encoding alone."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_low

import torch

from ckplan.tracing.costs.op_arguments import Run

COLD_BYTES = 1 << 26
_MOST_COPIES = 32  # of small inputs; more than the repeats, to evict the cache
_PATIENCE_SECONDS = 0.02  # time limit of the repeats of one op
_MOST_REPEATS = 7
_MOST_SECONDS = 0.1  # of the repeats of an op in memory that it had
_HEAD_START = 1_000_000  # GPU cycles, almost a millisecond
_LAUNCHES = 200


class Memory(enum.Enum):
    """Where an op finds its inputs, and puts its results."""

    NEW = "new"  # inputs are in no cache, and results in memory that no run had
    USED = "used"  # inputs are in no cache, and results where others were
    CACHED = "cached"  # both were just in use


@dataclass(frozen=True, slots=True)
class Job:
    """A function to measure, and its inputs' size."""

    prepare: Callable[[], Run]  # makes a run with its own input
    num_bytes: int  # larger of its input and the bytes that one run moves
    memory: Memory = Memory.NEW


def time_runs(job: Job, run: Run, device: torch.device) -> float:
    """Seconds of one run: the median of up to ``_MOST_REPEATS`` runs."""
    if job.memory is not Memory.NEW:
        return _time_again(run, device, evicted=job.memory is Memory.USED)
    copies = min(COLD_BYTES // max(job.num_bytes, 1), _MOST_COPIES)
    runs = [run, *(job.prepare() for _ in range(copies - 1))]
    outs: list[object] = [None] * len(runs)  # kept for one round: cold memory
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < _MOST_REPEATS:
        turn = len(times) % len(runs)
        outs[turn] = None
        seconds, outs[turn] = seconds_of(runs[turn], device)
        times.append(seconds)
        if time.perf_counter() - begin > _PATIENCE_SECONDS:
            break
    return median_low(times)


def _time_again(run: Run, device: torch.device, *, evicted: bool) -> float:
    num_bytes = COLD_BYTES if evicted else 0
    other = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    times: list[float] = []
    while len(times) < _MOST_REPEATS and sum(times) < _MOST_SECONDS:
        other.fill_(1)
        times.append(seconds_of(run, device)[0])
    return median_low(times)


def seconds_of(run: Run, device: torch.device) -> tuple[float, object]:
    """Seconds that the device works on a run, and its result.

    On one thread of a CPU, seconds in which other programs had the core do not count.
    """
    if device.type != "cuda":
        of_process = time.process_time()
        start = time.perf_counter()
        out = run()
        seconds = time.perf_counter() - start
        if torch.get_num_threads() == 1:
            seconds = min(seconds, time.process_time() - of_process)
        return seconds, out
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START)  # keeps the device from waiting for launches
        begin.record()
        out = run()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / 1e3, out


def launch_seconds(device: torch.device) -> float:
    """Seconds that the CPU needs to launch one small op on a GPU."""
    small = torch.zeros(1, device=device)
    small.add_(1)  # the first call loads the kernel
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(_LAUNCHES):
        small.add_(1)
    seconds = (time.perf_counter() - start) / _LAUNCHES
    torch.cuda.synchronize(device)
    return seconds
