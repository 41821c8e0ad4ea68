"""Compare the states of the random generators of Python and NumPy, in little time.

States are read whenever a call of a module begins or ends. To make Python objects of
their 624 words takes a tenth of a millisecond, so their memory is read.
"""

from __future__ import annotations

import ctypes
import random
import sys
from functools import cache
from types import ModuleType
from typing import Any

_WORDS = 624  # of a Mersenne twister
_BYTES = 4 * _WORDS
_HEAD = object.__basicsize__  # of a Python object, before its own fields
_PLACE = 4  # bytes of the position in these words


def python_state() -> Any:
    """A summary of the state of ``random``, equal if no number was drawn between."""
    mine: Any = random
    if not _is_laid_out_as_known():
        return hash(random.getstate())
    memory = ctypes.string_at(id(mine._inst) + _HEAD, _PLACE + _BYTES)
    return hash(memory), mine._inst.gauss_next


def numpy_state(numpy: ModuleType) -> Any:
    """The same of the global generator of NumPy.

    Args:
        numpy: The module ``numpy.random``.
    """
    generator: Any = getattr(numpy, "get_bit_generator", lambda: None)()
    if type(generator).__name__ != "MT19937":
        _, keys, place, *_ = numpy.get_state()
        return hash(keys.tobytes()), place
    address = generator.ctypes.state_address  # words, then the position
    return hash(ctypes.string_at(address, _BYTES + _PLACE))


@cache
def _is_laid_out_as_known() -> bool:
    """Whether the position, then the words, are behind an object's head."""
    if not isinstance(getattr(random, "_inst", None), random.Random):
        return False
    if type(random._inst) is not random.Random:
        return False
    one = random.Random(1)
    one.random()
    if type(one).__basicsize__ < _HEAD + _PLACE + _BYTES:
        return False
    *words, place = one.getstate()[1]
    expected = place.to_bytes(_PLACE, sys.byteorder) + b"".join(
        word.to_bytes(4, sys.byteorder) for word in words
    )
    return ctypes.string_at(id(one) + _HEAD, _PLACE + _BYTES) == expected
