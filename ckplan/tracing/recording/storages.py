"""Number the storages of a step as they appear, and see each of them die."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import torch

from ckplan.applying.tensors.arguments import UnknownArgumentError, storage_of
from ckplan.errors import WorkloadError
from ckplan.graph.records import BEFORE_STEP
from ckplan.tracing.recording.recording import RawStorage, Recording


class Storages:
    """The live storages of a step that is recorded, by their addresses."""

    def __init__(self, recording: Recording, placed: torch.device) -> None:
        """Begin without any.

        Args:
            recording: Where they are written down.
            placed: Where the step is; what is elsewhere takes nothing.
        """
        self._recording = recording
        self._placed = placed.type
        self._ids: dict[int, int] = {}  # address of a live storage -> its number
        self._keep: list[object] = []
        self._unread: set[int] = set()  # constants that nothing has read so far
        self._over = False

    def end(self) -> None:
        """What is there now outlives the step, whoever lets it go."""
        self._over = True

    def forget(self) -> None:
        """Hold nothing any more."""
        self._keep.clear()

    def register_existing(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Register storages that exist when the step begins."""
        for tensor in tensors:
            storage = _storage_of(tensor)
            if storage._cdata not in self._ids:
                if kind != "buffer":  # which a forward may put another one in place of
                    self._keep.append(storage)
                self._register(storage, kind, BEFORE_STEP, self._bytes_of(tensor))
                self._recording.num_known = len(self._recording.storages)

    def register_rng_state(self, state: torch.Tensor) -> None:
        """Register a random state, which comes from no op and is on the CPU."""
        storage = state.untyped_storage()
        number = self._register(storage, "temporary", self._now, storage.nbytes())
        self._recording.on_host.append(number)

    def register_constant(self, tensor: torch.Tensor) -> None:
        """Register what Python made of numbers, as ``torch.tensor`` does.

        It comes from no op, so once an op reads it, it was there before the step.
        """
        if _storage_of(tensor)._cdata not in self._ids:
            self._unread.update(self.numbers([tensor], "temporary", self._now))

    @property
    def _now(self) -> int:
        """The op before this moment; at first BEFORE_STEP."""
        return len(self._recording.ops) - 1

    def count_as_zero_bytes(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count nothing for what is in another memory than the device's."""
        for tensor in tensors:
            self._recording.storages[self.number_of(tensor)].bytes = 0

    def set_kind(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Say what storages that the step made are."""
        for tensor in tensors:
            number = self.find(tensor)
            if number is not None:
                self._recording.storages[number].kind = kind

    def numbers(self, leaves: Iterable[object], kind: str, maker: int) -> list[int]:
        """The numbers of all tensors; what was not seen before is registered."""
        numbers = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                storage = _storage_of(leaf)
                number = self._find(storage)
                if number is None:
                    number = self._register(storage, kind, maker, self._bytes_of(leaf))
                    if leaf.storage_offset() or not fills_storage(leaf):
                        self._recording.storages[number].dense = False
                numbers.append(number)
        return numbers

    def numbers_made_in_step(self, leaves: Iterable[object]) -> Iterator[int]:
        """The numbers of those tensors that the step made."""
        storages = self._recording.storages
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                with suppress(UnknownArgumentError):  # it is of others that are seen
                    number = self._ids.get(storage_of(leaf)._cdata)
                    if number is None or number in self._unread:
                        continue
                    if storages[number].maker != BEFORE_STEP:
                        yield number

    def number_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage, which was seen before."""
        return self._ids[tensor.untyped_storage()._cdata]

    def find(self, tensor: torch.Tensor) -> int | None:
        """The same if it was; None of one that was not."""
        return self._find(tensor.untyped_storage())

    def _find(self, storage: torch.UntypedStorage) -> int | None:
        """The number of a storage that is read, saved or told what it is."""
        number = self._ids.get(storage._cdata)
        if number in self._unread:
            self._unread.remove(number)
            found = self._recording.storages[number]
            found.kind, found.maker = "buffer", BEFORE_STEP
        return number

    def alias_until_freed(
        self, tensor: torch.Tensor, number: int, died: Callable[[], None]
    ) -> None:
        """Take a tensor for one of another storage until it dies.

        Args:
            tensor: What stands in.
            number: Of the storage that it stands in for.
            died: Called then.
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

    def _alias(
        self,
        storage: torch.UntypedStorage,
        number: int,
        died: Callable[[int, int], None],
    ) -> None:
        self._ids[storage._cdata] = number
        weakref.finalize(storage, died, storage._cdata, number).atexit = False

    def _died(self, address: int, number: int) -> None:
        self._ids.pop(address, None)
        if not self._over:
            self._recording.storages[number].last = self._now

    def _bytes_of(self, tensor: torch.Tensor) -> int:
        here = tensor.device.type == self._placed
        return tensor.untyped_storage().nbytes() if here else 0


def fills_storage(tensor: torch.Tensor) -> bool:
    """Whether its storage has no bytes beside its own."""
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
