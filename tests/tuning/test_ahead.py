"""Steps that copies of the process record: the same ones, or none."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import graphs
import pytest

from ckplan.errors import WorkloadError
from ckplan.graph.graph import Graph
from ckplan.tuning import ahead
from ckplan.tuning.ahead import Ahead, Asked, spare_processors
from ckplan.tuning.searches import Recorder
from ckplan.tuning.settings import Way

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="this system makes no copies of a process"
)
BF16 = Way(amp="bf16")


def step(way: Way, rows: int, accumulate: int) -> Graph:
    """A step whose notes say which process recorded it."""
    graph = graphs.chain(2, width_bytes=10 * rows)
    return replace(graph, notes=(f"{way.title} {accumulate}", str(os.getpid())))


@contextmanager
def beside(
    record: Callable[[Way, int, int], Graph] = step,
    *,
    most: int = 1,
    prepare: Callable[[], None] = lambda: None,
) -> Iterator[Ahead]:
    found = Ahead(record, prepare, most)
    try:
        yield found
    finally:
        found.end()


def wait(process: Ahead) -> None:
    """Wait until the copies have sent what they were asked for."""
    deadline = time.monotonic() + 30
    while any(one.is_busy() for one in process._copies):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_copies_record_the_same_steps(most: int) -> None:
    asked: list[Asked] = [(way, n, 1) for way in (Way(), BF16) for n in (4, 8)]
    with beside(most=most) as copies:
        assert copies.begin(asked)
        wait(copies)
        for one in asked:
            found, here = copies.take(one), step(*one)
            assert found is not None
            assert replace(found, notes=()) == replace(here, notes=())
            assert found.notes[0] == here.notes[0]
            assert found.notes[1] != here.notes[1]
        assert len(multiprocessing.active_children()) == min(most, len(asked))
        assert copies.take((Way(), 16, 1)) is None  # nobody asked for it
        assert copies.begin([(Way(), 16, 1)])  # by a copy that is made now
        wait(copies)
        assert copies.take((Way(), 16, 1)) is not None
    assert not multiprocessing.active_children()


def test_what_fails_in_a_copy_is_recorded_here_and_others_are_not() -> None:
    def recorded(way: Way, rows: int, accumulate: int) -> Graph:
        if rows == 3:
            raise WorkloadError("no odd ones", needed="even rows", hint="even rows")
        return step(way, rows, accumulate)

    with beside(recorded) as copies:
        copies.begin([(Way(), 3, 1), (Way(), 4, 1)])
        wait(copies)
        assert copies.take((Way(), 3, 1)) is None
        assert copies.take((Way(), 4, 1)) is not None


@pytest.mark.parametrize("begun", [False, True])
def test_a_copy_that_ends_is_done_without(begun: bool) -> None:
    def recorded(way: Way, rows: int, accumulate: int) -> Graph:
        os._exit(9)

    def at_once() -> None:
        os._exit(9)

    prepare = (lambda: None) if begun else at_once
    with beside(recorded, prepare=prepare) as copies:
        copies.begin([(Way(), 3, 1), (Way(), 4, 1)])
        wait(copies)
        assert copies.take((Way(), 4, 1)) is None
        assert copies.begin([(Way(), 5, 1)])  # by another one


def test_a_copy_that_waits_for_ever_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_PATIENCE_SECONDS", 0.2)
    begun = multiprocessing.get_context("fork").Event()

    def recorded(way: Way, rows: int, accumulate: int) -> Graph:
        begun.set()
        time.sleep(600)
        raise AssertionError

    with beside(recorded) as copies:
        copies.begin([(Way(), 3, 1)])
        assert begun.wait(30)
        assert copies.take((Way(), 3, 1)) is None
        assert not multiprocessing.active_children()


def test_a_step_that_no_copy_has_begun_is_recorded_here(tmp_path: Path) -> None:
    going = multiprocessing.get_context("fork").Event()
    begun = multiprocessing.get_context("fork").Event()

    def recorded(way: Way, rows: int, accumulate: int) -> Graph:
        begun.set()
        (tmp_path / str(rows)).touch()
        assert going.wait(30)
        return step(way, rows, accumulate)

    with beside(recorded) as copies:
        copies.begin([(Way(), rows, 1) for rows in (3, 4, 5)])
        assert begun.wait(30)
        assert copies.take((Way(), 4, 1)) is None
        going.set()
        wait(copies)
        assert copies.take((Way(), 5, 1)) is not None
        assert sorted(one.name for one in tmp_path.iterdir()) == ["3", "5"]


def test_large_steps_are_sent_while_others_are_recorded(tmp_path: Path) -> None:
    def recorded(way: Way, rows: int, accumulate: int) -> Graph:
        (tmp_path / str(rows)).touch()
        return replace(step(way, rows, accumulate), notes=("x" * (8 << 20),))

    with beside(recorded) as copies:
        copies.begin([(Way(), rows, 1) for rows in (3, 4)])
        deadline = time.monotonic() + 30
        while not (tmp_path / "4").exists():  # nobody has read the first one
            assert time.monotonic() < deadline
            time.sleep(0.01)
        found = copies.take((Way(), 3, 1))
        assert found is not None and len(found.notes[0]) == 8 << 20


def test_a_process_with_threads_is_not_copied() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        assert spare_processors() == 0
        with beside(most=0) as copies:
            assert not copies.begin([(Way(), 3, 1)])
            assert copies.take((Way(), 3, 1)) is None
    finally:
        over.set()
        thread.join()


def test_no_memory_for_a_copy_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "fork", fork)
    with beside() as copies:
        assert not copies.begin([(Way(), 3, 1)])


@pytest.mark.parametrize("accepted", [True, False])
def test_a_recorder_takes_what_it_may(
    monkeypatch: pytest.MonkeyPatch, accepted: bool
) -> None:
    monkeypatch.setattr(ahead, "spare_processors", lambda: 1)
    learnt: list[Asked] = []

    def learn(way: Way, rows: int, accumulate: int, graph: Graph) -> bool:
        learnt.append((way, rows, accumulate))
        return accepted

    recorder = Recorder(lambda *one: step(*one[:3]), learn, lambda: None)
    asked: Asked = (BF16, 4, 1)
    assert recorder.begin([asked])
    assert recorder._ahead is not None
    wait(recorder._ahead)
    found = recorder(*asked)
    assert (found.notes[1] != str(os.getpid())) is accepted
    assert recorder(*asked) is found
    assert learnt == [asked]
    recorder.end()
    assert not multiprocessing.active_children()


def test_measured_steps_are_recorded_here_alone() -> None:
    recorder = Recorder(lambda *one: step(*one[:3]))
    assert not recorder.begin([(Way(), 4, 1)])
    assert recorder(Way(), 4, 1).notes[1] == str(os.getpid())
