"""What ``python`` runs: a file, or with ``-m`` a module, and its arguments."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

MODULE = "-m"


class Script(NamedTuple):
    """A program that trains."""

    name: str  # path of a file, or dotted name of a module
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @classmethod
    def of(cls, command: Sequence[str]) -> Script:
        """The script of what follows ``python``: ``["-m", "package", "--lr", "1"]``."""
        is_module = command[0] == MODULE
        name, *arguments = command[is_module:]
        return cls(name, tuple(arguments), is_module)

    @property
    def command(self) -> list[str]:
        """What follows ``python``."""
        return [*[MODULE] * self.is_module, self.name, *self.arguments]

    @property
    def stem(self) -> str:
        """What its trace is called."""
        return self.name if self.is_module else Path(self.name).stem

    def __str__(self) -> str:
        """What follows ``python``, without arguments."""
        return f"{MODULE} {self.name}" if self.is_module else self.name

    @contextmanager
    def as_python_runs(self) -> Iterator[None]:
        """A scope with its arguments, and with what it imports from on the path."""
        argv, first = sys.argv, sys.path[:1]
        sys.argv = [self.name, *self.arguments]
        folder = Path.cwd() if self.is_module else Path(self.name).resolve().parent
        sys.path[:1] = [str(folder)]
        try:
            yield
        finally:
            sys.argv = argv
            sys.path[:1] = first
