"""Python's garbage collector: what it knows, and when it must keep still."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

_T = TypeVar("_T")


def every_object() -> list[object]:
    """All containers that are alive, also those that ``gc.freeze`` set apart.

    They are thawed, since the collector lists only others; what was frozen is collected
    with the others from then on.
    """
    _thaw()
    return gc.get_objects()


def instances_of(kind: type[_T]) -> list[_T]:
    """Containers of one type, without its subclasses; faster than to list all."""
    _thaw()
    return [one for one in gc.get_referrers(kind) if type(one) is kind]


@contextmanager
def apart_from_garbage() -> Iterator[None]:
    """Let garbage that exists now stay, while new garbage is collected.

    To collect it takes as long as a step of a small model, as every object is looked
    at. New objects alone are collected, which takes no time.
    """
    gc.collect(1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _thaw() -> None:
    if gc.get_freeze_count():
        gc.unfreeze()


@contextmanager
def collection_off() -> Iterator[None]:
    """Let no older garbage be freed meanwhile, and so be seen by an allocator's log."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
