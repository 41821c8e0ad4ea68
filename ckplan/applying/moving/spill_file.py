"""A temporary file for tensors, written and read by a small pool of threads.

The file has no name from the moment it is open, so nothing is left of it when the
process ends, however it ends. Its blocks are allocated on the disk before they are
written, so a full disk is an error before a copy begins. Where the file system can,
copies go past the page cache, through one aligned buffer for each thread.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from ckplan.applying.moving.room import Room
from ckplan.errors import ApplyError
from ckplan.units import format_bytes

BLOCK = 4096
"""Bytes that offsets and lengths of direct copies are multiples of."""
THREADS = 2
_CHUNK = 4 * 2**20  # most bytes of one job
_DIRECT = getattr(os, "O_DIRECT", 0)


class Job(Protocol):
    """A copy under way."""

    def exception(self) -> BaseException | None:
        """Wait until the copy is over; returns why it failed."""


Jobs: TypeAlias = Sequence[Job]
Copies: TypeAlias = list[Future[None]]


_Copy: TypeAlias = Callable[["SpillFile", int, int, int], None]


def _timed(copy: _Copy) -> _Copy:
    """Count the time that a copy takes of the processor."""

    @wraps(copy)
    def run(file: SpillFile, address: int, num_bytes: int, offset: int) -> None:
        start = time.thread_time()
        try:
            copy(file, address, num_bytes, offset)
        finally:
            file.count(time.thread_time() - start)

    return run


class SpillFile:
    """A nameless file in a folder, with a pool of threads to copy from and to it."""

    device_type = "cpu"
    host_bytes = 0  # of pinned memory

    def __init__(self, folder: Path, num_bytes: int = 0) -> None:
        """Create the file.

        Args:
            folder: Where.
            num_bytes: Least bytes that it will need, if known.

        Raises:
            ApplyError: The folder cannot be written, or has too little room.
        """
        self.num_bytes = 0  # allocated on the disk
        self.processor_seconds = 0.0  # of the threads, for copies that are over
        self._lock = threading.Lock()
        self._folder = folder
        self._room = Room(BLOCK)
        self._descriptor = _open_nameless(folder)
        self._buffers = threading.local()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="ckplan-spill")
        if num_bytes:
            self.free(*self._grow(whole_blocks(num_bytes)))

    def __del__(self) -> None:
        """Give the room on the disk back."""
        if hasattr(self, "_pool"):
            self._pool.shutdown(wait=False)  # jobs hold self: none is left
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return self.num_bytes

    def allocate(self, num_bytes: int) -> int:
        """Reserve room for a tensor; returns its offset.

        Raises:
            ApplyError: The disk is full.
        """
        offset = self._room.take(num_bytes)
        return self._grow(whole_blocks(num_bytes))[0] if offset is None else offset

    def free(self, offset: int, num_bytes: int) -> None:
        """Give room in the file back, for later tensors."""
        self._room.free(offset, num_bytes)

    def write(self, tensor: torch.Tensor, offset: int) -> Copies:
        """Begin to copy a tensor, which must stay as it is, to the file."""
        return self._copy(self._write, tensor, offset)

    def read(self, tensor: torch.Tensor, offset: int) -> Copies:
        """Begin to copy from the file to a tensor."""
        return self._copy(self._read, tensor, offset)

    def submit(self, job: Callable[..., None], *args: Any) -> Future[None]:
        """Begin a job on a thread of the file."""
        return self._pool.submit(job, *args)

    def put(self, view: memoryview, offset: int) -> None:
        """Write whole blocks of an aligned buffer."""
        done = 0
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], offset + done)

    def get(self, view: memoryview, offset: int) -> None:
        """Read whole blocks to an aligned buffer."""
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if not count:
                raise OSError(errno.EIO, "the file is shorter than what was written")
            done += count

    def count(self, seconds: float) -> None:
        """Add what a copy took of the processor."""
        with self._lock:
            self.processor_seconds += seconds

    def _grow(self, num_bytes: int) -> tuple[int, int]:
        """Make the file longer; returns offset and length of the new part."""
        offset = self.num_bytes
        try:
            os.posix_fallocate(self._descriptor, offset, num_bytes)
        except OSError as error:
            raise _no_room(self._folder, num_bytes, error) from error
        self.num_bytes = offset + num_bytes
        return offset, num_bytes

    def _copy(
        self,
        job: Callable[[int, int, int], None],
        tensor: torch.Tensor,
        offset: int,
    ) -> Copies:
        address, num_bytes = tensor.data_ptr(), tensor.untyped_storage().nbytes()
        parts = range(0, num_bytes, _CHUNK)
        return [
            self._pool.submit(
                job, address + at, min(_CHUNK, num_bytes - at), offset + at
            )
            for at in parts
        ]

    def _buffer(self) -> tuple[memoryview, int]:
        """This thread's aligned buffer, and its address."""
        found = getattr(self._buffers, "one", None)
        if found is None:
            pages = mmap.mmap(-1, _CHUNK)
            address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
            found = self._buffers.one = memoryview(pages), address
        return found

    @_timed
    def _write(self, address: int, num_bytes: int, offset: int) -> None:
        view, buffer = self._buffer()
        ctypes.memmove(buffer, address, num_bytes)
        self.put(view[: whole_blocks(num_bytes)], offset)

    @_timed
    def _read(self, address: int, num_bytes: int, offset: int) -> None:
        view, buffer = self._buffer()
        self.get(view[: whole_blocks(num_bytes)], offset)
        ctypes.memmove(address, buffer, num_bytes)


def wait(jobs: Jobs) -> None:
    """Wait until all copies are over: no other thread uses their memory any more.

    Raises:
        ApplyError: One of them failed.
    """
    errors = [job.exception() for job in jobs]
    for error in errors:
        if isinstance(error, OSError):
            why = os.strerror(error.errno or 0)
            raise ApplyError(
                f"cannot move a tensor to disk and back: {why}",
                needed="a disk that can be written and read",
                hint="another folder for --spill",
            ) from error
        if error is not None:
            raise error


def release(jobs: Jobs, memory: list[torch.Tensor | None]) -> None:
    """Let go of memory that nobody wants as soon as its copies are over.

    Copies of a GPU are left to whoever waits for them with its streams.
    """
    copies = [job for job in jobs if isinstance(job, Future)]
    if len(copies) < len(jobs):
        return

    def look(_: object = None) -> None:
        if all(copy.done() for copy in copies):
            memory.clear()

    look()
    for copy in copies:
        copy.add_done_callback(look)


def whole_blocks(num_bytes: int) -> int:
    """Bytes in whole blocks of the file."""
    return -(-num_bytes // BLOCK) * BLOCK


def _open_nameless(folder: Path) -> int:
    """Open a new file without a name, past the page cache where that is possible."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".ckplan-spill-", dir=folder)
    except OSError as error:
        raise ApplyError(
            f"cannot spill to '{folder}': {os.strerror(error.errno or 0)}",
            needed="a folder that can be written",
            hint="/tmp, or another folder on a local disk",
        ) from error
    try:
        direct = os.open(name, os.O_RDWR | os.O_CLOEXEC | _DIRECT)
    except OSError:  # a file system in memory
        return descriptor
    finally:
        Path(name).unlink()
    os.close(descriptor)
    return direct


def _no_room(folder: Path, num_bytes: int, error: OSError) -> ApplyError:
    free = shutil.disk_usage(folder).free
    why = os.strerror(error.errno or 0)
    return ApplyError(
        f"cannot spill {format_bytes(num_bytes)} more to '{folder}': {why}",
        needed=f"room for the moved tensors; {format_bytes(free)} is free",
        hint="--spill with a folder on a larger disk, or a plan that moves less",
    )
