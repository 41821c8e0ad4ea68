"""Forwards that begin like an earlier one, and then differ: right, and within the plan.

What they take is compared with the same forward of a model that is written down from
its beginning, and must not be more.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from measured import peak_bytes_of
from torch import nn
from torch.nn import functional

from ckplan import applying
from ckplan.names import OpName
from ckplan.plan import Plan, PlannedRegion

ROWS, WIDTH = 64, 32


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x.exp())
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x, e = ctx.saved_tensors
        return grad * (3 * x**2 + 0 * e)


class Op(NamedTuple):
    """What a block does next, and with which of the tensors that it has."""

    kind: str
    at: int
    number: float


def _filled(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(x)
    made.copy_(x.detach())
    return made


def _attention(x: torch.Tensor) -> torch.Tensor:
    heads = x.view(4, ROWS // 4, 2, WIDTH // 2).transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
    return mixed.transpose(1, 2).reshape(ROWS, WIDTH)


def _averaged(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.mean.mul_(0.9).add_(x.detach().mean(0))
    return x


def _sliced(x: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    made[1:] *= torch.sigmoid(x[:-1])
    made[0] = 0.5
    return made


KINDS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "linear": lambda s, x, y, n: s.first(x),
    "other linear": lambda s, x, y, n: s.second(x),
    "norm": lambda s, x, y, n: s.norm(x),
    "gelu": lambda s, x, y, n: functional.gelu(x),
    "scale": lambda s, x, y, n: x * n,
    "product": lambda s, x, y, n: torch.tanh(x) * torch.sigmoid(y),
    "sum": lambda s, x, y, n: x + y,
    "dropout": lambda s, x, y, n: functional.dropout(x, 0.3),
    "in place": lambda s, x, y, n: s.first(x).relu_(),
    "dropout in place": lambda s, x, y, n: s.drop(x + 1),
    "slices": lambda s, x, y, n: _sliced(torch.tanh(x)),
    "function": lambda s, x, y, n: Cube.apply(torch.tanh(x)),
    "noise": lambda s, x, y, n: torch.tanh(x + torch.rand_like(x)),
    "attention": lambda s, x, y, n: _attention(torch.tanh(x)),
    "counted": lambda s, x, y, n: torch.sin(x * float(s.count.add_(1))),
    "buffer": lambda s, x, y, n: _averaged(s, torch.sin(x)),
    "filled": lambda s, x, y, n: torch.sin(x) * _filled(y),
    "softmax": lambda s, x, y, n: (x @ x.t()).softmax(-1) @ y,
    "parts": lambda s, x, y, n: torch.cat(
        [p.exp() * n for p in x.tanh().chunk(2, 1)], 1
    ),
    "frozen": lambda s, x, y, n: torch.cos(x + torch.sin(y.detach())),
    "constant": lambda s, x, y, n: x * torch.tensor([n, 0.5] * (WIDTH // 2)).tanh(),
}
LATER = ("relu_", "mul_", "add_")  # on what was made last, if its maker saved it not


class Block(nn.Module):
    """Runs what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.2, inplace=True)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.ones(WIDTH))
        self.script: Sequence[Op] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        there = [x]
        for kind, at, number in self.script:
            if kind in KINDS:
                y = there[(at * 7) % len(there)]
                there.append(KINDS[kind](self, there[-1 - at % len(there)], y, number))
            else:
                new = there[-1] if len(there) > 1 else there[-1] * 2
                new = self.second(new)
                later = torch.tanh(new.detach()).sum()  # a call between
                there.append(getattr(new, kind)(*(later,) if kind != "relu_" else ()))
        return x + there[-1]


def script(rng: random.Random, length: int) -> tuple[Op, ...]:
    kinds = [*KINDS, *LATER]
    return tuple(
        Op(rng.choice(kinds), rng.randrange(3), round(rng.uniform(0.5, 1.5), 3))
        for _ in range(length)
    )


def scripts(rng: random.Random) -> tuple[list[tuple[Op, ...]], list[tuple[Op, ...]]]:
    """What the blocks do at first, and then: one of them, or all, goes on otherwise."""
    first = [script(rng, rng.randrange(2, 8)) for _ in range(3)]
    then = list(first)
    for block in rng.choice([[0], [1], [2], [0, 1, 2]]):
        begun = first[block][: rng.randrange(len(first[block]) + 1)]
        then[block] = (*begun, *script(rng, rng.randrange(5)))
    return first, then


SAVES = ("first/addmm", "second/addmm", "./tanh", "norm/native_layer_norm", "./mul#1")
MASKS = ("./bernoulli_", "drop/bernoulli_", "./bernoulli_#1")


def _keeping(region: str, top: str = "", **rest: Any) -> PlannedRegion:
    ops = [OpName.parse(op) for op in (*SAVES, *MASKS)]
    below = [OpName(f"{top}{op.path}".strip("."), op.name, op.occurrence) for op in ops]
    saves, masks = below[: len(SAVES)], below[len(SAVES) :]
    if not rest:
        rest = {"encode": tuple((op, "bits") for op in masks)}
    return PlannedRegion(region, save=tuple(saves), **rest)


RUN = {"calls": "0..2", "run": ("0", "2")}
PLANS: dict[str, tuple[PlannedRegion, ...]] = {
    "blocks": (PlannedRegion("[0..2]"),),
    "whole": (PlannedRegion("."),),
    "run": (PlannedRegion(**RUN),),  # type: ignore[arg-type]
    "keeping": (_keeping("[0..2]"),),
    "whole keeping": (_keeping(".", "1."),),
    "nested": (PlannedRegion(".", inner=(PlannedRegion("[0..2]"),)),),
    "nested keeping": (_keeping(".", "0.", inner=(_keeping("[0..2]", inner=()),)),),
    "some nested": (PlannedRegion(".", inner=(PlannedRegion("1"),)),),
}


def step(model: nn.Sequential, told: Sequence[Sequence[Op]], seed: int) -> list[Any]:
    """Gradients, buffers and random state after a step."""
    for block, one in zip(model, told, strict=True):
        block.script = one
    torch.manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    model.zero_grad()
    (model(x * 1) * torch.linspace(0, 1, WIDTH)).sum().backward()
    grads = [x.grad, *(p.grad for p in model.parameters())]
    return [*grads, *model.buffers(), torch.get_rng_state()]


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(
        b is None if a is None else b is not None and torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.filterwarnings("ignore:.*runs no op.*:UserWarning")
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("seed", range(40))
def test_forwards_that_differ_at_random_are_the_same_and_take_no_more(
    name: str, seed: int
) -> None:
    rng = random.Random(f"{name} {seed}")
    first, then = scripts(rng)
    torch.manual_seed(seed)
    plain = nn.Sequential(Block(), Block(), Block())
    planned = copy.deepcopy(plain)
    applying.apply(planned, Plan(regions=PLANS[name]))
    for number, told in enumerate((first, first)):
        assert same(step(plain, told, number), step(planned, told, number))
    anew = copy.deepcopy(planned)
    applying.apply(anew, Plan(regions=PLANS[name]))
    found: list[list[Any]] = [[], []]
    most = peak_bytes_of(lambda: found[0].extend(step(anew, then, 2)))
    assert peak_bytes_of(lambda: found[1].extend(step(planned, then, 2))) <= most
    expected = step(plain, then, 2)
    assert same(expected, found[0])
    assert same(expected, found[1])
    for number, told in enumerate((then, first, then)):
        assert same(step(plain, told, number), step(planned, told, number))
    assert not any(region.kept for region in applying.status(planned).regions)
