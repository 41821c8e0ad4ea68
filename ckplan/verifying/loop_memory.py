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
from ckplan.tracing.alive import alive_tensors
from ckplan.training.allocator import (
    AllocatorLog,
    GpuAllocatorStats,
    gpu_allocator_stats,
    log_allocations,
)
from ckplan.training.loaders import waiting_tensors
from ckplan.verifying.worker import BEGIN, END, MARK, mark, measured_curve
from ckplan.verifying.worker_state import (
    WeakStorages,
    bytes_held_on_gpu,
    live_bytes_of,
    storages_of,
)

_FREED = "freed "  # mark of a storage that is older than the log


class Memory(NamedTuple):
    """Memory of a step."""

    peak_bytes: int
    curve: Curve | None  # None if the loop has no forward, backward and update in turns
    gpu: GpuAllocatorStats | None


class LoopMemory:
    """Measures a step from one update to the next.

    The allocator's log tells of what is made while it runs. It begins before the first
    forward; what is older is known from Python, which tells when it is freed. Of memory
    that processes share, the log tells whenever it is mapped, and when no longer.
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
        self._known, shared = _by_sharing([*found, *grads, *waiting_tensors()])
        self._shared_bytes = live_bytes_of(shared)
        self._waiting: set[int] = set()  # addresses of what waits as the step begins
        self._held_bytes: int | None = None  # on a GPU

    def begin(self) -> None:
        """The step begins."""
        gc.collect()
        self._waiting = {one.data_ptr() for one in _waiting_storages()}
        self._held_bytes = bytes_held_on_gpu(self._device)
        alive = [(one, size) for known, size in self._known if (one := known())]
        self._known = [
            (weakref.ref(one, partial(_freed, number)), size)
            for number, (one, size) in enumerate(alive)
        ]
        del alive
        mark(BEGIN)

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
            held_bytes -= self._leave_out_waiting(log)
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
        return sum(size for _, size in self._known) + self._shared_bytes

    def _leave_out_waiting(self, log: AllocatorLog) -> int:
        """Bytes that waited all along; what began to wait is taken from the log."""
        waited_bytes = 0
        for one in _waiting_storages():
            size = one.nbytes()
            if one.data_ptr() in self._waiting:
                waited_bytes += size
                continue
            came = (event for event in log.events if event[1] == size)
            if event := next(came, None):
                log.events.remove(event)
        return waited_bytes


def _by_sharing(
    tensors: Iterable[torch.Tensor],
) -> tuple[WeakStorages, WeakStorages]:
    """Storages of this process alone, and those that processes of the CPU share."""
    own: list[torch.Tensor] = []
    shared: list[torch.Tensor] = []
    for one in tensors:
        is_shared = one.device.type == "cpu" and one.is_shared()
        (shared if is_shared else own).append(one)
    return storages_of(own), storages_of(shared)


def _waiting_storages() -> list[torch.UntypedStorage]:
    """The storages of batches that wait in shared memory."""
    _, shared = _by_sharing(waiting_tensors())
    return [one for known, _ in shared if (one := known())]


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
