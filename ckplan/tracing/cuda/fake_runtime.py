"""Fake streams, events, generators and properties for a GPU that is not installed.

None of them changes the bytes of a step. Streams and events order kernels in time,
seeds decide values, and properties come from the table of cards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ckplan.gpus import Gpu
from ckplan.tracing.cuda.translation import Capability

_DEVICE = torch.device("cuda", 0)
_STATE_BYTES = 16  # of a CUDA generator: seed and offset


def fake_cuda_functions(capability: Capability, gpu: Gpu | None) -> dict[str, object]:
    """Name of a ``torch.cuda`` function -> its result, or a function to call."""
    major, minor = capability
    stream = Stream()
    found: dict[str, object] = {
        **dict.fromkeys(_DOING_NOTHING, None),
        **dict.fromkeys(_NOTHING_YET, 0),
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "can_device_access_peer": False,
        "is_current_stream_capturing": False,
        "current_stream": stream,
        "default_stream": stream,
        "get_device_capability": capability,
        "get_arch_list": lambda: [f"sm_{major}{minor}"],
        "is_bf16_supported": partial(_computes_bf16, capability),
        "is_tf32_supported": capability >= (8, 0),
        "get_rng_state": _random_state,
        "get_rng_state_all": lambda: [_random_state()],
        "memory_stats": lambda device=None: Counter(),
        "memory_summary": "",
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    if gpu is not None:
        sizes = (gpu.usable_bytes, gpu.capacity_bytes)
        found["get_device_name"] = gpu.name
        found["mem_get_info"] = sizes
        found["get_device_properties"] = Properties(gpu.name, major, minor, sizes[1])
    return found


_DOING_NOTHING = (
    "synchronize",
    "empty_cache",
    "set_device",
    "set_stream",
    "init",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_accumulated_memory_stats",
    "set_per_process_memory_fraction",
)
_NOTHING_YET = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "initial_seed",
)
ACCELERATOR: dict[str, object] = {
    "is_available": True,
    "device_count": 1,
    "current_accelerator": _DEVICE,
    "current_device_index": 0,
    "synchronize": None,
    "set_device_index": None,
    "empty_cache": None,
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
    "reset_peak_memory_stats": None,
}
"""Name of a ``torch.accelerator`` function -> its result."""


@contextmanager
def fake_cuda_objects() -> Iterator[None]:
    """A scope in which CUDA streams, events and generators can be created."""
    with ExitStack() as stack:

        def put(owner: Any, name: str, by: Any) -> None:
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, by))

        for kind, by in ((torch.cuda.Stream, Stream), (torch.cuda.Event, Event)):
            put(kind, "__new__", _made_as(by))  # also where its name was imported
        put(torch, "Stream", Stream)
        put(torch, "Event", Event)
        put(torch, "Generator", Generator)
        put(torch.Tensor, "record_stream", lambda tensor, stream: None)
        put(torch.cuda.nvtx, "_nvtx", _Ranges())
        yield


def _made_as(by: Callable[..., object]) -> Callable[..., object]:
    return lambda cls, *args, **kwargs: by(*args, **kwargs)


class Stream:
    """A stream on which all work is already done."""

    device, device_index, stream_id, cuda_stream = _DEVICE, 0, 0, 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        del args, kwargs

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # ``isinstance`` reads this, too
        return torch.cuda.Stream

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority, as on most cards."""
        return 0, -5

    def query(self) -> bool:
        """Whether all work is done: always True."""
        return True

    def synchronize(self) -> None:
        """Do nothing, as there is nothing to wait for."""

    def wait_stream(self, stream: object) -> None:
        """Do nothing, as there is nothing to wait for."""

    def wait_event(self, event: object) -> None:
        """Do nothing, as there is nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """Return the given event or a new one, which is already done."""
        return event or Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: object) -> None:
        pass


class Event:
    """An event that is already done; two events are a millisecond apart."""

    device, cuda_event, event_id = _DEVICE, 0, 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        del args, kwargs

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # ``isinstance`` reads this, too
        return torch.cuda.Event

    def record(self, stream: object = None) -> None:
        """Do nothing."""

    def wait(self, stream: object = None) -> None:
        """Do nothing, as there is nothing to wait for."""

    def query(self) -> bool:
        """Whether the event is done: always True."""
        return True

    def synchronize(self) -> None:
        """Do nothing, as there is nothing to wait for."""

    def elapsed_time(self, end: object) -> float:
        """One millisecond; not zero, as callers divide by it."""
        del end
        return 1.0


class _OfTorch(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, torch._C.Generator)


class Generator(torch.Generator, metaclass=_OfTorch):
    """A CUDA generator that draws on the CPU and reports CUDA as its device."""

    def __new__(cls, device: Any = "cpu") -> Any:  # noqa: D102
        if torch.device(device).type != "cuda":
            return torch._C.Generator(device)
        return super().__new__(cls, "cpu")

    def __init__(self, device: Any = "cpu") -> None:
        del device

    @property
    def device(self) -> torch.device:
        """The reported device."""
        return _DEVICE


@dataclass(frozen=True)
class Properties:
    """Device properties of a card."""

    name: str
    major: int
    minor: int
    total_memory: int
    warp_size: int = 32

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name!r} of {self.name} is not known without it")


class _Ranges:
    """NVTX ranges that do nothing."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args: 0


def _random_state(device: object = None) -> torch.Tensor:
    del device
    with _disable_current_modes():
        return torch.zeros(_STATE_BYTES, dtype=torch.uint8)


def _computes_bf16(
    capability: Capability, device: object = None, including_emulation: bool = True
) -> bool:
    """Whether a card supports bfloat16; older cards emulate it."""
    return including_emulation or capability >= (8, 0)
