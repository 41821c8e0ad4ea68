"""A file for tensors of a GPU, behind a small room of pinned host memory.

For machines whose host memory is too small for what moves. The threads of the file copy
parts of a tensor: from the device to a pinned buffer and on to the file, and back. Each
has one such buffer, so host memory is the same for every plan.

- A copy waits, on its own stream, for what the tensor's stream had begun when it was
  asked for: the op that makes the tensor, or ops that still use the block for what was
  there before. Its thread waits for its end before it writes the buffer to the file, or
  fills it again; the file is read without waiting for the device.
- Whoever wants the tensor, or its block, waits on the CPU until it is all over. So no
  stream has anything left to wait for, and blocks are freed as ``mover.py`` says: live
  bytes depend on the order of ops alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias
from weakref import finalize, ref

import torch

from ckplan.applying.moving.host_memory import (
    AbstractStreams,
    CudaStreams,
    Event,
    Stream,
)
from ckplan.applying.moving.spill_file import THREADS, Jobs, SpillFile, whole_blocks
from ckplan.simulating.moving import STAGING_BYTES

PART_BYTES = STAGING_BYTES // THREADS
"""Of each thread's pinned buffer."""

_Buffer: TypeAlias = tuple[torch.Tensor, memoryview]
"""The same pinned bytes, for streams and for the file."""


class _Way(NamedTuple):
    """Where the parts of one tensor are copied, and what for they wait first."""

    stream: Stream
    ready: Event
    tensor: ref[torch.Tensor]  # which nobody frees before its copies are over


class _Copy(NamedTuple):
    """A copy under way, which the CPU waits for."""

    parts: Sequence[Future[None]]
    streams: AbstractStreams
    owner: Stream  # of the block of the tensor
    device: torch.device
    tensor: torch.Tensor | None = None  # that comes back

    def exception(self) -> BaseException | None:
        """Wait until all parts are over; returns why one failed."""
        errors = [part.exception() for part in self.parts]
        current = self.streams.current(self.device)
        if self.tensor is not None and current != self.owner:
            self.streams.record_stream(self.tensor, current)
        return next((error for error in errors if error is not None), None)


class FileBehindHost:
    """A nameless file, one pinned buffer for each of its threads, a stream each way."""

    def __init__(
        self, folder: Path, num_bytes: int = 0, streams: AbstractStreams | None = None
    ) -> None:
        """Create the file and pin the buffers.

        Args:
            folder: Where.
            num_bytes: Least bytes that the file will need, if known.
            streams: Those of CUDA by default.

        Raises:
            ApplyError: There is no GPU, no pinned memory, the folder cannot be written,
                or the disk has too little room.
        """
        self.streams = CudaStreams() if streams is None else streams
        self.device_type = self.streams.device_type
        self._file = SpillFile(folder, num_bytes)
        self._out: dict[torch.device, Stream] = {}
        self._back: dict[torch.device, Stream] = {}
        self._memory, give_back = self.streams.pin(STAGING_BYTES)
        finalize(self, give_back).atexit = False  # the system does it then
        self._buffers: SimpleQueue[_Buffer] = SimpleQueue()
        for start in range(0, STAGING_BYTES, PART_BYTES):
            self._buffers.put(_buffer(self._memory[start : start + PART_BYTES]))

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return self._file.file_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory."""
        return len(self._memory)

    def allocate(self, num_bytes: int) -> int:
        """Reserve room in the file for a tensor; returns its offset.

        Raises:
            ApplyError: The disk is full.
        """
        return self._file.allocate(num_bytes)

    def free(self, offset: int, num_bytes: int) -> None:
        """Give room in the file back, for later tensors."""
        self._file.free(offset, num_bytes)

    def write(self, tensor: torch.Tensor, offset: int) -> Jobs:
        """Begin to copy a tensor, which must stay as it is, to the file."""
        streams, device = self.streams, tensor.device
        owner = streams.current(device)
        way = self._way(self._out, owner, tensor)
        parts = [
            self._file.submit(self._write, way, start, num_bytes, offset + start)
            for start, num_bytes in _parts(tensor)
        ]
        return [_Copy(parts, streams, owner, device)]

    def read(self, tensor: torch.Tensor, offset: int) -> Jobs:
        """Begin to copy from the file to a tensor, which was allocated just now."""
        streams, device = self.streams, tensor.device
        owner = streams.current(device)
        way = self._way(self._back, owner, tensor)
        parts = [
            self._file.submit(self._read, way, start, num_bytes, offset + start)
            for start, num_bytes in _parts(tensor)
        ]
        return [_Copy(parts, streams, owner, device, tensor)]

    def _way(
        self, known: dict[torch.device, Stream], owner: Stream, tensor: torch.Tensor
    ) -> _Way:
        device = tensor.device
        if device not in known:
            known[device] = self.streams.create(device)
        return _Way(known[device], self.streams.record(owner), ref(tensor))

    @contextmanager
    def _taken(self) -> Iterator[_Buffer]:
        """A buffer that no other thread has."""
        buffer = self._buffers.get()
        try:
            yield buffer
        finally:
            self._buffers.put(buffer)

    def _write(self, way: _Way, start: int, num_bytes: int, offset: int) -> None:
        streams, tensor = self.streams, way.tensor()
        assert tensor is not None, "internal error: freed before its copy out"
        with self._taken() as (pinned, view):
            streams.wait_event(way.stream, way.ready)
            part = pinned[:num_bytes]
            streams.synchronize(streams.copy_out(way.stream, part, tensor, start))
            self._file.put(view[: whole_blocks(num_bytes)], offset)

    def _read(self, way: _Way, start: int, num_bytes: int, offset: int) -> None:
        streams, tensor = self.streams, way.tensor()
        assert tensor is not None, "internal error: freed before its copy back"
        with self._taken() as (pinned, view):
            self._file.get(view[: whole_blocks(num_bytes)], offset)
            streams.wait_event(way.stream, way.ready)
            part = pinned[:num_bytes]
            streams.synchronize(streams.copy_back(way.stream, tensor, part, start))


def _parts(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Start and bytes of each part of a tensor's storage."""
    size = tensor.untyped_storage().nbytes()
    for start in range(0, size, PART_BYTES):
        yield start, min(PART_BYTES, size - start)


def _buffer(pinned: torch.Tensor) -> _Buffer:
    bytes_ = (ctypes.c_char * len(pinned)).from_address(pinned.data_ptr())
    return pinned, memoryview(bytes_).cast("B")
