"""Where random numbers start from, and which ops draw them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from unittest import mock

import numpy
import torch

_PROBABILITY = "dropout_p"


def seed_everything(seed: int) -> None:
    """Make every global generator of random numbers start from here."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


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


def torch_put_back() -> Callable[[], None]:
    """What lets torch's own generators, those of GPUs too, draw the same again."""
    of_cpu = torch.get_rng_state()
    of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def put_back() -> None:
        torch.set_rng_state(of_cpu)
        torch.cuda.set_rng_state_all(of_gpus)

    return put_back


def seeing_states(
    see: Callable[[torch.Tensor], None],
) -> AbstractContextManager[object]:
    """Show the CPU generator's states that anybody asks for, which no op makes.

    Torch's own checkpoint keeps one for every call.
    """
    real = torch.get_rng_state

    def seen() -> torch.Tensor:
        state = real()
        see(state)
        return state

    return mock.patch.object(torch, "get_rng_state", seen)


@cache
def _place_of_probability(func: Any) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index(_PROBABILITY) if _PROBABILITY in names else None
