"""State of a worker process: digests of tensors, memory that persists over steps."""

from __future__ import annotations

import hashlib
import pickle
import random
import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy
import torch
from torch.nn.parameter import is_lazy

from ckplan.errors import WorkloadError
from ckplan.training.step import TrainingStep
from ckplan.training.workload import Workload, first_rows, rows_of, tensors_of

WeakStorages: TypeAlias = list[tuple["weakref.ref[torch.UntypedStorage]", int]]
"""Weak references to storages, and their bytes."""


def halved(workload: Workload, times: int) -> Workload:
    """The same workload with the first half of its batch, or a quarter, and so on.

    Raises:
        WorkloadError: The batch has too few rows.
    """
    rows = rows_of(workload)
    if times and rows >> times == 0:
        raise WorkloadError(
            f"cannot halve a batch of {rows} rows {times} times",
            needed="tensors whose first dimension is the batch",
            hint="a factory with a larger batch",
        )
    return first_rows(workload, rows >> times) if times else workload


def cap_memory(cap_bytes: int | None, device: torch.device) -> None:
    """Limit the bytes that a GPU's allocator may reserve; None sets no limit.

    A larger GPU can thus verify a budget: a step over the limit is out of memory.
    """
    if cap_bytes is not None:
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        share = min(1.0, cap_bytes / total_bytes)
        number = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_per_process_memory_fraction(share, number)


def digest(tensor: torch.Tensor | None) -> str:
    """Equal for tensors of the same dtype, shape and bits only."""
    if tensor is None:
        return "none"
    plain = tensor.detach().to_dense().resolve_conj().resolve_neg().contiguous()
    found = hashlib.sha256(f"{plain.dtype}{tuple(plain.shape)}".encode())
    found.update(plain.cpu().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def wait_for(device: torch.device) -> None:
    """Wait until a GPU finishes its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bytes_held_on_gpu(device: torch.device) -> int | None:
    """Bytes allocated at the start of a step; resets the GPU's peak. None on CPU."""
    if device.type != "cuda":
        return None
    wait_for(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def persistent_storages(step: TrainingStep) -> WeakStorages:
    """Weak references to distinct storages of ``persistent_tensors``.

    Lazy parameters have no storage before their first forward, which the log records.
    """
    return storages_of(one for one in persistent_tensors(step) if not is_lazy(one))


def storages_of(tensors: Iterable[torch.Tensor]) -> WeakStorages:
    """Weak references to the distinct storages of tensors."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    distinct = {storage.data_ptr(): storage for storage in storages}.values()
    return [(weakref.ref(storage), storage.nbytes()) for storage in distinct]


def live_bytes_of(known: WeakStorages) -> int:
    """Bytes of the storages that are still alive; the allocator's log lacks them."""
    return sum(size for storage, size in known if storage() is not None)


def persistent_tensors(step: TrainingStep) -> list[torch.Tensor]:
    """Tensors that live from one step to the next.

    Parameters, buffers, tensors that modules hold as plain attributes, the optimizer's
    state, the batch and the target, and what the functions of the loss hold.
    """
    workload = step.workload
    optimizer = [] if step.optimizer is None else list(step.optimizer.state.values())
    held = [*map(_held_by, (workload.model, workload.loss, workload.step))]
    return tensors_of([held, optimizer, workload.data])


def _held_by(function: Any) -> list[Any]:
    """What a function closes over or was given, and the attributes of modules in it."""
    found = [function]
    if isinstance(function, partial):
        found += [*function.args, *function.keywords.values()]
        found += _held_by(function.func)
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # it is empty
            found.append(cell.cell_contents)
    modules = (one.modules() for one in found if isinstance(one, torch.nn.Module))
    return [*found, *map(vars, chain.from_iterable(modules))]


def random_state_digest(device: torch.device) -> str:
    """Return a digest of the random states of Python, NumPy and torch."""
    others = pickle.dumps((random.getstate(), numpy.random.get_state()))
    found = digest(torch.get_rng_state()) + hashlib.sha256(others).hexdigest()
    if device.type == "cuda":
        found += digest(torch.cuda.get_rng_state(device))
    return found
