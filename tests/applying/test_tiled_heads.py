"""Heads of unmodified models in tiles: results are the same, whoever reads logits."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ckplan
from ckplan.applying.tiling.lazy import LazyLogits
from ckplan.errors import ApplyError, PlanError
from ckplan.plan.plan import Plan, PlannedRegion

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = 300
TILES = (3, 4)


class Tiny(nn.Module):
    """An embedding, a layer and a head; its caller computes the loss."""

    def __init__(self, bias: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.layer = nn.Linear(16, 16)
        self.head = nn.Linear(16, WORDS, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Any:
        """Logits [B, S, V]."""
        return self.head(torch.tanh(self.layer(self.embedding(ids))))


def ids() -> Tensor:
    return torch.randint(0, WORDS, (2, 70), generator=torch.Generator().manual_seed(0))


def results(
    loss_of: Callable[[nn.Module], Tensor],
    make: Callable[[], nn.Module] = Tiny,
    head: str = "head",
) -> tuple[list[dict[str, Tensor | None]], ckplan.applying.tiling.TiledHead]:  # type: ignore[name-defined]
    """Loss and gradients of two steps, plain and tiled."""
    found = []
    for is_tiled in (False, True):
        torch.manual_seed(0)
        model = make()
        handle = ckplan.tile_head(model, head, tiles=TILES) if is_tiled else None
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(1)
            loss = loss_of(model)
            loss.backward()
        gradients = {name: one.grad for name, one in model.named_parameters()}
        found.append({"loss": loss.detach(), **gradients})
    assert handle is not None
    return found, handle


def assert_same(found: list[dict[str, Tensor | None]]) -> None:
    plain, tiled = found
    for name, one in plain.items():
        other = tiled[name]
        if one is None or other is None:
            assert one is other, name
        else:
            assert one.isfinite().all(), name
            assert torch.equal(one, other), name


def flat(logits: Tensor) -> Tensor:
    return logits.view(-1, WORDS)


LOSSES: dict[str, Callable[[nn.Module], Tensor]] = {
    "direct": lambda m: F.cross_entropy(flat(m(ids())), ids().view(-1)),
    "module": lambda m: nn.CrossEntropyLoss(ignore_index=5)(
        m(ids()).reshape(-1, WORDS).float(), ids().reshape(-1)
    ),
    "shift": lambda m: F.cross_entropy(
        flat(m(ids())[..., :-1, :].contiguous()), ids()[:, 1:].reshape(-1)
    ),
    "shift in place of an ellipsis": lambda m: F.cross_entropy(
        m(ids())[:, :-1].reshape(-1, WORDS),
        ids()[:, 1:].reshape(-1),
        reduction="sum",
        label_smoothing=0.1,
    ),
    "soft cap": lambda m: F.cross_entropy(
        flat(torch.tanh(m(ids()) / 5.0) * 5.0), ids().view(-1), torch.ones(WORDS) / 3
    ),
    "scaled loss": lambda m: F.cross_entropy(flat(m(ids())), ids().view(-1)) / 3,
    "none": lambda m: (
        F.cross_entropy(flat(m(ids())), ids().view(-1), reduction="none")
        * torch.linspace(0, 1, 140)
    ).mean(),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tied", [False, True])
def test_losses_of_plain_loops_run_in_tiles(name: str, tied: bool) -> None:
    found, handle = results(LOSSES[name], lambda: Tiny(tied=tied))
    assert_same(found)
    assert (handle.tiled, handle.whole) == (2, 0)


class _Square(torch.autograd.Function):
    """Reads its input below torch functions."""

    @staticmethod
    def forward(ctx: Any, one: Tensor) -> Tensor:
        ctx.save_for_backward(one)
        return one * one

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (one,) = ctx.saved_tensors
        return 2 * one * gradient


def _entropy(logits: Tensor) -> Tensor:
    return F.cross_entropy(flat(logits), ids().view(-1))


def _changed_in_place(m: nn.Module) -> Tensor:
    logits = m(ids()) * 1.0
    copy_of_it = logits.float()
    rows = logits.view(-1, WORDS)
    logits[:, 3] = 0.5
    rows[7] += 1.0
    return _entropy(logits) + F.cross_entropy(
        copy_of_it.view(-1, WORDS), ids().view(-1)
    )


def _through_a_function(m: nn.Module) -> Tensor:
    logits = m(ids())
    loss = _entropy(logits)
    return loss + _Square.apply(logits).mean()  # type: ignore[no-any-return]


def _read_without_gradients(m: nn.Module) -> Tensor:
    logits = m(ids())
    with torch.no_grad():
        assert logits.argmax(-1).shape == (2, 70)
    return _entropy(logits)


def _with_a_hook(m: nn.Module) -> Tensor:
    logits = m(ids())
    logits.register_hook(lambda gradient: gradient * 2)
    return _entropy(logits)


READERS: dict[str, Callable[[nn.Module], Tensor]] = {
    "another loss": lambda m: -F.log_softmax(m(ids()), -1)[..., 0].mean(),
    "changed in place": _changed_in_place,
    "a function of autograd": lambda m: _Square.apply(m(ids()) / 2.0).mean(),
    "without gradients": _read_without_gradients,
    "a hook": _with_a_hook,
    "a shift by two": lambda m: F.cross_entropy(
        m(ids())[:, :-2].reshape(-1, WORDS), ids()[:, 2:].reshape(-1)
    ),
    "rows of an array": lambda m: _entropy(m(ids())[numpy.arange(2)]),
    "a cap of another number": lambda m: _entropy(torch.tanh(m(ids()) / 5.0) * 4.0),
    "a scale": lambda m: _entropy(m(ids()) * 0.5),
    "probabilities": lambda m: F.cross_entropy(
        flat(m(ids())), torch.full((140, WORDS), 1 / WORDS)
    ),
    "weights of words": lambda m: F.cross_entropy(
        m(ids()).transpose(1, 2), ids(), reduction="sum"
    ),
}


@pytest.mark.filterwarnings("ignore:the logits of head were read")
@pytest.mark.parametrize("name", READERS)
def test_other_readers_get_the_logits(name: str) -> None:
    found, handle = results(READERS[name])
    assert_same(found)
    assert handle.whole == 2


SECOND: dict[str, Callable[[nn.Module], Tensor]] = {
    "a torch function": lambda m: (lambda x: _entropy(x) + x.square().mean())(m(ids())),
    "a function of autograd": _through_a_function,
}


@pytest.mark.filterwarnings("ignore:the logits of head were read")
@pytest.mark.parametrize("name", SECOND)
def test_a_second_loss_adds_its_gradient(name: str) -> None:
    """The sums of the two gradients are rounded in other places, and no more."""
    (plain, tiled), handle = results(SECOND[name])
    assert (handle.tiled, handle.whole) == (2, 2)
    for key, one in plain.items():
        assert one is not None
        torch.testing.assert_close(tiled[key], one, rtol=1e-5, atol=1e-7)


def test_a_reader_is_named_once() -> None:
    model = Tiny()
    with ckplan.tile_head(model, "head"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            model(ids()).exp()
    assert [str(one.message).partition(":")[0] for one in told] == [
        "the logits of head were read by exp"
    ]


@pytest.mark.filterwarnings("ignore:the logits of head were read")
def test_logits_are_read_before_the_weight_changes_or_not_at_all() -> None:
    model = Tiny()
    ckplan.tile_head(model, "head")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    early, late = model(ids()), model(ids())
    read = early.sum().item()
    _entropy(late).backward()
    optimizer.step()
    assert early.sum().item() == read
    with pytest.raises(ApplyError, match="changed since the head ran"):
        late.sum()
    logits = model(ids())
    optimizer.step()
    with pytest.raises(ApplyError, match="changed since the head ran"):
        _entropy(logits)


def test_lazy_logits_have_the_facts_of_logits_and_no_bytes() -> None:
    model = Tiny()
    plain = model(ids())
    with ckplan.tile_head(model, "head") as handle:
        logits = model(ids())
        assert type(logits) is LazyLogits
        assert isinstance(logits, torch.Tensor)
        for fact in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf"):
            assert getattr(logits, fact) == getattr(plain, fact)
        assert logits.size(-1) == WORDS
        assert len(logits) == 2
        assert logits.untyped_storage().size() == 0 if handle.whole else True
        assert handle.whole == 0
        with torch.no_grad():
            assert type(model(ids())) is Tensor
    assert type(model(ids())) is Tensor


def test_nothing_stays_alive_after_backward() -> None:
    model = Tiny()
    ckplan.tile_head(model, "head")
    held: list[weakref.ref[Tensor]] = []
    model.head.register_forward_pre_hook(
        lambda module, args: held.append(weakref.ref(args[0]))
    )
    gc.disable()
    try:
        logits = model(ids())
        loss = F.cross_entropy(logits.float().view(-1, WORDS), ids().view(-1))
        loss.backward()
        assert held[0]() is not None
        del logits, loss
        assert held[0]() is None
    finally:
        gc.enable()


def test_copies_and_state_dicts() -> None:
    torch.manual_seed(0)
    model = Tiny()
    names = list(model.state_dict())
    ckplan.tile_head(model, "head")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.head.weight.zero_()
        twin.head.bias.zero_()
    assert list(twin.state_dict()) == names
    loss = _entropy(twin(ids()))
    assert torch.allclose(loss, torch.tensor(float(WORDS)).log())
    assert not torch.allclose(_entropy(model(ids())), loss)


def test_ops_are_watched_whole() -> None:
    """Under a dispatch mode, such as a profile of the model, the head is plain."""
    from torch.utils.flop_counter import FlopCounterMode

    model = Tiny()
    ckplan.tile_head(model, "head")
    with FlopCounterMode(display=False):
        assert type(model(ids())) is Tensor


def test_what_cannot_be_tiled_is_refused() -> None:
    model = Tiny()
    for head, message in (
        ("heat", "Tiny has no module 'heat'"),
        (None, "cannot tell which module of Tiny is its head"),
    ):
        with pytest.raises(ApplyError, match=message) as error:
            ckplan.tile_head(model, head)
        assert "try:" in str(error.value)
    with pytest.raises(PlanError, match="it is a Embedding as a head"):
        ckplan.tile_head(model, "embedding")
    ckplan.tile_head(model, "head")
    with pytest.raises(PlanError, match="with a replaced forward"):
        ckplan.tile_head(model, "head")
    with pytest.raises(ApplyError, match="cannot tile the head of a str"):
        ckplan.tile_head("model")  # type: ignore[arg-type]
    whole = Plan(regions=(PlannedRegion(".", "tiles"),))
    with pytest.raises(PlanError, match=r"cannot tile \.: it is a Tiny"):
        ckplan.apply(Tiny(), whole)


def families() -> dict[str, Callable[[], nn.Module]]:
    import transformers as t

    size = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": WORDS}
    more = {**size, "num_hidden_layers": 1, "num_attention_heads": 2}
    gemma = {**more, "num_key_value_heads": 1, "head_dim": 16}
    small = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 1}
    return {
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(
                n_layer=1, n_head=2, n_embd=32, vocab_size=WORDS, n_positions=80
            )
        ),
        "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**gemma)),
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(**more)),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(**small, vocab_size=WORDS, decoder_start_token_id=0)
        ),
    }


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "bert", "t5"])
def test_unmodified_models_of_transformers(family: str, amp: bool) -> None:
    labels = ids().clone()
    labels[:, :4] = -100

    def loss_of(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss: Tensor = model(input_ids=ids(), labels=labels).loss
        return loss

    head = "cls.predictions.decoder" if family == "bert" else "lm_head"
    found, handle = results(loss_of, families()[family], head)
    assert_same(found)
    assert (handle.tiled, handle.whole) == (2, 0)
