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
from blocks import Cube
from measured import live_bytes_of
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from ckplan import applying
from ckplan.errors import ApplyError
from ckplan.plan.names import OpName
from ckplan.plan.plan import Plan, PlannedRegion

ROWS, WIDTH = 64, 32
SCALARS_BYTES = 256
# A value that the plan keeps, and the first forwards' program has no use for, is not
# held: where a later forward goes on otherwise and needs it, it is made again.
REBUILT_BYTES = {("whole keeping", 12): ROWS * WIDTH // 2 * 4}


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
    "steady norm": lambda s, x, y, n: functional.batch_norm(x, s.shift, s.spread),
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
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.register_buffer("spread", torch.ones(WIDTH))
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


def move(block: Any, x: torch.Tensor) -> None:
    """Train on something else: statistics move, and torch does not notice."""
    functional.batch_norm(x.detach(), block.shift, block.spread, training=True)


def step(model: nn.Sequential, told: Sequence[Sequence[Op]], seed: int) -> list[Any]:
    """Gradients, buffers and random state after a step."""
    for block, one in zip(model, told, strict=True):
        block.script = one
    torch.manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    model.zero_grad()
    loss = (model(x * 1) * torch.linspace(0, 1, WIDTH)).sum()
    for block in model:
        move(block, x)
    loss.backward()
    grads = [x.grad, *(p.grad for p in model.parameters())]
    return [*grads, *model.buffers(), torch.get_rng_state()]


def slow(seed: int) -> Any:
    return pytest.param(seed, marks=pytest.mark.slow)


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(
        b is None if a is None else b is not None and torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.filterwarnings("ignore:.*runs no op.*:UserWarning")
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("seed", [*range(3), *map(slow, range(3, 20))])
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
    most = live_bytes_of(lambda: found[0].extend(step(anew, then, 2)))
    peak_bytes = live_bytes_of(lambda: found[1].extend(step(planned, then, 2)))
    assert peak_bytes <= most + SCALARS_BYTES + REBUILT_BYTES.get((name, seed), 0)
    expected = step(plain, then, 2)
    assert same(expected, found[0])
    assert same(expected, found[1])
    for number, told in enumerate((then, first) * 3):
        assert same(step(plain, told, number), step(planned, told, number))
    assert not any(region.kept for region in applying.status(planned).regions)


# -- models that change now and then -----------------------------------------------


class Layer(nn.Module):
    """What the layers below do, with a step to go by."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixed = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        self.mixed.momentum = None

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.dropout(functional.gelu(self.up(x)), 0.1))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Scheduled(Layer):
    """A number that enters every layer, in the first call or in the last."""

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        p = 0.1 if number < 3 else 0.2
        x = x + self.mlp(functional.dropout(x, p))
        return x * (1.0 if number < 4 else 0.9)


class Skipping(Layer):
    """Stochastic depth, by Python's randomness."""

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        for _ in range(2):
            if number < 3 or random.random() < 0.5:
                x = x + self.mlp(x)
        return x


class Averaging(Layer):
    """Running statistics weighed by how many there were."""

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return x + self.mlp(self.mixed(x))


class Routed(Layer):
    """Experts that are asked only if something is for them."""

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        hit = x.detach().mean(0)[:3].gt(0).tolist() if number > 2 else [True] * 3
        return x + sum(self.mlp(self.norm(x)) * 0.1 for one in [True, *hit] if one)


class Model(nn.Module):
    def __init__(self, kind: type[Layer]) -> None:
        super().__init__()
        self.h = nn.ModuleList(kind() for _ in range(6))
        self.number = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        for layer in self.h:
            x = layer(x, self.number)
        return x


LAYERS = PlannedRegion("h.[0..5]")
WHERE = {"layers": LAYERS, "nested": PlannedRegion(".", inner=(LAYERS,))}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kind", [Layer, Scheduled, Skipping, Averaging, Routed])
def test_the_step_that_differs_first_takes_what_others_take(
    kind: type[Layer], where: str
) -> None:
    torch.manual_seed(0)
    plain = Model(kind)
    planned = copy.deepcopy(plain)
    applying.apply(planned, Plan(regions=(WHERE[where],)))
    most = [[], []]  # type: list[list[int]]
    for number in range(6):
        grads = []
        for peaks, model in zip(most, (plain, planned), strict=True):
            random.seed(number)
            torch.manual_seed(number)
            x = torch.randn(2 * ROWS, WIDTH)
            model.zero_grad()
            peaks.append(live_bytes_of(lambda m=model, x=x: m(x).sum().backward()))
            grads.append([p.grad for p in model.parameters()])
        assert same(*grads)
    assert max(most[1]) <= 1.05 * most[1][0] < 0.5 * most[0][0]
    regions = applying.status(planned).regions
    assert not any(region.kept for region in regions)
    changes = kind is not Layer
    assert all((region.recorded > 1) == changes for region in regions)


# -- what must hold there ------------------------------------------------------------


def trained(
    body: Callable[[Any, torch.Tensor, int], torch.Tensor], **rest: Any
) -> applying.RegionStatus:
    """Four steps of a block whose forward is told their number."""

    class Told(Block):
        def forward(self, x: torch.Tensor, number: int = 0) -> torch.Tensor:
            return body(self, x, number)

    torch.manual_seed(0)
    plain = Told()
    planned = copy.deepcopy(plain)
    applying.apply(planned, Plan(regions=(PlannedRegion(".", **rest),)))
    for number in range(4):
        found = []
        for model in (plain, planned):
            torch.manual_seed(number)
            model.zero_grad()
            x = torch.randn(ROWS, WIDTH)
            loss = (model(x, number) ** 2).sum()
            move(model, x)
            loss.backward()
            found.append([*(p.grad for p in model.parameters()), torch.get_rng_state()])
        assert same(*found), number
    (status,) = applying.status(planned).regions
    return status


def test_saves_are_named_on_from_where_a_forward_differs() -> None:
    def body(s: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(s.first(x))
        return torch.tanh(s.first(x if number < 2 else x * 2)).exp()

    saves = tuple(OpName("", "tanh", n) for n in range(3))
    status = trained(body, save=saves)
    assert (status.recorded, status.kept, status.missing) == (3, 0, ())
    with pytest.warns(UserWarning, match=r"runs no op \./tanh#3"):
        status = trained(body, save=(*saves, OpName("", "tanh", 3)))
    assert status.missing == ("./tanh#3",)


def test_statistics_that_move_before_backward_are_those_of_the_forward() -> None:
    def body(s: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        for _ in range(2):
            x = torch.sin(functional.batch_norm(s.first(x), s.shift, s.spread))
            x = x if number < 2 else torch.exp(x)
        return s.second(x)

    status = trained(body)
    assert (status.recorded, status.kept) == (3, 0)


def test_what_random_ops_made_and_no_state_makes_again_is_held() -> None:
    def body(s: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        x = s.first(x) + torch.rand_like(x)  # whose state nobody wants
        return s.second(x if number < 2 else torch.exp(x))

    assert trained(body).kept == 0


def test_what_nobody_filled_yet_may_be_filled_past_torch() -> None:
    def body(s: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        x, weights = s.first(x), torch.empty(ROWS, WIDTH)
        if number < 2:
            return s.second(x * weights.fill_(2))
        weights.numpy()[:] = number
        return s.second(torch.exp(x * weights))

    assert trained(body).kept == 0


def test_under_a_mode_of_somebody_else_the_rest_is_kept() -> None:
    def body(s: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        x = torch.tanh(s.first(x)).exp()
        with FlopCounterMode(display=False):
            x = torch.tanh(x * (2 if number < 2 else 3)).exp()
        return s.second(torch.tanh(x))

    assert trained(body).kept == 1


def test_bytes_that_move_are_not_mistaken() -> None:
    def body(s: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        x, other = s.first(x).detach() * 2, torch.sin(x)
        x.data = other
        return s.second(torch.exp(s.first(x if number < 2 else x * 2)))

    assert not trained(body).repeatable


def test_an_input_that_only_a_later_forward_overwrites_is_told() -> None:
    def body(s: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        y = torch.sin(s.mean + torch.tanh(s.first(x)))
        if number == 2:
            s.mean.mul_(2)
        return s.second(y)

    with pytest.raises(ApplyError, match="changes an input in place"):
        trained(body)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_differs_and_raises_leaves_nothing(
    error: type[BaseException],
) -> None:
    class Raising(Block):
        def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
            x = torch.tanh(self.first(x))
            if fails:
                x = torch.exp(x)
                raise error
            return self.second(x)

    model = applying.apply(Raising(), Plan(regions=(PlannedRegion("."),)))
    x = torch.randn(ROWS, WIDTH)
    for fails in (False, True, False):
        try:
            model(x, fails).sum().backward()
        except error:
            assert fails
        assert not torch._C._len_torch_dispatch_stack()
    (status,) = applying.status(model).regions
    assert status.kept == 0


def test_one_of_the_calls_of_a_module_differs() -> None:
    class Cell(Block):
        def forward(self, x: torch.Tensor, number: int = 0) -> torch.Tensor:
            return torch.tanh(self.first(x * number)).exp()

    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.step = Cell(), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.step += 1
            for call in range(3):
                x = self.cell(x, 2 if (self.step, call) == (3, 1) else 1)
            return x

    torch.manual_seed(0)
    plain = Unrolled()
    planned = copy.deepcopy(plain)
    applying.apply(planned, Plan(regions=(PlannedRegion("cell#[0..2]"),)))
    x = torch.randn(ROWS, WIDTH)
    for _ in range(5):
        grads = []
        for model in (plain, planned):
            model.zero_grad()
            model(x).sum().backward()
            grads.append([p.grad for p in model.parameters()])
        assert same(*grads)
    assert sum(r.kept for r in applying.status(planned).regions) == 0


class Compiled(nn.Module):
    """Calls what torch compiled, in some steps or in all."""

    def __init__(self, steps: Sequence[int]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.steps, self.step = steps, 0
        function = torch.compile(
            lambda t: t.sin() * t.exp(), backend="eager", fullgraph=True
        )
        self.functions = [function]  # no module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x).tanh()
        if self.step in self.steps:
            y = self.functions[0](y)
        return self.b(y).exp().tanh()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own doing
@pytest.mark.parametrize("steps", [(2,), (0, 1, 3), range(5)])
@pytest.mark.parametrize("by", ["program", "rerun"])
def test_what_torch_compiled_runs_uncompiled_inside(
    steps: Sequence[int], by: str
) -> None:
    def gradients(*, plan: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        model, found = Compiled(steps), []
        if plan:
            applying.apply(model, Plan(regions=(PlannedRegion(".", by),)))
        for model.step in range(5):
            model.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            found += [parameter.grad for parameter in model.parameters()]
        return found

    expected, found = gradients(plan=False), gradients(plan=True)
    for one, other in zip(expected, found, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


def test_torch_compiles_again_once_the_last_region_of_all_threads_is_over() -> None:
    from torch._dynamo import eval_frame

    from ckplan.applying.tensors.compiled import uncompiled

    before = eval_frame._stance.stance
    one, other = uncompiled(), uncompiled()
    one.__enter__()
    other.__enter__()  # as in another thread, which ends later
    one.__exit__(None, None, None)
    assert eval_frame._stance.stance == "force_eager"
    other.__exit__(None, None, None)
    assert eval_frame._stance.stance == before
