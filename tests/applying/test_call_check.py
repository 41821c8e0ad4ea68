"""Second runs that make other calls, or read other tensors, are told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

from ckplan import applying
from ckplan.applying.rebuilding.digest import holds_same
from ckplan.errors import ApplyError
from ckplan.plan.plan import Plan, PlannedRegion

RERUN = Plan(regions=(PlannedRegion("0", by="rerun"),))
HIDDEN: dict[str, Any] = {}


class Reading(nn.Module):
    """Reads hidden state that no snapshot holds; its kind says how."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sin(self.linear(x))
        HIDDEN["runs"] += 1
        again = HIDDEN["runs"] % 2 == 0  # every second run is a rerun
        found: torch.Tensor = getattr(self, self.kind)(x, h, again)
        return torch.sin(found.exp()).exp()

    def another_tensor(self, x: Any, h: Any, again: bool) -> Any:
        return h * HIDDEN["two"][again]

    def another_tensor_late(self, x: Any, h: Any, again: bool) -> Any:
        return torch.cos(h * HIDDEN["two"][0]) * HIDDEN["two"][again]

    def another_number(self, x: Any, h: Any, again: bool) -> Any:
        return h * (2.0 + again)

    def another_sign_of_zero(self, x: Any, h: Any, again: bool) -> Any:
        return torch.atan2(h * 0, h) + torch.full((4,), -0.0 if again else 0.0).sign()

    def another_type_of_number(self, x: Any, h: Any, again: bool) -> Any:
        return h * (1.0 if again else 1)

    def another_number_of_numpy(self, x: Any, h: Any, again: bool) -> Any:
        return h * numpy.float64(2 + again)

    def another_complex_number(self, x: Any, h: Any, again: bool) -> Any:
        return (h * (1j + again)).abs()

    def another_array_of_indices(self, x: Any, h: Any, again: bool) -> Any:
        return h[numpy.array([0, 2 + again, 1, 1])]

    def other_data(self, x: Any, h: Any, again: bool) -> Any:
        return h * torch.tensor([1.0, 2.0 + again, 3.0, 4.0])

    def data_in_another_array(self, x: Any, h: Any, again: bool) -> Any:
        return h * torch.tensor(numpy.full(4, 2.0 + again, "f4"))

    def twice_the_same(self, x: Any, h: Any, again: bool) -> Any:
        one, two = HIDDEN["two"]
        return h * one + torch.cos(h) * (one if again else two)

    def no_tensor(self, x: Any, h: Any, again: bool) -> Any:
        bias = torch.from_numpy(HIDDEN["array"].copy())
        return functional.linear(h, HIDDEN["two"][0], None if again else bias)

    def a_dead_tensor(self, x: Any, h: Any, again: bool) -> Any:
        bias = h.sum(0) * 2
        if again:
            bias = None
        return functional.linear(h.cos(), HIDDEN["two"][0], bias)

    def keywords(self, x: Any, h: Any, again: bool) -> Any:
        return torch.sum(h, dim=int(again)) * h

    def without_gradients(self, x: Any, h: Any, again: bool) -> Any:
        with torch.set_grad_enabled(not again):
            y = h.cos()
        return y * h

    def another_default_type(self, x: Any, h: Any, again: bool) -> Any:
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if again else dtype)
        try:
            number = torch.full((4,), 0.1)
        finally:
            torch.set_default_dtype(dtype)
        return h * number.float()

    def casts(self, x: Any, h: Any, again: bool) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=again):
            return self.linear(h).float()


KINDS = [name for name in vars(Reading) if name not in ("__init__", "forward")]
KINDS = [name for name in KINDS if not name.startswith("_")]


def two_tensors(first: float = 2.0, second: float = 3.0) -> list[torch.Tensor]:
    return [torch.full((4, 4), first), torch.full((4, 4), second)]


def hidden() -> None:
    array = torch.ones(4).numpy()
    HIDDEN.update(runs=0, two=two_tensors(), array=array)


def step(model: nn.Module) -> torch.Tensor:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    out: torch.Tensor = model(x.requires_grad_()).sum()
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_run_that_differs_is_told_in_every_step(kind: str) -> None:
    """The first step learns the calls, later ones compare with matchers."""
    hidden()
    model = nn.Sequential(Reading(kind), nn.Tanh())
    applying.apply(model, RERUN)
    for _ in range(4):
        out = step(model)
        with pytest.raises(ApplyError, match="differs from the first one"):
            out.backward()
        HIDDEN["runs"] = 0


@pytest.mark.parametrize("kind", KINDS)
def test_forwards_that_differ_from_those_before_are_right(kind: str) -> None:
    hidden()
    plain = nn.Sequential(Reading(kind), nn.Tanh())
    planned = copy.deepcopy(plain)
    applying.apply(planned, RERUN)
    for number in range(24):
        grads = []
        for model in (plain, planned):
            model.zero_grad()
            # Both runs of a step are alike, but differ from those of other steps.
            other = number % 3 == 1 or number > 18
            HIDDEN["runs"] = int(other)
            out = step(model)
            HIDDEN["runs"] = int(other)
            out.backward()
            grads.append([p.grad for p in model.parameters()])
        assert all(map(torch.equal, *grads)), number


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * HIDDEN["two"][0]).exp() * self.linear(x)


def swapped() -> None:
    HIDDEN["two"].reverse()


BETWEEN: dict[str, Callable[[], object]] = {
    "trained": lambda: HIDDEN["two"][0].requires_grad_(True),
    "written": lambda: HIDDEN["two"][0].add_(1),
    "swapped": swapped,
    "laid out anew": lambda: setattr(
        HIDDEN["two"][0], "data", torch.full((4, 4), 2.0).t().contiguous().t()
    ),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_a_tensor_from_elsewhere_that_changes_before_backward_is_told(
    what: str,
) -> None:
    hidden()
    model = nn.Sequential(Outside(), nn.Tanh())
    applying.apply(model, RERUN)
    for _ in range(3):
        HIDDEN["two"] = two_tensors()
        step(model).backward()
    for _ in range(3):
        HIDDEN["two"] = two_tensors()
        out = step(model)
        BETWEEN[what]()
        with pytest.raises(ApplyError, match="differs from the first one"):
            out.backward()


def test_an_input_that_requires_gradients_only_later_is_told() -> None:
    model = nn.Sequential(Outside(), nn.Tanh())
    hidden()
    applying.apply(model, RERUN)
    for _ in range(3):
        x = torch.randn(4, 4)
        out = model(x).sum()
        x.requires_grad_()
        with pytest.raises(ApplyError, match="differs from the first one"):
            out.backward()


def test_tensors_made_anew_with_the_same_values_are_the_same() -> None:
    """Such as constants from NumPy, of which the caller holds the first."""

    class Constants(Outside):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = torch.from_numpy(HIDDEN["array"].copy())
            HIDDEN["made"] = made
            return torch.sin(x * made).exp() * self.linear(x)

    hidden()
    HIDDEN["array"][1] = float("nan")
    model = nn.Sequential(Constants(), nn.Tanh())
    applying.apply(model, RERUN)
    for _ in range(3):
        step(model).backward()


def test_an_error_that_the_forward_catches_is_raised_again() -> None:
    class Trying(Outside):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with suppress(RuntimeError):
                torch.ones(2) @ torch.ones(3)
            return torch.sin(self.linear(x)).exp()

    model = nn.Sequential(Trying(), nn.Tanh())
    applying.apply(model, RERUN)
    for _ in range(3):
        step(model).backward()


def test_values_are_the_same_if_their_bytes_are() -> None:
    nan, two = torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])
    assert holds_same(nan, nan.clone()) and holds_same(two, two[:])
    assert not holds_same(nan, two) and not holds_same(two, nan)
    assert holds_same(torch.tensor([True]), torch.tensor([True]))
    assert not holds_same(torch.tensor([True]), torch.tensor([False]))
    meta = torch.empty(2, device="meta")
    assert not holds_same(two, two + 1) and holds_same(meta, torch.empty_like(meta))


def test_an_attribute_that_is_trained_no_more_is_put_back() -> None:
    """What is state is asked in every forward, not when attributes were looked at."""

    class Averaging(Outside):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(4, requires_grad=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.scale.requires_grad:
                self.scale.mul_(0.5)
            return torch.sin(x * self.scale.clone()).exp() * self.linear(x)

    plain = nn.Sequential(nn.Sequential(Averaging()), nn.Tanh())
    planned = copy.deepcopy(plain)
    applying.apply(planned, RERUN)
    for number in range(4):
        grads = []
        for model in (plain, planned):
            model.zero_grad()
            model[0][0].scale.requires_grad_(number < 2)
            step(model).backward()
            grads.append([*(p.grad for p in model.parameters()), model[0][0].scale])
        assert all(map(torch.equal, *grads)), number
