"""Words that the translation's parts share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

Capability: TypeAlias = tuple[int, int]
"""Compute capability of a GPU, major and minor."""

HALVES = (torch.float16, torch.bfloat16)


class TranslationNotes:
    """What was done differently, each thing said once."""

    def __init__(self) -> None:
        self._said: dict[str, None] = {}

    def add_note(self, what: str) -> None:
        """Remember one thing."""
        self._said[what] = None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._said))


def composite(name: str, *args: Any, **kwargs: Any) -> Any:
    """Run the composite of torch's own that is below autograd's key.

    Torch has others in Python for some ops, meant for its compiler, which copy.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return overload(name)._op_dk(key, *args, **kwargs)


def overload(name: str) -> Any:
    """``softmax.int`` as the op of torch; ``mm`` as its default overload."""
    packet, _, kind = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), kind or "default")
