"""Live bytes while code runs on fake tensors, and their peak.

Fake tensors have sizes and no bytes. Every storage counts from its allocation until
nothing holds it. On a card, bytes are those of the allocator's blocks; what is on the
CPU beside it does not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckplan.compiling.torch_names import storage_key
from ckplan.compiling.workspaces import KernelBytes, Taken, bytes_on
from ckplan.training.workload import tensors_of

_NO_KERNEL = {"empty_strided", "as_strided", "detach", "device"}


class Ledger:
    """Live bytes and their peak, from births and deaths of storages.

    On a card, these are bytes of blocks, and tensors on the CPU take none.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device  # its type
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()

    def ignore(self, value: object) -> int:
        """Do not count a tensor that exists anyway; returns its bytes, once."""
        if not isinstance(value, torch.Tensor):
            return 0
        return self._watch(value, self._known.discard)

    def count(self, value: object, num_bytes: int | None = None) -> None:
        """Count a tensor's storage until it is freed, unless it is known.

        Args:
            value: The tensor; anything else does not count.
            num_bytes: That it takes; by default, those of its storage.
        """
        if isinstance(value, torch.Tensor):
            self._add(self._watch(value, self._free, num_bytes))

    def spike(self, num_bytes: int) -> None:
        """Count bytes that are freed at once."""
        self._add(num_bytes)
        self._add(-num_bytes)

    def _watch(
        self,
        tensor: torch.Tensor,
        at_death: Callable[..., None],
        num_bytes: int | None = None,
    ) -> int:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        size = bytes_on(self.device, tensor) if num_bytes is None else num_bytes
        if key in self._known:
            return 0
        self._known.add(key)
        sized = (key, size) if at_death == self._free else (key,)
        weakref.finalize(storage, at_death, *sized)
        return size

    def _free(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self._add(-num_bytes)

    def _add(self, num_bytes: int) -> None:
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class Meter(TorchDispatchMode):
    """Counts the outputs and the scratch memory of every op."""

    def __init__(self, ledger: Ledger, kernels: KernelBytes) -> None:
        super().__init__()
        self.ledger, self.kernels = ledger, kernels

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        taken = Taken()
        if op.overloadpacket.__name__ not in _NO_KERNEL:
            taken = self.kernels.taken_by(op, args, kwargs)
        self.ledger.spike(taken.peak_bytes)
        made = op(*args, **kwargs)
        tensors = tensors_of(made)
        sizes = taken.made or [None] * len(tensors)
        for one, num_bytes in zip(tensors, sizes, strict=True):
            self.ledger.count(one, num_bytes)
        return made
