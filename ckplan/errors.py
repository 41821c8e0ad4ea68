"""Errors that a user can act on: what was found, what is needed, what to try."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import partial
from typing import Any, ClassVar


class CkplanError(Exception):
    """Something that ckplan could not do, in three lines.

    Args:
        what: What could not be done, the object, and what was found.
        needed: What would be accepted.
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
    """The user's model file does not offer what a profile needs."""


class GraphError(CkplanError):
    """A trace is malformed, or of a version that this ckplan does not read."""


class PlanError(CkplanError):
    """A plan is malformed, or does not belong to its model."""


class UnitError(CkplanError):
    """A size or budget cannot be read."""


class InfeasibleError(CkplanError):
    """No plan fits the budget."""

    exit_code = 3


class VerifyError(CkplanError):
    """A planned step differs from the unplanned one, or exceeds its budget."""

    exit_code = 4


class ApplyError(CkplanError):
    """A plan cannot be put on a model."""


def did_you_mean(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that is spelled most like a word, if one is near enough.

    >>> did_you_mean("budjet_bytes", ["budget_bytes", "bound"])
    'budget_bytes'
    """
    return next(iter(get_close_matches(word, list(choices), n=1)), None)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())
