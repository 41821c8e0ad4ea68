"""Attentions that are written out, in tiles of heads: bits, readers, refusals."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from measured import peak_bytes_of
from torch import Tensor, nn
from written_attention import Attention, causal, scaled

import ckplan
from ckplan.applying.tiling.scores import FollowScores
from ckplan.errors import ApplyError
from ckplan.plan.tiles import RowTiles

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, HEADS, LENGTH, SAMPLES = 64, 4, 32, 6
Mix = Callable[[Tensor], Tensor]


def in_float32(scores: Tensor) -> Tensor:
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)


def idle_dropout(scores: Tensor) -> Tensor:
    return F.dropout(torch.softmax(scores / torch.full([], 4.0), 3), 0.0)


MIXES: dict[str, Mix] = {
    "scaled": scaled,
    "causal": causal,
    "in float32": in_float32,
    "idle dropout": idle_dropout,
    "dropout": lambda s: F.dropout(causal(s), 0.3),
    "all but dropped": lambda s: F.dropout(s, 0.99).softmax(-1),
}


def model_of(mix: Mix) -> Attention:
    torch.manual_seed(0)
    return Attention(WIDTH, HEADS, mix)


def masks(sizes: tuple[int, ...]) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(1))


def results(
    model: nn.Module,
    mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    samples: int = SAMPLES,
) -> list[Tensor]:
    """Output and all gradients."""
    torch.manual_seed(1)
    rows = torch.randn(samples, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
    model.zero_grad()
    out = model(rows) if mask is None else model(rows, mask.to(dtype))
    out.square().sum().backward()
    found = (rows, *model.parameters())
    return [out.detach(), *(one.grad.clone() for one in found if one.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("samples", [1, 2, 6])
@pytest.mark.parametrize("mix", MIXES)
def test_output_and_gradients_have_autograds_bits(
    mix: str, samples: int, dtype: torch.dtype
) -> None:
    model = model_of(MIXES[mix]).to(dtype)
    plain = results(model, None, dtype, samples)
    with ckplan.tile_rows(model, "", tiles=(4, 1)) as handle:
        tiled = results(model, None, dtype, samples)
        again = results(model, None, dtype, samples)
    assert (handle.tiled, handle.whole) == (2, 0)
    assert len(tiled) == len(plain) == 6
    assert all(map(torch.equal, plain, tiled))
    assert all(map(torch.equal, plain, again))


@pytest.mark.parametrize("tiles", [1, 3, 4, 8, 24, 100])
@pytest.mark.parametrize(
    "sizes",
    [
        *((LENGTH,), (LENGTH, LENGTH), (LENGTH, 1), (SAMPLES, 1, 1, LENGTH)),
        *((1, HEADS, LENGTH, LENGTH), (SAMPLES, HEADS, 1, LENGTH)),
    ],
)
def test_masks_are_cut_with_the_heads(sizes: tuple[int, ...], tiles: int) -> None:
    model, mask = model_of(scaled), masks(sizes)
    plain = results(model, mask)
    with ckplan.tile_rows(model, "", tiles=(tiles, 1)) as handle:
        tiled = results(model, mask)
    assert (handle.tiled, handle.whole) == (1, 0)
    assert all(map(torch.equal, plain, tiled))


def test_gradients_are_the_differences_of_the_loss() -> None:
    model = model_of(causal).double()
    ckplan.tile_rows(model, "", tiles=(5, 1))
    weight = model.inputs.weight
    results(model, None, torch.float64)
    assert weight.grad is not None
    slope, step = float(weight.grad[70, 20]), 1e-5
    losses = []
    for change in (step, -2 * step):
        with torch.no_grad():
            weight[70, 20] += change
        out, *_ = results(model, None, torch.float64)
        losses.append(float(out.square().sum()))
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(slope, rel=1e-6)


def test_scores_are_never_whole() -> None:
    model = Attention(WIDTH, 8)
    rows = torch.randn(2, 256, WIDTH, requires_grad=True)

    def step() -> None:
        model.zero_grad()
        rows.grad = None
        model(rows).sum().backward()

    step()
    plain = peak_bytes_of(step)
    with ckplan.tile_rows(model, "", tiles=(16, 1)):
        step()
        tiled = peak_bytes_of(step)
    scores = 2 * 8 * 256 * 256 * 4
    assert plain > 3 * scores
    assert tiled < plain - 2 * scores


def test_attentions_of_transformers_run_in_tiles() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"attn_implementation": "eager", "vocab_size": 64}
    gpt2 = transformers.GPT2Config(
        n_layer=2, n_embd=WIDTH, n_head=HEADS, attn_pdrop=0, **small
    )
    llama = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        **small,
    )
    ids = torch.randint(0, 64, (3, LENGTH))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    models = {
        "transformer.h.{}.attn": transformers.GPT2LMHeadModel(gpt2),
        "model.layers.{}.self_attn": transformers.LlamaForCausalLM(llama),
    }
    for name, model in models.items():

        def gradients(model: nn.Module = model) -> list[Tensor]:
            torch.manual_seed(1)
            model.zero_grad()
            model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
            return [p.grad for p in model.parameters() if p.grad is not None]

        plain = gradients()
        handles = [ckplan.tile_rows(model, name.format(n)) for n in range(2)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tiled = gradients()
        assert [(one.tiled, one.whole) for one in handles] == [(1, 0)] * 2
        assert all(map(torch.equal, plain, tiled))


class Learned(Attention):
    """Adds a parameter to its scores."""

    def __init__(self, *given: int) -> None:
        super().__init__(*given)
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))
        self.mix = lambda scores: (scores + self.bias).softmax(-1)


WHOLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dropout in place": (
        lambda: model_of(lambda s: F.dropout(s * 2, 0.5, inplace=True).softmax(-1)),
        "dropout",
    ),
    "other softmax": (lambda: model_of(lambda s: s.softmax(-2)), "softmax"),
    "over heads": (lambda: model_of(lambda s: s.softmax(1)), "softmax"),
    "no softmax": (lambda: model_of(lambda s: s * 2), "matmul"),
    "relu": (lambda: model_of(lambda s: s.relu()), "relu"),
    "learned": (lambda: Learned(WIDTH, HEADS), "add"),
    "in place": (lambda: model_of(lambda s: s.mul_(2).softmax(-1)), "mul_"),
    "mean": (lambda: model_of(lambda s: (s - s.mean()).softmax(-1)), "mean"),
    "itself": (lambda: model_of(lambda s: (s + s * 2).softmax(-1)), "add"),
    "of heads": (
        lambda: model_of(lambda s: (s * s.detach().sum((0, 1))).softmax(-1)),
        "detach",
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_treats_heads_together_runs_whole_with_a_warning(name: str) -> None:
    make, reader = WHOLE[name]
    torch.manual_seed(0)
    model = make()
    plain = results(model)
    with (
        ckplan.tile_rows(model, "") as handle,
        pytest.warns(UserWarning, match=f"attention are read by .*{reader}"),
    ):
        tiled = results(model)
    assert (handle.tiled, handle.whole) == (0, 1)
    assert all(map(torch.equal, plain, tiled))


def test_ops_that_were_followed_see_scores_before_they_change() -> None:
    def mix(scores: Tensor) -> Tensor:
        double = scores * 2.0
        scores += 3.0
        return (double + scores).softmax(-1)

    model = model_of(mix)
    plain = results(model)
    with ckplan.tile_rows(model, ""), pytest.warns(UserWarning, match="read by add_"):
        assert all(map(torch.equal, plain, results(model)))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_it_does_without_tiles(mix: str, dtype: torch.dtype) -> None:
    model = model_of(MIXES[mix])
    with torch.autocast("cpu", dtype):
        plain = results(model)
        with ckplan.tile_rows(model, "") as handle:
            tiled = results(model)
    assert (handle.tiled, handle.whole) == (1, 0)
    assert all(map(torch.equal, plain, tiled))


def test_without_gradients_it_is_whole() -> None:
    model = model_of(scaled)
    with ckplan.tile_rows(model, "") as handle, torch.no_grad():
        model(torch.randn(2, LENGTH, WIDTH))
    assert (handle.tiled, handle.whole) == (0, 0)


class Returns(Attention):
    """Returns what it multiplies values by, too."""

    def forward(self, rows: Tensor, mask: Tensor | None = None) -> Tensor:
        kept: list[Tensor] = []
        mix = self.mix
        self.mix = lambda scores: kept.append(mix(scores)) or kept[0]  # type: ignore[func-returns-value]
        try:
            return super().forward(rows), kept[0]  # type: ignore[return-value]
        finally:
            self.mix = mix


def test_scores_that_leave_the_call_are_made_when_they_are_read() -> None:
    torch.manual_seed(0)
    model, rows = Returns(WIDTH, HEADS), torch.randn(2, LENGTH, WIDTH)
    weights: list[Tensor] = []

    def gradients() -> list[Tensor]:
        model.zero_grad()
        out, kept = model(rows)
        (out.sum() + kept.square().sum()).backward()
        weights.append(kept.square().detach())
        return [one.grad.clone() for one in model.parameters()]

    plain = gradients()
    with (
        ckplan.tile_rows(model, "") as handle,
        pytest.warns(UserWarning, match="its scores were read by square"),
    ):
        tiled = gradients()
    assert (handle.tiled, handle.whole) == (1, 1)
    assert torch.equal(*weights)
    for one, other in zip(plain, tiled, strict=True):  # sums in another order
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_mask_that_changes_before_backward_is_an_error() -> None:
    model, mask = model_of(scaled), masks((LENGTH, LENGTH))
    rows = torch.randn(2, LENGTH, WIDTH)
    with ckplan.tile_rows(model, ""):
        out = model(rows, mask)
        mask.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_mask_that_changes_before_it_is_used_is_an_error() -> None:
    def spoil(scores: Tensor) -> Tensor:
        mask.zero_()
        return scores.softmax(-1)

    model, mask = model_of(spoil), masks((LENGTH, LENGTH))
    with (
        ckplan.tile_rows(model, ""),
        pytest.raises(ApplyError, match="a mask changed in place") as error,
    ):
        model(torch.randn(2, LENGTH, WIDTH), mask)
    assert str(error.value).count("\n") == 2


def test_a_factor_that_changes_before_it_is_used_is_an_error() -> None:
    class Spoils(nn.Module):
        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            first = first * 2
            scores = (first @ second.transpose(1, 2)).softmax(-1)
            first.zero_()
            made: Tensor = scores @ second
            return made

    model = Spoils()
    given = [torch.randn(3, 8, 4, requires_grad=True) for _ in range(2)]
    with (
        ckplan.tile_rows(model, ""),
        pytest.raises(ApplyError, match="a factor changed in place"),
    ):
        model(*given)


def test_scores_below_torch_functions_are_an_error() -> None:
    torch.manual_seed(0)
    model = Returns(WIDTH, HEADS)
    with ckplan.tile_rows(model, ""):
        _, kept = model(torch.randn(2, LENGTH, WIDTH))
        with torch._C.DisableTorchFunctionSubclass(), pytest.raises(ApplyError):
            kept.square()


def test_autocast_inside_a_call_is_as_without_tiles() -> None:
    def halves(scores: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (scores @ scores.new_ones(LENGTH, LENGTH)).float().softmax(-1)

    def cast(scores: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return scores.softmax(-1)

    model = model_of(halves)
    plain = results(model)
    with (
        ckplan.tile_rows(model, "") as handle,
        pytest.warns(UserWarning, match="are read by"),
    ):
        tiled = results(model)
    assert (handle.tiled, handle.whole) == (0, 1)
    assert all(map(torch.equal, plain, tiled))
    model = model_of(cast)
    plain = results(model)
    with ckplan.tile_rows(model, "") as handle:
        tiled = results(model)
    assert (handle.tiled, handle.whole) == (1, 0)
    assert all(map(torch.equal, plain, tiled))


def test_scores_that_go_to_another_device_or_fail_run_as_they_do_without_tiles() -> (
    None
):
    model = model_of(lambda scores: scores.to("meta").softmax(-1).to("cpu"))
    with ckplan.tile_rows(model, ""):
        for _ in range(2):
            with pytest.raises(NotImplementedError, match="meta"):
                results(model)
    wrong = model_of(lambda scores: (scores + torch.ones(LENGTH + 1)).softmax(-1))
    with (
        ckplan.tile_rows(wrong, ""),
        pytest.raises(RuntimeError, match="must match the size"),
    ):
        results(wrong)


@pytest.mark.parametrize("seed", range(40))
def test_any_masks_and_scales_give_autograds_gradients(seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)

    def number(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=drawn))

    sizes = number(1, 4), number(1, 5), number(1, 20), number(1, 20)
    many = [
        torch.randn(
            [size if number(0, 1) else 1 for size in sizes][number(0, 3) :],
            generator=drawn,
            dtype=torch.float64,
        )
        for _ in range(3)
    ]
    ops: list[Mix] = [
        lambda scores: scores * many[0],
        lambda scores: many[1] + scores,
        lambda scores: scores.masked_fill(many[2] < 0, -1e4),
        lambda scores: torch.add(scores, many[1], alpha=2) / 3,
        lambda scores: scores.float().double(),
    ]
    before = [ops[number(0, 4)] for _ in range(number(0, 3))]
    after = [ops[number(0, 4)] for _ in range(number(0, 2))]

    class Written(nn.Module):
        def forward(self, first: Tensor, second: Tensor, values: Tensor) -> Tensor:
            scores = first @ second.transpose(2, 3)
            for op in before:
                scores = op(scores)
            scores = torch.softmax(scores, 3)
            for op in after:
                scores = op(scores)
            return scores @ values

    samples, heads, queries, keys = sizes
    lengths = (queries, 6), (keys, 6), (keys, 4)
    given = [
        torch.randn(samples, heads, *one, generator=drawn, dtype=torch.float64)
        for one in lengths
    ]

    def gradients(model: nn.Module) -> list[Tensor]:
        leaves = [one.clone().requires_grad_() for one in given]
        out = model(*leaves)
        out.square().sum().backward()
        return [out.detach(), *(one.grad for one in leaves if one.grad is not None)]

    model = Written()
    plain = gradients(model)
    with ckplan.tile_rows(model, "", tiles=(number(1, 9), 1)) as handle:
        tiled = gradients(model)
    assert (handle.tiled, handle.whole) == (1, 0)
    for one, other in zip(plain, tiled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


class Fused(Attention):
    """Torch's own function, with values of all samples alike."""

    def forward(self, rows: Tensor, mask: Tensor | None = None) -> Tensor:
        sizes = *rows.shape[:2], self.heads, rows.shape[-1] // self.heads
        parts = self.inputs(rows).split(rows.shape[-1], -1)
        first, second, values = (one.view(sizes).transpose(1, 2) for one in parts)
        values = values[:1] if mask is None else values
        made = F.scaled_dot_product_attention(
            first, key=second, value=values, dropout_p=0.3
        )
        output: Tensor = self.output(made.transpose(1, 2).reshape(rows.shape))
        return output


@pytest.mark.parametrize("is_alike", [False, True])
def test_numbers_of_dropout_are_drawn_once(is_alike: bool) -> None:
    torch.manual_seed(0)
    model = Fused(WIDTH, HEADS)
    mask = None if is_alike else torch.zeros(1)
    plain, state = results(model, mask), torch.get_rng_state()
    with ckplan.tile_rows(model, "") as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tiled = results(model, mask)
    assert handle.tiled == (not is_alike)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, plain, tiled))


def test_a_mask_beside_a_causal_one_is_torchs_own_error() -> None:
    model = nn.Linear(4, 4)
    given = [torch.randn(1, 1, 3, 4, requires_grad=True) for _ in range(3)]
    mask = torch.zeros(3, 3)

    def forward(rows: Tensor) -> Tensor:
        made: Tensor = F.scaled_dot_product_attention(
            *given, attn_mask=mask, dropout_p=0.5, is_causal=True
        )
        return made + rows.sum()

    model.forward = forward  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="is_causal") as plain:
        model(torch.zeros(1))
    del model.forward
    follow = FollowScores(RowTiles(2, 1), lambda reader: None)
    with follow, pytest.raises(RuntimeError) as tiled:
        forward(torch.zeros(1))
    assert str(tiled.value) == str(plain.value)
