"""Memory of one step of a loop that somebody else runs, as the allocator has it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch

from ckplan.simulating.curve import PHASES, Curve
from ckplan.tracing.watched_loop import alive_tensors
from ckplan.training.allocator import (
    AllocatorLog,
    GpuAllocatorStats,
    gpu_allocator_stats,
    log_allocations,
)
from ckplan.verifying.worker import BEGIN, END, MARK, mark, measured_curve
from ckplan.verifying.worker_state import WeakStorages, bytes_held_on_gpu, storages_of

_FREED = "freed "  # mark of a storage that is older than the log


class Memory(NamedTuple):
    """Memory of a step."""

    peak_bytes: int
    curve: Curve | None  # None if the loop has no forward, backward and update in turns
    gpu: GpuAllocatorStats | None


class LoopMemory:
    """Measures a step from one update to the next.

    The allocator's log tells of what is made while it runs. It begins before the first
    forward; what is older is known from Python, which tells when it is freed.
    """

    def __init__(
        self, device: torch.device, beside_bytes: int, scope: ExitStack
    ) -> None:
        """Begin to log, before the first forward.

        Args:
            device: Where the model is.
            beside_bytes: Bytes of tensors that are alive, but of no step.
            scope: Ends the log; closed by ``end``.
        """
        self._device, self._beside_bytes, self._scope = device, beside_bytes, scope
        gc.collect()  # below, garbage would count
        self._log: AllocatorLog = scope.enter_context(log_allocations(MARK, device))
        found = alive_tensors()
        grads = [one.grad for one in found if one.is_leaf and one.grad is not None]
        self._known: WeakStorages = storages_of([*found, *grads])
        self._addresses: set[int] = set()
        self._shared: dict[int, int] = {}  # address -> bytes
        self._held_bytes: int | None = None  # on a GPU

    def begin(self) -> None:
        """The step begins."""
        gc.collect()
        self._shared = {}
        self._held_bytes = bytes_held_on_gpu(self._device)
        alive = [(one, size) for known, size in self._known if (one := known())]
        self._addresses = {one.data_ptr() for one, _ in alive}
        self._known = [
            (weakref.ref(one, partial(_freed, number)), size)
            for number, (one, size) in enumerate(alive)
        ]
        del alive
        mark(BEGIN)

    def given(self, batch: Iterable[torch.Tensor]) -> None:
        """The model is given tensors, some of which workers of a loader share."""
        for one in batch:
            if one.device.type == "cpu" and one.is_shared():
                storage = one.untyped_storage()
                self._shared[storage.data_ptr()] = storage.nbytes()

    def end(self) -> Memory:
        """The step has ended."""
        mark(END)
        self._scope.close()
        begin, _ = self._log.spans[MARK + BEGIN]
        before, log = self._log.split(begin)
        gpu, held_bytes = None, self._held_bytes
        if self._device.type == "cuda":
            gpu = gpu_allocator_stats(self._device)
        if held_bytes is None:
            held_bytes = before.held_bytes + self._older_bytes(log, begin)
        held_bytes -= self._beside_bytes
        peak_bytes = held_bytes + log.peak_bytes
        if gpu is not None:
            peak_bytes = gpu.requested_peak_bytes - self._beside_bytes
        return Memory(peak_bytes, _curve(log, held_bytes), gpu)

    def _older_bytes(self, log: AllocatorLog, begin: int) -> int:
        """Bytes at the start that no log has; adds to the log when they are freed."""
        for number, (_, size) in enumerate(self._known):
            freed = log.spans.get(f"{MARK}{_FREED}{number}")
            if freed and freed[0] >= begin:
                log.events.append((freed[0], -size))
        log.events.sort()
        shared = (n for at, n in self._shared.items() if at not in self._addresses)
        return sum(size for _, size in self._known) + sum(shared)


def _freed(number: int, known: weakref.ref[torch.UntypedStorage]) -> None:
    """Called as a storage is freed."""
    del known
    mark(f"{_FREED}{number}")


def _curve(log: AllocatorLog, held_bytes: int) -> Curve | None:
    marks = [log.spans.get(MARK + name) for name in (*PHASES, END)]
    times = [one[0] for one in marks if one is not None]
    is_in_order = all(one <= other for one, other in pairwise(times))
    whole = len(times) == len(marks) and is_in_order
    return measured_curve(log, held_bytes) if whole else None
