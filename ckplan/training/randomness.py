"""Which ops draw random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

_PROBABILITY = "dropout_p"


def may_draw(func: Any) -> bool:
    """Whether an op draws random numbers for some arguments."""
    return torch.Tag.nondeterministic_seeded in func.tags


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op draws random numbers: attention without dropout does not."""
    if not may_draw(func):
        return False
    place = _place_of_probability(func)
    if place is None:
        return True
    default = func._schema.arguments[place].default_value
    given = args[place] if place < len(args) else kwargs.get(_PROBABILITY, default)
    return bool(given)


@cache
def _place_of_probability(func: Any) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index(_PROBABILITY) if _PROBABILITY in names else None
