"""Fake tensors that a traced model leaves in caches of its module's own.

A dict such as ``_POSITIONS[length]``, or a list that a hook appends to, outlives the
trace, and would hand its fake tensors to the next real step.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_OF_OTHERS = {"torch", "ckplan", "numpy", "sympy", "networkx", *sys.stdlib_module_names}
_PLAIN = dict, list, OrderedDict, defaultdict  # others may load what they list


def known_containers() -> list[Any]:
    """The dicts and lists that modules and their classes hold by name."""
    return [*{id(one): one for one in _containers()}.values()]  # each once


def empty_of(fake: FakeTensorMode, containers: list[Any]) -> None:
    """Take what has fake tensors of a mode out of dicts and lists."""
    for one in containers:
        if isinstance(one, list):
            if any(_holds(value, fake) for value in one):
                one[:] = [value for value in one if not _holds(value, fake)]
            continue
        for key in [key for key, value in one.items() if _holds(value, fake)]:
            del one[key]


def _containers() -> Iterator[Any]:
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] in _OF_OTHERS:
            continue
        for value in [*getattr(module, "__dict__", {}).values()]:
            if type(value) in _PLAIN:
                yield value
            elif type(value) is type and value.__module__ == name:
                yield from (one for one in vars(value).values() if type(one) in _PLAIN)


def _holds(value: Any, fake: FakeTensorMode) -> bool:
    """Whether a value is a fake tensor of a mode, or a few things with one."""
    if type(value) in (tuple, list):
        return any(type(one) is FakeTensor and one.fake_mode is fake for one in value)
    # not isinstance: it asks torch about each of hundred thousands of values
    return type(value) is FakeTensor and value.fake_mode is fake
