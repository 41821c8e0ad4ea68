"""The log of torch functions that a forward calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from ckplan.applying.recording.saved_tensors import Packing
from ckplan.applying.tensors.arguments import (
    Slots,
    hands_out,
    is_query,
    moves,
    only_checks,
    reads_sizes,
    storage_of,
    switches,
    takes_sizes,
)
from ckplan.applying.tensors.geometry import (
    Geometry,
    UnknownArgumentError,
    geometry_of,
)
from ckplan.applying.tensors.numbers import makes_tensor
from ckplan.applying.tensors.retained import tensors_in
from ckplan.applying.tensors.storages import Storages


class Returned(NamedTuple):
    """A tensor that a call returned."""

    value: int = -1  # if the region made or wrote it
    geometry: Geometry | None = None
    unread: StorageWeakRef | None = None  # its storage, if no op has seen that


@dataclass(slots=True)
class Call:
    """A recorded call."""

    func: Callable[..., Any]
    arguments: Any
    switches: tuple[Any, ...]
    packed_before: int
    writes: Mapping[int, int]  # to tensors that it took, since a call returned them
    packed_after: int = 0
    returned: Sequence[Returned] = ()
    numbers: Sequence[int] = ()  # of the tensors that it returned
    returns_new: bool = False  # one tensor, which no call had returned or taken before
    is_sized: bool = False  # it took sizes from tensors


class CallLog(TorchFunctionMode):
    """Records the functions that a forward calls."""

    def __init__(self, storages: Storages, packing: Packing) -> None:
        """Begin a forward with its storages and saved tensors."""
        super().__init__()
        self.calls: list[Call] = []
        self.inputs: list[tuple[Geometry, StorageWeakRef]] = []
        self.made: list[int] = []  # the values of tensors that calls returned
        self.read = False  # a call took a number from a tensor
        self.broken = False  # a call cannot be compared with another
        self.current = -1
        self._is_paused = False
        self._storages = storages
        self._packing = packing
        self._slots = Slots(self._meet)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if hands_out(func) and isinstance(args[0], torch.Tensor):
            self._storages.hand_out(args[0])
        if moves(func):
            self.leave(*args)
        if self.broken or self._is_paused or is_query(func):
            return func(*args, **kwargs)
        if reads_sizes(func, args):
            self.broken = True
            return func(*args, **kwargs)
        try:
            arguments = self._slots.freeze(
                args, kwargs, makes_tensor=makes_tensor(func)
            )
        except UnknownArgumentError:
            self.broken = True
            return func(*args, **kwargs)
        taken = self._slots.writes
        writes = {n: taken[n] for n in taken if self.made[n] >= 0}
        num_packed = len(self._packing.packed)
        call = Call(func, arguments, switches(func), num_packed, writes)
        self.current, self.read = len(self.calls), False
        try:
            out = func(*args, **kwargs)
        except BaseException:
            self.broken = True
            raise
        finally:
            self.current = -1
        self._slots.returned(out)
        tensors = tensors_in(out)
        if self.read and tensors and not only_checks(func, args, kwargs):
            call.is_sized = takes_sizes(func)
            self.broken |= not call.is_sized
        call.packed_after = len(self._packing.packed)
        call.returned = [self._describe(tensor) for tensor in tensors]
        call.numbers = [self._slots.number_of(tensor) for tensor in tensors]
        is_new = call.numbers == [len(self.made)]
        call.returns_new = isinstance(out, torch.Tensor) and is_new
        for number, one in zip(call.numbers, call.returned, strict=True):
            if number == len(self.made):
                self.made.append(one.value)
        self.calls.append(call)
        return out

    def leave(self, tensor: torch.Tensor, other: object = None) -> None:
        """Note that a tensor is about to be given the bytes of another.

        No guard of a later forward knows which bytes it has.
        """
        self.broken = True
        self._storages.leave(tensor, other)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record no calls that the region itself makes."""
        self._is_paused = True
        yield
        self._is_paused = False

    def close(self) -> None:
        """End the forward."""
        self._slots.close()

    def _meet(self, tensor: torch.Tensor) -> None:
        self.inputs.append((geometry_of(tensor), StorageWeakRef(storage_of(tensor))))

    def _describe(self, tensor: torch.Tensor) -> Returned:
        try:
            geometry, storage = geometry_of(tensor), storage_of(tensor)
        except UnknownArgumentError:
            return Returned()
        number = self._storages.numbers.get(storage._cdata)
        if number is None:
            return Returned(-1, geometry, StorageWeakRef(storage))
        return Returned(self._storages.value_made(number), geometry)
