"""Forwards that repeat are only looked at; forwards that do not are never mistaken."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
import torch
from blocks import Batch, Block, Branching, Cube, Numbered, same_gradients
from torch import nn
from torch.nn import functional

import ckplan
from ckplan import applying
from ckplan.applying import RegionStatus
from ckplan.applying.rebuilding.rebuilder import Rebuilder
from ckplan.applying.recording import recorder as record
from ckplan.applying.tensors import arguments as calls
from ckplan.plan.names import OpName
from ckplan.plan.outputs import name_ops
from ckplan.plan.plan import Plan, PlannedRegion

WHOLE = Plan(regions=(PlannedRegion("."),))


def trained(
    model: nn.Module, batch: Batch, steps: int = 6, plan: Plan = WHOLE
) -> RegionStatus:
    planned = copy.deepcopy(model)
    applying.apply(planned, plan)
    same_gradients(model, planned, batch, steps)
    (status,) = applying.status(planned).regions
    assert status.runs == steps
    return status


def one(step: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(step)),)


SAVES = ("./_safe_softmax", "qkv/addmm", "out/addmm", "./mul")


@pytest.mark.parametrize("save", [(), SAVES[:1], SAVES[1:2], SAVES])
@pytest.mark.parametrize("encode", [(), ("./bernoulli_",), ("drop/bernoulli_",)])
def test_a_forward_that_repeats_is_written_down_once(
    save: tuple[str, ...], encode: tuple[str, ...]
) -> None:
    region = PlannedRegion(
        ".",
        save=tuple(map(OpName.parse, save)),
        encode=tuple((OpName.parse(op), "bits") for op in encode),
    )
    status = trained(Block(), one, plan=Plan(regions=(region,)))
    assert (status.recorded, status.kept, status.missing) == (1, 0, ())


class Causal(Block):
    """Attention that makes scalars of its own, which no function returns."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:-1], 3, 16).unbind(-2)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=0.1, is_causal=True
        )
        return x + self.drop(self.out(mixed))


def test_tiny_values_inside_a_function_are_rebuilt_rather_than_never_replayed() -> None:
    model, batch = Causal(), one(0)[0]
    graph = ckplan.profile(model, batch)
    call = next(i for i, c in enumerate(graph.calls) if not c.fqn)
    names = name_ops(graph, call)
    inner = tuple(n for n in names if n.name in ("scalar_tensor", "_safe_softmax"))
    assert any(name.name == "scalar_tensor" for name in inner)
    status = trained(model, one, plan=Plan(regions=(PlannedRegion(".", save=inner),)))
    assert (status.recorded, status.kept, status.missing) == (1, 0, ())


@pytest.mark.parametrize(
    "make", [Block, lambda: Flipping(), lambda: Constant("number")]
)
@pytest.mark.usefixtures("quick_collector")
def test_a_step_leaves_nothing_to_the_garbage_collector(
    make: Callable[[], nn.Module],
) -> None:
    model = make()
    applying.apply(model, WHOLE)
    for step in range(3):
        gc.collect()
        gc.disable()
        try:
            model(*one(step)).square().sum().backward()
            assert gc.collect() == 0
        finally:
            gc.enable()


@pytest.mark.usefixtures("quick_collector")
def test_what_backward_never_runs_is_not_held() -> None:
    """What a region keeps must not hold the graph that is to rebuild from it."""
    model = Block()
    save = OpName("out", "addmm"), OpName("", "gelu")
    applying.apply(model, Plan(regions=(PlannedRegion(".", save=save),)))

    def rebuilders() -> int:
        gc.collect()
        return sum(type(thing) is Rebuilder for thing in gc.get_objects())

    before = rebuilders()
    for step in range(3):
        model(*one(step))
        assert rebuilders() == before


class Growing(Numbered):
    """A constant that changes every step."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y = torch.exp(self.out(x) * torch.tensor(0.1 * self.step))
        return super().forward(y, scale)


class Flipping(Block):
    """Goes by Python's own randomness."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for _ in range(random.randint(1, 3)):
            x = super().forward(x, scale)
        return x


class Scheduled(Block):
    """A probability that changes, and a grad mode that does."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.drop.p = min(0.9, self.drop.p + 0.1)
        with torch.set_grad_enabled(self.drop.p > 0.4):
            y = torch.exp(self.out(x))
        return super().forward(x + y, scale)


ONE, OTHER = torch.ones(1), torch.ones(1)
CALLS: list[tuple[tuple[object, ...], dict[str, object]]] = [
    ((), {}),
    ((1,), {}),
    ((True,), {}),
    ((1.0,), {}),
    ((0.0,), {}),
    ((-0.0,), {}),
    ((float("nan"),), {}),
    ((1, 2), {}),
    (((1, 2),), {}),
    (([1, 2],), {}),
    (([1], 2), {}),
    (([], 1, 2), {}),
    ((torch.Size([1, 2]),), {}),
    ((slice(1, 2),), {}),
    ((slice(1, 2, 1),), {}),
    (("a", 1), {}),
    ((), {"a": 1}),
    (({"a": 1},), {}),
    ((), {"a": 1, "b": 1}),
    ((), {"a": "b", "b": 1}),
    ((None,), {}),
    ((...,), {}),
    ((torch.float32,), {}),
    ((ONE,), {}),
    ((OTHER,), {}),
    ((ONE, ONE), {}),
    ((ONE, OTHER), {}),
    (([ONE], OTHER), {}),
    ((ONE,), {"out": OTHER}),
]


def test_calls_that_differ_are_told_apart_and_others_are_not() -> None:
    met: list[torch.Tensor] = []
    slots = calls.Slots(met.append)
    frozen = [slots.freeze(*call) for call in CALLS]
    assert [slots.freeze(*call) for call in CALLS] == frozen
    assert len(set(frozen)) == len(CALLS)
    assert list(map(id, met)) == [id(ONE), id(OTHER)]
    with pytest.raises(calls.UnknownArgumentError):
        slots.freeze((object(),), {})


@pytest.mark.parametrize("kind", [Numbered, Branching, Flipping, Scheduled, Growing])
def test_a_forward_that_differs_is_written_down_from_there_on(
    kind: type[Block],
) -> None:
    status = trained(kind(), one, 20)
    assert status.kept == 0
    assert status.recorded > 1


def test_a_number_that_changes_for_good_costs_two_steps() -> None:
    def batch(step: int) -> tuple[torch.Tensor, ...]:
        return (*one(step), 1.0 + step // 10)  # type: ignore[return-value]

    status = trained(Block(), batch, 60)
    assert (status.recorded, status.kept) == (1 + 5 * 2, 0)


def test_forwards_that_vary_are_written_down_from_where_they_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[object] = []
    traits_of = record.traits_of
    monkeypatch.setattr(record, "traits_of", lambda f: seen.append(f) or traits_of(f))

    def batch(step: int) -> tuple[torch.Tensor, ...]:
        numbers.append(len(seen))
        return (*one(step), 1.0 + step % 2 * step)  # type: ignore[return-value]

    numbers: list[int] = []
    status = trained(Block(), batch, 12)
    assert (status.recorded, status.kept) == (6 + 3, 0)
    ops = [after - before for before, after in pairwise(numbers[1::2])]
    first, varied = ops[0], ops[7::2]
    assert all(0 < number < first / 4 for number in varied)
    assert not any(ops[6::2])


def test_shapes_that_come_back_are_known() -> None:
    def batch(step: int) -> tuple[torch.Tensor, ...]:
        return (one(step)[0][:, : 3 + step % 3],)

    status = trained(Block(), batch, 12)
    assert (status.recorded, status.kept) == (3, 0)


def test_a_number_passed_by_the_caller_is_seen() -> None:
    def batch(step: int) -> tuple[torch.Tensor, ...]:
        return (*one(step), 1.0 + (step == 4))  # type: ignore[return-value]

    status = trained(Block(), batch, 6)
    assert (status.recorded, status.kept) == (3, 0)  # the first, that one, and the next


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.exp(self.up(x)) * torch.sin(y) + torch.tanh(self.up(y) * x)


def test_inputs_that_are_one_tensor_or_two_are_told_apart() -> None:
    def batch(step: int) -> tuple[torch.Tensor, ...]:
        x, y = one(step)[0], one(step + 100)[0]
        return (x, x) if step % 2 else (x, y)

    trained(Two(), batch, 6)


def test_inputs_that_share_a_storage_or_do_not_are_told_apart() -> None:
    def batch(step: int) -> tuple[torch.Tensor, ...]:
        both = torch.cat([*one(step), *one(step + 100)])
        x, y = both[:2], both[2:]
        return (x, y) if step < 3 else (x, torch.cat([both, both])[2:4])

    trained(Two(), batch, 6)


class WithFunction(Block):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(Cube.apply(self.out(x)), scale)


class Catching(Block):
    """Goes on after an exception."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        try:
            torch.exp(x) @ torch.ones(3, 3)
        except RuntimeError:
            x = torch.exp(x)
        return super().forward(x, scale)


class Scripted(Block):
    """Runs ops that no Python call shows."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(scripted()(self.out(x)), scale)


@cache
def scripted() -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.jit.trace(lambda x: torch.sin(torch.exp(x)), torch.ones(2))


class InplaceFormulas(Block):
    """Writes over what it made, and into views."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y = self.out(x)
        y.mul_(2).add_(x)
        z = y.clone()
        z[:, 1:] += torch.sin(y[:, :-1])
        z[0] = 0.5
        z = functional.relu(z, inplace=True)
        return super().forward(z + y.exp(), scale)


@pytest.mark.parametrize("kind", [WithFunction, Catching, InplaceFormulas])
def test_unusual_forwards_are_right_step_after_step(kind: type[Block]) -> None:
    trained(kind(), one)


def shifted(x: torch.Tensor, index: object) -> torch.Tensor:
    """With a number written into a copy of it."""
    copied = x * 1
    copied[index] = 0.5
    return copied


def hooked(x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    x.register_hook(lambda grad: grad * 2) if x.requires_grad else None
    return x


TOLD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "number": lambda x: x * torch.tensor(0.5),
    "list": lambda x: x + torch.as_tensor([0.5] * 16).view(1, 16),
    "of a kind": lambda x: x * x.new_tensor([0.5]),
    "what the data say": lambda x: x * torch.tensor([x.detach()[0, 0, 0], 0.5])[0],
    "number filled in": lambda x: shifted(x, 1),
    "numbers filled in": lambda x: shifted(x, (slice(None), [0, 2])),
    "filled in by a mask": lambda x: shifted(x, x > 0),
    "chosen": lambda x: x[:, [0, 2, 1]],
    "hook": hooked,
}


class Constant(Block):
    """Makes a tensor of what is none."""

    def __init__(self, told: str) -> None:
        super().__init__()
        self.told = told

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y = torch.exp(TOLD[self.told](self.out(x)))
        return super().forward(y, scale)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")
@pytest.mark.parametrize("told", TOLD)
def test_constants_made_in_a_forward_are_its_own(told: str) -> None:
    status = trained(Constant(told), one)
    assert (status.recorded, status.kept) == (1, 0)


class Chosen(Block):
    """Writes where the data say, which no argument tells."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        first = (x.detach().sum() > 0).long()
        y = torch.exp(shifted(self.out(x), ([first, first * 0],)))
        return super().forward(y, scale)


def test_indices_that_no_argument_tells_are_written_down_each_time() -> None:
    status = trained(Chosen(), one)
    assert (status.recorded, status.kept) == (6, 0)


HINT = nn.Parameter(torch.ones(16))


class Hinted(Block):
    """Reads a tensor that a call returns, and that is another one every step."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y = self.out(x)
        hint = HINT.grad
        return super().forward(torch.exp(y if hint is None else y * hint), scale)


@pytest.mark.parametrize("hints", ["other values", "none", "other strides"])
def test_what_calls_bring_is_taken_from_each_forward(hints: str) -> None:
    def batch(step: int) -> tuple[torch.Tensor, ...]:
        HINT.grad = torch.full((16,), 0.1 * step)
        if hints == "none" and step == 3:
            HINT.grad = None
        if hints == "other strides" and step == 3:
            HINT.grad = torch.rand(32)[::2]
        return one(step)

    status = trained(Hinted(), batch)
    if hints == "other values":
        assert (status.recorded, status.kept) == (1, 0)
    else:
        assert status.kept == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_what_no_python_call_shows_is_written_down_each_time() -> None:
    status = trained(Scripted(), one, 4)
    assert (status.recorded, status.kept) == (4, 0)


def test_settings_of_torch_are_part_of_what_is_known() -> None:
    plain = Block()
    planned = copy.deepcopy(plain)
    applying.apply(planned, WHOLE)
    for autocast in (False, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            same_gradients(plain, planned, one, 2)
    (status,) = applying.status(planned).regions
    assert status.runs == 8


def test_training_and_evaluation_are_told_apart() -> None:
    plain = Block()
    planned = copy.deepcopy(plain)
    applying.apply(planned, WHOLE)
    for training in (True, False, True, False):
        plain.train(training)
        planned.train(training)
        same_gradients(plain, planned, one, 2)
    (status,) = applying.status(planned).regions
    assert (status.runs, status.recorded, status.kept) == (8, 2, 0)


def test_memory_is_as_planned_when_written_down_and_when_repeated() -> None:
    model = nn.Sequential(Block(), Block())
    applying.apply(model, Plan(regions=(PlannedRegion("[0..1]"),)))
    dropped = []
    for step in range(3):
        model(*one(step)).sum().backward()
        dropped.append([r.dropped_bytes for r in applying.status(model).regions])
    assert dropped[0] == dropped[1] == dropped[2]
    assert all(dropped[0])


class Masking(nn.Module):
    """Attention whose mask no call of torch shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attend = functional.scaled_dot_product_attention
        return attend(x, x, x, dropout_p=0.1, is_causal=True)


@pytest.mark.parametrize(("heads", "recorded"), [(96, 1), (8, 3)])
def test_small_values_that_no_call_shows_are_made_again(
    heads: int, recorded: int
) -> None:
    plain = nn.Sequential(nn.Linear(8, 8), Masking())
    planned = copy.deepcopy(plain)
    region = PlannedRegion("1", save=(OpName("", "tril"),))
    ckplan.apply(planned, Plan(regions=(region,)))
    for seed in range(3):
        found = []
        for model in (plain, planned):
            torch.manual_seed(seed)
            model.zero_grad()
            model(torch.randn(heads, 96, 8)).sum().backward()
            found.append([p.grad for p in model.parameters()])
        assert all(map(torch.equal, *found))
    (status,) = ckplan.status(planned).regions
    assert (status.recorded, status.missing) == (recorded, ())
