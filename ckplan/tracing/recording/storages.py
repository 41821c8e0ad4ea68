"""Number the storages of a step as they appear, and record when each is freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch

from ckplan.applying.tensors.arguments import storage_of
from ckplan.applying.tensors.geometry import UnknownArgumentError
from ckplan.errors import WorkloadError
from ckplan.graph.records import BEFORE_STEP
from ckplan.tracing.recording.recording import RawStorage, Recording, describe


class _Alive(weakref.ref[torch.UntypedStorage]):
    """A storage that is followed until it is freed."""

    __slots__ = ("address", "died", "number")

    def __new__(cls, storage: torch.UntypedStorage, gone: Any, *_: object) -> _Alive:
        return super().__new__(cls, storage, gone)

    def __init__(
        self,
        storage: torch.UntypedStorage,
        gone: Callable[[weakref.ref[torch.UntypedStorage]], None],
        address: int,
        number: int,
        died: Callable[[int, int], None],
    ) -> None:
        del storage, gone
        self.address, self.number, self.died = address, number, died


class Storages:
    """The live storages of a recorded step, by address."""

    def __init__(self, recording: Recording, placed: torch.device) -> None:
        """Start without storages.

        Args:
            recording: The recording that storages are added to.
            placed: Device of the step; storages elsewhere count zero bytes.
        """
        self._recording = recording
        self._placed = placed.type
        self._ids: dict[int, int] = {}  # address of a live storage -> its number
        self._alive: dict[int, _Alive] = {}  # the same storages
        self._keep: list[object] = []
        self._unread: set[int] = set()  # constants that nothing has read so far
        self._constants: dict[int, int] = {}  # those that were read -> when made
        self._outside: set[int] = set()  # of the device's memory: zero bytes count
        self._over = False

    def end(self) -> None:
        """Mark the end of the step: storages alive now outlive it.

        Constants of the update are there from then on: nothing is rebuilt there.
        """
        self._over = True
        stop = self._recording.num_forward + self._recording.num_backward
        for number, made in self._constants.items():
            if made >= stop - 1:
                found = self._recording.storages[number]
                found.kind, found.maker = "temporary", made

    def forget(self) -> None:
        """Drop references to existing storages."""
        self._keep.clear()

    def register_existing(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Register storages that exist when the step begins."""
        for tensor in tensors:
            storage = _storage_of(tensor)
            if storage._cdata not in self._ids:
                if kind != "buffer":  # a forward can replace it
                    self._keep.append(storage)
                number = self._register(
                    storage, kind, BEFORE_STEP, self._bytes_of(tensor)
                )
                self._describe(number, tensor)
                self._recording.num_known = len(self._recording.storages)

    def register_rng_state(self, state: torch.Tensor) -> None:
        """Register a random state, which no op makes and which is on the CPU."""
        storage = state.untyped_storage()
        number = self._register(storage, "temporary", self._now, storage.nbytes())
        self._recording.on_host.append(number)

    def register_constant(self, tensor: torch.Tensor) -> None:
        """Register a constant that Python makes, as with ``torch.tensor``.

        No op makes it. Once an op of forward or backward reads it, it counts as made
        before the step.
        """
        if _storage_of(tensor)._cdata not in self._ids:
            self._unread.update(self.numbers([tensor], "temporary", self._now))

    @property
    def _now(self) -> int:
        """The last recorded op; at first BEFORE_STEP."""
        return len(self._recording.ops) - 1

    def count_as_zero_bytes(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count zero bytes for tensors outside the device's memory."""
        for tensor in tensors:
            number = self.number_of(tensor)
            self._recording.storages[number].bytes = 0
            self._outside.add(number)

    def set_kind(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Set the kind of storages that the step made."""
        for tensor in tensors:
            number = self.find(tensor)
            if number is not None:
                self._recording.storages[number].kind = kind

    def numbers(self, leaves: Iterable[object], kind: str, maker: int) -> list[int]:
        """The storage numbers of all tensors; registers storages that are new."""
        numbers = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                storage = _storage_of(leaf)
                number = self._find(storage)
                if number is None:
                    number = self._register(storage, kind, maker, self._bytes_of(leaf))
                    self._describe(number, leaf)
                else:
                    self._follow_growth(leaf, number)
                numbers.append(number)
        return numbers

    def _follow_growth(self, tensor: torch.Tensor, number: int) -> None:
        """Count what an op added to a storage, such as to an empty ``out``."""
        found, num_bytes = self._recording.storages[number], self._bytes_of(tensor)
        if num_bytes > found.bytes and number not in self._outside:
            alive = self._alive[_storage_of(tensor)._cdata]
            if alive.died == self._died:  # it stands for no other
                found.bytes = num_bytes

    def numbers_made_in_step(self, leaves: Iterable[object]) -> Iterator[int]:
        """The storage numbers of those tensors that the step made."""
        storages = self._recording.storages
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                with suppress(UnknownArgumentError):  # its parts are recorded
                    number = self._ids.get(storage_of(leaf)._cdata)
                    if number is None or number in self._unread:
                        continue
                    if storages[number].maker != BEFORE_STEP:
                        yield number

    def known(self, leaves: Iterable[object]) -> set[int]:
        """The numbers of those storages of tensors that are known."""
        tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        found = (self._ids.get(_storage_of(tensor)._cdata) for tensor in tensors)
        return {number for number in found if number is not None}

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is known."""
        return bool(self.known([tensor]))

    def number_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage, which must be known."""
        return self._ids[tensor.untyped_storage()._cdata]

    def find(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor's storage; None if it is not known."""
        return self._find(tensor.untyped_storage())

    def _find(self, storage: torch.UntypedStorage) -> int | None:
        """The number of a storage that is read, saved or marked with a kind."""
        number = self._ids.get(storage._cdata)
        if number in self._unread:
            self._unread.remove(number)
            found = self._recording.storages[number]
            self._constants[number] = found.maker
            found.kind, found.maker = "buffer", BEFORE_STEP
        return number

    def alias_until_freed(
        self, tensor: torch.Tensor, number: int, died: Callable[[], None]
    ) -> None:
        """Count a tensor as part of another storage until it is freed.

        Args:
            tensor: The placeholder.
            number: The storage that the placeholder represents.
            died: Called when the placeholder's storage is freed.
        """
        storage = tensor.untyped_storage()
        if storage._cdata in self._ids:
            return

        def gone(address: int, number: int) -> None:
            del number
            self._ids.pop(address, None)
            died()

        self._alias(storage, number, gone)

    def _register(
        self, storage: torch.UntypedStorage, kind: str, maker: int, num_bytes: int
    ) -> int:
        number = len(self._recording.storages)
        self._recording.storages.append(RawStorage(num_bytes, kind, maker))
        self._alias(storage, number, self._died)
        return number

    def _describe(self, number: int, tensor: torch.Tensor) -> None:
        """Record the first tensor of a storage.

        One that existed before the step can be a part of it; then, no tensor is named.
        """
        found = self._recording.storages[number]
        found.dense = not tensor.storage_offset() and fills_storage(tensor)
        if found.dense or found.maker != BEFORE_STEP:
            found.tensor = describe(tensor)

    def _alias(
        self,
        storage: torch.UntypedStorage,
        number: int,
        died: Callable[[int, int], None],
    ) -> None:
        address = storage._cdata
        self._ids[address] = number
        # Not ``weakref.finalize``, which takes three times as long.
        self._alive[address] = _Alive(storage, self._gone, address, number, died)

    def _gone(self, alive: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(alive, _Alive)
        if self._alive.get(alive.address) is alive:
            del self._alive[alive.address]
        alive.died(alive.address, alive.number)

    def _died(self, address: int, number: int) -> None:
        self._ids.pop(address, None)
        if not self._over:
            self._recording.storages[number].last = self._now

    def _bytes_of(self, tensor: torch.Tensor) -> int:
        here = tensor.device.type == self._placed
        return tensor.untyped_storage().nbytes() if here else 0


def fills_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor uses every byte of its storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    try:
        return storage_of(tensor)
    except UnknownArgumentError:
        layout = str(tensor.layout).removeprefix("torch.")
        raise WorkloadError(
            f"cannot trace the step: it uses tensors of layout {layout}, whose bytes "
            "are not followed",
            needed="strided tensors, in gradients, too",
            hint="sparse=False for embeddings, to_dense() for matrices",
        ) from None
