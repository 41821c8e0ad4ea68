"""States of random number generators, and ops that draw from them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import numpy
import torch

_PROBABILITY = "dropout_p"
_TAGGED = frozenset(
    {
        *("aten", "prims", "prim", "inductor", "quantized", "mkldnn", "mkl", "onednn"),
        *("c10d", "_c10d_functional", "fsdp", "profiler", "torchvision", "torchaudio"),
    }
)
"""Namespaces whose ops are tagged if they draw, or none of which does."""


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def says_it_draws(func: Any) -> bool:
    """Whether an op is tagged as one that draws random numbers for some arguments."""
    return torch.Tag.nondeterministic_seeded in func.tags


def may_draw(func: Any) -> bool:
    """Whether an op draws random numbers for some arguments, or nobody knows.

    Custom ops, such as attention with dropout in a library of its own, do not say.
    """
    return says_it_draws(func) or func.namespace not in _TAGGED


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op draws random numbers: attention without dropout does not."""
    if not may_draw(func):
        return False
    place = _place_of_probability(func)
    if place is None:
        return True
    default = func._schema.arguments[place].default_value
    probability = (
        args[place] if place < len(args) else kwargs.get(_PROBABILITY, default)
    )
    return bool(probability)


def torch_rng_restorer() -> Callable[[], None]:
    """Return a function that restores the current states of torch's generators."""
    of_cpu = torch.get_rng_state()
    of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def put_back() -> None:
        torch.set_rng_state(of_cpu)
        torch.cuda.set_rng_state_all(of_gpus)

    return put_back


@contextmanager
def randomness_restored() -> Iterator[None]:
    """Restore random states of torch, Python and NumPy, whatever fails."""
    put_back = torch_rng_restorer()
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        put_back()
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)


def state_of_generator(generator: torch.Generator) -> torch.Tensor:
    """The state of a generator that is not a device's default one."""
    return generator.get_state()


@contextmanager
def observed_rng_states(see: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Pass each requested generator state, which no op returns, to ``see``.

    All requests of the CPU generator's state count: torch's checkpoint retains one per
    call. For other generators, only requests of ckplan count.
    """

    def seen(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def ask(*generator: torch.Generator) -> torch.Tensor:
            state = real(*generator)
            see(state)
            return state

        return ask

    patch, this_module = mock.patch.object, sys.modules[__name__]
    with (
        patch(torch, "get_rng_state", seen(torch.get_rng_state)),
        patch(this_module, "state_of_generator", seen(state_of_generator)),
    ):
        yield


@cache
def _place_of_probability(func: Any) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index(_PROBABILITY) if _PROBABILITY in names else None
