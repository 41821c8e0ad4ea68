"""Guards of calls: what differs is never taken for what was recorded."""

from __future__ import annotations

import copy
import enum
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import spectral_norm

from ckplan import applying
from ckplan.applying.tensors.arguments import Slots
from ckplan.applying.tensors.geometry import UnknownArgumentError
from ckplan.applying.tensors.matchers import Matchers
from ckplan.applying.tensors.retained import Retained
from ckplan.plan.names import OpName
from ckplan.plan.plan import Plan, PlannedRegion

KEEPING = Plan(
    regions=(PlannedRegion(".", save=(OpName("linear", "add"), OpName("", "exp"))),)
)
WHOLE = Plan(regions=(PlannedRegion("."),))
NAN = float("nan")


class Mode(enum.IntEnum):
    ONE = 1
    TWO = 2


class Name(str):
    __slots__ = ()


class Count(int):
    """A number of another type."""


GROUPS: tuple[tuple[Any, ...], ...] = (
    (0, False, 0.0, -0.0, None, "0", (0,), [0], 0j, numpy.int64(0), numpy.float64(0)),
    (1, True, 1.0, Mode.ONE, Mode.TWO, numpy.float32(1), numpy.bool_(True), 10**30),
    (NAN, float("inf"), -float("inf"), 1e-320, -1e-320, 5e-324, 0.1, 0.1 + 2**-56),
    ("sum", Name("sum"), "Sum", "su'm\n", ""),
    ((1, 2), [1, 2], torch.Size((1, 2)), (1, 2.0), (1, (2,)), (2, 1), (1,), (1, 2, 3)),
    ([[1], 2], [1, [2]], [[1, 2]], [[1], [2]], [], [[]], ([],), ()),
    ([*range(20)], (*range(20),), [*range(19), 19.0], [*range(19), 20], [*range(21)]),
    ([*range(1, 21)], [True, *range(2, 21)], [*range(1, 20), Mode.TWO], [*range(20)]),
    ([*range(20), [1]], [*range(20), [2]], [*range(20), 1, [1]], [1, *range(19), [1]]),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1}, {"a": True, "b": 2}, {}),
    (slice(1), slice(0, 1), slice(None, True), slice(1.0), slice(1, None, 1), 1),
    (torch.float32, torch.float64, "torch.float32", torch.strided, torch.sparse_coo),
    (torch.device("cpu"), torch.device("cpu", 0), torch.device("meta"), "cpu", ...),
    (torch.contiguous_format, torch.channels_last, torch.preserve_format),
    (1j, -1j, complex(0.0, -0.0), 0j, complex(1), 1, complex(NAN, 1), (0.0, 1.0)),
    (numpy.float64(2), numpy.float32(2), numpy.float16(2), 2.0, numpy.int64(2), 2),
    (numpy.float64(NAN), NAN, numpy.float64(0.0), numpy.float64(-0.0), numpy.int8(0)),
    (range(3), range(4), range(0), range(1, 3), [0, 1, 2], (0, 1, 2), 3),
    (
        numpy.ones(2),
        numpy.zeros(2),
        numpy.ones((2, 1)),
        numpy.ones(2, "f4"),
        [1.0, 1.0],
    ),
)


def matches(arguments: Any, others: Any) -> bool | None:
    """Whether a call is taken for a recorded one; None if it is never compared."""
    slots = Slots(lambda tensor: None)
    try:
        frozen = slots.freeze(*arguments)
    except UnknownArgumentError:
        return None
    return Matchers().make(frozen)(*others, [], [], [], NothingIsMet())


class NothingIsMet:
    """A guard that no tensor from outside passes."""

    def meet(self, number: int, tensor: torch.Tensor) -> bool:
        return False


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: repr(group[0]))
def test_only_the_same_value_matches(group: tuple[Any, ...]) -> None:
    for one in group:
        for other in group:
            for first, second in (
                (((one,), {}), ((other,), {})),
                (((3, [one]), {}), ((3, [other]), {})),
                (((), {"x": one, "y": 2}), ((), {"x": other, "y": 2})),
                (((slice(one),), {}), ((slice(other),), {})),
            ):
                found = matches(first, second)
                assert found is None or found == (one is other), (one, other)


@pytest.mark.parametrize(
    "first, second",
    [
        (((1,), {}), ((1, 1), {})),
        (((1, 1), {}), ((1,), {})),
        (((), {}), ((), {"x": 1})),
        (((), {"x": 1}), ((), {})),
        (((), {"x": 1}), ((1,), {})),
        (((), {"x": 1, "y": 2}), ((), {"y": 2, "x": 1})),
        (((), {"x": 1, "y": 1}), ((), {"x": 1})),
        (((), {"x": 1}), ((), {"y": 1})),
        ((("x",), {}), ((), {"x": 1})),
    ],
)
def test_places_and_keywords_count(first: Any, second: Any) -> None:
    assert matches(first, first) and not matches(first, second)


def test_what_can_not_be_compared_never_matches() -> None:
    objects = numpy.array([None]), numpy.array(["a"])
    for value in (object(), Name("a"), Count(1), {1: 2}, {True: 2}, {1, 2}, *objects):
        assert matches(((value,), {}), ((value,), {})) is None


def test_data_that_a_tensor_is_made_of_is_never_a_tensor() -> None:
    def takes(one: Any, other: Any) -> bool | None:
        frozen = Slots(lambda tensor: None).freeze((one, 2), {}, makes_tensor=True)
        return Matchers().make(frozen)((other, 2), {}, [], [], [], NothingIsMet())

    data = (1, 0.5, 1j, [1, 2.0], ((1,), [2]), numpy.float32(1), numpy.ones(3), [])
    for one in data:
        assert all(takes(one, other) for other in data)
        for other in (torch.ones(3), [torch.ones(())], (1, [torch.ones(1)]), "a", None):
            assert not takes(one, other)
    assert takes(torch.ones(3), 1) is False


def test_a_number_that_only_nan_equals_is_compared_by_its_bits() -> None:
    assert matches(((NAN,), {}), ((-NAN,), {})) is True  # torch takes them alike
    assert matches(((0.0,), {}), ((-0.0,), {})) is False


# -- models ----------------------------------------------------------------------------


class Shifting(nn.Module):
    """Makes other calls from the third step on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.late = kind, False
        self.linear, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fixed = torch.full((8, 8), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = torch.tanh(self.linear(x))
        return torch.sin(getattr(self, self.kind)(h, self.late)).exp()

    def a_dead_tensor_then_none(self, h: Any, late: bool) -> Any:
        bias = self.other.bias * 2
        if late:
            bias = None
        return functional.linear(h.sin(), self.other.weight, bias)

    def a_dead_scale_then_none(self, h: Any, late: bool) -> Any:
        scale = self.linear.weight[0] * 2
        if late:
            del scale
        return functional.layer_norm(h, (8,), None if late else scale)

    def made_then_outside(self, h: Any, late: bool) -> Any:
        made = torch.full((8, 8), 0.5)
        return h * (self.fixed if late else made) + made

    def outside_then_made(self, h: Any, late: bool) -> Any:
        return h * (h.detach() if late else self.fixed) + self.fixed

    def twice_then_two(self, h: Any, late: bool) -> Any:
        other = h.cos()
        return h * (other if late else h)

    def two_then_twice(self, h: Any, late: bool) -> Any:
        other = h.cos()
        return h * (h if late else other)

    def an_id_used_again(self, h: Any, late: bool) -> Any:
        total = h
        for number in range(4):  # each dies before the next is made
            made = torch.full((8, 8), float(number + late * (number == 2)))
            total = total * made.sin() + h
        return total

    def in_place_then_not(self, h: Any, late: bool) -> Any:
        y = h.sin()
        z = y.mul(2) if late else y.mul_(2)
        return z * y

    def a_view_then_a_copy(self, h: Any, late: bool) -> Any:
        y = h.sin()
        part = y[:, :4].clone() if late else y[:, :4]
        part.add_(1.0)
        return y * 2

    def a_list_that_is_longer(self, h: Any, late: bool) -> Any:
        return torch.cat([h, h.cos(), h.sin()][: 2 + late]).view(-1, 8).sum(0)

    def a_list_in_another_order(self, h: Any, late: bool) -> Any:
        both = [h.cos(), h.sin()]
        return torch.stack(both[::-1] if late else both).cumprod(0)

    def zero_with_another_sign(self, h: Any, late: bool) -> Any:
        return 1 / torch.clamp((h * (-0.0 if late else 0.0)), -1.0, 1.0).atan2(h - 2)

    def a_number_that_is_true(self, h: Any, late: bool) -> Any:
        return h.sin() * (True if late else 1) + h.sum(1, keepdim=late).sum()

    def a_number_that_is_an_int(self, h: Any, late: bool) -> Any:
        return h.pow(2 if late else 2.0) * h.mul(3 if late else 3.0)

    def another_slice(self, h: Any, late: bool) -> Any:
        return h[:: 2 - late].sin().sum(0) * h

    def another_index(self, h: Any, late: bool) -> Any:
        return h[[0, 2 + late, 1]].sin().sum(0) * h

    def keywords_for_places(self, h: Any, late: bool) -> Any:
        return torch.sum(h, dim=int(late)) * h.sin()

    def without_gradients_inside(self, h: Any, late: bool) -> Any:
        with torch.no_grad() if late else nullcontext():
            y = self.other(h).sigmoid()
        return y * h

    def cast_inside(self, h: Any, late: bool) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=late):
            return self.other(h).float()

    def cast_otherwise_inside(self, h: Any, late: bool) -> Any:
        with torch.autocast("cpu", torch.float16 if late else torch.bfloat16):
            return self.other(h).float()

    def another_kernel_of_attention(self, h: Any, late: bool) -> Any:
        q = h.view(1, 2, 4, 8)
        with sdpa_kernel(SDPBackend.MATH if late else SDPBackend.FLASH_ATTENTION):
            y = functional.scaled_dot_product_attention(q, q.sin(), q.cos())
        return y.reshape(8, 8)

    def another_parameter(self, h: Any, late: bool) -> Any:
        return (self.linear if late else self.other)(h)

    def another_layout(self, h: Any, late: bool) -> Any:
        image = h.view(2, 2, 4, 4)
        if late:
            image = image.contiguous(memory_format=torch.channels_last)
        return self.conv(image).reshape(8, 8)

    def another_number_of_numpy(self, h: Any, late: bool) -> Any:
        return h * numpy.float64(3 if late else 2) / numpy.sqrt(8) + h.sum(
            numpy.int64(late), keepdim=True
        )

    def another_complex_number(self, h: Any, late: bool) -> Any:
        return (h * (2j if late else 1 + 2j)).abs().sin()

    def another_range(self, h: Any, late: bool) -> Any:
        return h[range(2 + late)].sin().sum(0) * h

    def another_array_of_indices(self, h: Any, late: bool) -> Any:
        return h[numpy.array([0, 2 + late, 1])].sin().sum(0) * h

    def other_data(self, h: Any, late: bool) -> Any:
        return h.sin() * torch.tensor([0.5 + late, 2.0]).repeat(4) * torch.tensor(late)

    def data_of_another_shape(self, h: Any, late: bool) -> Any:
        return h.sin() * torch.tensor([[0.5]] if late else 0.5)

    def data_of_another_type(self, h: Any, late: bool) -> Any:
        return h.sin() * torch.as_tensor(2 if late else 0.5)

    def data_then_a_tensor(self, h: Any, late: bool) -> Any:
        data = numpy.full((8, 8), 2.0, "f4")
        return h.sin() * torch.as_tensor(h if late else data) * torch.tensor(data)

    def another_size_of_a_view(self, h: Any, late: bool) -> Any:
        y = h.sin().view(torch.tensor(4 if late else 8), -1)
        return y.exp().cumsum(0).view(8, 8)

    def another_size_of_a_copy(self, h: Any, late: bool) -> Any:
        y = h.sin().t().reshape(torch.tensor(4 if late else 8), -1)
        return y.exp().cumsum(0).reshape(8, 8)

    def another_place_of_a_view(self, h: Any, late: bool) -> Any:
        y = h.sin().as_strided((4, 8), (8, 1), torch.tensor(8 * late))
        return y.exp().repeat(2, 1) * h

    def more_zeros(self, h: Any, late: bool) -> Any:
        zeros = h.new_zeros(torch.tensor(8 + 8 * late), 8)
        return (torch.cat([h.exp(), zeros]).sin() + 1).cumsum(0)[8:16] * h

    def itself_returned(self, h: Any, late: bool) -> Any:
        y = h.t() if late else h
        return y.contiguous().sin() * y


KINDS = [name for name in vars(Shifting) if name not in ("__init__", "forward")]
KINDS = [name for name in KINDS if not name.startswith("_")]


def same_steps(
    plain: nn.Module,
    planned: nn.Module,
    between: Callable[[nn.Module, int], object],
    steps: int = 6,
) -> None:
    for step in range(steps):
        found = []
        for model in (plain, planned):
            between(model, step)
            model.zero_grad()
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
            x.requires_grad_()
            out = model(x)
            out.square().sum().backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            found.append([out.detach(), x.grad, *grads])
        assert len(found[0]) == len(found[1])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one.nan_to_num(7), other.nan_to_num(7)), step


@pytest.mark.parametrize("by", ["program", "rerun"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_makes_another_call_is_right(kind: str, by: str) -> None:
    def change(model: Any, step: int) -> None:
        (model[0] if by == "rerun" else model).late = 2 <= step < 5

    plain: nn.Module = Shifting(kind)
    fqn = "."
    if by == "rerun":
        plain, fqn = nn.Sequential(plain), "0"
    planned = copy.deepcopy(plain)
    applying.apply(planned, Plan(regions=(PlannedRegion(fqn, by=by),)))
    same_steps(plain, planned, change)


def filled(h: torch.Tensor, value: Any) -> torch.Tensor:
    h = h.sin()
    h[h > 0] = value
    return h


def classes(step: torch.Tensor) -> torch.Tensor:
    return functional.one_hot(torch.arange(8) + step, 16)[:, :8].float()


ALIKE: dict[str, Callable[[Any, int], Any]] = {
    "numbers of numpy": lambda h, step: h.view(numpy.int64(8), -1) / numpy.sqrt(8),
    "complex numbers": lambda h, step: (h * (1 + 2j)).abs(),
    "ranges": lambda h, step: h[range(3)],
    "sizes from tensors": lambda h, step: (
        h.sin().view(torch.div(16, 2, rounding_mode="trunc"), -1)
        * h.new_ones(torch.tensor(8), 8)
    ),
    "classes": lambda h, step: h @ classes(torch.tensor(step)),
    "a number of numpy that fills": lambda h, step: filled(h, numpy.float64(0.5)),
    "a number as a tensor": lambda h, step: h * torch.tensor(0.1 * step),
    "a list as a tensor": lambda h, step: h * torch.tensor([1.0, step]).repeat(4),
    "an array as a tensor": lambda h, step: (
        h * torch.as_tensor(numpy.full(8, step, "f4"))
    ),
}


@pytest.mark.parametrize("kind", ALIKE)
def test_forwards_that_differ_in_data_alone_repeat_the_first(kind: str) -> None:
    class Model(Shifting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x).sin()
            return torch.tanh(ALIKE[kind](h, self.step).sin()).exp()

    plain = Model("")
    planned = copy.deepcopy(plain)
    applying.apply(planned, WHOLE)
    same_steps(plain, planned, lambda model, step: setattr(model, "step", step))
    (region,) = applying.status(planned).regions
    assert (region.runs, region.recorded) == (6, 1)
    assert region.repeatable


class Averaging(nn.Module):
    """Moves a mean on, and subtracts it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).sin()
        return torch.tanh(getattr(self, self.kind)(h)).exp()

    def move(self, h: torch.Tensor) -> None:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)

    def once(self, h: torch.Tensor) -> torch.Tensor:
        self.move(h)
        return (h - self.mean).sin()

    def by_a_view(self, h: torch.Tensor) -> torch.Tensor:
        self.move(h)
        return (h[:, :4] - self.mean[2:6]).sin() * self.mean[:4]

    def through_a_view(self, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean[2:6].add_(h.mean(0)[:4])
        return (h - self.mean).sin()

    def read_alone_before(self, h: torch.Tensor) -> torch.Tensor:
        scale = float(self.mean.shape[0])
        self.move(h * scale)
        return (h - self.mean).sin()


@pytest.mark.parametrize("kind", ["once", "by_a_view", "read_alone_before"])
def test_what_forward_makes_of_a_buffer_is_held_by_those_that_repeat_it(
    kind: str,
) -> None:
    assert averaged(kind).recorded == 1


def test_what_is_written_through_a_view_is_right() -> None:
    averaged("through_a_view")


def averaged(kind: str) -> applying.RegionStatus:
    plain = Averaging(kind)
    planned = copy.deepcopy(plain)
    applying.apply(planned, WHOLE)
    same_steps(plain, planned, lambda model, step: None)
    assert torch.equal(plain.mean, planned.mean)
    (region,) = applying.status(planned).regions
    return region


def normed() -> nn.Sequential:
    layer = spectral_norm(nn.Linear(8, 8))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(8, 8))


@pytest.mark.parametrize("make", [normed, lambda: nn.Sequential(Averaging("once"))])
@pytest.mark.parametrize("forwards", [1, 2, 3])
def test_what_a_forward_wrote_is_kept_where_the_next_one_comes_before_its_backward(
    make: Callable[[], nn.Module], forwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a discriminator runs on true and on false pictures; else nothing is copied."""
    copies: list[int] = []
    copy_one = Retained.copy
    monkeypatch.setattr(
        Retained, "copy", lambda one: (copies.append(1), copy_one(one))[1]
    )
    plain = make()
    planned = copy.deepcopy(plain)
    applying.apply(planned, Plan(regions=(PlannedRegion("0"),)))
    for step in range(4):
        found = []
        for model in (plain, planned):
            model.zero_grad()
            torch.manual_seed(step)
            outs = [model(torch.randn(4, 8)).square().sum() for _ in range(forwards)]
            sum(outs).backward()  # type: ignore[union-attr]
            found.append([*(p.grad for p in model.parameters()), *model.buffers()])
        assert all(map(torch.equal, *found))
    assert bool(copies) == (forwards > 1)


def test_spectral_norms_are_recorded_once() -> None:
    plain = normed()
    planned = copy.deepcopy(plain)
    applying.apply(planned, Plan(regions=(PlannedRegion("0"), PlannedRegion("1"))))
    same_steps(plain, planned, lambda model, step: None)
    assert [one.recorded for one in applying.status(planned).regions] == [1, 1]


def test_indices_in_an_array_that_changes_later_are_not_those_of_before() -> None:
    arrays = [numpy.array([0, 2, 1]) for _ in range(6)]

    class Model(Shifting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.linear(x))
            return h[arrays[self.step]].sin().exp()

    plain = Model("")
    planned = copy.deepcopy(plain)
    applying.apply(planned, WHOLE)

    def between(model: Any, step: int) -> None:
        model.step = step
        for array in arrays[:step]:
            array[:] = 7

    same_steps(plain, planned, between)
    assert not applying.status(planned).regions[0].repeatable


CHANGES: dict[str, Callable[[Any], object]] = {
    "frozen": lambda m: m.linear.weight.requires_grad_(False),
    "replaced": lambda m: setattr(
        m.linear, "weight", nn.Parameter(m.linear.weight.detach().t() * 2)
    ),
    "shared": lambda m: setattr(m.other, "weight", m.linear.weight),
    "data": lambda m: setattr(m.linear.weight, "data", m.linear.weight.data.t() * 2),
    "type": lambda m: m.double().float(),
    "buffer": lambda m: setattr(m, "fixed", torch.full((8, 8), 0.25)),
    "trained buffer": lambda m: setattr(
        m, "fixed", torch.full((8, 8), 0.25, requires_grad=True)
    ),
    "a view": lambda m: setattr(m, "fixed", m.linear.weight.detach()),
    "evaluation": lambda m: m.eval(),
}


class Plain(Shifting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.linear(x)) * self.fixed
        return functional.dropout(torch.sin(self.other(h)), 0.0, self.training).exp()


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_between_steps_is_right(change: str) -> None:
    plain = Plain("")
    planned = copy.deepcopy(plain)
    applying.apply(planned, WHOLE)

    def between(model: nn.Module, step: int) -> None:
        if step == 2:
            CHANGES[change](model)

    same_steps(plain, planned, between)


def test_attention_as_one_function_is_told_apart_by_its_kernels() -> None:
    """``multi_head_attention_forward`` is one call, and asks inside which kernels."""

    class Attending(Shifting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kernel = SDPBackend.MATH if self.late else SDPBackend.FLASH_ATTENTION
            with sdpa_kernel(kernel):
                h = x.sin()[None]
                y = self.attention(h, h, h, need_weights=False)[0]
            return torch.tanh(self.linear(y[0]))

    plain = Attending("")
    planned = copy.deepcopy(plain)
    applying.apply(planned, WHOLE)

    def change(model: Any, step: int) -> None:
        model.late = 2 <= step < 5

    same_steps(plain, planned, change)
    (status,) = applying.status(planned).regions
    assert status.kept == 0


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2.0)


class Unseen(Shifting):
    """Writes, from the third step on, what no function mode sees."""

    script: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sin(self.linear(x))
        y = (h * 1.5).detach() if self.kind == "set_" else h * 1.5
        if self.late and self.kind == "set_":
            y.set_(self.fixed)  # type: ignore[call-overload]
        elif self.late:
            self.script(y)
        return torch.sin(y.exp()) * h


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["set_", "script"])
def test_a_write_that_no_mode_sees_is_seen_by_its_version(kind: str) -> None:
    Unseen.script = staticmethod(torch.jit.script(_doubled))
    plain = Unseen(kind)
    planned = copy.deepcopy(plain)
    applying.apply(planned, WHOLE)

    def change(model: Any, step: int) -> None:
        model.late = step == 2

    same_steps(plain, planned, change, steps=3)
    (status,) = applying.status(planned).regions
    assert (status.recorded, status.kept) == (1, 1)


@pytest.mark.parametrize("region", [WHOLE, KEEPING])
def test_what_a_function_writes_itself_is_no_miss(region: Plan) -> None:
    """``linear`` adds a bias in place, but not while ops are recorded."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x.view(2, 4, 8).expand(3, 2, 4, 8).transpose(1, 2))
            assert y._version == 1 or torch._C._len_torch_dispatch_stack()
            y = functional.softplus(y)
            y[0, 0] = 0.0
            return torch.sin(y.mean(0)).exp().view(8, 8)

    plain = Turned()
    planned = copy.deepcopy(plain)
    applying.apply(planned, region)
    same_steps(plain, planned, lambda model, step: None, steps=3)
    (status,) = applying.status(planned).regions
    assert (status.runs, status.recorded, status.kept) == (3, 1, 0)
    assert not status.missing


def test_tensors_from_outside_are_told_apart_when_they_come_again() -> None:
    class Crossing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.Parameter(torch.rand(8, 8)) for _ in range(2))
            self.late = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.sin(x * self.one) * torch.cos(x * self.two)
            first, second = (self.two, self.one)[:: -1 if self.late else 1]
            return torch.sin(h * first).exp() * torch.cos(h * second)

    plain = Crossing()
    planned = copy.deepcopy(plain)
    applying.apply(planned, WHOLE)
    same_steps(plain, planned, lambda model, step: None)
    assert applying.status(planned).regions[0].recorded == 1

    def change(model: Any, step: int) -> None:
        model.late = step == 1

    same_steps(plain, planned, change)
    assert applying.status(planned).regions[0].recorded > 1


def test_tensors_from_outside_that_shared_their_bytes_and_then_do_not() -> None:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.one = torch.rand(8, 8)
            self.two = self.one[:]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.sin(self.linear(x) * self.one)
            return torch.cos(torch.sin(h * self.two).exp() * self.two)

    plain = Sharing()
    planned = copy.deepcopy(plain)
    applying.apply(planned, WHOLE)

    def change(model: Any, step: int) -> None:
        model.two = model.one[:] if step % 4 < 2 else torch.full((8, 8), 0.5)

    same_steps(plain, planned, change, steps=8)


def test_a_long_list_of_numbers_is_compiled_at_once() -> None:
    """A test of its own for each number would take seconds to compile."""
    numbers = [*range(20_000)]
    begin = time.thread_time()
    arguments = ((numbers,), {})
    assert matches(arguments, arguments)
    assert not matches(arguments, (([*numbers[:-1], 0],), {}))
    assert time.thread_time() - begin < 0.5
