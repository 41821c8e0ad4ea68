"""Memory that kernels allocate while they run, measured once per distinct call.

The sizes of tensors do not say how much scratch memory a convolution or a sort needs.
So each distinct call runs alone, on tensors of zeros, under the allocator's log. On a
card, multiplications do not run: what cuBLAS takes is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ckplan.collector import collection_off
from ckplan.compiling.torch_names import storage_key
from ckplan.errors import ApplyError
from ckplan.graph.records import MULTIPLIES
from ckplan.tracing.cuda.cublas import WORKSPACE_PERSISTS, kept_bytes
from ckplan.training.allocator import (
    CPU,
    AllocatorLog,
    log_allocations,
    requested_within,
)
from ckplan.training.randomness import randomness_restored
from ckplan.training.workload import device_of, tensors_of
from ckplan.units import in_blocks

_MARK = "ckplan kernel "
_RECURRENT = "aten.mkldnn_rnn_layer"  # and its backward, which zeros would crash
_CALLED = {"bias_addmm": "addmm"}  # in generated code


class Taken(NamedTuple):
    """Bytes that a kernel takes."""

    peak_bytes: int = 0  # at once, outputs included
    # On a card, by each tensor that it returns: some are on the CPU, whatever fake
    # tensors say, such as the seed of dropout in attention.
    made: tuple[int, ...] | None = None


_KNOWN: dict[str, Taken] = {}


def bytes_on(device: str, tensor: torch.Tensor) -> int:
    """Bytes of a tensor's storage, as they count on a type of device."""
    num_bytes = tensor.untyped_storage().nbytes()
    if device == "cpu":
        return num_bytes
    return in_blocks(num_bytes) if tensor.device.type == device else 0


def bytes_of_all(tensors: Iterable[torch.Tensor], device: str) -> int:
    """Bytes of the storages of tensors, each counted once."""
    storages = {storage_key(one): bytes_on(device, one) for one in tensors}
    return sum(storages.values())


class KernelBytes:
    """Most bytes that kernels allocate at once, outputs included."""

    def __init__(self, in_code: Mapping[str, int] | None = None) -> None:
        """Measure kernels, except those that are known.

        Args:
            in_code: ``seen`` of a replay. The layout of tensors decides which kernel
                runs, and generated code lays them out as it likes.
        """
        self._in_code = in_code or {}
        self._wanted: dict[str, tuple[Callable[..., Any], Any, Any]] = {}
        self.seen: dict[str, int] = {}  # most bytes by op and shapes
        self._ran: set[str] = set()  # ops, by the thread of now

    def bytes_of(self, op: Callable[..., Any], args: Any, kwargs: Any) -> int:
        """Bytes that one call takes at once; see ``taken_by``."""
        return self.taken_by(op, args, kwargs).peak_bytes

    def taken_by(self, op: Callable[..., Any], args: Any, kwargs: Any) -> Taken:
        """Bytes of one call; none, until ``measure``, if no such call was measured.

        Raises:
            ApplyError: The kernel reads what only the same kernel can have written.
        """
        _check_runs_alone(op)
        name = _name_of(op)
        self._ran.add(name)
        tensors = tensors_of((args, kwargs))
        shapes = f"{name} {[tuple(one.shape) for one in tensors]}"
        if shapes in self._in_code:
            return Taken(self._in_code[shapes])
        if WORKSPACE_PERSISTS and name in MULTIPLIES and device_of(tensors) != CPU:
            return Taken()
        described = pytree.tree_map(_describe, (args, kwargs))
        key = repr((str(op), described, torch.get_num_threads()))
        if key not in _KNOWN:
            self._wanted[key] = op, *described
        taken = _KNOWN.get(key, Taken())
        self.seen[shapes] = max(taken.peak_bytes, self.seen.get(shapes, 0))
        return taken

    def end_thread(self, device: torch.device) -> int:
        """End the thread of forward or of backward, which ran the ops since the last.

        Returns:
            Bytes that the libraries of a card keep for it.
        """
        ran, self._ran = self._ran, set()
        if device == CPU:
            return 0
        capability = torch.cuda.get_device_capability(device)
        return sum(map(in_blocks, kept_bytes(capability, ran)))

    @property
    def wants_any(self) -> bool:
        """Whether there are calls whose bytes are unknown."""
        return bool(self._wanted)

    def measure(self) -> bool:
        """Measure the calls whose bytes are unknown; whether there were any."""
        wanted, self._wanted = self._wanted, {}
        if not wanted:
            return False
        with torch.no_grad(), randomness_restored():
            for op, args, kwargs in wanted.values():
                _run(op, args, kwargs)  # what the first run allocates stays
            with collection_off(), log_allocations(_MARK) as log:
                taken = [
                    _run(op, args, kwargs, f"{_MARK}{number}")
                    for number, (op, args, kwargs) in enumerate(wanted.values())
                ]
        for number, (key, one) in enumerate(zip(wanted, taken, strict=True)):
            if one.made is None:  # on the CPU, the log says it
                one = Taken(_peak_within(log, f"{_MARK}{number}"))
            _KNOWN[key] = one
        return True


def _check_runs_alone(op: Callable[..., Any]) -> None:
    if str(op).startswith(_RECURRENT):
        raise ApplyError(
            "cannot replay a recurrent layer of oneDNN: its workspace has a size and a "
            "content that only its kernels know",
            needed="a recurrent layer whose input requires a gradient, or no oneDNN",
            hint="torch.backends.mkldnn.set_flags(False), where the model is built",
        )


def _name_of(op: Callable[..., Any]) -> str:
    name: str = getattr(op, "overloadpacket", op).__name__
    return _CALLED.get(name, name)


class _Tensor(tuple[Any, ...]):
    """Shape, stride, type and device of a tensor made when a kernel is measured."""


def _describe(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _Tensor((tuple(value.shape), value.stride(), value.dtype, value.device))


def _made(value: Any) -> Any:
    if not isinstance(value, _Tensor):
        return value
    shape, stride, dtype, device = value
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()


def _run(op: Callable[..., Any], args: Any, kwargs: Any, mark: str = "") -> Taken:
    """Run an op on zeros; returns what it takes of a card, in blocks."""
    real_args, real_kwargs = pytree.tree_map(
        _made, (args, kwargs), is_leaf=lambda value: isinstance(value, _Tensor)
    )
    device = device_of((real_args, real_kwargs))
    with torch.profiler.record_function(mark), requested_within(device) as requested:
        # its result is freed within the mark
        made = _each_bytes(device.type, op(*real_args, **real_kwargs))
    return Taken(in_blocks(requested.peak_bytes), made)


def _each_bytes(device: str, made: object) -> tuple[int, ...] | None:
    """Bytes of each tensor that was made on a card; None on a CPU."""
    if device == "cpu":
        return None
    return tuple(bytes_on(device, one) for one in tensors_of(made))


def _peak_within(log: AllocatorLog, mark: str) -> int:
    start, stop = log.spans[mark]
    sizes = (size for at, size in log.events if start <= at <= stop)
    return max(accumulate(sizes, initial=0))
