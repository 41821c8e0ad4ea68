"""Layers that are alike share records; others never do."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import combinations, starmap
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ckplan import applying
from ckplan.applying.guards.guarded_program import GuardedProgram
from ckplan.applying.hooks.choices import Choice
from ckplan.applying.tensors import geometry
from ckplan.applying.tensors.geometry import GeometryCheck, geometry_of, has_geometry
from ckplan.applying.tensors.retained import Place, Ref
from ckplan.applying.tensors.sharing import Shared, exactly
from ckplan.plan.names import OpName
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.region import PROGRAM, RERUN


@dataclass(frozen=True)
class Pair:
    """A record with two fields."""

    one: Any
    two: Any


VALUES: tuple[Any, ...] = (
    *(0, False, 0.0, -0.0, None, "0", (0,), [0], {0}, frozenset({0}), {0: 0}, 0j),
    *(1, True, 1.0, float("nan"), float("inf"), 10**30, 1e-320, "", (), [], {}, ...),
    *((1, (2, 3)), ((1, 2), 3), (1, 2, 3), [1, [2], 3], (1, 2.0, 3), (True, 2, 3)),
    *({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1, "b": 2.0}, {int}, {float}, int),
    *(torch.Size((1, 2)), (1, 2), Pair(1, 2), Pair(2, 1), Pair(1, (2,)), Pair(1.0, 2)),
    *(torch.float32, torch.float64, torch.strided, torch.device("cpu"), "cpu"),
    *(torch.Tensor.size, torch.Tensor.dim, torch.relu, torch.ops.aten.relu.default),
    *(Ref(1, Place(torch.Size(()), (), 0, torch.float32)), slice(1), slice(2), {0.0}),
    Place(torch.Size((2,)), (1,), 0, torch.float32),
)


def test_values_that_differ_in_type_or_bits_have_other_keys() -> None:
    for one, other in combinations(VALUES, 2):
        assert exactly(one) != exactly(other)
        assert exactly((one, 2)) != exactly((other, 2))
        assert exactly(1, one) != exactly(one, 1) or one == 1


def test_a_copy_of_plain_data_has_the_same_key() -> None:
    for value in VALUES:
        if not isinstance(value, (slice, complex, set)):  # they stand for themselves
            assert exactly(deepcopy(value)) == exactly(value)
    assert exactly(torch.Tensor.shape.__get__) == exactly(torch.Tensor.shape.__get__)
    assert exactly(torch.ones(1)) != exactly(torch.ones(1))


def test_what_nobody_holds_is_forgotten() -> None:
    shared: Shared[Pair] = Shared()
    first = shared.one("key", Pair(1, 2))
    assert shared.one("key", Pair(3, 4)) is first
    del first
    gc.collect()
    assert shared.one("key", Pair(3, 4)) == Pair(3, 4)


# -- layers ----------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer with numbers that only its calls tell."""

    def __init__(self, p: float = 0.1, scale: Any = 2.0, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(8, width)
        self.back = nn.Linear(width, 8)
        self.p, self.scale = p, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.linear(x)) * self.scale
        return x + nn.functional.dropout(self.back(inner), self.p)


def model_of(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.3)
    return nn.Sequential(nn.Linear(8, 8), *layers)


def plan_of(model: nn.Sequential, *save: OpName) -> Plan:
    calls = [str(number) for number in range(1, len(model))]
    return Plan(regions=tuple(PlannedRegion(call, save=save) for call in calls))


def gradients(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        x = torch.randn(4, 8)
        found += torch.autograd.grad(model(x).sin().sum(), [*model.parameters()])
    return found


def programs_of(model: nn.Module) -> list[GuardedProgram]:
    """The guarded program of each region, after steps."""
    session = applying.regions._session_of(model)
    assert session is not None
    return [one for choice in session.choices for one in _known(choice)]


def _known(choice: Choice) -> Iterator[GuardedProgram]:
    for kind in choice.programs._kinds.values():
        if kind.program is not None:
            yield kind.program


@pytest.mark.parametrize("save", [(), (OpName("linear", "addmm"),)])
def test_equal_layers_are_checked_against_one_program(save: tuple[OpName, ...]) -> None:
    model = model_of(Layer(), Layer(), Layer())
    expected = gradients(model)
    with applying.planned(model, plan_of(model, *save)):
        found = gradients(model)
        first, *others = programs_of(model)
        counters = [(one.runs, one.recorded) for one in applying.status(model).regions]
    assert len(others) == 2 and all(one is first for one in others)
    assert counters == [(3, 1)] * 3
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize(
    "other",
    [
        *({"p": 0.2}, {"scale": 2}, {"scale": -2.0}, {"width": 16}),
        *({"scale": 0.0}, {"scale": -0.0}, {"scale": True}, {"p": 0}),
    ],
)
def test_a_layer_that_differs_has_its_own_program(other: dict[str, Any]) -> None:
    model = model_of(Layer(), Layer(**other), Layer())
    expected = gradients(model)
    with applying.planned(model, plan_of(model)):
        found = gradients(model)
        first, second, third = programs_of(model)
    assert first is third and first is not second
    assert all(map(torch.equal, expected, found))


def test_layers_that_differ_in_the_sign_of_a_zero_share_nothing() -> None:
    model = model_of(Layer(scale=0.0), Layer(scale=-0.0))
    with applying.planned(model, plan_of(model)):
        gradients(model)
        one, other = programs_of(model)
    assert one is not other


def test_a_layer_that_changes_leaves_the_others_their_program() -> None:
    layers = Layer(), Layer(), Layer()
    model = model_of(*layers)
    with applying.planned(model, plan_of(model)):
        gradients(model)
        layers[1].scale = 3.0
        found = gradients(model)
        first, second, third = programs_of(model)
    assert first is third and first is not second
    assert all(map(torch.equal, gradients(model), found))


def test_errors_name_the_layer_though_its_program_is_that_of_another() -> None:
    model = model_of(Layer(), Layer())
    with applying.planned(model, plan_of(model)):
        gradients(model)
        out = model(torch.randn(4, 8))
        with torch.no_grad():
            model[2].back.weight.add_(1)
        with pytest.raises(applying.regions.ApplyError, match=r"cannot rebuild 2"):
            out.sum().backward()


class Block(nn.Module):
    """Its kinds differ in numbers, functions, and whether they are given more."""

    def __init__(self, p: float, act: Callable[..., torch.Tensor], scale: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear, self.back = nn.Linear(8, 16), nn.Linear(16, 8)
        self.p, self.act, self.scale = p, act, scale

    def forward(
        self, x: torch.Tensor, more: torch.Tensor | None = None
    ) -> torch.Tensor:
        inner = nn.functional.dropout(self.act(self.linear(self.norm(x))), self.p)
        inner = inner if more is None else inner + more
        return x + self.back(inner) * self.scale


class Blocks(nn.Module):
    """Blocks that are nearly alike."""

    def __init__(self) -> None:
        super().__init__()
        gelu, relu = nn.functional.gelu, nn.functional.relu
        kinds = (0.1, gelu, 1.0), (0.1, gelu, 1.0), (0.2, gelu, 1.0), (0.1, relu, 1.0)
        signs = (0.1, gelu, 1), (0.1, gelu, True), (0.1, gelu, 0.0), (0.1, gelu, -0.0)
        self.blocks = nn.ModuleList(starmap(Block, (*kinds, *signs, *kinds[:2])))
        self.more = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, None if (number + turn) % 4 else self.more)
        return x


def trained(plan: Plan | None) -> list[torch.Tensor]:
    """Losses and gradients of steps before each of which something changes."""
    torch.manual_seed(0)
    model = Blocks()
    if plan is not None:
        applying.apply(model, plan)
    blocks: Any = model.blocks
    blocks[8].linear.weight.requires_grad_(False)
    blocks[9].norm.eps = 1e-3
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = []
    for step in range(8):
        if step == 3:
            blocks[2].p, blocks[4].scale = 0.1, 3.0
        if step == 5:
            blocks[0].linear.weight.requires_grad_(False)
            blocks[5].act = torch.tanh
        x = torch.randn(4, 3 if step % 3 == 2 else 4, 8)
        losses = [model(x, step % 2).square().mean(), model(x * 0.5, 0).sin().mean()]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step in (4, 6)):
            losses.append(model(x, 1).float().square().mean())
        sum(losses, torch.zeros(())).backward()
        grads = (one.grad for one in model.parameters())
        found += losses + [one.clone() for one in grads if one is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("by", [PROGRAM, RERUN])
def test_layers_that_are_nearly_alike_are_never_taken_for_each_other(by: str) -> None:
    plan = Plan(regions=tuple(PlannedRegion(f"blocks.{n}", by=by) for n in range(10)))
    found, expected = trained(plan), trained(None)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


# -- geometry --------------------------------------------------------------------------


def tensors() -> list[Any]:
    """Tensors that differ in one thing each; the first two are alike."""
    plain = torch.randn(4, 6)
    with torch.inference_mode():
        inferred = torch.randn(4, 6)
    return [
        *(plain, torch.randn(4, 6), torch.randn(4, 7), torch.randn(6, 4).t()),
        *(torch.randn(30)[6:].view(4, 6), plain.double(), plain.to_sparse()),
        *(plain.to("meta"), torch._neg_view(plain), inferred, plain[:, :1], plain[:2]),
        *(torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, 1)),
        *(nn.Parameter(plain), nn.Parameter(plain, requires_grad=False), None, 3),
    ]


def states() -> list[AbstractContextManager[Any]]:
    """What the thread may be in while tensors are compared."""
    return [
        *(nullcontext(), torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16)),
        *(torch._C._AutoDispatchBelowAutograd(), torch.inference_mode()),
    ]


def guards_of_another_torch(tensor: torch.Tensor) -> None:
    """Takes other arguments."""
    raise AssertionError(tensor)


@pytest.mark.parametrize("guards", ["", None, guards_of_another_torch])
def test_a_fast_check_passes_what_the_properties_pass(
    monkeypatch: pytest.MonkeyPatch, guards: Any
) -> None:
    if guards != "":
        monkeypatch.setattr(geometry, "_TensorGuards", guards)
    found = tensors()
    for like in found[:2] + found[3:5] + found[12:16]:
        for learned_in in states():
            wanted = geometry_of(like)
            check = GeometryCheck(wanted)
            with learned_in:
                assert check.passes(like)
            for state in states():
                with state:
                    for tensor in found:
                        assert check.passes(tensor) == has_geometry(tensor, wanted)


def test_a_tensor_like_one_that_passed_is_compared_in_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = torch.randn(4, 6), torch.randn(4, 6)
    check = GeometryCheck(geometry_of(one))
    assert check.passes(one)
    monkeypatch.setattr(geometry, "has_geometry", lambda *_: False)
    assert check.passes(other)
    assert not check.passes(torch.randn(30)[6:].view(4, 6))


def test_fake_tensors_are_compared_by_their_properties() -> None:
    with FakeTensorMode():
        one, other = torch.randn(4, 6), torch.randn(4, 7)
        check = GeometryCheck(geometry_of(one))
        assert check.passes(one) and not check.passes(other)
    assert not check.passes(torch.randn(4, 6))
