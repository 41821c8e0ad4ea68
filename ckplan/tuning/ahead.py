"""Steps recorded beside a search, by copies of this process.

A copy knows all that was known when it was made: what was imported, and which steps
were recorded. Nothing that it does reaches this process but the graphs that it sends.
Whatever fails in a copy is recorded here once more, where the error is shown.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from ckplan.copies import start_copy
from ckplan.graph.graph import Graph
from ckplan.tuning.settings import Way

Asked = tuple[Way, int, int]
"""A step to record: the way, rows of a micro-batch, micro-batches."""
_MOST_ASKED = 256  # steps of one copy
_PATIENCE_SECONDS = 300.0
"""A copy that sends nothing for so long has stopped: a lock that was held when it was
made is never released in it."""


def spare_processors() -> int:
    """How many processes can run beside this one; 0 where it cannot be copied.

    A copy has the memory of this process, but not its threads.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        return 0
    return len(os.sched_getaffinity(0)) - 1


@dataclass
class Ahead:
    """Graphs that copies of this process record.

    Args:
        record: Records a step.
        prepare: Called first in every copy.
        most: Largest number of copies at a time.
    """

    record: Callable[[Way, int, int], Graph]
    prepare: Callable[[], None]
    most: int | None = None  # by default as many as processors are spare
    _copies: list[_Copy] = field(default_factory=list)
    _begun: set[Asked] = field(default_factory=set)

    def begin(self, steps: Iterable[Asked]) -> bool:
        """Have steps recorded, the first ones first; whether any copy is at work.

        They are shared out among new copies, which know what is known now, or else are
        appended to the work of copies that are not done yet.
        """
        new = [step for step in dict.fromkeys(steps) if step not in self._begun]
        self._begun.update(new)
        busy = [one for one in self._copies if one.is_busy()]
        for one in self._copies:
            if one not in busy:
                one.stop()  # what it found stays known
        most = spare_processors() if self.most is None else self.most
        made = self._made(min(most - len(busy), len(new)))
        workers = made or busy
        for place, step in enumerate(new if workers else ()):
            workers[place % len(workers)].ask(step)
        return bool(made or busy)

    def _made(self, count: int) -> list[_Copy]:
        """New copies, as many as there is memory for."""
        made: list[_Copy] = []
        with suppress(OSError):
            made.extend(_Copy(self.record, self.prepare) for _ in range(count))
        self._copies += made
        return made

    def take(self, step: Asked) -> Graph | None:
        """The graph of a step; None if no copy records it, and none will."""
        found = (one for one in self._copies if one.was_asked(step))
        return next((one.wait_for(step) for one in found), None)

    def end(self) -> None:
        """Stop all copies."""
        for one in self._copies:
            one.stop()


class _Copy:
    """A copy of this process, made by a fork, as this process sees it."""

    def __init__(
        self, record: Callable[[Way, int, int], Graph], prepare: Callable[[], None]
    ) -> None:
        fork = multiprocessing.get_context("fork")
        self._pipe, theirs = fork.Pipe()
        self._claims = fork.Array("b", _MOST_ASKED)  # step -> whether one records it
        self._asked: list[Asked] = []
        self._found: dict[Asked, Graph | None] = {}
        self._process = start_copy(
            _serve, theirs, self._pipe, self._claims, record, prepare
        )
        theirs.close()

    def is_busy(self) -> bool:
        """Whether it has not sent all that it was asked for."""
        self.receive()
        return len(self._found) < len(self._asked)

    def ask(self, step: Asked) -> None:
        """Have a step recorded."""
        if len(self._asked) == _MOST_ASKED:
            return
        self._asked.append(step)
        try:
            self._pipe.send((len(self._asked) - 1, step))
        except OSError:  # it ended
            self._give_up()

    def was_asked(self, step: Asked) -> bool:
        """Whether it records a step, or has done so."""
        return step in self._asked

    def receive(self, seconds: float = 0.0) -> bool:
        """Take all that it has sent; whether that is anything, after a time at most."""
        any_sent = False
        try:
            while self._pipe.poll(0.0 if any_sent else seconds):
                number, graph = self._pipe.recv()
                self._found[self._asked[number]] = graph
                any_sent = True
        except (EOFError, OSError):  # it ended
            self._give_up()
        return any_sent

    def wait_for(self, step: Asked) -> Graph | None:
        """The graph of a step; None if it is to be recorded here."""
        self.receive()
        number = self._asked.index(step)
        if step not in self._found and _is_claimed_now(self._claims, number):
            self._found[step] = None
        while step not in self._found:
            if not self.receive(_PATIENCE_SECONDS) and step not in self._found:
                self.stop()
        return self._found[step]

    def stop(self) -> None:
        """End it; what it did not send is recorded here."""
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._give_up()

    def _give_up(self) -> None:
        for step in self._asked:
            self._found.setdefault(step, None)


def _is_claimed_now(claims: Any, number: int) -> bool:
    """Claim a step; False if the other process has done so."""
    with claims.get_lock():
        free = not claims[number]
        claims[number] = 1
    return bool(free)


def _serve(
    pipe: Connection,
    other: Connection,
    claims: Any,
    record: Callable[[Way, int, int], Graph],
    prepare: Callable[[], None],
) -> None:
    """Record steps until nobody listens any more."""
    other.close()
    prepare()
    with suppress(EOFError), ThreadPoolExecutor(1) as sending:
        while True:
            number, step = pipe.recv()
            graph = None
            if _is_claimed_now(claims, number):
                with suppress(Exception):  # raised where it is recorded once more
                    graph = record(*step)
            sending.submit(_send, pipe, number, graph)  # the other side reads it late


def _send(pipe: Connection, number: int, graph: Graph | None) -> None:
    try:
        pipe.send((number, graph))
    except Exception:  # it holds something that cannot be sent
        pipe.send((number, None))
