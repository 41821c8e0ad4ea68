"""Numbers of a plan file, read from its text."""

from __future__ import annotations

import math

from ckplan.errors import PlanError


def whole_number(text: str) -> int:
    """A number of bytes.

    Raises:
        PlanError: It is no whole number.
    """
    if not _is_whole(text, most_digits=18):
        raise _not_a_number(text, "a whole number of bytes, without a unit")
    return int(text)


def count(text: str) -> int:
    """A number of things, such as tiles.

    Raises:
        PlanError: It is no whole number, or zero.
    """
    if not (_is_whole(text, most_digits=9) and int(text)):
        raise PlanError(
            f"cannot read the number {text!r}",
            needed="a whole number, 1 or more",
            hint="tiles: {tokens: 8, vocabulary: 16}",
        )
    return int(text)


def fraction(text: str) -> float:
    """A fraction of an unplanned step.

    Raises:
        PlanError: It is no finite number.
    """
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise _not_a_number(text, "a fraction of an unplanned step: 0.031 for 3.1 %")
    return found


def _is_whole(text: str, most_digits: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= most_digits


def _not_a_number(text: str, needed: str) -> PlanError:
    hint = "leave 'predicted' and 'bound' out, if you write by hand"
    return PlanError(f"cannot read the number {text!r}", needed=needed, hint=hint)
