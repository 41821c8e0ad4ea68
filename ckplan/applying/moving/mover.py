"""Which tensor is copied when: few on their way out, few on their way back.

The order of copies follows the order of ops alone, never the speed of the disk, so
live bytes are those that ``simulating/moving.py``, which states the rules, predicts.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias
from weakref import ref

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ckplan import encodings
from ckplan.applying.moving.moved import (
    FILE,
    OF_ENCODED,
    Group,
    Moved,
    changed_error,
    is_changed,
)
from ckplan.applying.moving.spill_file import Jobs, release, wait
from ckplan.applying.moving.stores import HOST, Store, elsewhere, new_store
from ckplan.applying.tensors.arguments import version_of
from ckplan.encodings import Encoded
from ckplan.errors import ApplyError
from ckplan.simulating.moving import IN_FLIGHT

Form: TypeAlias = Encoded | Moved
"""What is kept of a value in place of its tensor."""


class _Remains(NamedTuple):
    """What is left of a moved tensor that nobody wants any more."""

    jobs: Jobs
    offset: int
    num_bytes: int
    memory: list[torch.Tensor | None]  # which the jobs may still use


class Mover:
    """Moves tensors of one model; a copy of the model gets its own."""

    def __init__(
        self, place: Path | str | None, num_bytes: int = 0, device_type: str = "cpu"
    ) -> None:
        """Create the file or pin the memory.

        Args:
            place: A folder, ``HOST``, or None: only fake tensors can be moved.
            num_bytes: Bytes of the tensors that will move, if known.
            device_type: Where the model is. Before the first tensor is moved, the model
                may go elsewhere.

        Raises:
            ApplyError: The folder cannot be written, there is no GPU, or too little
                room.
        """
        self._place, self._num_bytes = place, num_bytes
        self._device_type = device_type
        self._lock = threading.RLock()
        self._leaving: deque[ref[Moved]] = deque()  # the last ones handed over
        self._count = 0  # of tensors moved so far
        self._groups: list[ref[Group]] = []  # in the order of their forwards
        self._remains: deque[_Remains] = deque()
        self._process = os.getpid()
        self._store: Store | None = None
        if place is not None:
            self._store = new_store(place, device_type, num_bytes)

    def __reduce__(self) -> tuple[Callable[..., Mover], tuple[object, ...]]:
        return _unopened, (self._place, self._num_bytes, self._device_type)

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return self._store.file_bytes if self._store else 0

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory."""
        return self._store.host_bytes if self._store else 0

    def encode(
        self, form: str, tensor: torch.Tensor, *, in_place: bool = False
    ) -> Form | None:
        """Encode a tensor, or begin to move it; None if it has no such form.

        Args:
            form: ``FILE``, an encoding, or both with ``OF_ENCODED`` between.
            tensor: Output of an op that has just run.
            in_place: Whether that op is about to count as a change of the tensor.

        Raises:
            ApplyError: The disk is full, or a copy failed.
        """
        name, _, place = form.rpartition(OF_ENCODED)
        if place != FILE:
            return encodings.encode(form, tensor)
        if not _is_whole(tensor):
            return None
        small = encodings.encode(name, tensor) if name else None
        if small is not None:
            tensor, in_place = small.data, False
        if tensor.device.type == "cpu" and tensor.is_shared():
            raise _shared(tensor)
        with self._lock:
            self.settle(IN_FLIGHT - 1)
            num_bytes = tensor.untyped_storage().nbytes()
            store = None if isinstance(tensor, FakeTensor) else self._own_store(tensor)
            offset = store.allocate(num_bytes) if store else 0
            version = version_of(tensor) + in_place
            moved = Moved(self, self._count, tensor, offset, version, small)
            if store:
                moved.address = tensor.data_ptr()
                moved.jobs = store.write(tensor, offset)
            self._leaving.append(ref(moved))
            self._count += 1
            return moved

    def settle(self, most: int = 0, *, quiet: bool = False) -> None:
        """Wait until at most some tensors are on their way out; free the others.

        Args:
            most: How many may go on.
            quiet: Whether what failed is an error only if it is wanted back.

        Raises:
            ApplyError: A copy failed, or a tensor changed meanwhile.
        """
        with self._lock:
            self._bury()
            while len(self._leaving) > most:
                moved = self._leaving.popleft()()
                if moved is None or moved.data is None:
                    continue
                try:
                    wait(moved.jobs)
                    if is_changed(moved, moved.data):
                        raise changed_error(moved)
                except ApplyError as error:
                    moved.lost = error
                    if not quiet:
                        raise
                moved.data, moved.jobs = None, ()

    def add(self, group: Group) -> None:
        """Add the tensors of a region whose forward is over."""
        with self._lock:
            living = (one for one in self._groups if one() is not None)
            self._groups = [*living, ref(group)]

    def begin(self, group: Group) -> None:
        """Begin to return the last tensors of a region."""
        with self._lock:
            self.settle()
            if not group.begun:
                self._follow(group)

    def fetch(self, moved: Moved) -> torch.Tensor:
        """Return a tensor to memory, and begin to return the one moved before it.

        Raises:
            ApplyError: A copy failed.
        """
        with self._lock:
            self.settle()
            group = moved.group() if moved.group else None
            assert group is not None, "internal error: fetched without its region"
            if moved.process != os.getpid():
                raise _of_parent(moved)
            if moved.lost is not None:
                raise moved.lost
            if moved.back is None:
                group.away.remove(moved)
                self._begin_return(moved)
            if moved in group.ahead:
                group.ahead.remove(moved)
            self._follow(group)
            if not group.ahead:
                self._begin_group_before()
            jobs, back = moved.jobs, moved.back
        wait(jobs)
        assert back is not None, "internal error: a moved tensor was fetched twice"
        with self._lock:
            if self._store:
                self._store.free(moved.offset, moved.num_bytes)
            moved.back, moved.jobs, moved.num_bytes = None, (), 0
        return back

    def forget(self, moved: Moved) -> None:
        """Keep what copies still use; called whenever Python frees a moved tensor.

        It takes no lock: it may run in the middle of any method.
        """
        if moved.num_bytes and moved.process == os.getpid():
            memory = [moved.data, moved.back]
            release(moved.jobs, memory)
            self._remains.append(
                _Remains(moved.jobs, moved.offset, moved.num_bytes, memory)
            )

    def _bury(self) -> None:
        """Free what forgotten tensors leave, when their copies are over."""
        while self._remains:
            jobs, offset, num_bytes, _ = self._remains.popleft()
            for job in jobs:
                job.exception()  # waits; nobody wants what it copied
            if self._store:
                self._store.free(offset, num_bytes)

    def _follow(self, group: Group) -> None:
        """Begin to return the last tensors of a region that are still away."""
        group.begun = True
        while group.away and len(group.ahead) < IN_FLIGHT:
            group.ahead.append(group.away.pop())
            self._begin_return(group.ahead[-1])

    def _begin_group_before(self) -> None:
        """Begin to return tensors of the last region that was not asked yet."""
        for one in reversed(self._groups):
            group = one()
            if group is not None and not group.begun:
                self._follow(group)
                return

    def _begin_return(self, moved: Moved) -> None:
        size, stride, dtype = moved.moves
        moved.back = torch.empty_strided(size, stride, dtype=dtype, device=moved.device)
        if self._store:
            moved.jobs = self._store.read(moved.back, moved.offset)

    def _own_store(self, tensor: torch.Tensor) -> Store:
        """The file of this process: a fork must not write into its parent's."""
        place, device_type = self._place, tensor.device.type
        if place is None:
            raise elsewhere(device_type, None)
        if place != HOST and not self._count and device_type != self._device_type:
            self._store, self._device_type = None, device_type
        if self._store is None or self._process != os.getpid():
            self._store = new_store(place, self._device_type, self._num_bytes)
            self._process = os.getpid()
            self._groups = []
            self._leaving.clear()
            self._remains.clear()
        if device_type != self._store.device_type:
            raise elsewhere(device_type, place)
        return self._store


def _unopened(place: Path | str | None, num_bytes: int, device_type: str) -> Mover:
    """That of a copy of a model: it takes room when it trains, if it ever does."""
    mover = Mover(None, num_bytes, device_type)
    mover._place = place
    return mover


def decode(kept: Form) -> torch.Tensor:
    """Return a value that was kept in another form to its tensor."""
    return kept.decode() if isinstance(kept, Moved) else encodings.decode(kept)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is plain, and all of its storage."""
    plain = tensor.layout is torch.strided and not tensor.is_quantized
    if not plain or tensor.device.type == "meta" or tensor.storage_offset():
        return False
    dense = encodings.is_dense(tensor.size(), tensor.stride())
    return dense and tensor.nbytes == tensor.untyped_storage().nbytes() > 0


def warn_of_kept(form: str, region: str, op: str) -> None:
    """Warn that a tensor stays where it is, if its form is one that moves."""
    if not form.endswith(FILE):
        return
    warnings.warn(
        f"{region} keeps {op}, which the plan moves: it is no plain tensor with memory "
        "of its own; results are the same, memory is not",
        stacklevel=2,
    )


def _of_parent(moved: Moved) -> ApplyError:
    return ApplyError(
        f"cannot return a tensor of shape {tuple(moved.size)}: the process that this "
        "one was forked from moved it to its own file",
        needed="backward in the process of its forward",
        hint="run the forward again in this process",
    )


def _shared(tensor: torch.Tensor) -> ApplyError:
    return ApplyError(
        f"cannot move a tensor of shape {tuple(tensor.shape)}: its memory is shared "
        "with other processes",
        needed="offloaded tensors that nobody else writes to",
        hint="leave its op out of offload",
    )
