"""Storages of a region's tensors, and the values retained on them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ckplan.applying.tensors.arguments import UnknownArgumentError, storage_of
from ckplan.applying.tensors.retained import Retained, retain
from ckplan.errors import ApplyError
from ckplan.simulating.program import Flow


class Storages:
    """The storages of one forward, numbered by first appearance."""

    def __init__(self, region: str) -> None:
        """Begin without storages; ``region`` is its name in errors."""
        self.flow = Flow()
        self.numbers: dict[int, int] = {}  # address of a storage -> its number
        self.num_bytes: list[int] = []  # of each
        self.inside: set[int] = set()  # those that the region made
        self.retained: dict[int, Retained] = {}  # value -> tensor
        # Storages that code other than ops may write: not filled yet, or their bytes
        # were handed out, which lasts for the whole forward.
        self.unfilled: dict[int, torch.Tensor] = {}
        self.handed_out: set[int] = set()
        self._region = region
        self._addresses: list[StorageWeakRef] = []  # keep addresses from being reused

    def number(self, tensor: torch.Tensor, *, inside: bool = False) -> int:
        """The number of a tensor's storage; outside tensors are retained."""
        try:
            storage = storage_of(tensor)
        except UnknownArgumentError:
            raise ApplyError(
                f"cannot rebuild {self._region}: it uses tensors without bytes of "
                f"their own ({str(tensor.layout).removeprefix('torch.')})",
                needed="strided tensors",
                hint="leave this call out of the plan, or run it again (by: rerun)",
            ) from None
        number = self.numbers.get(storage._cdata)
        if number is None:
            number = len(self.num_bytes)
            self.num_bytes.append(storage.nbytes())
            self.know(storage, number)
            if inside:
                self.inside.add(number)
            else:
                self.retained[self.flow.value(number)] = retain(tensor)
        return number

    def know(self, storage: torch.UntypedStorage, number: int) -> None:
        """Register a storage by its address."""
        self._addresses.append(StorageWeakRef(storage))
        self.numbers[storage._cdata] = number

    def value(self, tensor: torch.Tensor) -> int:
        """The value of a tensor."""
        return self.flow.value(self.number(tensor))

    def value_inside(self, tensor: torch.Tensor) -> int:
        """The value of a tensor that the region made; -1 for another."""
        try:
            number = self.numbers.get(storage_of(tensor)._cdata)
        except UnknownArgumentError:
            return -1
        return self.flow.value(number) if number in self.inside else -1

    def hand_out(self, tensor: torch.Tensor) -> None:
        """Note that code outside torch may write a tensor's bytes."""
        if self.value_inside(tensor) >= 0:
            number = self.number(tensor)
            self.handed_out.add(number)
            self.unfilled[number] = tensor

    def fill(self, numbers: Iterable[int]) -> None:
        """Note that an op filled storages: their content is its output."""
        for number in {*numbers} - self.handed_out:
            self.unfilled.pop(number, None)

    def hold_unfilled(self) -> None:
        """Retain storages that code other than ops may have written."""
        for number, tensor in self.unfilled.items():
            self.retained[self.flow.value(number)] = retain(tensor)
