"""Names of modules (FQNs) and of their calls."""

from __future__ import annotations

import re
from typing import TypeAlias

Call: TypeAlias = tuple[str, int]  # a module's FQN, and how often it ran before
OP_NAME = r"[^/#@\s]+"


def call_name(fqn: str, number: int) -> str:
    """Return the pattern that matches one call.

    >>> call_name("encoder.cell", 3), call_name("", 0)
    ('encoder.cell#3', '.#0')
    """
    return f"{fqn or '.'}#{number}"


def relative_path(fqn: str, top: str) -> str:
    """Return the path of a module below another, "" for that one itself.

    A module that is not below it keeps its FQN.

    >>> relative_path("h.0.mlp", "h.0"), relative_path("h.0", "h.0")
    ('mlp', '')
    """
    if fqn == top:
        return ""
    return fqn.removeprefix(f"{top}.") if top else fqn


def is_around(outer: str, inner: str) -> bool:
    """Return whether one module is another one or contains it, by their FQNs.

    >>> is_around("h.1", "h.1.mlp"), is_around("", "h.1"), is_around("h.1", "h.10")
    (True, True, False)
    """
    return not outer or f"{inner}.".startswith(f"{outer}.")


def is_op_name(text: str) -> bool:
    """Whether a plan can use this text as the name of an op."""
    return re.fullmatch(OP_NAME, text) is not None
