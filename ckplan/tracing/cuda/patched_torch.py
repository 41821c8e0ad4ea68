"""Answer queries for a GPU while Python code runs without one.

Code of the workload gets the answer that CUDA is available and that its tensors are on
it. Libraries get the true answer, because they cache it and would load kernels that
cannot be traced. A note says which library asked.
"""

from __future__ import annotations

import functools
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils

from ckplan.gpus import Gpu
from ckplan.tracing.cuda.fake_runtime import (
    ACCELERATOR,
    fake_cuda_functions,
    fake_cuda_objects,
)
from ckplan.tracing.cuda.translation import Capability, TranslationNotes

_LIBRARIES = ("site-packages", "dist-packages")
_STANDARD = sysconfig.get_path("stdlib")
_OURS = str(Path(__file__).parents[2])
_TORCHS = str(Path(torch.__file__).parent)
_REMEMBERED = ("is_available", "device_count", "is_initialized", "current_accelerator")
_PLAIN = (bool, int, float, str, tuple, list, torch.device)


@contextmanager
def patched_cuda_queries(
    capability: Capability, words: TranslationNotes, gpu: Gpu | None = None
) -> Iterator[None]:
    """A scope in which queries of the workload's code find a GPU.

    Args:
        capability: Compute capability of the GPU.
        words: Gets a note on each answer.
        gpu: The card, for its name, memory and properties.
    """
    owners = (
        (torch.cuda, fake_cuda_functions(capability, gpu)),
        (torch.accelerator, ACCELERATOR),
    )
    with ExitStack() as stack:
        stack.callback(torch.set_default_device, _default_device())
        for owner, answers in owners:
            for name, answer in answers.items():
                real = getattr(owner, name, None)
                if real is not None:
                    told = _told(f"{owner.__name__}.{name}", real, answer, words)
                    stack.enter_context(mock.patch.object(owner, name, told))
        stack.enter_context(fake_cuda_objects())
        yield


@contextmanager
def cuda_calls_on_cpu(words: TranslationNotes) -> Iterator[None]:
    """A scope in which tensors for CUDA are on the CPU and report CUDA."""
    with ExitStack() as stack:

        def put(owner: Any, name: str, by: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, by))

        put(FakeTensor, "device", _device())
        for module in (optimizer, _foreach_utils):  # foreach kernels, as on CUDA
            devices = "_get_foreach_kernels_supported_devices"
            put(module, devices, lambda: ["cpu"])
        for owner, name in ((torch._C._nn, "_parse_to"), (torch, "set_default_device")):
            put(owner, name, _first_on_cpu(getattr(owner, name)))
        if torch.get_default_device().type == "cuda":
            stack.enter_context(torch.device(_CPU))
        stack.enter_context(_OnCpu(words))
        yield


def amp_without_gpu() -> AbstractContextManager[object]:
    """A scope in which CUDA's autocast and scalers stay enabled without a GPU."""
    missing = "amp_definitely_not_available"
    return mock.patch.object(torch.cuda.amp.common, missing, lambda: False)


def _told(
    name: str, real: Callable[..., object], answer: object, words: TranslationNotes
) -> Callable[..., object]:
    def ask(*args: Any, **kwargs: Any) -> object:
        who = sys._getframe(1).f_code.co_filename
        told = answer(*args, **kwargs) if callable(answer) else answer
        if is_workload(who):
            if told is not None:
                words.add_note(f"{name}(): the workload was told {_shown(told)}")
            return told
        if not name.endswith(_REMEMBERED):
            return told
        if not who.startswith((_TORCHS, _OURS)):
            *_, library = re.split("|".join(f"/{one}/" for one in _LIBRARIES), who)
            library = library.partition("/")[0] or who
            words.add_note(f"{name}(): {library} asked and saw no GPU")
        return real(*args, **kwargs)

    return ask


def _default_device() -> torch.device | None:
    """The device set by ``torch.set_default_device``, or None."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _shown(told: object) -> object:
    """An answer for a note; objects by type, as addresses mean nothing."""
    return told if isinstance(told, _PLAIN) else f"a {type(told).__name__}"


@functools.cache
def is_workload(file: str) -> bool:
    """Whether a file belongs to the user, not to a library, torch or ckplan."""
    library = any(f"/{one}/" in file for one in _LIBRARIES)
    return not (library or file.startswith((_TORCHS, _OURS, "<", _STANDARD)))


def _device() -> property:
    real = FakeTensor.device
    cuda = torch.device("cuda", 0)

    def device(tensor: FakeTensor) -> torch.device:
        found = real.fget(tensor)
        asked_by = sys._getframe(1).f_code.co_filename
        return cuda if found.type == "cpu" and is_workload(asked_by) else found

    return property(device, real.fset)


def _first_on_cpu(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to move a first argument that is a CUDA device to the CPU."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return real(*map(_on_cpu, args[:1]), *args[1:], **_with_device(kwargs))

    return call


class _OnCpu(TorchFunctionMode):
    """Creates and moves tensors for CUDA on the CPU instead."""

    def __init__(self, words: TranslationNotes) -> None:
        super().__init__()
        self._words = words

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        by_workload = is_workload(sys._getframe(1).f_code.co_filename)
        if func is torch.Tensor.cuda:
            return args[0]
        if func == torch.Tensor.is_cuda.__get__:
            return by_workload
        if func is torch.Tensor.get_device:
            return 0 if by_workload else -1
        moved = args[1:2] if func is torch.Tensor.to else ()
        places = {_type_of(one) for one in (*moved, kwargs.get("device"))}
        if func is torch.Tensor.cpu or (by_workload and _CPU in places):
            self._words.add_note(
                "what goes to the host counts as if it were on the card"
            )
        args = (*args[:1], *map(_on_cpu, moved), *args[1 + len(moved) :])
        return func(*args, **_with_device(kwargs))


_CPU = "cpu"


def _with_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    device = kwargs.get("device")
    return kwargs if device is None else {**kwargs, "device": _on_cpu(device)}


def _on_cpu(device: Any) -> Any:
    return torch.device(_CPU) if _type_of(device) == "cuda" else device


def _type_of(device: Any) -> str | None:
    """The device type of a device, its name or its index; else None."""
    if type(device) is int:
        return "cuda"
    name = device.type if isinstance(device, torch.device) else device
    return name.partition(":")[0] if isinstance(name, str) else None
