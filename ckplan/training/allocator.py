"""Log of a device's torch allocator, from memory events of the profiler.

The log is exact to the byte, unlike resident set size. Each event has a time in ns and
a signed number of bytes. The profiler stores events in ``kineto_results``.
"""

from __future__ import annotations

import gc
import os
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.autograd.profiler import profile

CPU = torch.device("cpu")
_KINDS = {
    "cpu": torch.autograd.DeviceType.CPU,
    "cuda": torch.autograd.DeviceType.CUDA,
}


@dataclass(slots=True)
class AllocatorLog:
    """Allocations in order of time, and named spans of time."""

    events: list[tuple[int, int]] = field(default_factory=list)  # (ns, signed bytes)
    spans: dict[str, tuple[int, int]] = field(
        default_factory=dict
    )  # last span by name, in ns

    @property
    def peak_bytes(self) -> int:
        """Most bytes allocated at once, above the level at the start."""
        return max(accumulate((size for _, size in self.events), initial=0))

    @property
    def held_bytes(self) -> int:
        """Bytes allocated and not freed."""
        return sum(size for _, size in self.events)

    def split(self, when: int) -> tuple[AllocatorLog, AllocatorLog]:
        """Split the log at a time in ns; returns the logs before and after it."""
        place = bisect_left(self.events, when, key=lambda event: event[0])
        before, after = self.events[:place], self.events[place:]
        return AllocatorLog(before), AllocatorLog(after, self.spans)


class GpuAllocatorStats(NamedTuple):
    """Statistics of a GPU's caching allocator since its peaks were reset."""

    requested_bytes: int  # now
    requested_peak_bytes: int
    allocated_peak_bytes: int  # in blocks, which may exceed requests
    reserved_peak_bytes: int


def gpu_allocator_stats(device: torch.device) -> GpuAllocatorStats:
    """Read the statistics of a GPU's allocator."""
    stats = torch.cuda.memory_stats(device)
    return GpuAllocatorStats(
        stats["requested_bytes.all.current"],
        stats["requested_bytes.all.peak"],
        stats["allocated_bytes.all.peak"],
        stats["reserved_bytes.all.peak"],
    )


@dataclass(slots=True)
class Requested:
    """Bytes requested from a GPU's allocator; blocks can be larger."""

    peak_bytes: int = 0
    held_bytes: int = 0


@contextmanager
def requested_within(device: torch.device) -> Iterator[Requested]:
    """Count what is requested of a GPU's allocator, whose peaks it resets.

    On a CPU, nothing is counted: the profiler tells.
    """
    found = Requested()
    if device.type != "cuda":
        yield found
        return
    torch.cuda.reset_peak_memory_stats(device)
    before = gpu_allocator_stats(device).requested_bytes
    yield found
    after = gpu_allocator_stats(device)
    found.peak_bytes = after.requested_peak_bytes - before
    found.held_bytes = after.requested_bytes - before


@contextmanager
def log_allocations(
    marks: str = "", device: torch.device = CPU
) -> Iterator[AllocatorLog]:
    """Log allocations; profiler marks that begin with ``marks`` become spans.

    Garbage is collected before, so that it is not freed meanwhile; unless the collector
    is off. On a GPU, sizes are blocks of the caching allocator, multiples of 512 bytes.
    Times are those of the requests on the CPU.
    """
    log = AllocatorLog()
    if gc.isenabled():
        gc.collect()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it prints to stderr
    with profile(profile_memory=True) as profiler:
        yield log
    assert profiler.kineto_results is not None
    for event in profiler.kineto_results.events():
        name = event.name()
        if name == "[memory]":
            if event.device_type() == _KINDS[device.type]:
                log.events.append((event.start_ns(), event.nbytes()))
        elif marks and name.startswith(marks):
            start = event.start_ns()
            span = start, start + event.duration_ns()
            log.spans[name] = max(span, log.spans.get(name, span))
    log.events.sort(key=lambda event: event[0])
