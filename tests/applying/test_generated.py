"""Generated functions: alike ones share their code, and each has its own constants."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from ckplan.applying.tensors.arguments import Slots
from ckplan.applying.tensors.generated import generate
from ckplan.applying.tensors.matchers import Matchers

NAMES: dict[str, Any] = {"__builtins__": builtins, "added": sum}
LINES = ["def count(values):", " if not values: return k0", " return added(values, k1)"]


def test_functions_of_the_same_source_share_their_code_and_names() -> None:
    """So Python may remember where it found a name, in each of them."""
    one = generate(LINES, {"k0": "none", "k1": 10}, NAMES, "<counts>")
    other = generate(LINES, {"k0": None, "k1": 20}, NAMES, "<counts>")
    assert one.__code__ is other.__code__
    assert one.__globals__ is other.__globals__ is NAMES
    assert one([]) == "none" and one([1, 2]) == 13
    assert other([]) is None and other([1, 2]) == 23


def test_a_function_may_have_no_constants() -> None:
    assert generate(["def two():", " return 2"], {}, NAMES, "<two>")() == 2


def test_an_error_names_the_file() -> None:
    fails = generate(["def fails():", " return 1 / k0"], {"k0": 0}, NAMES, "<failing>")
    with pytest.raises(ZeroDivisionError) as caught:
        fails()
    assert str(caught.traceback[-1].path) == "<failing>"


def test_matchers_of_equal_calls_share_their_code() -> None:
    made = [
        Matchers().make(Slots(lambda tensor: None).freeze((number, "x", 0.5), {}))
        for number in (1, 1)
    ]
    codes = {getattr(one, "__code__", None) for one in made}
    worlds = {id(getattr(one, "__globals__", None)) for one in made}
    assert len(codes) == len(worlds) == 1
