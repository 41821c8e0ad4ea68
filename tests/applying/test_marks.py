"""Marks: every draw, and every write to an attribute, changes them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from torch import nn

from ckplan.applying.rerunning import marks
from ckplan.applying.rerunning.attributes import Containers, Content, Modules
from ckplan.applying.rerunning.snapshot import Snapshot
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
        assert marks.numpy_mark(numpy.random.get_state.__self__)() is None
        state = place.state()
        first = numpy.random.rand()
        assert not place.is_at(state)
        place.put(state)
        assert numpy.random.rand() == first
    finally:
        numpy.random.set_bit_generator(before)


def test_a_mark_that_misses_draws_is_not_used() -> None:
    source = random.Random(0)
    marked = marks.Marked(source.getstate, lambda source: lambda: 0, random.Random(0))
    before = marked()
    source.random()
    assert marked() != before


class Named:
    """Has attributes."""


def _fill(one: Any) -> None:
    one.count = len(vars(one))


WRITES: list[Callable[[Any], Any]] = [
    _fill,
    lambda one: setattr(one, "first", 2),
    lambda one: delattr(one, "first"),
    lambda one: vars(one).update(first=3),
    lambda one: vars(one).__setitem__("other", 1),
    lambda one: vars(one).setdefault("other", 1),
    lambda one: vars(one).pop("first"),
    lambda one: vars(one).popitem(),
    lambda one: vars(one).clear(),
    lambda one: vars(one).__ior__({"first": 4}),
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("times", (1, 200))
def test_every_write_to_attributes_is_seen(
    write: Callable[[Any], Any], times: int
) -> None:
    """Also by code that Python has specialised, which then ran often."""
    for _ in range(times):
        one = Named()
        vars(one).update(first=1)
        found = marks.DictMarks([vars(one)])
        assert found.are_now() or not marks.tells_of_dicts
        write(one)
        assert not found.are_now()


@pytest.mark.parametrize("tells", (False, True))
def test_attributes_are_compared_where_marks_changed_or_do_not_tell(
    tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "tells_of_dicts", tells and marks.tells_of_dicts)
    module = nn.Sequential(nn.Linear(2, 2))
    content = Content([*module.modules()])
    assert content.is_now()
    training = module[0].training
    module[0].training = not training
    assert not content.is_now()
    module[0].training = training
    assert content.is_now() and content.is_now()
    vars(module[0])["_buffers"] = {}
    assert not content.is_now()


def test_attributes_of_another_dict_are_compared() -> None:
    module = nn.Linear(2, 2)
    content = Content([module])
    module.__dict__ = dict(vars(module), bias=None)
    assert not content.is_now()


CHANGES: list[Callable[[dict[str, Any], list[Any]], Any]] = [
    lambda named, several: named.update(first=object()),
    lambda named, several: named.update(third=1),
    lambda named, several: named.pop("second"),
    lambda named, several: named.update(first=named.pop("first")),  # another order
    lambda named, several: several.append(3),
    lambda named, several: several.reverse(),
    lambda named, several: (named.pop("second"), several.append(3)),
    lambda named, several: (several.pop(), named.update(third=1)),
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_container_is_seen(
    change: Callable[[dict[str, Any], list[Any]], Any],
) -> None:
    named: dict[str, Any] = {"first": 1, "second": 2}
    several = [object(), object()]
    found = Containers([(named, dict(named)), (several, list(several))])
    assert found.are_now()
    change(named, several)
    assert not found.are_now()


@pytest.mark.parametrize("place", (0, 1))
def test_a_look_between_two_changes_leaves_what_is_restored(place: int) -> None:
    """What a module holds is compared with what it held, not with what was seen."""
    module = nn.Linear(2, 2)
    module.kept = [[1], {"one": 1}][place]  # type: ignore[assignment]
    modules = Modules(module)
    snapshot = Snapshot.of(modules, [])
    before = module.kept.copy()  # type: ignore[operator]
    module.kept.clear()  # type: ignore[operator]
    assert modules.look()
    now = Snapshot.of(modules, [])
    snapshot.restore(now)
    assert module.kept == before
    now.restore()
    assert not module.kept
