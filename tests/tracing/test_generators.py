"""States of random generators are compared without making their words."""

import random

import numpy
import pytest

from ckplan.tracing.recording import generators
from ckplan.tracing.recording.generators import numpy_state, python_state


@pytest.mark.parametrize(
    ("state", "draw"),
    [
        (python_state, random.random),
        (python_state, lambda: random.gauss(0, 1)),
        (lambda: numpy_state(numpy.random), numpy.random.rand),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_a_draw_changes_the_state_and_nothing_else_does(
    monkeypatch, state, draw, known
):
    if not known:  # another layout of Python's objects
        monkeypatch.setattr(generators, "_is_laid_out_as_known", lambda: False)
    before = state()
    assert state() == before
    draw()
    assert state() != before


def test_the_layout_of_this_python_is_known():
    assert generators._is_laid_out_as_known()


def test_a_state_that_comes_back_is_the_same():
    kept, before = random.getstate(), python_state()
    random.random()
    random.setstate(kept)
    assert python_state() == before
