"""Tensors that are given the bytes of others, in a forward or after it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from ckplan import applying
from ckplan.errors import ApplyError
from ckplan.plan.plan import Plan, PlannedRegion

BOTH = pytest.mark.parametrize("by", ["program", "rerun"])


class Moving(nn.Module):
    """Gives a buffer, or its weight, other bytes, from some step on."""

    def __init__(self, kind: str, since: int = 0) -> None:
        super().__init__()
        self.kind, self.since, self.step = kind, since, 0
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8))
        self.register_buffer("mean", torch.randn(8))
        self.array = numpy.ones(8, "f4")
        self.indices = numpy.arange(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        if self.step >= self.since:
            h = getattr(self, self.kind)(h, 0.9 * self.mean + 0.1 * h.detach().mean(0))
        else:
            h = h - self.mean
        return torch.tanh(h.sin())

    def before_it_is_read(self, h: Any, new: torch.Tensor) -> Any:
        self.mean.data = new
        return h - self.mean

    def after_it_was_read(self, h: Any, new: torch.Tensor) -> Any:
        y = (h - self.mean).sin()
        self.mean.data = new
        return y * 2

    def between_two_reads(self, h: Any, new: torch.Tensor) -> Any:
        y = (h - self.mean).sin()
        self.mean.data = new
        return y * (h - self.mean)

    def by_set(self, h: Any, new: torch.Tensor) -> Any:
        y = (h - self.mean).sin()
        with torch.no_grad():
            self.mean.set_(new)  # type: ignore[call-overload]
        return y * (h - self.mean)

    def under_a_view(self, h: Any, new: torch.Tensor) -> Any:
        view = self.mean[:]
        y = (h - view).sin()
        self.mean.data = new
        return y * (h - view)

    def and_its_old_ones_are_read(self, h: Any, new: torch.Tensor) -> Any:
        y, old = (h - self.mean).sin(), self.mean.data
        self.mean.data = new
        return y * (h - old)

    def of_a_tensor_made_here(self, h: Any, new: torch.Tensor) -> Any:
        y = h.sin()
        z = y * 2
        y.data = y.data * 0.5
        return z.exp() * y

    def of_another_shape(self, h: Any, new: torch.Tensor) -> Any:
        y = (h - self.mean).sin()
        self.mean.data = torch.cat([new, new])
        self.mean.data = new
        return y

    def of_a_parameter(self, h: Any, new: torch.Tensor) -> Any:
        y = (h * self.weight).sin()
        self.weight.data = self.weight.data * 0.9
        return y * self.weight

    def in_a_parameter(self, h: Any, new: torch.Tensor) -> Any:
        y = (h * self.weight).sin()
        self.weight.data.mul_(0.9)
        return y * self.weight

    def before_a_parameter_is_read(self, h: Any, new: torch.Tensor) -> Any:
        self.weight.data[2:].div_(self.weight.data.norm())
        return (h * self.weight).sin()

    def in_its_array(self, h: Any, new: torch.Tensor) -> Any:
        y = (h - self.mean).sin()
        array = self.mean.numpy()
        array *= 0.9
        return y * 2

    def before_it_is_read_in_its_array(self, h: Any, new: torch.Tensor) -> Any:
        array = self.mean.numpy()
        array *= 0.9
        return (h - self.mean).sin()

    def indices_in_an_array(self, h: Any, new: torch.Tensor) -> Any:
        y = h[self.indices].sin()
        self.indices[:] = self.indices[::-1].copy()
        return y * 2

    def in_an_array(self, h: Any, new: torch.Tensor) -> Any:
        y = (h - torch.from_numpy(self.array)).sin()
        self.array *= 0.9
        return y * 2


KINDS = [name for name in vars(Moving) if name not in ("__init__", "forward")]
KINDS = [name for name in KINDS if not name.startswith("_")]


def pair(kind: str, by: str, since: int = 0) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(Moving(kind, since))
    planned = copy.deepcopy(plain)
    applying.apply(planned, Plan(regions=(PlannedRegion("0", by=by),)))
    return plain, planned


def trained(model: Any, step: int, after: Callable[[Any], object]) -> list[Any]:
    model.zero_grad()
    model[0].step = step
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    out = model(x.requires_grad_())
    after(model[0])
    out.square().sum().backward()
    return [out, x.grad, *(p.grad for p in model.parameters()), model[0].mean]


def nothing(model: object) -> None:
    """Change nothing after forward."""


@pytest.mark.parametrize("since", [0, 2])
@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_bytes_that_were_read(
    kind: str, by: str, since: int
) -> None:
    plain, planned = pair(kind, by, since)
    plain_weight, planned_weight = plain[0].weight, planned[0].weight  # type: ignore[index]
    for step in range(5):
        wanted = trained(plain, step, nothing)
        try:
            found = trained(planned, step, nothing)
        except ApplyError as error:  # never other gradients without a word
            assert (by, kind) in REFUSED and step == since
            assert str(error).startswith("error: cannot r")
            return
        for one, other in zip(wanted, found, strict=True):
            assert one is other is None or torch.equal(one, other)
    assert (by, kind) not in REFUSED
    assert torch.equal(plain_weight, planned_weight)


REFUSED = {
    ("rerun", "of_a_parameter"),  # would be given other bytes twice
    ("rerun", "in_a_parameter"),
    ("rerun", "before_a_parameter_is_read"),
    ("rerun", "in_an_array"),
    ("rerun", "indices_in_an_array"),
    ("program", "in_an_array"),
    ("program", "in_its_array"),
    ("program", "before_it_is_read_in_its_array"),  # it was read before, too
    ("program", "indices_in_an_array"),
    ("program", "of_another_shape"),
    ("program", "in_a_parameter"),
}


@pytest.mark.parametrize("by_set", [False, True])
@BOTH
def test_bytes_that_a_buffer_is_given_after_forward_are_told(
    by: str, by_set: bool
) -> None:
    _, planned = pair("between_two_reads", by, since=9)

    def give(model: Any) -> None:
        new = model.mean + 1.0
        if by_set:
            model.mean.set_(new)
        else:
            model.mean.data = new

    for step in range(3):
        trained(planned, step, nothing)
        with pytest.raises(ApplyError, match=r"other data after|changed in place"):
            trained(planned, step, give)
