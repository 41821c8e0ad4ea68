"""MLPs in tiles: the bits of autograd, less memory, and what stays whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gated import Gated
from measured import peak_bytes_of
from normed_mlps import OnPictures, WrittenRms, convnext, flat, norm_first
from torch import Tensor, nn

import ckplan
from ckplan.applying.tiling.row_noting import program_of
from ckplan.applying.tiling.row_program import NotRowWise
from ckplan.errors import ApplyError, CkplanError, PlanError

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, HIDDEN, ROWS = 96, 384, 256


class Matrices(nn.Module):
    """As in GPT-2: weights are [inputs, outputs], and gelu is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, HIDDEN) / 10)
        self.second = nn.Parameter(torch.randn(HIDDEN, WIDTH) / 20)
        self.biases = nn.ParameterList([torch.randn(HIDDEN), torch.randn(WIDTH)])

    def forward(self, rows: Tensor) -> Tensor:
        flat = torch.addmm(self.biases[0], rows.view(-1, WIDTH), self.first)
        one = flat.view(*rows.shape[:-1], HIDDEN)
        one = 0.5 * one * (1.0 + torch.tanh(0.8 * (one + 0.044 * torch.pow(one, 3.0))))
        made = torch.addmm(self.biases[1], one.view(-1, HIDDEN), self.second)
        return made.view(rows.shape)


def of(activation: nn.Module) -> nn.Module:
    first, last = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
    return nn.Sequential(first, activation, last)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "gelu": lambda: of(nn.GELU()),
    "relu": lambda: of(nn.ReLU()),
    "gated": lambda: Gated(WIDTH, HIDDEN),
    "matrices": Matrices,
    "dropped": lambda: nn.Sequential(of(nn.GELU()), nn.Dropout(0.3)),
    "normed": lambda: flat(nn.LayerNorm(WIDTH), WIDTH, HIDDEN),
    "rms norm": lambda: flat(nn.RMSNorm(WIDTH), WIDTH, HIDDEN),
    "written norm": lambda: norm_first(WrittenRms(WIDTH), Gated(WIDTH, HIDDEN)),
    "dropped first": lambda: norm_first(nn.Dropout(0.3), of(nn.GELU())),
    "tanh first": lambda: norm_first(nn.Tanh(), Gated(WIDTH, HIDDEN)),
    "convnext": lambda: OnPictures(convnext(WIDTH, HIDDEN), WIDTH),
}


def model_of(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(WIDTH), KINDS[kind](), nn.Linear(WIDTH, 4))


def results(model: nn.Module, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Output and all gradients."""
    torch.manual_seed(1)
    rows = torch.randn(2, ROWS // 2, WIDTH, dtype=dtype, requires_grad=True)
    model.zero_grad()
    out = model(rows)
    out.square().sum().backward()
    found = (rows, *model.parameters())
    return [out.detach(), *(one.grad.clone() for one in found if one.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_have_autograds_bits(
    kind: str, dtype: torch.dtype
) -> None:
    model = model_of(kind).to(dtype)
    plain = results(model, dtype)
    with ckplan.tile_rows(model, "1", tiles=(4, 3)) as handle:
        tiled = results(model, dtype)
    assert str(handle) == "1: 1 calls in tiles, 0 whole"
    assert len(tiled) == len(plain) == 2 + len([*model.parameters()])
    assert all(map(torch.equal, plain, tiled))


def test_gradients_are_the_differences_of_the_loss() -> None:
    model = model_of("gated").double()
    ckplan.tile_rows(model, "1", tiles=(4, 3))
    weight = model[1].up.weight
    _, *_ = results(model, torch.float64)
    assert weight.grad is not None
    slope, step = float(weight.grad[200, 50]), 1e-5
    losses = []
    for change in (step, -2 * step):
        with torch.no_grad():
            weight[200, 50] += change
        losses.append(float(results(model, torch.float64)[0].square().sum()))
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(slope, rel=1e-6)


def test_hidden_values_are_never_whole() -> None:
    model = KINDS["gelu"]()
    rows = torch.randn(1024, WIDTH, requires_grad=True)

    def step() -> None:
        model.zero_grad()
        rows.grad = None
        model(rows).sum().backward()

    step()
    plain = peak_bytes_of(step)
    with ckplan.tile_rows(model, "", tiles=(8, 6)):
        step()
        tiled = peak_bytes_of(step)
    hidden = 1024 * HIDDEN * 4
    assert plain > 2 * hidden
    assert tiled < plain - hidden


class Twice(nn.Module):
    """Not row-wise."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.mix = mix

    def forward(self, rows: Tensor) -> Tensor:
        made: Tensor = self.last(self.mix(self.first(rows)))
        return made


def _gate_without_gradient(one: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(one)
    return gate * one


MIXES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "softmax": (lambda one: one.softmax(-1), "it runs _softmax"),
    "dropout": (lambda one: F.dropout(one, 0.5), "draws a number for every hidden"),
    "no gradient": (_gate_without_gradient, "without gradients"),
    "detach": (lambda one: one.detach() * one, "reads other tensors"),
    "in place": (lambda one: one.relu_(), "it runs relu_"),
    "values": (lambda one: one * float(one.detach().sum()), "it"),
    "nothing": (lambda one: one, "no elementwise op"),
    "norm": (lambda one: F.layer_norm(one, one.shape[-1:]), "it runs native_layer_nor"),
}


def runs_whole(model: nn.Module, why: str) -> None:
    """Its call ``1`` stays whole, with a warning and the same bits."""
    plain = results(model)
    with (
        ckplan.tile_rows(model, "1") as handle,
        pytest.warns(UserWarning, match=f"1 runs whole, not in tiles: {why}"),
    ):
        tiled = results(model)
    assert (handle.tiled, handle.whole) == (0, 1)
    assert all(map(torch.equal, plain, tiled))


def test_what_comes_before_the_products_must_be_of_the_input_alone() -> None:
    class Other(Twice):
        def forward(self, rows: Tensor) -> Tensor:
            made: Tensor = self.last(torch.relu(self.first(rows.add_(2))))
            return made

    cases: dict[str, tuple[nn.Module, str]] = {
        "batch norm": (nn.BatchNorm1d(ROWS // 2), "it runs add_"),
        "in place": (nn.Identity(), "it cannot run without values: a leaf"),
    }
    for name, (first, why) in cases.items():
        mlp = Other(torch.relu) if name == "in place" else of(nn.ReLU())
        model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Sequential(first, mlp))
        runs_whole(model, why)
        counted = getattr(first, "num_batches_tracked", None)
        assert counted is None or int(counted) == 2  # noting ops counts nothing


@pytest.mark.parametrize("name", MIXES)
def test_what_is_no_mlp_runs_whole_with_a_warning(name: str) -> None:
    mix, why = MIXES[name]
    model = nn.Sequential(nn.LayerNorm(WIDTH), Twice(mix))
    runs_whole(model, f".*{why}")


def test_a_forward_that_assigns_attributes_runs_whole_and_keeps_them() -> None:
    class Keeps(Twice):
        def forward(self, rows: Tensor) -> Tensor:
            self.seen = self.first(rows)
            self.buffer = self.seen.detach()
            self.all_seen.append(self.buffer)
            self.by_name["last"] = self.buffer
            made: Tensor = self.last(torch.relu(self.seen))
            return made

    model = nn.Sequential(nn.LayerNorm(WIDTH), Keeps(torch.relu))
    model[1].register_buffer("buffer", torch.zeros(1))
    model[1].all_seen, model[1].by_name = [], {}
    plain, seen = results(model), model[1].seen
    with (
        ckplan.tile_rows(model, "1") as handle,
        pytest.warns(UserWarning, match="its forward assigns attributes"),
    ):
        tiled = results(model)
    assert (handle.tiled, handle.whole) == (0, 1)
    assert all(map(torch.equal, plain, tiled))
    containers = model[1].all_seen, model[1].by_name
    assert [*map(len, containers)] == [2, 1]
    for kept in (
        *containers[0],
        *containers[1].values(),
        model[1].seen,
        model[1].buffer,
    ):
        assert type(kept) is Tensor and torch.equal(kept, seen)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_casts_as_it_does_without_tiles(kind: str) -> None:
    model = model_of(kind)
    with torch.autocast("cpu", torch.bfloat16):
        plain = results(model)
        with ckplan.tile_rows(model, "1", tiles=(4, 3)) as handle:
            tiled = results(model)
        later = results(model)  # autocast keeps no copy that the tiles made
    assert (handle.tiled, handle.whole) == (1, 0)
    assert all(map(torch.equal, plain, tiled))
    assert all(map(torch.equal, plain, later))


class Shared(nn.Module):
    """Three products, of which two read the same copy of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, HIDDEN) for _ in range(3))
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        low = rows.bfloat16()
        made = F.silu(self.one(low)) * self.two(low) * self.three(rows)
        output: Tensor = self.down(made)
        return output


def test_products_that_share_a_copy_in_part_stay_whole() -> None:
    model = nn.Sequential(nn.LayerNorm(WIDTH), Shared(), nn.Linear(WIDTH, 4))
    with (
        torch.autocast("cpu", torch.bfloat16),
        ckplan.tile_rows(model, "1") as handle,
        pytest.warns(UserWarning, match="share a copy of its input"),
    ):
        results(model)
    assert (handle.tiled, handle.whole) == (0, 1)


def test_hooks_inside_keep_a_call_whole() -> None:
    model = model_of("gelu")
    seen: list[int] = []
    with ckplan.tile_rows(model, "1") as handle:
        model[1][1].register_forward_hook(lambda *_: seen.append(1))
        with pytest.warns(UserWarning, match="has hooks"):
            results(model)
        with torch.no_grad():
            model(torch.randn(2, WIDTH))
    assert (handle.tiled, handle.whole, len(seen)) == (0, 1, 2)


def test_bad_arguments_are_refused_and_change_nothing() -> None:
    model = model_of("gelu")
    cases: list[tuple[type[CkplanError], str, tuple[int, int], str]] = [
        (ApplyError, "mlp", (8, 8), "has no module 'mlp'"),
        (PlanError, "1", (0, 8), "cannot cut the rows into 0 tiles"),
    ]
    for kind, name, tiles, text in cases:
        with pytest.raises(kind, match=text) as error:
            ckplan.tile_rows(model, name, tiles=tiles)
        assert str(error.value).count("\n") == 2
    assert "forward" not in vars(model[1])
    with ckplan.tile_rows(model, "1"), pytest.raises(PlanError, match="replaced"):
        ckplan.tile_rows(model, "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results(model)


def test_torch_logs_nothing_of_what_cannot_run_on_fake_tensors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scale = torch.ones(5)
    with pytest.raises(NotRowWise, match="it cannot run without values"):
        program_of(lambda x: x * scale, torch.zeros(4, 8))
    assert caplog.records == []
