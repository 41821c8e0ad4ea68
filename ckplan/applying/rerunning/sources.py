"""Random sources that a forward may draw from: torch's, Python's and NumPy's."""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from ckplan.applying.rerunning.marks import Marked, numpy_mark, python_mark
from ckplan.applying.tensors.random_state import (
    check_restorable,
    random_state,
    set_random_state,
)


@dataclass(frozen=True)
class Source:
    """A random source: functions that read, set and compare its state."""

    state: Callable[[], Any]
    set_state: Callable[[Any], None]
    are_same: Callable[[Any, Any], bool] = operator.eq

    def put(self, state: Any) -> None:
        """Set the state."""
        self.set_state(state)

    def is_at(self, state: Any) -> bool:
        """Whether nothing was drawn since a state."""
        return self.are_same(self.state(), state)


def _look_same(one: Any, other: Any) -> bool:
    """Whether two NumPy states are equal: they contain arrays."""
    if one is other:
        return True
    if isinstance(one, dict):
        same = one.keys() == other.keys()
        return same and all(_look_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_look_same, one, other))
    as_bytes = getattr(one, "tobytes", None)
    return bool(one == other) if as_bytes is None else as_bytes() == other.tobytes()


def _numpy_state() -> Any:
    """NumPy's global random source, if NumPy is imported."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else _marked_numpy()()


@cache
def _marked_numpy() -> Marked:
    numpy = sys.modules["numpy"]
    return Marked(numpy.random.get_state, numpy_mark, numpy.random.RandomState(0))


def _set_numpy_state(state: Any) -> None:
    if state is not None:
        sys.modules["numpy"].random.set_state(state)


def _torch_source(
    device: torch.device, generator: torch.Generator | None = None
) -> Source:
    """A generator, or a device's own."""
    place = device, generator
    state, set_state = partial(random_state, *place), partial(set_random_state, *place)
    return Source(state, set_state, torch.equal)


PYTHON = Source(Marked(random.getstate, python_mark, random.Random(0)), random.setstate)
NUMPY = Source(_numpy_state, _set_numpy_state, _look_same)
_EVERYWHERE = (PYTHON, NUMPY, _torch_source(torch.device("cpu")))


def source_of(generator: torch.Generator) -> Source:
    """A generator that a forward was given or made."""
    return _torch_source(generator.device, generator)


def source_in(value: Any) -> Source | None:
    """The generator of Python's or NumPy's that a value is, if it is one."""
    if isinstance(value, random.Random):
        system = isinstance(value, random.SystemRandom)  # which has no state
        return None if system else Source(value.getstate, value.setstate)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(value, numpy.Generator):
        bits = value.bit_generator
        state = partial(getattr, bits, "state"), partial(setattr, bits, "state")
        return Source(*state, _look_same)
    if numpy is not None and isinstance(value, numpy.RandomState):
        return Source(value.get_state, value.set_state, _look_same)
    return None


def sources_on(devices: Iterable[torch.device]) -> list[Source]:
    """Random sources of a forward on some devices, except its own generators.

    Raises:
        ApplyError: The random state of one is not restored.
    """
    places = [*devices]
    for device in places:
        check_restorable(device)
    cuda = (_torch_source(device) for device in places if device.type == "cuda")
    return [*_EVERYWHERE, *cuda]
