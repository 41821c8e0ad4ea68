"""Plans with attentions in tiles of heads: predicted, as they run, chosen, refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from measured import peak_bytes_of
from torch import Tensor, nn
from written_attention import Attention, causal, scaled

import ckplan
from ckplan.applying.tiling.bits import Bits
from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.resolve import resolve
from ckplan.plan.tiles import RowTiles
from ckplan.simulating.simulate import simulate
from ckplan.solving.tiled_rows import find_tileable_rows, row_wise_calls
from ckplan.tracing.steps import tiled_row_bits
from ckplan.tracing.steps.fake_forward import told_by_forward
from ckplan.training.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, HEADS, LENGTH = 64, 8, 96
NUMBERS = 16  # bytes of numbers that autograd frees earlier
Mix = Callable[[Tensor], Tensor]


def in_float32(scores: Tensor) -> Tensor:
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)


class Plain(Attention):
    """The same in one line; returns its weights."""

    def forward(self, rows: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:  # type: ignore[override]
        sizes = *rows.shape[:2], self.heads, rows.shape[-1] // self.heads
        parts = self.inputs(rows).split(rows.shape[-1], -1)
        first, second, values = (one.view(sizes).transpose(1, 2) for one in parts)
        weights = (first @ second.transpose(-2, -1)).softmax(-1)
        made = self.output((weights @ values).transpose(1, 2).reshape(rows.shape))
        return made, weights


class Model(nn.Module):
    """A layer with an attention beside a residual, and a head."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.head = attention, nn.Linear(WIDTH, 8)

    def forward(self, rows: Tensor) -> tuple[Tensor, ...]:
        rows = self.first(rows)
        made = self.attention(self.norm(rows))
        made, *kept = made if isinstance(made, tuple) else (made,)
        return (self.head(rows + made), *kept)


class Fused(Attention):
    """Runs torch's own function, which has no fused kernel with dropout on a CPU."""

    def __init__(self, **options: object) -> None:
        super().__init__(WIDTH, HEADS)
        self.options = options

    def forward(self, rows: Tensor, mask: Tensor | None = None) -> Tensor:
        sizes = *rows.shape[:2], self.heads, rows.shape[-1] // self.heads
        parts = self.inputs(rows).split(rows.shape[-1], -1)
        given = (one.view(sizes).transpose(1, 2) for one in parts)
        made = F.scaled_dot_product_attention(
            *given,
            attn_mask=mask,
            dropout_p=0.2,
            **self.options,  # type: ignore[arg-type]
        )
        output: Tensor = self.output(made.transpose(1, 2).reshape(rows.shape))
        return output


class Masked(Fused):
    """Some keys count for all queries."""

    def forward(self, rows: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(rows, torch.arange(LENGTH).remainder(3).bool())


class Summed(Attention):
    """Its products are written as sums over indices."""

    layout = "bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd"

    def forward(self, rows: Tensor, mask: Tensor | None = None) -> Tensor:
        sizes = *rows.shape[:2], self.heads, rows.shape[-1] // self.heads
        parts = self.inputs(rows).split(rows.shape[-1], -1)
        first, second, values = (self.laid(one.view(sizes)) for one in parts)
        weights = torch.einsum(self.layout[0], first, second).softmax(-1)
        made = self.laid(torch.einsum(self.layout[1], weights, values))
        output: Tensor = self.output(made.reshape(rows.shape))
        return output

    def laid(self, one: Tensor) -> Tensor:
        return one.transpose(1, 2)


class SummedInPlace(Summed):
    """The same, without another layout."""

    layout = "bqhd, bkhd -> bhqk", "bhqk, bkhd -> bqhd"

    def laid(self, one: Tensor) -> Tensor:
        return one


def dropped(scores: Tensor) -> Tensor:
    return F.dropout(causal(scores), 0.1)


def rotated(width: int, heads: int) -> Attention:
    """Queries are scaled before, and there is no op but the softmax."""
    return Attention(width, heads, lambda scores: scores.softmax(-1))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "scaled": lambda: Attention(WIDTH, HEADS, scaled),
    "causal": lambda: Attention(WIDTH, HEADS, causal),
    "in float32": lambda: Attention(WIDTH, HEADS, in_float32),
    "softmax": lambda: rotated(WIDTH, HEADS),
    "returned": lambda: Plain(WIDTH, HEADS),
    "few heads": lambda: Attention(WIDTH, 2, scaled),
    "dropout": lambda: Attention(WIDTH, HEADS, dropped),
    "dropout of few heads": lambda: Attention(WIDTH, 2, dropped),
    "fused": Fused,
    "fused, causal": lambda: Fused(is_causal=True, scale=0.2),
    "fused, masked": Masked,
    "sums": lambda: Summed(WIDTH, HEADS),
    "sums in place": lambda: SummedInPlace(WIDTH, HEADS),
}


def model_of(kind: str) -> Model:
    torch.manual_seed(0)
    return Model(KINDS[kind]())


def batch(samples: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, LENGTH, 8, generator=generator)


def loss_of(made: tuple[Tensor, ...], _: object = None) -> Tensor:
    return made[0].square().mean()


@cache
def recorded(kind: str, samples: int, dtype: torch.dtype = torch.float32) -> Graph:
    given = model_of(kind).to(dtype), (batch(samples).to(dtype),)
    return ckplan.profile(*given, loss_fn=loss_of, optimizer="none", replay=False)


def plan_of(rows: int) -> Plan:
    region = PlannedRegion("attention", "tiles", tiles=RowTiles(rows, 1))
    return Plan(regions=(region,))


def measured(
    kind: str, samples: int, plan: Plan | None, dtype: torch.dtype = torch.float32
) -> tuple[int, list[Tensor]]:
    """Peak of the second step, and its gradients."""
    model, rows = model_of(kind).to(dtype), batch(samples).to(dtype)
    if plan is not None:
        ckplan.apply(model, plan)

    def run() -> None:
        output = model(rows)  # stays until backward ends
        loss_of(output).backward()

    run()
    model.zero_grad()
    peak = peak_bytes_of(run, [*model.parameters(), rows])
    if plan is not None:
        (region,) = ckplan.status(model).regions
        assert (region.runs, region.kept) == (2, 0)
    return peak, [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("rows", [1, 3, 8, 16])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_peak_is_predicted_and_gradients_are_the_same(
    kind: str, dtype: torch.dtype, samples: int, rows: int
) -> None:
    plan, graph = plan_of(rows), recorded(kind, samples, dtype)
    peak, gradients = measured(kind, samples, plan, dtype)
    _, expected = measured(kind, samples, None, dtype)
    assert len(gradients) == len(expected) > 0
    assert all(map(torch.equal, gradients, expected))
    predicted = simulate(graph, resolve(plan, graph)).peak_bytes
    # Tiles copy less to the scratch memory of 16-bit products than it is taken to be.
    scratch = max(op.workspace.bytes for op in graph.ops if op.name == "bmm")
    assert 0 <= predicted - peak <= NUMBERS + scratch


@pytest.mark.parametrize("kind", ["scaled", "in float32", "dropout", "fused, causal"])
def test_an_attention_under_autocast_runs_in_tiles(kind: str) -> None:
    def run(model: nn.Module, rows: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(rows)
            loss = loss_of(output)
        loss.backward()

    graph = ckplan.profile(
        *(model_of(kind), (batch(3),)),
        loss_fn=loss_of,
        optimizer="none",
        amp="bf16",
        replay=False,
    )
    plan, results, peaks = plan_of(8), [], []
    for one in (None, plan):
        model, rows = model_of(kind), batch(3)
        if one is not None:
            ckplan.apply(model, one)
        run(model, rows)
        model.zero_grad()
        held = [*model.parameters(), rows]
        peaks.append(peak_bytes_of(lambda m=model, r=rows: run(m, r), held))  # type: ignore[misc]
        results.append([p.grad for p in model.parameters()])
    (region,) = ckplan.status(model).regions
    assert (region.runs, region.kept) == (2, 0)
    assert all(map(torch.equal, *results))
    predicted = simulate(graph, resolve(plan, graph)).peak_bytes
    assert predicted == pytest.approx(peaks[1], rel=0.01)
    assert peaks[1] < 0.7 * peaks[0]


def test_solve_chooses_tiles_that_lower_the_floor() -> None:
    graph = recorded("causal", 3)
    tests = [(graph.calls[t.call].fqn, t.rows, t.difference) for t in graph.tiled]
    assert ("attention", 8, 0) in tests
    least = ckplan.solve(graph, goal="min-memory").predicted
    plan = ckplan.solve(graph, goal="min-memory", allow=["tiles"])
    assert least is not None and plan.predicted is not None
    assert [one.calls for one in plan.regions if one.tiles] == ["attention"]
    scores = 3 * HEADS * LENGTH * LENGTH * 4
    assert plan.predicted.peak_bytes < least.peak_bytes - scores


def test_tiles_cost_the_products_that_run_again() -> None:
    graph = recorded("causal", 3)
    timeline = simulate(graph, resolve(plan_of(8), graph))
    (product,) = {op.flops for op in graph.ops if op.name == "bmm"}
    more = sum(op.flops for op in timeline.graph.ops)
    assert more - sum(op.flops for op in graph.ops) == product
    assert timeline.recompute_seconds > 0


FAMILIES: dict[str, tuple[str, dict[str, object]]] = {  # name of attentions, options
    "GPT2LMHeadModel": ("attn", {}),
    "LlamaForCausalLM": ("self_attn", {"num_key_value_heads": 2, "head_dim": 8}),
    "BertForMaskedLM": ("self", {}),
    "OPTForCausalLM": ("self_attn", {"word_embed_proj_dim": WIDTH}),
    "GPTNeoXForCausalLM": ("attention", {}),
    "ViTForImageClassification": ("attention", {"image_size": 72, "patch_size": 8}),
}


def family(
    name: str, written: str, dropout: float
) -> tuple[Callable[[], nn.Module], dict[str, Tensor]]:
    """A small model of transformers, unmodified, and its batch."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    config = kind.config_class(attn_implementation=written, **FAMILIES[name][1])
    sizes = {
        **dict.fromkeys(("num_hidden_layers", "n_layer"), 2),
        **dict.fromkeys(("hidden_size", "n_embd", "intermediate_size"), WIDTH),
        **dict.fromkeys(("num_attention_heads", "n_head"), HEADS),
        **dict.fromkeys(("ffn_dim", "vocab_size"), WIDTH),
    }
    for key in [*vars(config)]:
        if key in sizes:
            setattr(config, key, sizes[key])
        if "drop" in key:
            setattr(config, key, dropout)

    def build() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = kind(config)
        return model.train()

    if name.startswith("ViT"):
        pictures = torch.randn(3, 3, 72, 72)
        return build, {"pixel_values": pictures, "labels": torch.zeros(3).long()}
    ids = torch.randint(2, WIDTH, (3, LENGTH))
    return build, {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("name", "written", "dropout"),
    [
        *((name, "eager", 0.1) for name in FAMILIES),
        ("GPTNeoXForCausalLM", "eager", 0.0),
        *((name, "sdpa", 0.1) for name in list(FAMILIES)[:3]),
    ],
)
def test_unmodified_models_of_transformers_run_in_tiles(
    name: str, written: str, dropout: float
) -> None:
    build, given = family(name, written, dropout)
    graph = ckplan.profile(build(), given, optimizer="none", replay=False)
    plan = ckplan.solve(graph, goal="min-memory", allow=["tiles"])
    assert any(one.endswith(FAMILIES[name][0]) for one in plan.calls_in_tiles)
    results, peaks = [], []
    for one in (None, plan):
        model = build()
        if one is not None:
            ckplan.apply(model, one)

        def run(model: nn.Module = model) -> None:
            torch.manual_seed(0)
            output = model(**given)
            output.loss.backward()

        run()
        model.zero_grad()
        held = [*model.parameters(), *model.buffers(), *given.values()]
        peaks.append(peak_bytes_of(run, held))
        grads = [p.grad for p in model.parameters()]
        results.append([g for g in grads if g is not None])
    assert plan.predicted is not None
    assert 0 <= plan.predicted.peak_bytes - peaks[1] <= 2 * NUMBERS
    assert peaks[1] < 0.6 * peaks[0]
    assert len(results[0]) == len(results[1]) > 0
    assert all(map(torch.equal, *results))


class TwoOf(nn.Module):
    """Two attentions in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        for _ in range(2):
            one = self.inputs(rows)
            rows = (one @ one.transpose(1, 2)).softmax(-1) @ one
        return rows


class Learned(Attention):
    """Adds a parameter to its scores."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS)
        self.bias = nn.Parameter(torch.zeros(HEADS, LENGTH, LENGTH))

    def forward(self, rows: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(rows, self.bias)


def with_mix(mix: Mix) -> Callable[[], nn.Module]:
    return lambda: Attention(WIDTH, HEADS, mix)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dropout twice": (
        with_mix(lambda s: F.dropout(F.dropout(s.softmax(-1), 0.5), 0.5)),
        "its scores go through empty_like",
    ),
    "relu": (with_mix(lambda s: s.relu().softmax(-1)), "its scores go through relu"),
    "in place": (
        with_mix(lambda s: s.mul_(0.5).softmax(-1)),
        "its scores go through mul_",
    ),
    "itself": (with_mix(lambda s: (s * s).softmax(-1)), "its backward runs"),
    "mean": (with_mix(lambda s: (s - s.mean()).softmax(-1)), "mean|sub"),
    "learned": (Learned, "its scores meet a parameter"),
    "two": (TwoOf, "it has 4 products of heads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_scores_whose_heads_are_not_apart_are_refused(name: str) -> None:
    make, why = REFUSED[name]
    graph = ckplan.profile(
        Model(make()), (batch(2),), loss_fn=loss_of, optimizer="none", replay=False
    )
    with pytest.raises(PlanError, match=why) as error:
        simulate(graph, resolve(plan_of(2), graph))
    assert str(error.value).count("\n") == 2
    assert not any(graph.calls[one.call].fqn == "attention" for one in graph.tiled)


def test_weights_that_the_loss_reads_are_refused() -> None:
    def loss(made: tuple[Tensor, ...], _: object = None) -> Tensor:
        return made[0].square().mean() + made[1].square().mean()

    given = Model(Plain(WIDTH, HEADS)), (batch(2),)
    graph = ckplan.profile(*given, loss_fn=loss, optimizer="none", replay=False)
    with pytest.raises(PlanError, match="its backward runs add"):
        simulate(graph, resolve(plan_of(2), graph))


def test_other_bits_are_found_and_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def check(sizes: tuple[int, ...], **given: object) -> Bits:
        seen.append(sizes)
        return Bits("close", 1e-6, "output", 1)

    monkeypatch.setattr(tiled_row_bits, "check_attention_bits", check)
    given = Model(Attention(WIDTH, 4, causal)), (batch(5),)
    graph = ckplan.profile(*given, loss_fn=loss_of, optimizer="none", replay=False)
    assert seen == [(5, 4, LENGTH, LENGTH, WIDTH // 4)]
    region = PlannedRegion("attention", "tiles", tiles=RowTiles(8, 8))
    with pytest.raises(PlanError, match="with the same bits: profile found"):
        simulate(graph, resolve(Plan(regions=(region,)), graph))


class Core(nn.Module):
    """From queries, keys and values to the output: no parameters."""

    def forward(self, first: Tensor, second: Tensor, values: Tensor) -> Tensor:
        made: Tensor = (first @ second.transpose(2, 3) / 3).softmax(-1) @ values
        return made


class Around(Attention):
    """Its attention is a module of its own."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS)
        self.core = Core()

    def forward(self, rows: Tensor, mask: Tensor | None = None) -> Tensor:
        sizes = *rows.shape[:2], self.heads, rows.shape[-1] // self.heads
        parts = self.inputs(rows).split(rows.shape[-1], -1)
        made = self.core(*(one.view(sizes).transpose(1, 2) for one in parts))
        output: Tensor = self.output(made.transpose(1, 2).reshape(rows.shape))
        return output


def test_an_attention_without_parameters_runs_in_tiles() -> None:
    def build() -> Model:
        torch.manual_seed(0)
        return Model(Around())

    graph = ckplan.profile(
        build(), (batch(3),), loss_fn=loss_of, optimizer="none", replay=False
    )
    plan = ckplan.solve(graph, goal="min-memory", allow=["tiles"])
    assert plan.calls_in_tiles == ("attention.core",)
    results = []
    for one in (None, plan):
        model, rows = build(), batch(3)
        if one is not None:
            ckplan.apply(model, one)

        def run(model: Model = model, rows: Tensor = rows) -> None:
            output = model(rows)
            loss_of(output).backward()

        run()
        model.zero_grad()
        peak = peak_bytes_of(run, [*model.parameters(), rows])
        results.append([p.grad for p in model.parameters()])
    assert plan.predicted is not None
    assert 0 <= plan.predicted.peak_bytes - peak <= NUMBERS
    assert all(map(torch.equal, *results))


class Direct(Attention):
    """Calls an operator of torch by its own name, which is not followed."""

    def forward(self, rows: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = self.inputs(rows).split(rows.shape[-1], -1)
        first, second, values = (one.contiguous() for one in parts)
        scores = torch.ops.aten.bmm.default(first, second.transpose(1, 2))
        output: Tensor = self.output(torch.bmm(scores.softmax(-1), values))
        return output


@pytest.mark.parametrize("fails", [False, True])
def test_what_follows_a_forward_leaves_the_model_as_it_was(fails: bool) -> None:
    model = Model(Attention(WIDTH, HEADS))
    graph = recorded("scaled", 3)
    calls = row_wise_calls(graph)
    assert calls
    given = batch(3)[:, :, :5] if fails else batch(3)
    told = told_by_forward(graph, lambda: Workload(model, (given,)), calls)
    assert told.whole == {}
    assert "forward" not in vars(model.attention)


def test_an_attention_whose_code_is_not_followed_is_not_chosen() -> None:
    given = Model(Direct(WIDTH, HEADS)), (batch(2),)
    graph = ckplan.profile(*given, loss_fn=loss_of, optimizer="none", replay=False)
    assert any("attention#0: it would run whole" in note for note in graph.notes)
    assert find_tileable_rows(graph) == ()
    with pytest.raises(PlanError, match="profile found that it would run whole"):
        simulate(graph, resolve(plan_of(2), graph))
