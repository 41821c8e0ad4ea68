"""The same work for several items at a time, by copies of this process.

A copy knows all that this process knew when it was made. Nothing that it does reaches
this process but its result, and where it fails or stops, there is none.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

import torch

from ckplan.copies import start_copy

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_MOST = 4  # at a time: copies of what is large take memory
_PATIENCE, _LEAST_PATIENCE_SECONDS = 4.0, 20.0
"""How much longer than this process a copy may take. A lock that another thread held
when it was made is never released in it."""


def most_at_once() -> int:
    """How many items can be worked at: at most as many as torch has threads.

    CUDA does not run in a copy.
    """
    if torch.cuda.is_initialized():
        return 1
    if sys.platform != "linux" or multiprocessing.current_process().daemon:
        return 1
    return min(torch.get_num_threads(), len(os.sched_getaffinity(0)), _MOST)


def side_by_side(
    work: Callable[[_Item], _Result],
    items: Sequence[_Item],
    meanwhile: Callable[[], object],
) -> list[_Result | None]:
    """What a function makes of each item, in their order, each in a copy of its own.

    Args:
        work: Makes something that can be sent between processes.
        items: One fewer than there are processes to be.
        meanwhile: About as much work, for this process. Its errors are raised.

    Returns:
        None where a copy has not made anything.
    """
    copies: list[_Copy[_Result]] = []
    try:
        with suppress(OSError):  # as many as there is memory for
            copies.extend(_Copy(work, item) for item in items)
        began = time.monotonic()
        meanwhile()
        took = time.monotonic() - began
        until = time.monotonic() + _PATIENCE * took + _LEAST_PATIENCE_SECONDS
        found = [one.result(until) for one in copies]
    finally:
        for one in copies:
            one.stop()
    return [*found, *([None] * (len(items) - len(found)))]


def shared_out(
    work: Callable[[_Item], _Result], items: Sequence[_Item]
) -> list[_Result]:
    """What a function makes of each item, shared out among copies and this process."""
    count = max(1, min(most_at_once(), len(items)))
    parts = [items[place::count] for place in range(count)]
    own: list[_Result] = []
    found = side_by_side(
        partial(_each, work), parts[1:], lambda: own.extend(_each(work, parts[0]))
    )
    made: dict[int, _Result] = {}
    for place, (part, results) in enumerate(zip(parts, [own, *found], strict=True)):
        some = _each(work, part) if results is None else results
        made |= zip(range(place, len(items), count), some, strict=True)
    return [made[place] for place in range(len(items))]


def _each(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    return [*map(work, items)]


class _Copy(Generic[_Result]):
    """A copy of this process, made by a fork, as this process sees it."""

    def __init__(self, work: Callable[[_Item], _Result], item: _Item) -> None:
        self._pipe, theirs = multiprocessing.Pipe(duplex=False)
        self._process = start_copy(_work, theirs, work, item)
        theirs.close()

    def result(self, until: float) -> _Result | None:
        """What it has made; None if there is nothing at a time of the clock."""
        with suppress(EOFError, OSError):
            if self._pipe.poll(max(until - time.monotonic(), 0.0)):
                found: _Result | None = self._pipe.recv()
                return found
        return None

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _work(pipe: Connection, work: Callable[[_Item], _Result], item: _Item) -> None:
    torch.set_num_threads(1)  # those of the other process are not there
    with suppress(Exception):  # raised where it is done once more
        pipe.send(work(item))
