"""Peaks as the allocator of the CPU has them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ckplan.training.allocator import log_allocations


def peak_bytes_of(run: Callable[[], object], held: Iterable[torch.Tensor] = ()) -> int:
    """Most bytes allocated while ``run`` runs, on top of tensors held all along."""
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
    with log_allocations() as log:
        run()
    return sum(sizes.values()) + log.peak_bytes


class Live(TorchDispatchMode):
    """Most bytes that ops made and somebody holds: faster, and without kernels' own."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._now_bytes = 0
        self._known: set[int] = set()  # addresses of storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self._now_bytes += storage.nbytes()
                    weakref.finalize(
                        storage, self._died, storage._cdata, storage.nbytes()
                    )
        self.peak_bytes = max(self.peak_bytes, self._now_bytes)
        return out

    def _died(self, address: int, num_bytes: int) -> None:
        self._known.remove(address)
        self._now_bytes -= num_bytes


def live_bytes_of(run: Callable[[], object]) -> int:
    """Most bytes that ops make while ``run`` runs, as far as somebody holds them."""
    with Live() as live:
        run()
    return live.peak_bytes
