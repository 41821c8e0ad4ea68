"""How far long work has come, on stderr, without getting in its way.

A terminal shows one line that changes; there is no thread behind it, since that would
disturb the times which ``profile`` measures. Anywhere else every stage is one line, and
work that is done within a second says nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

_ERASE_LINE = "\r\x1b[2K"
_SILENT_SECONDS = 1.0  # where there is no terminal
_FRAME_SECONDS = 0.1


class ProgressLine:
    """A ``Progress`` callback: the stage of the work, and how much of it is done."""

    def __init__(
        self, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Write to a stream; ``clock`` is for tests."""
        self._stream = stream
        self._clock = clock
        self._begin = clock()
        self._stage = ""
        self._shown = ""
        self._next_frame = 0.0
        self._terminal = stream.isatty() and os.environ.get("TERM") != "dumb"

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the line as it was found."""
        if self._terminal and self._shown:
            self._stream.write(_ERASE_LINE)
            self._stream.flush()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Say what is being done, how many are done, and how many there are."""
        new_stage, self._stage = what != self._stage, what
        now = self._clock()
        if not self._terminal:
            self._log(what, now)
        elif new_stage or now >= self._next_frame:
            self._next_frame = now + _FRAME_SECONDS
            self._draw(f"{what} {done}/{total}" if total else f"{what} ...")

    def _log(self, what: str, now: float) -> None:
        if what != self._shown and now - self._begin > _SILENT_SECONDS:
            self._shown = what
            self._stream.write(f"{what} ...\n")
            self._stream.flush()

    def _draw(self, text: str) -> None:
        self._shown = text
        self._stream.write(f"{_ERASE_LINE}{text}")
        self._stream.flush()
