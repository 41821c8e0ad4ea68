"""What torch's CPU allocator did, from the profiler's own memory events.

Exact to the byte, unlike resident set size. The events carry a time and a signed number
of bytes; ``kineto_results`` is where the profiler keeps them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile

_CPU = torch.autograd.DeviceType.CPU


@dataclass(slots=True)
class AllocatorLog:
    """Allocations in order of time, and named spans of time."""

    events: list[tuple[int, int]] = field(default_factory=list)  # (ns, signed bytes)
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> ns

    def peak_within(self, name: str) -> int:
        """Most bytes allocated at once inside a span, above the level at its start."""
        start, stop = self.spans[name]
        return _peak(size for time, size in self.events if start <= time <= stop)

    @property
    def peak_bytes(self) -> int:
        """Most bytes allocated at once, above the level at the start."""
        return _peak(size for _, size in self.events)


def _peak(sizes: Iterator[int]) -> int:
    live = most = 0
    for size in sizes:
        live += size
        most = max(most, live)
    return most


@contextmanager
def log_allocations(marks: str = "") -> Iterator[AllocatorLog]:
    """Log allocations; profiler marks that begin with ``marks`` become spans."""
    log = AllocatorLog()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield log
    kineto = profiler.profiler
    assert kineto is not None and kineto.kineto_results is not None
    for event in kineto.kineto_results.events():
        name = event.name()
        if name == "[memory]":
            if event.device_type() == _CPU:
                log.events.append((event.start_ns(), event.nbytes()))
        elif marks and name.startswith(marks):
            log.spans[name] = (event.start_ns(), event.start_ns() + event.duration_ns())
    log.events.sort(key=lambda event: event[0])


def peak_bytes_of(run: Callable[[], object]) -> int:
    """Peak of bytes allocated while ``run`` runs, above the level at its start."""
    with log_allocations() as log:
        run()
    return log.peak_bytes
