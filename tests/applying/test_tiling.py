"""A head and its loss in tiles: the bits of the plain loss, without its logits."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ckplan
from ckplan.applying.tiling import bits, rows
from ckplan.applying.tiling.bits import plain_cross_entropy
from ckplan.errors import ApplyError, PlanError
from ckplan.plan.tiles import Tiles
from ckplan.training.allocator import log_allocations

pytestmark = pytest.mark.usefixtures("one_thread")

TILES = (3, 4)
WORDS = 333


def operands(
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] = (2, 65),
    width: int = 24,
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    target = torch.randint(0, WORDS, shape)
    target[0, 3:9] = -100
    return {
        "hidden": torch.randn(*shape, width).to(dtype),
        "weight": (torch.randn(WORDS, width) * 0.5).to(dtype),
        "bias": torch.randn(WORDS).to(dtype),
        "target": target,
    }


def results(
    function: Any, given: dict[str, Tensor], *, scale: float = 1.0, **options: Any
) -> dict[str, Tensor]:
    """Loss and gradients."""
    names = [name for name in given if name != "target"]
    leaves = {name: given[name].clone().requires_grad_() for name in names}
    loss = function(**leaves, target=given["target"], **options)
    weights = torch.linspace(0.1, 1, loss.numel()).view(loss.shape)
    ((loss * weights).sum() if loss.dim() else loss * scale).backward()
    return {"loss": loss.detach(), **{n: leaves[n].grad for n in names}}  # type: ignore[dict-item]


def assert_same(plain: dict[str, Tensor], tiled: dict[str, Tensor]) -> None:
    for name, one in plain.items():
        assert one.isfinite().all()
        assert torch.equal(one, tiled[name]), name


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_option_has_the_bits_of_autograd(
    dtype: torch.dtype, reduction: str
) -> None:
    given = operands(dtype)
    class_weight = torch.rand(WORDS) + 0.1
    for shift, cap, smoothing, weighted, bias in product(
        (False, True), (None, 5.0), (0.0, 0.1), (False, True), (False, True)
    ):
        options = {
            "shift": shift,
            "soft_cap": cap,
            "label_smoothing": smoothing,
            "class_weight": class_weight if weighted else None,
            "reduction": reduction,
        }
        chosen = {k: v for k, v in given.items() if bias or k != "bias"}
        plain = results(plain_cross_entropy, chosen, **options)
        tiled = results(ckplan.tiled_cross_entropy, chosen, **options, tiles=TILES)
        assert_same(plain, tiled)


@pytest.mark.parametrize("tokens", [1, 31, 33, 64, 100, 257])
def test_every_number_of_tokens_and_tiles(tokens: int) -> None:
    given = operands(shape=(1, tokens + 9))
    plain = results(plain_cross_entropy, given)
    for tiles in ((1, 1), (2, 3), (7, 5), (1000, 1000)):
        tiled = results(ckplan.tiled_cross_entropy, given, tiles=tiles)
        assert_same(plain, tiled)


def test_the_gradient_agrees_with_finite_differences() -> None:
    given = operands(torch.float64, shape=(1, 40), width=3)
    target = given.pop("target")

    def loss(*tensors: Tensor) -> Tensor:
        named = dict(zip(given, tensors, strict=True))
        return ckplan.tiled_cross_entropy(
            **named, target=target, tiles=(2, 6), label_smoothing=0.1, soft_cap=3.0
        )

    leaves = [one.requires_grad_() for one in given.values()]
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True)


def count_passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    ran: list[str] = []
    for name in ("by_tokens", "by_vocabulary"):
        function = getattr(rows, name)

        def counted(*args: Any, name: str = name, function: Any = function) -> Any:
            ran.append(name)
            return function(*args)

        monkeypatch.setattr(rows, name, counted)
    return ran


def test_an_unexpected_gradient_costs_a_pass_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = count_passes(monkeypatch)
    given = operands()
    for scale in (1.0, 0.3):
        plain = results(plain_cross_entropy, given, scale=scale)
        function = ckplan.tiled_cross_entropy
        told = results(function, given, scale=scale, expected_gradient=scale)
        assert ran == ["by_tokens", "by_vocabulary"]
        ran.clear()
        not_told = results(function, given, scale=scale, expected_gradient=2.0)
        assert ran == ["by_tokens", "by_tokens", "by_vocabulary"]
        ran.clear()
        assert_same(plain, told)
        assert_same(plain, not_told)


def test_frozen_operands_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = count_passes(monkeypatch)
    given = operands()
    for frozen in ("hidden", "weight"):
        found = []
        for function in (plain_cross_entropy, ckplan.tiled_cross_entropy):
            leaves = {
                name: one.clone().requires_grad_(name not in (frozen, "bias"))
                for name, one in given.items()
                if name != "target"
            }
            function(**leaves, target=given["target"]).backward()
            assert leaves[frozen].grad is None
            kept = "weight" if frozen == "hidden" else "hidden"
            found.append(leaves[kept].grad)
        assert torch.equal(*found)  # type: ignore[arg-type]
        expected = ["by_tokens"] + ["by_vocabulary"] * (frozen == "hidden")
        assert ran == expected
        ran.clear()
    with torch.no_grad():
        loss = ckplan.tiled_cross_entropy(**given)
    assert torch.equal(loss, plain_cross_entropy(**given))


def test_tied_weights_and_a_second_backward() -> None:
    found = []
    for function in (plain_cross_entropy, ckplan.tiled_cross_entropy):
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(WORDS, 16)
        ids = torch.randint(0, WORDS, (2, 64))
        hidden = torch.tanh(embedding(ids))
        loss = function(hidden, embedding.weight, ids, shift=True)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(embedding.weight.grad)
    assert torch.equal(*found)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(130,), (130, 1), (5, 2, 13)])
def test_dimensions_and_strides(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = operands(dtype, (2, 65))
    given["target"] = given["target"].view(shape)
    given["hidden"] = given["hidden"].view(*shape, -1)
    strided = given["hidden"].transpose(0, -2).contiguous().transpose(0, -2)
    for hidden in (given["hidden"], strided):
        used = {**given, "hidden": hidden}
        plain = results(plain_cross_entropy, used)
        assert_same(plain, results(ckplan.tiled_cross_entropy, used, tiles=TILES))


def test_autocast() -> None:
    given = operands()
    with torch.autocast("cpu", torch.bfloat16):
        plain = results(plain_cross_entropy, given)
        assert_same(plain, results(ckplan.tiled_cross_entropy, given, tiles=TILES))
    assert plain["hidden"].dtype == torch.float32


def test_rows_that_are_all_ignored_give_nan_as_in_torch() -> None:
    given = operands()
    given["target"].fill_(-100)
    for function in (plain_cross_entropy, ckplan.tiled_cross_entropy):
        assert function(**given).isnan()
        assert function(**given, reduction="sum") == 0


def test_what_changes_before_backward_is_an_error() -> None:
    for changed in ("hidden", "weight"):
        given = operands()
        used = {
            name: one if name == "target" else one.clone().requires_grad_() * 1
            for name, one in given.items()
        }
        loss = ckplan.tiled_cross_entropy(**used)
        used[changed].detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_labels_may_change_before_backward() -> None:
    given = operands()
    plain = results(plain_cross_entropy, given)["hidden"]
    hidden = given["hidden"].clone().requires_grad_()
    loss = ckplan.tiled_cross_entropy(**{**given, "hidden": hidden})
    given["target"].fill_(0)
    loss.backward()
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, plain)


def test_a_second_derivative_is_an_error() -> None:
    given = operands()
    hidden = given["hidden"].requires_grad_()
    loss = ckplan.tiled_cross_entropy(**given)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(ApplyError, match="cannot differentiate the gradients"):
        gradient.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_is_below_a_tenth_of_the_plain_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tokens, words = 1024, 8192
    hidden = torch.randn(tokens, 8).to(dtype).requires_grad_()
    weight = torch.randn(words, 8).to(dtype).requires_grad_()
    target = torch.randint(0, words, (tokens,))
    peaks = []
    for function in (plain_cross_entropy, ckplan.tiled_cross_entropy):
        hidden.grad = weight.grad = None
        with log_allocations() as log:
            options = {} if function is plain_cross_entropy else {"tiles": (32, 32)}
            function(hidden, weight, target, **options).backward()
        peaks.append(log.peak_bytes)
    assert peaks[1] < peaks[0] / 10


def test_bits_are_tested_for_a_shape() -> None:
    found = ckplan.check_bits((130, 16, 300), threads=1, bias=True, tiles=TILES)
    assert (found.bits, found.difference, found.threads) == ("same", 0.0, 1)
    other = ckplan.check_bits(
        (130, 16, 300), torch.bfloat16, threads=1, upcast=False, tiles=TILES
    )
    assert other.bits == "close"
    assert 0 < other.difference < 0.05
    assert other.where == "weight"
    assert str(other).startswith("close, ")


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in float64 round elsewhere: the test of bits says so."""

    def rounded_once(hidden: Tensor, weight: Tensor, **rest: Any) -> Tensor:
        return plain_cross_entropy(
            hidden.double(), weight.double(), target=rest["target"]
        ).float()

    monkeypatch.setattr(bits, "tiled_cross_entropy", rounded_once)
    found = ckplan.check_bits((64, 64, 1000), threads=1)
    assert found.bits == "close"
    assert 0 < found.difference < 1e-4


def test_losses_of_no_tokens_are_not_compared() -> None:
    with pytest.raises(ApplyError, match=r"losses of the shape \(0, 32, 5\)"):
        ckplan.check_bits((0, 32, 5))


def test_cuts_cover_everything_and_are_wide_enough() -> None:
    for size, count in product((1, 31, 32, 33, 64, 95, 97, 1000), (1, 2, 3, 50)):
        cuts = Tiles(count, count).of_tokens(size)
        assert [i for cut in cuts for i in range(size)[cut]] == [*range(size)]
        assert len(cuts) <= count
        assert all(cut.stop - cut.start >= min(32, size) for cut in cuts)
        assert all(cut.start % 32 == 0 for cut in cuts)
    assert Tiles().of_tokens(0) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.zeros(2, 64, dtype=torch.int64)}, "target is"),
        ({"target": torch.zeros(2, 65)}, "target is torch.float32"),
        ({"target": torch.full((2, 65), WORDS)}, f"target {WORDS} is no class"),
        ({"weight": torch.zeros(WORDS, 9)}, "hidden is"),
        ({"weight": torch.zeros(WORDS, 24).half()}, "operands are"),
        ({"bias": torch.zeros(3)}, "bias is"),
        ({"class_weight": torch.zeros(3)}, "class_weight is"),
        ({"reduction": "max"}, "reduction is 'max'"),
        ({"label_smoothing": 2.0}, "label_smoothing is 2.0"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ApplyError, match=message):
        ckplan.tiled_cross_entropy(**{**operands(), **change})


def test_a_bad_number_of_tiles_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot cut the tokens into 0 tiles"):
        ckplan.tiled_cross_entropy(**operands(), tiles=(0, 4))


def test_torch_names_bad_classes_of_the_plain_loss_too() -> None:
    given = operands()
    with pytest.raises(IndexError):
        F.cross_entropy(torch.zeros(3, WORDS), torch.full((3,), WORDS))
    with pytest.raises(ApplyError):
        ckplan.tiled_cross_entropy(**{**given, "target": given["target"] - 7})
