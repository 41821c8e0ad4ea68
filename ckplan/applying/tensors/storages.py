"""Storages of a region's tensors, and the values retained on them."""

from __future__ import annotations

from collections.abc import Container, Iterable
from contextlib import suppress
from weakref import ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ckplan.applying.tensors.arguments import storage_of
from ckplan.applying.tensors.geometry import UnknownArgumentError
from ckplan.applying.tensors.retained import Retained, retain, retain_copy
from ckplan.errors import ApplyError
from ckplan.simulating.program import EXTERNAL, Flow


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
        self.shared: set[int] = set()  # addresses of those from outside
        # Storage from outside -> tensor through which it was written last.
        self._written_by: dict[int, ref[torch.Tensor]] = {}
        self._region = region
        self._addresses: list[StorageWeakRef] = []  # keep addresses from being reused

    def number(self, tensor: torch.Tensor, *, inside: bool = False) -> int:
        """The number of a tensor's storage; outside tensors are retained."""
        try:
            storage = storage_of(tensor)
        except UnknownArgumentError:
            raise self._not_strided(str(tensor.layout)) from None
        number = self.numbers.get(storage._cdata)
        if number is None:
            if tensor.is_nested:
                raise self._not_strided("nested")
            number = len(self.num_bytes)
            self.num_bytes.append(storage.nbytes())
            self.know(storage, number)
            if inside:
                self.inside.add(number)
            else:
                self.retained[self.flow.value(number)] = one = retain(tensor)
                if storage._cdata in self.shared:
                    one.watch()
        return number

    def _not_strided(self, layout: str) -> ApplyError:
        return ApplyError(
            f"cannot rebuild {self._region}: it uses tensors without bytes of "
            f"their own ({layout.removeprefix('torch.')})",
            needed="strided tensors",
            hint="leave this call out of the plan, or run it again (by: rerun)",
        )

    def know(self, storage: torch.UntypedStorage, number: int) -> None:
        """Register a storage by its address."""
        self._addresses.append(StorageWeakRef(storage))
        self.numbers[storage._cdata] = number

    def value(self, tensor: torch.Tensor) -> int:
        """The value of a tensor."""
        return self.flow.value(self.number(tensor))

    def note_written(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage, which an op writes through it."""
        number = self.number(tensor)
        if number not in self.inside:
            self._written_by[number] = ref(_owner_of(tensor))
        return number

    def retain_written(
        self, read: Iterable[tuple[torch.Tensor, int]], encoded: Container[int]
    ) -> bool:
        """Retain what the region wrote to tensors from outside, where it stays.

        So it need not be rebuilt, from content that is gone. What was written through
        another tensor, such as its ``data``, has no version of its own to check in
        backward: of that a copy is retained.

        Args:
            read: What an op reads: tensors and their values.
            encoded: Values that are held in another form.

        Returns:
            Whether something was copied.
        """
        copied = False
        for tensor, value in read:
            number = self.flow.storage_of[value]
            outside = number not in self.inside and value not in self.retained
            outside &= value not in encoded
            if outside and self.flow.maker_of[value] != EXTERNAL:
                by = self._written_by.get(number)
                tracked = by is not None and by() is _owner_of(tensor)
                self.retained[value] = (retain if tracked else retain_copy)(tensor)
                copied |= not tracked
        return copied

    def leave(self, tensor: torch.Tensor, other: object) -> None:
        """Note that a tensor is about to be given the bytes of another.

        One of another size frees or gathers it: it is checked for in backward.
        """
        if isinstance(other, torch.Tensor) and other.shape != tensor.shape:
            return
        for one in self.retained.values():
            if one.tensor is tensor:
                one.stay()

    def value_inside(self, tensor: torch.Tensor) -> int:
        """The value of a tensor that the region made; -1 for another."""
        try:
            number = self.numbers.get(storage_of(tensor)._cdata)
        except UnknownArgumentError:
            return -1
        return self.flow.value(number) if number in self.inside else -1

    def value_made(self, number: int) -> int:
        """The value of a storage that the region made or wrote; -1 for another."""
        value = self.flow.current.get(number, -1)
        return -1 if value < 0 or self.flow.maker_of[value] == EXTERNAL else value

    def hand_out(self, tensor: torch.Tensor) -> None:
        """Note that code outside torch may write a tensor's bytes."""
        if self.value_inside(tensor) >= 0:
            number = self.number(tensor)
            self.handed_out.add(number)
            self.unfilled[number] = tensor
            return
        with suppress(UnknownArgumentError):
            address = storage_of(tensor)._cdata
            self.shared.add(address)
            for one in self.retained.values():
                if one.address == address:
                    one.watch()

    def fill(self, numbers: Iterable[int]) -> None:
        """Note that an op filled storages: their content is its output."""
        for number in {*numbers} - self.handed_out:
            self.unfilled.pop(number, None)

    def hold_unfilled(self) -> None:
        """Retain storages that code other than ops may have written."""
        for number, tensor in self.unfilled.items():
            self.retained[self.flow.value(number)] = retain(tensor)


def _owner_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose version counts writes: that which a tensor is a view of."""
    return tensor if tensor._base is None else tensor._base
