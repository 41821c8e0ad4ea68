"""Numbers and arrays that functions of torch take, Python's and NumPy's."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy
import torch

_OF_NUMPY = (numpy.number, numpy.bool_)
_NUMBERS = (bool, int, float, complex, *_OF_NUMPY)
_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)


def makes_tensor(func: Any) -> bool:
    """Whether a function makes a tensor of data, which each forward retains anew."""
    return func in _MAKERS


def is_data(value: Any) -> bool:
    """Whether a value is made of numbers and arrays, without tensors."""
    if isinstance(value, (list, tuple)):
        return all(map(is_data, value))
    return is_number(_kind_of(value))


def bits_of(value: Any) -> Any:
    """What tells a complex number, or one or many of NumPy's, from others of its type.

    None for values of other types.
    """
    if type(value) is complex:
        return value.real.hex(), value.imag.hex()
    if not issubclass(_kind_of(value), _OF_NUMPY):
        return None
    found = blake2b(value.tobytes(), digest_size=16)
    return value.dtype.str, value.shape, found.digest()


def is_number(kind: Any) -> bool:
    """Whether it is a type of numbers."""
    return isinstance(kind, type) and issubclass(kind, _NUMBERS)


def is_array(kind: Any) -> bool:
    """Whether it is the type of NumPy's arrays."""
    return kind is numpy.ndarray


def _kind_of(value: Any) -> type:
    """The type of a value, or of the items of an array."""
    return value.dtype.type if is_array(type(value)) else type(value)
