"""Memory that kernels allocate while they run, measured once per distinct call.

The sizes of tensors do not say how much scratch memory a convolution or a sort needs.
So each distinct call runs alone, on tensors of zeros, under the allocator's log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ckplan.errors import ApplyError
from ckplan.training.allocator import AllocatorLog, log_allocations
from ckplan.training.collector import collection_off

_MARK = "ckplan kernel "
_RECURRENT = "aten.mkldnn_rnn_layer"  # and its backward, which zeros would crash
_KNOWN: dict[str, int] = {}


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

    def bytes_of(self, op: Callable[..., Any], args: Any, kwargs: Any) -> int:
        """Bytes of one call; 0, until ``measure``, if no such call was measured.

        Raises:
            ApplyError: The kernel reads what only the same kernel can have written.
        """
        _check_runs_alone(op)
        shapes = _op_and_shapes(op, args, kwargs)
        if shapes in self._in_code:
            return self._in_code[shapes]
        described = pytree.tree_map(_describe, (args, kwargs))
        key = repr((str(op), described))
        if key not in _KNOWN:
            self._wanted[key] = op, *described
        num_bytes = _KNOWN.get(key, 0)
        self.seen[shapes] = max(num_bytes, self.seen.get(shapes, 0))
        return num_bytes

    @property
    def wants_any(self) -> bool:
        """Whether there are calls whose bytes are unknown."""
        return bool(self._wanted)

    def measure(self) -> bool:
        """Measure the calls whose bytes are unknown; whether there were any."""
        wanted, self._wanted = self._wanted, {}
        if not wanted:
            return False
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for op, args, kwargs in wanted.values():
                _run(op, args, kwargs)  # what the first run allocates stays
            with collection_off(), log_allocations(_MARK) as log:
                for number, (op, args, kwargs) in enumerate(wanted.values()):
                    _run(op, args, kwargs, f"{_MARK}{number}")
        for number, key in enumerate(wanted):
            _KNOWN[key] = _peak_within(log, f"{_MARK}{number}")
        return True


def _check_runs_alone(op: Callable[..., Any]) -> None:
    if str(op).startswith(_RECURRENT):
        raise ApplyError(
            "cannot replay a recurrent layer of oneDNN: its workspace has a size and a "
            "content that only its kernels know",
            needed="a recurrent layer whose input requires a gradient, or no oneDNN",
            hint="torch.backends.mkldnn.set_flags(False), where the model is built",
        )


def _op_and_shapes(op: Callable[..., Any], args: Any, kwargs: Any) -> str:
    name = getattr(op, "overloadpacket", op).__name__
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return f"{name} {[tuple(one.shape) for one in tensors]}"


class _Tensor(tuple[Any, ...]):
    """Shape, stride and type of a tensor that is made when a kernel is measured."""


def _describe(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _Tensor((tuple(value.shape), value.stride(), value.dtype))


def _made(value: Any) -> Any:
    if not isinstance(value, _Tensor):
        return value
    shape, stride, dtype = value
    return torch.empty_strided(shape, stride, dtype=dtype).zero_()


def _run(op: Callable[..., Any], args: Any, kwargs: Any, mark: str = "") -> None:
    real_args, real_kwargs = pytree.tree_map(
        _made, (args, kwargs), is_leaf=lambda value: isinstance(value, _Tensor)
    )
    with torch.profiler.record_function(mark):
        op(*real_args, **real_kwargs)  # frees its result within the mark


def _peak_within(log: AllocatorLog, mark: str) -> int:
    start, stop = log.spans[mark]
    sizes = (size for at, size in log.events if start <= at <= stop)
    return max(accumulate(sizes, initial=0))
