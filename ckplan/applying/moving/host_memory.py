"""Pinned host memory for tensors of a GPU, and the streams that copy them.

The memory is pinned once, as many bytes as the plan moves: torch's own allocator of
pinned memory would round them up to a power of two. One stream copies out, one copies
back. Nothing here waits on the CPU: streams wait for events.

- A copy out waits for the stream that made the tensor. The tensor is given up after its
  stream waits for the copy, so the allocator may hand the block on at once, and
  allocated and reserved bytes do not depend on the speed of the link.
- A copy back goes to a block of the stream that wants the tensor, and waits for that
  stream, which may still use the block for what was there before. It waits for the copy
  out as well, for which that stream has waited.
- Room of the pinned memory is free when its tensor is back on its stream. Whatever is
  copied there next waits for the stream that makes it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias
from weakref import finalize

import torch

from ckplan.applying.moving.room import Room
from ckplan.applying.moving.spill_file import Jobs
from ckplan.available import available_bytes
from ckplan.errors import ApplyError
from ckplan.simulating.moving import host_bytes_for
from ckplan.units import format_bytes

BLOCK = 64
"""Bytes that offsets are multiples of."""

Stream: TypeAlias = Any  # torch.cuda.Stream, or one of a test
Event: TypeAlias = Any


class AbstractStreams(Protocol):
    """What copies need of a device."""

    device_type: str

    def current(self, device: torch.device) -> Stream:
        """The stream that ops run on now."""

    def create(self, device: torch.device) -> Stream:
        """A new stream."""

    def wait_stream(self, stream: Stream, other: Stream) -> None:
        """A stream waits for all that another one has begun."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        """A stream waits for an event."""

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Another stream uses a tensor, too: its block waits for it when freed."""

    def record(self, stream: Stream) -> Event:
        """The event of all that a stream has begun."""

    def synchronize(self, event: Event) -> None:
        """The CPU waits for an event."""

    def copy_out(
        self, stream: Stream, host: torch.Tensor, tensor: torch.Tensor, start: int = 0
    ) -> Event:
        """Begin to copy a tensor to pinned bytes; returns the event of its end.

        As many bytes as are pinned, from the tensor's byte ``start``.
        """

    def copy_back(
        self, stream: Stream, tensor: torch.Tensor, host: torch.Tensor, start: int = 0
    ) -> Event:
        """Begin to copy pinned bytes to a tensor; returns the event of its end."""

    def pin(self, num_bytes: int) -> tuple[torch.Tensor, Callable[[], None]]:
        """Pinned bytes of host memory, and what gives them back."""


class CudaStreams:
    """Streams and pinned memory of CUDA."""

    device_type = "cuda"

    def __init__(self) -> None:
        """Check that there is a GPU.

        Raises:
            ApplyError: There is none.
        """
        if not torch.cuda.is_available():
            raise ApplyError(
                "cannot offload to host memory: there is no GPU here",
                needed="a GPU, whose memory is not that of the host",
                hint="--spill FOLDER on the CPU, or --fake, which needs no hardware",
            )

    def current(self, device: torch.device) -> Stream:
        """The stream that ops run on now."""
        return torch.cuda.current_stream(device)

    def create(self, device: torch.device) -> Stream:
        """A new stream."""
        return torch.cuda.Stream(device)

    def wait_stream(self, stream: Stream, other: Stream) -> None:
        """A stream waits for all that another one has begun."""
        stream.wait_stream(other)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """A stream waits for an event."""
        stream.wait_event(event)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Another stream uses a tensor, too: its block waits for it when freed."""
        tensor.record_stream(stream)

    def record(self, stream: Stream) -> Event:
        """The event of all that a stream has begun."""
        return stream.record_event()

    def synchronize(self, event: Event) -> None:
        """The CPU waits for an event."""
        event.synchronize()

    def copy_out(
        self, stream: Stream, host: torch.Tensor, tensor: torch.Tensor, start: int = 0
    ) -> Event:
        """Begin to copy a tensor to pinned bytes; returns the event of its end."""
        return self._copy(stream, host, as_bytes(tensor)[start : start + len(host)])

    def copy_back(
        self, stream: Stream, tensor: torch.Tensor, host: torch.Tensor, start: int = 0
    ) -> Event:
        """Begin to copy pinned bytes to a tensor; returns the event of its end."""
        return self._copy(stream, as_bytes(tensor)[start : start + len(host)], host)

    def pin(self, num_bytes: int) -> tuple[torch.Tensor, Callable[[], None]]:
        """Pinned bytes of host memory, and what gives them back.

        Raises:
            ApplyError: The device or the system does not pin them.
        """
        memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)  # pages
        cudart = torch.cuda.cudart()
        code = int(cudart.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
        if code:
            raise ApplyError(
                f"cannot pin {format_bytes(num_bytes)} of host memory (CUDA's error "
                f"{code})",
                needed="a device with pinned memory, and a host that has room for it",
                hint="`ulimit -l unlimited`, or a plan that moves less",
            )

        def give_back() -> None:
            torch.cuda.synchronize()  # no copy uses it any more
            cudart.cudaHostUnregister(memory.data_ptr())

        return memory, give_back

    @staticmethod
    def _copy(stream: Stream, target: torch.Tensor, source: torch.Tensor) -> Event:
        with torch.no_grad(), torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event(torch.cuda.Event(blocking=True))


class _Copy(NamedTuple):
    """A copy under way, which streams wait for in place of the CPU."""

    streams: AbstractStreams
    event: Event
    owner: Stream  # of the block of the tensor
    device: torch.device
    tensor: torch.Tensor | None = None  # that comes back

    def exception(self) -> None:
        """The tensor's stream, and the one that runs now, wait for the copy."""
        current = self.streams.current(self.device)
        self.streams.wait_event(self.owner, self.event)
        if current != self.owner:
            self.streams.wait_event(current, self.event)
            if self.tensor is not None:
                self.streams.record_stream(self.tensor, current)


class HostMemory:
    """Pinned memory, with one stream each way for every GPU."""

    file_bytes = 0  # of a file

    def __init__(
        self, num_bytes: int = 0, streams: AbstractStreams | None = None
    ) -> None:
        """Pin the memory.

        Args:
            num_bytes: Bytes of the tensors that will move, if known. Without them,
                memory is pinned as tensors move for the first time.
            streams: Those of CUDA by default.

        Raises:
            ApplyError: There is no GPU, or too little memory.
        """
        self.streams = CudaStreams() if streams is None else streams
        self.device_type = self.streams.device_type
        self.num_bytes = 0  # pinned
        self._room = Room(BLOCK)
        self._parts: list[tuple[int, torch.Tensor]] = []  # (offset, pinned bytes)
        self._out: dict[torch.device, Stream] = {}
        self._back: dict[torch.device, Stream] = {}
        if num_bytes:
            self._pin(host_bytes_for(num_bytes))

    @property
    def host_bytes(self) -> int:
        """Bytes of pinned host memory."""
        return self.num_bytes

    def allocate(self, num_bytes: int) -> int:
        """Reserve room for a tensor; returns its offset.

        Raises:
            ApplyError: The host has no room.
        """
        offset = self._room.take(num_bytes)
        if offset is None:
            self._pin(self._room.rounded(num_bytes))
            offset = self._room.take(num_bytes)
        assert offset is not None, "internal error: no room in new memory"
        return offset

    def free(self, offset: int, num_bytes: int) -> None:
        """Give room back, for later tensors."""
        self._room.free(offset, num_bytes)

    def write(self, tensor: torch.Tensor, offset: int) -> Jobs:
        """Begin to copy a tensor, which must stay as it is, to the host."""
        streams, device = self.streams, tensor.device
        owner = streams.current(device)
        stream = self._stream(self._out, device)
        streams.wait_stream(stream, owner)
        event = streams.copy_out(stream, self._bytes(tensor, offset), tensor)
        return [_Copy(streams, event, owner, device)]

    def read(self, tensor: torch.Tensor, offset: int) -> Jobs:
        """Begin to copy from the host to a tensor, which was allocated just now."""
        streams, device = self.streams, tensor.device
        owner = streams.current(device)
        stream = self._stream(self._back, device)
        streams.wait_stream(stream, owner)
        event = streams.copy_back(stream, tensor, self._bytes(tensor, offset))
        return [_Copy(streams, event, owner, device, tensor)]

    def _stream(
        self, known: dict[torch.device, Stream], device: torch.device
    ) -> Stream:
        if device not in known:
            known[device] = self.streams.create(device)
        return known[device]

    def _bytes(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        """The pinned bytes of a tensor."""
        at, memory = next(one for one in reversed(self._parts) if one[0] <= offset)
        start = offset - at
        return memory[start : start + tensor.untyped_storage().nbytes()]

    def _pin(self, num_bytes: int) -> None:
        num_bytes = self._room.rounded(num_bytes)
        there = available_bytes()
        if num_bytes > there:
            raise ApplyError(
                f"cannot offload {format_bytes(num_bytes)} to host memory: "
                f"{format_bytes(there)} is available",
                needed="room for the moved tensors in the memory of this machine",
                hint="a plan that moves less: a larger --budget",
            )
        memory, give_back = self.streams.pin(num_bytes)
        finalize(self, give_back).atexit = False  # the system does it then
        at = self._parts[-1][0] + len(self._parts[-1][1]) if self._parts else 0
        self._parts.append((at + BLOCK, memory))  # parts are never neighbours
        self._room.free(at + BLOCK, num_bytes)
        self.num_bytes += num_bytes


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's storage, not copied."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))
