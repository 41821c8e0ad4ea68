"""Progress of long work, on stderr.

A terminal shows one line that is updated in place. No thread updates it, since a thread
would disturb the times that ``profile`` measures. Without a terminal, every stage is
one line, and work that ends within a second prints nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

_ERASE_LINE = "\r\x1b[2K"
_SILENT_SECONDS = 1.0  # without a terminal
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
        """Clear the line."""
        if self._terminal and self._shown:
            self._stream.write(_ERASE_LINE)
            self._stream.flush()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show the stage, the number of items done and their total."""
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
