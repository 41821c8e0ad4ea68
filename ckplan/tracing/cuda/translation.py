"""Types and helpers that the modules of the translation share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

Capability: TypeAlias = tuple[int, int]
"""Compute capability of a GPU, major and minor."""

HALVES = (torch.float16, torch.bfloat16)


class TranslationNotes:
    """Notes on what was translated, without repeats."""

    def __init__(self) -> None:
        self._said: dict[str, None] = {}

    def add_note(self, what: str) -> None:
        """Add a note."""
        self._said[what] = None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._said))


def composite(name: str, *args: Any, **kwargs: Any) -> Any:
    """Run torch's C++ composite of an op, below autograd's key.

    For some ops, torch also has composites in Python for its compiler; those copy.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return overload(name)._op_dk(key, *args, **kwargs)


def overload(name: str) -> Any:
    """The torch op of a name such as ``softmax.int``, or ``mm`` for ``mm.default``."""
    packet, _, kind = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), kind or "default")
