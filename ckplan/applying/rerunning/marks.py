"""Tell by a mark whether a random source moved, without reading its state.

Python and NumPy give their states as numbers one by one, which takes longer than all
else that a region does. Their own bytes are copied in a microsecond and change with
every draw. Where a draw from a fresh source leaves its bytes alone, nothing is marked,
and states are read each time. Likewise, CPython up to 3.12 numbers the writes to dicts
(PEP 509): the attributes of modules are looked at where a number changed.
"""

from __future__ import annotations

import ctypes
import operator
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

Mark: TypeAlias = Callable[[], Any]
"""Takes the mark of a source, as it is now."""

_HEADER = object.__basicsize__  # its count of references changes
_MERSENNE = "MT19937"
_MERSENNE_BYTES = 625 * 4  # its numbers, and the place among them


def python_mark(source: Any) -> Mark:
    """Takes the mark of a generator of Python's."""
    base = random.Random.__base__
    assert base is not None
    content = _memory_of(source, base)
    return lambda: (content.raw, source.gauss_next)


def numpy_mark(source: Any) -> Mark:
    """Takes the mark of a ``RandomState``; None if it draws from another generator."""
    content, bits = _memory_of(source, type(source)), source._bit_generator
    if type(bits).__name__ != _MERSENNE:
        return lambda: None
    numbers = _memory(bits.ctypes.state_address, _MERSENNE_BYTES)
    return lambda: (content.raw, numbers.raw) if source._bit_generator is bits else None


class Marked:
    """A source's state, which is read again if its mark has changed."""

    def __init__(
        self, state: Callable[[], Any], mark: Callable[[Any], Mark], sample: Any
    ) -> None:
        """Read nothing yet.

        Args:
            state: Reads the state; a method of the source.
            mark: Gives what takes the mark of a source.
            sample: A source of the same kind, whose draws are to change its mark.
        """
        source = getattr(state, "__self__", None)
        tells = type(source) is type(sample) and _tells(mark, sample)
        self._state = state
        self._mark = mark(source) if tells else None
        self._last: tuple[Any, Any] | None = None  # a mark, and the state then

    def __call__(self) -> Any:
        """The state; equal ones in a row are one object."""
        if self._mark is None:
            return self._state()
        mark, last = self._mark(), self._last
        if last is not None and mark is not None and last[0] == mark:
            return last[1]
        state = self._state()
        if self._mark() == mark:  # else another thread drew meanwhile
            self._last = mark, state
        return state


def _memory_of(source: Any, kind: type) -> Any:
    """The bytes of an object, without its header."""
    return _memory(id(source) + _HEADER, kind.__basicsize__ - _HEADER)


def _memory(address: int, size: int) -> Any:
    """Bytes at an address, which ``raw`` copies as they are then."""
    return (ctypes.c_char * size).from_address(address)


def _tells(mark: Callable[[Any], Mark], sample: Any) -> bool:
    """Whether every draw changes a mark, also the second of two normal numbers."""
    if sys.implementation.name != "cpython":
        return False
    is_python = isinstance(sample, random.Random)
    normal = partial(sample.gauss, 0.0, 1.0) if is_python else sample.standard_normal
    take = mark(sample)
    marks = [take()]
    for draw in (sample.random, normal, normal):
        draw()
        marks.append(take())
    return all(one != other for one, other in pairwise(marks))


class DictMarks:
    """Marks of dicts, which every write to one of them changes."""

    def __init__(self, dicts: Sequence[dict[str, Any]]) -> None:
        """Mark dicts as they are now; they are held, since their memory is read."""
        self._dicts = dicts
        read = dicts if tells_of_dicts else ()
        self._places = [ctypes.c_uint64.from_address(id(one) + _MARK) for one in read]
        self._marks = b"".join(self._places)

    def are_of(self, dicts: Iterable[dict[str, Any]]) -> bool:
        """Whether some dicts are the first of these."""
        return all(map(operator.is_, dicts, self._dicts))

    def are_now(self) -> bool:
        """Whether nothing was written since; False where marks do not tell."""
        return tells_of_dicts and b"".join(self._places) == self._marks


_MARK = _HEADER + ctypes.sizeof(ctypes.c_ssize_t)  # behind the number of items


class _Sample:
    """Has attributes."""


def _write(sample: Any, number: int) -> None:
    sample.number = number


def _writes(sample: Any) -> Iterator[Callable[[], Any]]:
    """Ways to write to attributes; the first so often that Python specialises it."""
    found = vars(sample)
    yield from (partial(_write, sample, number) for number in range(100))
    yield partial(delattr, sample, "number")
    yield partial(found.__setitem__, "number", 1)
    yield partial(found.__setitem__, "number", 2)
    yield partial(found.pop, "number")


def _tell_writes() -> bool:
    """Whether every write changes a mark."""
    sample = _Sample()
    for write in _writes(sample):
        marks = DictMarks([vars(sample)])
        write()
        if marks.are_now():
            return False
    return True


tells_of_dicts = sys.implementation.name == "cpython"
tells_of_dicts = tells_of_dicts and _tell_writes()
