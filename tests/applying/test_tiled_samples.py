"""1x1 convolutions in tiles of samples: the bits of autograd, and what stays whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from measured import peak_bytes_of
from pointwise import (
    GatedPointwise,
    LayerNorm2d,
    PointwiseMlp,
    depthwise_first,
    frozen_weight,
)
from torch import Tensor, nn

import ckplan

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, HIDDEN, SIDE = 48, 192, 7
PLAIN, LAST = torch.contiguous_format, torch.channels_last

KINDS: dict[str, Callable[[], nn.Module]] = {
    "gelu": lambda: PointwiseMlp(WIDTH, HIDDEN),
    "relu6": lambda: PointwiseMlp(WIDTH, HIDDEN, nn.ReLU6(), bias=False),
    "gated": lambda: GatedPointwise(WIDTH, HIDDEN),
    "depthwise": lambda: depthwise_first(WIDTH, HIDDEN),
    "norm": lambda: nn.Sequential(LayerNorm2d(WIDTH), PointwiseMlp(WIDTH, HIDDEN)),
    "dropped": lambda: nn.Sequential(PointwiseMlp(WIDTH, HIDDEN), nn.Dropout(0.3)),
    "half frozen": lambda: frozen_weight(PointwiseMlp(WIDTH, HIDDEN)),
}


def model_of(make: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.GroupNorm(1, WIDTH), make(), nn.GroupNorm(1, WIDTH))


def pictures(samples: int, layout: torch.memory_format = PLAIN) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(samples, WIDTH, SIDE, SIDE, generator=generator)
    return made.contiguous(memory_format=layout)


def results(model: nn.Module, given: Tensor) -> list[Tensor]:
    """Output and all gradients."""
    torch.manual_seed(1)
    leaf = given.detach().clone().requires_grad_()
    model.zero_grad()
    out = model(leaf)
    out.square().sum().backward()
    found = (leaf, *model.parameters())
    return [out.detach(), *(one.grad.clone() for one in found if one.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [PLAIN, LAST])
@pytest.mark.parametrize("samples", [5, 15, 16, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_have_autograds_bits(
    kind: str, samples: int, layout: torch.memory_format, dtype: torch.dtype
) -> None:
    model = model_of(KINDS[kind]).to(dtype)
    given = pictures(samples, layout).to(dtype)
    plain = results(model, given)
    with ckplan.tile_rows(model, "1", tiles=(8, 3)) as handle:
        tiled = results(model, given)
    assert str(handle) == "1: 1 calls in tiles, 0 whole"
    assert len(tiled) == len(plain)
    assert all(map(torch.equal, plain, tiled))
    assert [one.stride() for one in tiled[:2]] == [one.stride() for one in plain[:2]]


@pytest.mark.parametrize(
    ("convolution", "sizes"), [(nn.Conv1d, (9,)), (nn.Conv3d, (3, 4, 5))]
)
def test_sequences_and_volumes_run_in_tiles(
    convolution: type[nn.Module], sizes: tuple[int, ...]
) -> None:
    def mlp() -> nn.Module:
        first, last = convolution(WIDTH, 128, 1), convolution(128, WIDTH, 1)
        return nn.Sequential(first, nn.SiLU(), last)

    model, given = model_of(mlp), torch.randn(20, WIDTH, *sizes)
    plain = results(model, given)
    with ckplan.tile_rows(model, "1") as handle:
        tiled = results(model, given)
    assert (handle.tiled, handle.whole) == (1, 0)
    assert all(map(torch.equal, plain, tiled))


def test_gradients_are_the_differences_of_the_loss() -> None:
    model = model_of(KINDS["gated"]).double()
    ckplan.tile_rows(model, "1", tiles=(4, 3))
    given, weight = pictures(6).double(), model[1].up.weight
    results(model, given)
    slope, step = float(weight.grad[150, 20]), 1e-5
    losses = []
    for change in (step, -2 * step):
        with torch.no_grad():
            weight[150, 20] += change
        losses.append(float(results(model, given)[0].square().sum()))
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(slope, rel=1e-5)


def test_hidden_values_are_never_whole() -> None:
    model, given = KINDS["gelu"](), pictures(32).requires_grad_()

    def step() -> None:
        model.zero_grad()
        given.grad = None
        model(given).sum().backward()

    step()
    plain = peak_bytes_of(step)
    with ckplan.tile_rows(model, "", tiles=(8, 3)):
        step()
        tiled = peak_bytes_of(step)
    hidden = 32 * HIDDEN * SIDE * SIDE * 4
    assert plain > 2 * hidden
    assert tiled < plain - hidden


class Between(nn.Module):
    """Something between two convolutions."""

    def __init__(self, mix: Callable[[Tensor], Tensor], **options: int) -> None:
        super().__init__()
        self.up = nn.Conv2d(WIDTH, HIDDEN, 1, **options)
        self.down = nn.Conv2d(HIDDEN, WIDTH, 1)
        self.mix = mix

    def forward(self, picture: Tensor) -> Tensor:
        made: Tensor = self.down(self.mix(self.up(picture)))
        return made


class Transposed(nn.Module):
    """A permuted result is a view of other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(WIDTH, HIDDEN, 1), nn.Conv2d(HIDDEN, WIDTH, 1)

    def forward(self, picture: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(picture).transpose(2, 3)))


WHOLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch norm": (lambda: Between(nn.BatchNorm2d(HIDDEN)), "it "),
    "group norm": (lambda: Between(nn.GroupNorm(1, HIDDEN)), "it runs native_group"),
    "channel dropout": (lambda: Between(nn.Dropout2d(0.5)), "it runs new_empty|draws"),
    "depthwise": (
        lambda: Between(nn.Conv2d(HIDDEN, HIDDEN, 3, padding=1, groups=HIDDEN)),
        "it runs convolution",
    ),
    "softmax": (lambda: Between(lambda one: one.softmax(1)), "it runs _softmax"),
    "view": (lambda: Between(lambda one: one.flatten(2).unflatten(2, (7, 7))), "it "),
    "transposed": (Transposed, "it "),
    "in place": (lambda: Between(lambda one: F.relu(one, inplace=True)), "runs relu_"),
    "padded": (lambda: Between(torch.relu, padding=1), "it "),
    "strided": (lambda: Between(torch.relu, stride=2), "it "),
    "dilated": (lambda: Between(torch.relu, dilation=2), "it "),
    "groups": (lambda: Between(torch.relu, groups=2), "it "),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_no_mlp_runs_whole_with_a_warning(name: str) -> None:
    make, why = WHOLE[name]
    model, given = model_of(make), pictures(6)
    plain = results(model, given)
    with (
        ckplan.tile_rows(model, "1") as handle,
        pytest.warns(UserWarning, match=f"1 runs whole, not in tiles: .*({why})"),
    ):
        tiled = results(model, given)
    assert (handle.tiled, handle.whole) == (0, 1)
    assert all(map(torch.equal, plain, tiled))


PERMUTED = {
    "input": (
        lambda: PointwiseMlp(WIDTH, HIDDEN),
        pictures(6).transpose(2, 3),
        "its input is not contiguous",
    ),
    "weights": (
        lambda: PointwiseMlp(WIDTH, HIDDEN).to(memory_format=LAST),
        pictures(6),
        "a convolution in it changes the memory layout",
    ),
}


@pytest.mark.parametrize("name", PERMUTED)
def test_layouts_that_tiles_would_not_keep_run_whole(name: str) -> None:
    make, given, why = PERMUTED[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), make())
    plain = results(model, given)
    with (
        ckplan.tile_rows(model, "1") as handle,
        pytest.warns(UserWarning, match=why),
    ):
        tiled = results(model, given)
    assert (handle.tiled, handle.whole) == (0, 1)
    assert all(map(torch.equal, plain, tiled))
    assert tiled[0].stride() == plain[0].stride()
