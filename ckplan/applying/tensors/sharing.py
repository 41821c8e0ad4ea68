"""Keep one of equal records: layers that are alike then share what their forwards read.

What an engine reads at every call of every layer is more than the caches of a processor
hold, unless equal layers read the same objects.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from threading import Lock
from types import MethodWrapperType
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch

PLAIN = frozenset(
    {
        bool,
        bytes,
        int,
        range,
        str,
        type(None),
        type(...),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)
"""Types of values that are equal only if they are the same, item by item."""

_T = TypeVar("_T")
_IN_SETS = {int, str, type}


class Shared(Generic[_T]):
    """Records by their keys; those that nothing else holds are forgotten."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: WeakValueDictionary[Hashable, _T] = WeakValueDictionary()

    def one(self, key: Hashable, record: _T) -> _T:
        """The known record of a key; if there is none, this one from now on."""
        with self._lock:
            return self._known.setdefault(key, record)


def exactly(*values: Any) -> tuple[Any, ...]:
    """A key that other values have only if they are the same, types and bits included.

    Objects that are not plain data stand for themselves: the key is valid as long as
    something holds them.
    """
    found: list[Any] = []
    _write(values, found)
    return tuple(found)


def _write(values: Iterable[Any], found: list[Any]) -> None:
    for value in values:
        kind = type(value)
        if kind in PLAIN or kind is MethodWrapperType:
            found += kind, value
        elif kind is float:
            found += kind, value.hex()
        elif isinstance(value, (tuple, list)):
            found += kind, len(value)
            _write(value, found)
        elif isinstance(value, Mapping):
            found += kind, len(value)
            _write(value, found)
            _write(value.values(), found)
        elif kind in (set, frozenset) and {*map(type, value)} <= _IN_SETS:
            found += kind, frozenset(value)
        elif is_dataclass(value) and kind is not type:
            found.append(kind)
            _write((getattr(value, one.name) for one in fields(value)), found)
        else:
            found += kind, id(value)
