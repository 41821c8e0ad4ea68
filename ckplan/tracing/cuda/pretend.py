"""What Python code is told while it runs as if on a GPU.

Code of the workload itself hears that CUDA is there and that its tensors are on it.
Libraries hear the truth: they remember such answers, and would go on to load kernels of
their own that cannot be traced; that they asked is said.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils import _pytree as pytree

from ckplan.tracing.cuda.words import Capability, Words

_LIBRARIES = ("site-packages", "dist-packages")
_STANDARD = sysconfig.get_path("stdlib")
_OURS = str(Path(__file__).parents[2])
_TORCHS = str(Path(torch.__file__).parent)
_REMEMBERED = ("is_available", "device_count")


@contextmanager
def answered(capability: Capability, words: Words) -> Iterator[None]:
    """A scope in which the workload's code hears that there is a GPU."""
    answers: dict[str, object] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": capability,
        "is_bf16_supported": partial(_computes_bf16, capability),
        "synchronize": None,
        "empty_cache": None,
        "set_device": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "reset_peak_memory_stats": None,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            real = getattr(torch.cuda, name)
            told = _told(name, real, answer, words)
            stack.enter_context(mock.patch.object(torch.cuda, name, told))
        yield


@contextmanager
def on_cpu() -> Iterator[None]:
    """A scope in which what is asked for on CUDA is on CPU, and says that it is not."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(FakeTensor, "device", _device()))
        for module in (optimizer, _foreach_utils):  # lists of parameters, as on CUDA
            devices = "_get_foreach_kernels_supported_devices"
            stack.enter_context(mock.patch.object(module, devices, lambda: ["cpu"]))
        stack.enter_context(_OnCpu())
        yield


def autocast_on() -> AbstractContextManager[object]:
    """A scope in which autocast for CUDA does not turn itself off without a GPU."""
    missing = "amp_definitely_not_available"
    return mock.patch.object(torch.cuda.amp.common, missing, lambda: False)


def _computes_bf16(
    capability: Capability, device: object = None, including_emulation: bool = True
) -> bool:
    """Older cards emulate it, which torch counts."""
    return including_emulation or capability >= (8, 0)


def _told(
    name: str, real: Callable[..., object], answer: object, words: Words
) -> Callable[..., object]:
    def ask(*args: Any, **kwargs: Any) -> object:
        who = sys._getframe(1).f_code.co_filename
        told = answer(*args, **kwargs) if callable(answer) else answer
        if is_workload(who):
            words.say(f"torch.cuda.{name}(): the workload was told {told}")
            return told
        if name not in _REMEMBERED:
            return told
        if not who.startswith((_TORCHS, _OURS)):
            *_, library = re.split("|".join(f"/{one}/" for one in _LIBRARIES), who)
            library = library.partition("/")[0] or who
            words.say(f"torch.cuda.{name}(): {library} asked and saw no GPU")
        return real(*args, **kwargs)

    return ask


def is_workload(file: str) -> bool:
    """Whether code is the user's: no library, not torch, not ours."""
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


class _OnCpu(TorchFunctionMode):
    """Puts what is asked for on CUDA where the translation has it: on CPU."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func == torch.Tensor.is_cuda.__get__:
            return is_workload(sys._getframe(1).f_code.co_filename)
        if "device" in kwargs or func in _TAKING_DEVICES:
            args, kwargs = pytree.tree_map(_on_cpu, (args, kwargs))
        return func(*args, **kwargs)


_TAKING_DEVICES = {torch.Tensor.to, torch.Tensor.new_tensor}


def _on_cpu(leaf: Any) -> Any:
    text = leaf.type if isinstance(leaf, torch.device) else leaf
    if isinstance(text, str) and text.partition(":")[0] == "cuda":
        return torch.device("cpu")
    return leaf
