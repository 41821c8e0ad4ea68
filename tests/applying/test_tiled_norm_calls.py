"""Calls of written-out norms in tiles: the bits of autograd, and what stays whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from measured import peak_bytes_of
from normed_mlps import WrittenRms
from torch import Tensor, nn
from written_norms import NORMS, ROWS, WIDTH, Around, LayerNorm, T5Norm, batch

import ckplan

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Torch says once that its RMS norm is not fused for these.
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]


def model_of(norm: nn.Module) -> Around:
    torch.manual_seed(0)
    return Around(norm, residual=True)


def results(model: nn.Module, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Output and all gradients, which two backwards add up."""
    rows = batch(dtype).requires_grad_()
    model.zero_grad()
    for weight in (1, 2):
        out = model(rows)
        (weight * out.square().sum()).backward()
    found = (rows, *model.parameters())
    return [out.detach(), *(one.grad.clone() for one in found if one.grad is not None)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", NORMS)
def test_output_and_gradients_have_autograds_bits(kind: str, autocast: bool) -> None:
    model = model_of(NORMS[kind](WIDTH))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = results(model)
        with ckplan.tile_rows(model, "norm", tiles=(4, 2)) as handle:
            tiled = results(model)
    assert (handle.tiled, handle.whole) == (2, 0)
    assert len(tiled) == len(plain) == 2 + len([*model.parameters()])
    assert all(map(torch.equal, plain, tiled))


@pytest.mark.parametrize("kind", NORMS)
def test_gradients_are_the_differences_of_the_loss(kind: str) -> None:
    model = model_of(NORMS[kind](WIDTH)).double()
    weights = [*model.norm.parameters(), model.first.weight]
    if kind in ("llama", "t5", "gemma"):  # statistics in float32
        weights, step, far = weights[:1], 1e-2, 1e-3
    else:
        step, far = 1e-5, 1e-6
    ckplan.tile_rows(model, "norm", tiles=(4, 2))
    results(model, torch.float64)
    slopes = [float(one.grad.flatten()[7]) / 3 for one in weights]
    for one, slope in zip(weights, slopes, strict=True):
        losses = []
        for change in (step, -2 * step):
            with torch.no_grad():
                one.view(-1)[7] += change
            losses.append(float(results(model, torch.float64)[0].square().sum()))
        with torch.no_grad():
            one.view(-1)[7] += step
        assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(slope, rel=far)


@pytest.mark.parametrize("frozen", ["input", "parameters", "one"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    model = model_of(LayerNorm(WIDTH))
    if frozen == "input":
        model.first.requires_grad_(requires_grad=False)
    elif frozen == "parameters":
        model.norm.requires_grad_(requires_grad=False)
    else:
        model.norm.weight.requires_grad_(requires_grad=False)
    rows = batch()

    def gradients() -> list[Tensor | None]:
        model.zero_grad()
        model(rows).square().sum().backward()
        return [one.grad for one in model.parameters()]

    plain = gradients()
    with ckplan.tile_rows(model, "norm", tiles=(4, 2)) as handle:
        tiled = gradients()
    assert handle.tiled == 1
    for one, other in zip(plain, tiled, strict=True):
        assert one is other is None or torch.equal(one, other)


def test_values_are_never_whole() -> None:
    norm, rows = T5Norm(WIDTH).bfloat16(), torch.randn(4096, WIDTH).bfloat16()
    rows.requires_grad_()

    def step() -> None:
        norm.zero_grad()
        rows.grad = None
        norm(rows).sum().backward()

    step()
    plain = peak_bytes_of(step)
    with ckplan.tile_rows(norm, "", tiles=(8, 2)):
        step()
        tiled = peak_bytes_of(step)
    assert tiled < plain - 4 * 4096 * WIDTH  # one in float32


def test_nothing_is_tiled_without_gradients() -> None:
    model = model_of(WrittenRms(WIDTH))
    with ckplan.tile_rows(model, "norm") as handle, torch.no_grad():
        model(batch())
    assert (handle.tiled, handle.whole) == (0, 0)


class Of(nn.Module):
    """A norm of one function, with a weight and a number that is learned."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.other = nn.Parameter(torch.randn(ROWS // 4, WIDTH))
        self.function = function

    def forward(self, rows: Tensor) -> Tensor:
        made: Tensor = self.function(self, rows) * self.weight
        return made


def mean(rows: Tensor) -> Tensor:
    return rows.mean(-1, keepdim=True)


WHOLE: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], str]] = {
    "columns": (lambda m, x: x - x.mean(1, keepdim=True), "it changes the shape"),
    "all": (lambda m, x: x - x.mean(), "it changes the shape"),
    "both": (lambda m, x: x - x.mean((1, 2), keepdim=True), "it changes the shape"),
    "no sum": (lambda m, x: x * 2, "no norm"),
    "number": (lambda m, x: (x - mean(x)) * m.scale, "reads other tensors"),
    "wide": (lambda m, x: (x - mean(x)) * m.other, "reads other tensors"),
    "softmax": (lambda m, x: (x - mean(x)).softmax(-1), "it runs _softmax"),
    "unused": (lambda m, x: (x - mean(x), mean(x) + 1)[0], "what nobody reads"),
    "in place": (lambda m, x: (x - mean(x)).mul_(2), "in place|it runs mul_"),
    "transposed": (lambda m, x: x.mT.contiguous().mT - mean(x), "it runs"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_no_norm_runs_whole_with_a_warning(name: str) -> None:
    function, why = WHOLE[name]
    model = model_of(Of(function))
    plain = results(model)
    with (
        ckplan.tile_rows(model, "norm") as handle,
        pytest.warns(UserWarning, match=f"norm runs whole, not in tiles: .*({why})"),
    ):
        tiled = results(model)
    assert (handle.tiled, handle.whole) == (0, 2)
    assert all(map(torch.equal, plain, tiled))


def test_an_input_that_is_not_contiguous_runs_whole() -> None:
    norm = WrittenRms(WIDTH)
    rows = torch.randn(WIDTH, 64, requires_grad=True)
    with (
        ckplan.tile_rows(norm, "") as handle,
        pytest.warns(UserWarning, match="its input is not contiguous"),
    ):
        norm(rows.t()).sum().backward()
    assert (handle.tiled, handle.whole) == (0, 1)


def test_a_gradient_in_another_layout_has_the_same_bits() -> None:
    norm, found = LayerNorm(WIDTH), []
    for tiles in (False, True):
        rows = batch().new_ones(64, WIDTH).cumsum(1).requires_grad_()
        norm.zero_grad()
        handle = ckplan.tile_rows(norm, "") if tiles else None
        made = norm(rows)
        made.t().contiguous().square().cumsum(1).sum().backward()
        if handle is not None:
            assert handle.tiled == 1
        found.append([rows.grad, norm.weight.grad.clone(), norm.bias.grad.clone()])
    assert all(map(torch.equal, *found))


def test_an_input_that_changes_before_backward_is_an_error() -> None:
    norm = WrittenRms(WIDTH)
    source = torch.randn(64, WIDTH, requires_grad=True)
    rows = source * 1
    with ckplan.tile_rows(norm, ""):
        made = norm(rows)
        rows.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            made.sum().backward()
