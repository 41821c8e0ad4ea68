"""Errors in three lines: the problem, the accepted input, and what to try."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import partial
from typing import Any, ClassVar


class CkplanError(Exception):
    """An error that a user can act on, printed as three lines.

    Args:
        what: The operation that failed, its object, and the problem.
        needed: The accepted input.
        hint: The flag, command or edit that changes the outcome.

    >>> print(CkplanError("no plan fits", needed="5.31 GiB", hint="ckplan frontier"))
    error: no plan fits
      needed: 5.31 GiB
      try:    ckplan frontier
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, needed: str, hint: str) -> None:
        """Keep each part as one line."""
        self.what, self.needed, self.hint = map(_one_line, (what, needed, hint))
        super().__init__(self.what)

    def __str__(self) -> str:
        """Return the three lines."""
        return f"error: {self.what}\n  needed: {self.needed}\n  try:    {self.hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the keywords too, so that an error can cross processes."""
        rebuild = partial(type(self), needed=self.needed, hint=self.hint)
        return rebuild, (self.what,)


class WorkloadError(CkplanError):
    """The user's model file lacks something that profiling needs."""


class GraphBreakError(WorkloadError):
    """A step does not compile as one graph."""


class GraphError(CkplanError):
    """A trace is malformed, or this version of ckplan does not read its format."""


class PlanError(CkplanError):
    """A plan is malformed, or belongs to another model."""


class UnitError(CkplanError):
    """A size or budget cannot be read."""


class InfeasibleError(CkplanError):
    """No plan fits the budget."""

    exit_code = 3


class VerifyError(CkplanError):
    """A planned step differs from the unplanned one, or exceeds its budget."""

    exit_code = 4


class ApplyError(CkplanError):
    """A plan cannot be applied to a model."""


def did_you_mean(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice with the most similar spelling, if one is similar enough.

    >>> did_you_mean("budjet_bytes", ["budget_bytes", "bound"])
    'budget_bytes'
    """
    return next(iter(get_close_matches(word, list(choices), n=1)), None)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())
