"""Tensors that Python holds: all of them, and those that a step left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from ckplan.collector import instances_of
from ckplan.training.loaders import waiting_tensors


def alive_tensors() -> list[torch.Tensor]:
    """The tensors with bytes that Python holds; gradients may be held by autograd."""
    found: list[torch.Tensor] = instances_of(*_kinds_of_tensors(torch.Tensor))
    waiting = {id(one) for one in waiting_tensors()}
    return [one for one in found if id(one) not in waiting and _has_bytes(one)]


class LeftBehind:
    """What is alive after a step and was not before, such as a cache of a function.

    ``functools.lru_cache`` holds a tensor of the last step until the next one replaces
    it, whose forward then takes so much more.
    """

    def __init__(self, *, fake: bool) -> None:
        """Note what is alive, before the step.

        Args:
            fake: Whether the step makes fake tensors.
        """
        self._fake = fake
        self._before = self._alive()

    def tensors(self, is_known: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
        """Those that the step left; garbage is collected first, if there are any.

        What was alive before is not held any longer.

        Args:
            is_known: Whether a tensor is one of the model's, or of its optimizer.
        """
        before = {id(one) for one in self._before}

        def left() -> list[torch.Tensor]:
            new = (one for one in self._alive() if id(one) not in before)
            return [one for one in new if not is_known(one)]

        if found := left():
            found.clear()
            gc.collect()
            found = left()
        self._before.clear()
        return found

    def _alive(self) -> list[torch.Tensor]:
        if not self._fake:
            return alive_tensors()
        found: list[torch.Tensor] = [*instances_of(FakeTensor)]
        return [one for one in found if one.layout == torch.strided]


def _kinds_of_tensors(kind: type) -> Iterator[type]:
    """Classes of tensors that have bytes."""
    if kind is not FakeTensor:
        yield kind
        below: list[type] = type.__subclasses__(kind)
        for one in below:
            yield from _kinds_of_tensors(one)


def _has_bytes(tensor: torch.Tensor) -> bool:
    apart = tensor.is_nested or tensor.is_meta or is_lazy(tensor)
    return tensor.layout == torch.strided and not apart
