"""Work by copies of this process: what they make, and what of those that fail."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from ckplan.compiling import side_by_side as module
from ckplan.compiling.side_by_side import most_at_once, shared_out, side_by_side

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="made by a fork")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def nothing() -> None:
    """What this process does meanwhile."""


def test_each_item_has_a_process_of_its_own() -> None:
    found = side_by_side(lambda one: (one, os.getpid()), ["a", "b", "c"], nothing)
    assert [one for one, _ in filter(None, found)] == ["a", "b", "c"]
    assert len({pid for _, pid in filter(None, found)} - {os.getpid()}) == 3


def test_a_copy_has_one_thread_and_says_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def work(_: int) -> int:
        print("a warning", flush=True)
        os.write(2, b"another")
        return torch.get_num_threads()

    assert side_by_side(work, [1], nothing) == [1]
    assert capfd.readouterr() == ("", "")


def test_nothing_comes_from_copies_that_fail_or_end() -> None:
    def work(one: int) -> object:
        if one == 1:
            raise ValueError
        if one == 2:
            os._exit(1)
        return nothing.__code__ if one == 3 else one  # code cannot be sent

    assert side_by_side(work, [1, 2, 3, 4], nothing) == [None, None, None, 4]


def test_a_copy_that_stops_is_waited_for_as_long_as_this_process_worked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LEAST_PATIENCE_SECONDS", 0.2)
    began = time.monotonic()
    assert side_by_side(lambda _: time.sleep(60), [1], nothing) == [None]
    assert time.monotonic() - began < 30


def test_errors_of_this_process_are_raised_and_copies_end() -> None:
    def meanwhile() -> None:
        raise KeyError("here")

    began = time.monotonic()
    with pytest.raises(KeyError, match="here"):
        side_by_side(lambda _: time.sleep(60), [1], meanwhile)
    assert time.monotonic() - began < 30


def test_there_are_as_many_as_torch_has_threads(
    threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    for count, most in ((1, 1), (2, 2), (64, 4)):
        torch.set_num_threads(count)
        assert most_at_once() == most
    monkeypatch.setattr(sys, "platform", "darwin")
    assert most_at_once() == 1


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_items_are_shared_out_in_their_order(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "most_at_once", lambda: 3)
    found = shared_out(lambda one: (one, os.getpid()), range(count))
    assert [one for one, _ in found] == [*range(count)]
    assert len({pid for _, pid in found}) == min(count, 3)


def test_what_a_copy_has_not_made_this_process_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "most_at_once", lambda: 2)
    here = os.getpid()

    def work(one: int) -> int:
        if os.getpid() != here:
            raise ValueError
        return one

    assert shared_out(work, [3, 4, 5]) == [3, 4, 5]
