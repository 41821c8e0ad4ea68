"""What no mode of torch shows: programs must not be wrong, or stale, for that."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy
import pytest
import torch
from measured import peak_bytes_of
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import ckplan
from ckplan import applying
from ckplan.applying.rebuilding.digest import digest
from ckplan.applying.rerunning.sources import sources_on
from ckplan.applying.tensors.random_state import random_state
from ckplan.errors import ApplyError
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.simulating.simulate import simulate
from ckplan.training.allocator import log_allocations

_Body: TypeAlias = Callable[..., torch.Tensor]

X = torch.randn(12, 8)


class Block(nn.Module):
    """What is planned: two layers, and something between them."""

    def __init__(self, body: _Body) -> None:
        super().__init__()
        self.first, self.second, self.body = nn.Linear(8, 8), nn.Linear(8, 8), body
        self.table = nn.Parameter(torch.randn(10, 8))
        self.rnn = nn.LSTM(8, 8)

    def forward(self, *given: Any) -> torch.Tensor:
        return self.body(self, *given)


class Outer(nn.Module):
    """Calls it."""

    def __init__(self, body: _Body) -> None:
        super().__init__()
        self.block = Block(body)

    def forward(self, *given: Any) -> torch.Tensor:
        return self.block(*given)


def gradients(model: nn.Module, given: Sequence[Any]) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    model(*given).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def check(body: _Body, steps: Sequence[Sequence[Any]], by: str = "program") -> Any:
    """The same gradients in all steps; returns what the region did."""
    torch.manual_seed(1)
    plain = Outer(body)
    planned = copy.deepcopy(plain)
    applying.apply(planned, Plan(regions=(PlannedRegion("block", by=by),)))
    for given in steps:
        expected, found = gradients(plain, given), gradients(planned, given)
        assert all(map(torch.equal, expected, found))
    (region,) = applying.status(planned).regions
    return region


@torch.library.custom_op("ckplan_tests::drop", mutates_args=())
def drop(x: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws inside, and no tag of it says so."""
    mask = (torch.rand_like(x) > share).to(x.dtype)
    return x * mask, mask


@drop.register_fake
def _(x: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    del share
    return torch.empty_like(x), torch.empty_like(x)


def _keep_mask(ctx: Any, inputs: Any, output: Any) -> None:
    del inputs
    ctx.save_for_backward(output[1])


drop.register_autograd(
    lambda ctx, grad, _: (grad * ctx.saved_tensors[0], None), setup_context=_keep_mask
)


def drops(s: Block, x: torch.Tensor) -> torch.Tensor:
    return s.second(drop(s.first(x).exp(), 0.5)[0])


@pytest.mark.parametrize("by", ["program", "rerun"])
def test_a_custom_op_that_draws_draws_the_same_again(by: str) -> None:
    region = check(drops, [(X,)] * 4, by)
    assert region.runs == 4
    once = Outer(drops)
    expected = gradients(once, (X,))
    after = torch.get_rng_state()
    applying.apply(once, Plan(regions=(PlannedRegion("block", by=by),)))
    assert all(map(torch.equal, gradients(once, (X,)), expected))
    assert torch.equal(torch.get_rng_state(), after)  # as without a plan


def test_a_custom_op_takes_the_bytes_of_a_random_state() -> None:
    model = Outer(drops)
    graph = ckplan.profile(model, X, loss_fn=lambda out, _: out.square().sum())
    assert [op.random for op in graph.ops if op.name == "drop"] == [True]


NUMBERS: dict[str, tuple[_Body, Sequence[float]]] = {
    "index": (lambda s, x, t: s.second(s.first(x).exp() * s.table[t]), (1, 2, 7)),
    "slice": (lambda s, x, t: s.second(s.table[t : t + 2].exp()), (1, 2, 7)),
    "select": (lambda s, x, t: s.second(s.table.select(0, t).exp()), (1, 2, 7)),
    "narrow": (lambda s, x, t: s.second(s.table.narrow(0, t, 2).exp()), (1, 2, 7)),
    "roll": (lambda s, x, t: s.second(s.first(x).exp().roll(t, 0)), (1, 2, 3)),
    "tril": (lambda s, x, t: s.second(s.first(x).exp().tril(t)), (1, 2, -1)),
    "pad": (lambda s, x, t: functional.pad(s.first(x).exp(), (t, 0)).exp(), (1, 2, 3)),
    "full": (
        lambda s, x, t: s.second((s.first(x) * torch.full((8,), t)).exp()),
        (0.5, 0.5, 0.3),
    ),
    "alpha": (lambda s, x, t: s.first(x).add(s.second(x), alpha=t).exp(), (1.0, 2.0)),
    "slope": (
        lambda s, x, t: functional.leaky_relu(s.first(x), t).exp(),
        (0.1, 0.2, 0.7),
    ),
    "probability": (
        lambda s, x, t: s.second(functional.dropout(s.first(x).exp(), t)),
        (0.1, 0.2, 0.7),
    ),
    "length": (
        lambda s, x, t: s.second(s.first(x).exp()) * torch.arange(t).sum(),
        (3, 4, 5),
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_torch_takes_from_tensors_are_not_those_of_before(
    name: str,
) -> None:
    body, numbers = NUMBERS[name]
    check(body, [(X, torch.tensor(number)) for number in numbers])


def test_a_number_that_the_forward_took_itself_is_compared() -> None:
    def body(s: Block, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return s.second(functional.leaky_relu(s.first(x), t.item()).exp())

    steps = [(X, torch.tensor(0.1))] * 4
    assert check(body, steps).recorded < 4
    check(body, [(X, torch.tensor(number)) for number in (0.1, 0.1, 0.4, 0.1)])


def as_complex(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.view(12, 4, 2).contiguous()) * 2


LAZY: dict[str, _Body] = {
    "conj": lambda s, x: (as_complex(s.first(x)) ** 2).conj().abs(),
    "power": lambda s, x: (lambda z: (z * z.conj()).real.exp())(as_complex(s.first(x))),
    "neg": lambda s, x: (lambda y: torch.tanh(y * y.sigmoid()))(
        as_complex(s.first(x)).conj().imag
    ),
    "adjoint": lambda s, x: (lambda z: torch.tanh((z @ z.mH).abs()))(
        as_complex(s.first(x))
    ),
    "spectrum": lambda s, x: (lambda h: torch.fft.irfft(h * h.conj(), n=8))(
        torch.fft.rfft(s.first(x))
    ),
    "given": lambda s, x: (s.first(x) * as_complex(x).conj().imag.repeat(1, 2)).exp(),
}


@pytest.mark.parametrize("name", LAZY)
def test_views_that_conjugate_and_negate_do_so_again(name: str) -> None:
    check(LAZY[name], [(X,), (X * 0.5,), (X,)])


class Foreign(torch.autograd.Function):
    """As kernels of Triton and of extensions: torch allocates, somebody else writes."""

    in_place = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        numpy.tanh(x.numpy(), out=out.numpy())
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        first = ctx.saved_tensors[0]
        second = ctx.saved_tensors[0]
        return grad * (1 - first * second)


class Silent(Foreign):
    """The same, not even asking torch where the bytes are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            out.copy_(x.tanh())
        ctx.save_for_backward(out)
        return out


@pytest.mark.parametrize("kernel", [Foreign, Silent])
def test_what_unseen_kernels_wrote_is_kept(kernel: Any) -> None:
    def body(s: Block, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(s.second(kernel.apply(s.first(x).exp())) * 2)

    check(body, [(X,), (X * 0.5,), (X,)])


def test_masks_filled_by_numpy_are_kept() -> None:
    def body(s: Block, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(12, 8)
        rows = mask.numpy()
        for row in range(12):
            rows[row, : row + 2] = 1
        return torch.tanh(s.first(x)) * mask

    check(body, [(X,), (X * 0.5,)])


def test_unseen_kernels_are_hazards_that_running_again_guards() -> None:
    def body(s: Block, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(s.second(Foreign.apply(s.first(x).exp())) * 2)

    model = Outer(body)
    graph = ckplan.profile(model, torch.randn(4096, 8), optimizer="none")
    assert {(h.kind, h.guarded_by) for h in graph.hazards} == {("unseen", ("rerun",))}
    plan = ckplan.solve(graph, goal="min-memory")
    planned = ckplan.apply(copy.deepcopy(model), plan)
    given = (torch.randn(4096, 8),)
    assert all(map(torch.equal, gradients(model, given), gradients(planned, given)))


def test_packed_sequences_of_other_lengths_run_other_ops() -> None:
    def body(s: Block, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(s.first(x), lengths, enforce_sorted=False)
        out, _ = pad_packed_sequence(s.rnn(packed)[0])
        return s.second(out.exp())

    x = torch.randn(6, 3, 8)
    lengths = ((6, 4, 3), (6, 4, 3), (6, 2, 5), (5, 6, 2))
    check(body, [(x, torch.tensor(one)) for one in lengths])


def test_tensors_from_numpy_are_taken_anew() -> None:
    def body(s: Block, x: torch.Tensor) -> torch.Tensor:
        noise = numpy.random.default_rng(len(x)).random((8,), dtype=numpy.float32)
        return s.second((s.first(x) * torch.from_numpy(noise)).exp())

    region = check(body, [(X,)] * 4)
    assert (region.recorded, region.kept) == (1, 0)


def test_saved_tensors_may_be_asked_for_one_by_one() -> None:
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            return grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]

    check(lambda s, x: Both.apply(s.first(x).exp(), s.second(x).exp()), [(X,)] * 3)


def test_parameters_in_the_place_of_others_are_those_that_run_again() -> None:
    plain = Outer(lambda s, x: s.second(s.first(x).exp()))
    found = []
    for by in ("", "program", "rerun"):
        model = copy.deepcopy(plain)
        if by:
            applying.apply(model, Plan(regions=(PlannedRegion("block", by=by),)))
        others = {
            name: nn.Parameter(value.detach() * 2)
            for name, value in plain.named_parameters()
        }
        out = torch.func.functional_call(model, others, (X,))
        out.square().sum().backward()
        found.append([p.grad for p in others.values() if p.grad is not None])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


def test_a_model_that_has_a_plan_is_profiled_without_it() -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in "abcd")
    )
    x = torch.randn(512, 64)
    how: dict[str, Any] = {"optimizer": "none", "loss_fn": lambda out, _: out.sum()}
    before = ckplan.profile(model, x, **how)
    ckplan.auto(model, x, "90%", **how)
    again = ckplan.profile(model, x, **how)
    assert simulate(before).peak_bytes == simulate(again).peak_bytes
    assert applying.status(model).regions


def test_a_forward_that_raised_teaches_nothing() -> None:
    def body(s: Block, x: torch.Tensor, fails: bool) -> torch.Tensor:
        y = s.first(x).exp()
        if fails:
            raise ValueError
        return s.second(y)

    model = Outer(body)
    applying.apply(model, Plan(regions=(PlannedRegion("block"),)))
    for step in range(6):
        try:
            model(X, step in (0, 3)).square().sum().backward()
        except ValueError:
            continue
    (region,) = applying.status(model).regions
    assert (region.recorded, region.kept) == (2, 0)


def test_freezing_costs_two_steps() -> None:
    model = Outer(lambda s, x: s.second(s.first(x).exp()))
    applying.apply(model, Plan(regions=(PlannedRegion("block"),)))
    for step in range(6):
        model.block.first.requires_grad_(step < 2)
        model(X).square().sum().backward()
    (region,) = applying.status(model).regions
    assert (region.recorded, region.kept) == (3, 0)


class InplaceFormulas(torch.autograd.Function):
    """A kernel that overwrites what it is given, seen by nobody."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            x.mul_(-3)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * ctx.saved_tensors[0]


def test_what_is_rebuilt_otherwise_is_told_in_the_first_step() -> None:
    model = Outer(lambda s, x: s.second(InplaceFormulas.apply(s.first(x).exp())))
    applying.apply(model, Plan(regions=(PlannedRegion("block"),)))
    loss = model(X).square().sum()
    with pytest.warns(
        UserWarning, match="block was recomputed with a different result"
    ):
        loss.backward()


@pytest.mark.filterwarnings("error", "ignore:Complex modules")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_what_is_rebuilt_as_it_was_is_not(dtype: torch.dtype) -> None:
    model = Outer(lambda s, x: s.second(s.first(x).exp()).exp()).to(dtype)
    applying.apply(model, Plan(regions=(PlannedRegion("block"),)))
    for value in (X, X * float("nan"), X * float("inf"), X):
        model(value.to(dtype)).abs().sum().backward()


@pytest.mark.parametrize(
    "dtype",  # torch sums the last two in a copy of eight bytes for each
    [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8],
)
def test_looking_takes_no_memory_that_a_plan_does_not_know_of(
    dtype: torch.dtype,
) -> None:
    tensor = torch.randn(512, 1024).to(dtype)
    for given in (tensor, tensor.t(), tensor[:, ::2]):
        assert peak_bytes_of(partial(digest, given)) < 1024


def test_looking_at_a_first_forward_holds_no_bytes() -> None:
    model = Outer(lambda s, x: s.second(s.first(x).exp()).exp())
    applying.apply(model, Plan(regions=(PlannedRegion("block"),)))
    results, held_bytes = [], []
    for _ in range(2):
        with log_allocations() as log:
            results.append(model(X).sum())
        held_bytes.append(log.held_bytes)
    assert held_bytes[0] == held_bytes[1]


def test_settings_that_change_inside_are_seen_there() -> None:
    """A forward that enters them itself, others in every step."""

    class Settled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.step = nn.Linear(8, 8), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.step += 1
            odd = self.step % 2 == 1
            with torch.autocast("cpu", torch.bfloat16 if odd else torch.float16):
                y = self.layer(x).exp()
            h = y.float().view(1, 2, 6, 8)
            kernel = SDPBackend.MATH if odd else SDPBackend.FLASH_ATTENTION
            with sdpa_kernel(kernel):
                return functional.scaled_dot_product_attention(h, h.exp(), h)

    plain = nn.Sequential(Settled())
    planned = applying.apply(copy.deepcopy(plain), Plan(regions=(PlannedRegion("0"),)))
    for _ in range(4):
        expected, found = gradients(plain, (X,)), gradients(planned, (X,))
        assert all(map(torch.equal, expected, found))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("by", ["program", "rerun"])
@pytest.mark.parametrize("inside", [True, False])
def test_another_default_dtype_in_forward_is_that_of_what_is_rebuilt(
    by: str, *, inside: bool
) -> None:
    """It decides what ``full`` makes, and what whole numbers divide to."""
    dtypes = [torch.float64, torch.bfloat16, torch.float32, torch.bfloat16]

    def body(s: Block, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        y = s.first(x).exp()
        with default_dtype(dtype if inside else torch.get_default_dtype()):
            thirds = torch.full((8,), 1 / 3) * (torch.arange(8) + 1) / 3
            y = y * thirds.exp().float()
        return s.second((y * torch.full((8,), 0.1)).float()).exp()

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(body)

        def forward(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            with default_dtype(torch.float32 if inside else dtype):
                return self.block(x, dtype)

    torch.manual_seed(1)
    plain = Around()
    plan = Plan(regions=(PlannedRegion("block", by=by),))
    planned = applying.apply(copy.deepcopy(plain), plan)
    for dtype in dtypes:
        expected = gradients(plain, (X, dtype))
        found = gradients(planned, (X, dtype))
        assert all(map(torch.equal, expected, found))
        assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_random_numbers_of_devices_that_nobody_restores_are_refused(kind: str) -> None:
    for ask in (partial(random_state, generator=None), lambda one: sources_on([one])):
        with pytest.raises(ApplyError, match=f"random numbers again on {kind}"):
            ask(torch.device(kind))
