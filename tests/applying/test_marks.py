"""Marks of random sources: every draw changes them, and states are those of now."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from ckplan.applying.rerunning import marks
from ckplan.applying.rerunning.sources import sources_on


def _with_cached_normal() -> None:
    random.gauss(0.0, 1.0)
    numpy.random.standard_normal()


DRAWS: list[tuple[int, Callable[[], Any]]] = [
    (0, random.random),
    (0, lambda: random.gauss(0.0, 1.0)),
    (0, lambda: random.seed(3)),
    (0, lambda: random.getrandbits(1)),
    (1, numpy.random.rand),
    (1, numpy.random.standard_normal),
    (1, lambda: numpy.random.shuffle([1, 2, 3])),
    (1, lambda: numpy.random.seed(3)),
]


@pytest.mark.parametrize("cached", (False, True))
@pytest.mark.parametrize(("place", "draw"), DRAWS)
def test_every_draw_is_seen_and_undone(
    place: int, draw: Callable[[], Any], cached: bool
) -> None:
    random.seed(1)
    numpy.random.seed(1)
    if cached:  # a second normal number is left, of which the generator knows nothing
        _with_cached_normal()
    source = sources_on([])[place]
    before = source.state()
    assert source.is_at(before)
    assert source.state() is before, "it is read again, though nothing was drawn"
    first = draw()
    assert not source.is_at(before)
    source.put(before)
    assert source.is_at(before)
    assert draw() == first


@pytest.mark.filterwarnings("ignore:get_state and legacy")
def test_another_generator_below_numpy_is_read_each_time() -> None:
    place, before = sources_on([])[1], numpy.random.get_bit_generator()
    place.state()
    try:
        numpy.random.set_bit_generator(numpy.random.PCG64(5))
        assert marks.numpy_mark(numpy.random.get_state.__self__) is None
        state = place.state()
        first = numpy.random.rand()
        assert not place.is_at(state)
        place.put(state)
        assert numpy.random.rand() == first
    finally:
        numpy.random.set_bit_generator(before)


def test_a_mark_that_misses_draws_is_not_used() -> None:
    source = random.Random(0)
    marked = marks.Marked(source.getstate, lambda source: 0, random.Random(0))
    before = marked()
    source.random()
    assert marked() != before
