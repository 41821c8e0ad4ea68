"""What a profile records, against the allocator and against hand counts."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from measured import peak_bytes_of
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from trained import measured_peak

import ckplan
from ckplan.errors import WorkloadError
from ckplan.graph.graph import Graph
from ckplan.simulating.simulate import simulate
from ckplan.tracing.copying import copied
from ckplan.tracing.costs import calibrate
from ckplan.tracing.faking.fake_mode import fake_tensors
from ckplan.tracing.first_step import FirstStep
from ckplan.tracing.profile import profile_workload
from ckplan.tracing.target import find_target
from ckplan.tracing.trace import trace, trace_on_real_tensors
from ckplan.training.loading import WorkloadSpec, parse_input, parse_options
from ckplan.training.step import Training, make_step
from ckplan.training.workload import Workload


def mean_square(output: Any, batch: Any) -> torch.Tensor:
    del batch
    return output.square().mean()


def unplanned(model: nn.Module, batch: Any) -> tuple[int, int]:
    """Predicted and measured peak."""
    graph = ckplan.profile(model, batch, loss=mean_square)
    return simulate(graph).peak_bytes, measured_peak(
        Workload(model, batch, mean_square)
    )


class CachedByFunction(nn.Module):
    """A function's cache holds what the last step made until the next one replaces it.

    So do position embeddings of detection models.
    """

    def __init__(self, *, wants_values: bool) -> None:
        super().__init__()
        self.wants_values = wants_values
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 8)

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def positions(self, mask: torch.Tensor) -> torch.Tensor:
        return mask.cumsum(1).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh().sigmoid()
        if self.wants_values and hidden.sum().item() < 0:
            return hidden
        return self.last(hidden + self.positions(torch.ones_like(hidden)))


class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(500, 64), nn.Linear(64, 500, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.embed(ids)))


class Readers(nn.Module):
    """One tensor that many read, so that gradients meet."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layers[0](x))
        return sum((layer(y) for layer in self.layers), y)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(self.inner(x))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(128, 512), nn.Tanh(), nn.Linear(512, 128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.inner, checkpoint(self.inner, x, use_reentrant=False))


class Recurrent(nn.Module):
    """One kernel for all of it, whose workspace only the kernel knows."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(32, 64, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(x)[0]


class Shared(nn.Module):
    """A weight whose gradients meet: each is a view of what a matmul made."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(self.inner(x))
        return x


class Experts(nn.Module):
    """Every token to one of four matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 64, 96) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stops = torch.arange(1, 5, dtype=torch.int32) * (x.shape[0] // 4)
        return torch.tanh(torch._grouped_mm(x, self.weight, offs=stops))


class Scaled(nn.Module):
    """Numbers that autograd keeps as tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = x * 0.9 / 1.1
        return x


class Holding(nn.Module):
    """A constant that nothing reads, and that lives as long as what is returned."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        y.limits = torch.tensor([0.5] * 4096)
        return y


def frozen_prefix() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)), nn.Tanh())
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (TiedEmbedding(), torch.randint(500, (8, 64))),
        (Readers(), torch.randn(512, 128)),
        (OwnFunction(), torch.randn(512, 128)),
        (frozen_prefix(), torch.randn(512, 128)),
        (Recurrent(nn.LSTM), torch.randn(16, 32, 32)),
        (Recurrent(nn.GRU), torch.randn(16, 32, 32)),
        (Shared(), torch.randn(4, 256)),
        (Experts(), torch.randn(512, 64)),
        (nn.Sequential(nn.Linear(64, 64), Scaled()), torch.randn(4, 64)),
        (nn.Sequential(nn.Linear(4, 4), Holding()), torch.randn(64, 4)),
        (
            nn.Sequential(nn.Conv2d(3, 16, 3), nn.MaxPool2d(2)),
            torch.randn(4, 3, 32, 32),
        ),
    ],
    ids=[
        "tied",
        "readers",
        "function",
        "frozen",
        "lstm",
        "gru",
        "shared",
        "experts",
        "scaled",
        "holding",
        "convolution",
    ],
)
def test_the_predicted_peak_is_the_allocators(
    model: nn.Module, batch: torch.Tensor
) -> None:
    predicted, measured = unplanned(model, batch)
    assert predicted == pytest.approx(measured, rel=0.003)


def test_two_dense_layers_of_16_and_32_outputs_hold_192_bytes() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 32))
    graph = ckplan.profile(model, torch.randn(1, 8))
    held = {
        graph.calls[graph.ops[s.maker].call].fqn: s.bytes
        for s in graph.storages
        if s.kind == "activation" and graph.ops[s.maker].call >= 0
    }
    assert held == {"0": 64, "1": 128}


def test_a_profile_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    before = [t.clone() for t in model.state_dict().values()]
    random = torch.get_rng_state()
    ckplan.profile(model, torch.randn(4, 8, generator=torch.Generator()))
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


Returned: TypeAlias = list[tuple[str, list[tuple[torch.dtype, tuple[int, ...]]]]]


class Layouts(TorchDispatchMode):
    """Notes of every op the types and the layouts of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Returned = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view:
            leaves = torch.utils._pytree.tree_leaves(out)
            tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
            self.seen.append((str(func), [(x.dtype, x.stride()) for x in tensors]))
        return out


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.mse_loss(x, torch.ones(x.shape)),
        lambda x: functional.smooth_l1_loss(x, torch.ones(x.shape)),
        lambda x: functional.huber_loss(x, torch.ones(x.shape)),
        lambda x: functional.logsigmoid(x).square().sum(),
        lambda x: functional.glu(x).square().sum(),
        lambda x: (functional.log_softmax(x, -1) * x).sum(),
        lambda x: (functional.layer_norm(x, x.shape[-1:]) * x).sum(),
        lambda x: (functional.batch_norm(x, None, None, training=True) * x).sum(),
    ],
)
@pytest.mark.parametrize(
    "laid_out",
    [
        lambda: torch.ones(4, 8, 6, 10).to(memory_format=torch.channels_last),
        lambda: torch.ones(4, 6, 8).transpose(1, 2),
        lambda: torch.ones(4, 6, 8, 10).permute(0, 2, 3, 1),
        lambda: torch.ones(2, 4, 6, 8)[1:].to(memory_format=torch.channels_last),
    ],
    ids=["channels last", "transposed", "permuted", "one image"],
)
def test_fake_results_are_laid_out_as_the_kernels_do(
    function: Callable[[torch.Tensor], torch.Tensor],
    laid_out: Callable[[], torch.Tensor],
) -> None:
    def layouts() -> Returned:
        x = laid_out().requires_grad_()
        with Layouts() as mode:
            function(x).backward()
        return mode.seen

    real = layouts()
    with fake_tensors():
        assert real == layouts()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.batch_norm(x, None, None, training=True) * x,
        lambda x: functional.dropout(x, 0.1) * x,
        lambda x: functional.gelu(x) + 1,
        lambda x: functional.hardsigmoid(x) * x.clone(),
        lambda x: functional.hardswish(x) / 2,
        lambda x: functional.hardtanh(x),
        lambda x: functional.leaky_relu(x) + torch.ones(8, 1, 1),
        lambda x: functional.relu(x),
        lambda x: torch.where(x > 0, x, 1 - x),
        lambda x: x.sigmoid() * torch.ones(4, 8, 6, 6),
        lambda x: functional.relu(x * 2, inplace=True),
    ],
)
def test_fake_images_of_one_pixel_are_laid_out_as_the_kernels_do(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def layouts() -> Returned:
        x = torch.ones(4, 1, 1, 8).permute(0, 3, 1, 2).requires_grad_()
        with Layouts() as mode:
            y = function(x)
            y.backward(torch.ones(y.shape))
        return mode.seen

    real = layouts()
    with fake_tensors():
        assert real == layouts()


class Pooled(nn.Module):
    """Joins an image with what is left of it as one pixel, as DeepLab does."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 64, 3), nn.Conv2d(128, 8, 3)
        self.pixel = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(64, 64, 1), norm(), nn.ReLU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        pooled = functional.interpolate(self.pixel(x), size=x.shape[-2:])
        return self.last(torch.cat([pooled, x], 1))


@pytest.mark.parametrize("norm", [nn.Identity, lambda: nn.BatchNorm2d(64)])
def test_a_pooled_image_is_as_large_again_in_the_layout_it_has(
    norm: Callable[[], nn.Module],
) -> None:
    batch = torch.ones(4, 3, 34, 34).to(memory_format=torch.channels_last)
    model = Pooled(norm).to(memory_format=torch.channels_last)
    graph = ckplan.profile(model, batch, loss=mean_square)
    assert "traced under fake tensors" in graph.notes
    measured = measured_peak(Workload(model, batch, mean_square))
    assert simulate(graph).peak_bytes == pytest.approx(measured, rel=0.003)


@pytest.mark.parametrize(
    "norm",
    [lambda: nn.LayerNorm(8), lambda: nn.GroupNorm(2, 4), lambda: nn.BatchNorm2d(4)],
)
def test_fake_norms_return_the_types_that_kernels_do_where_weights_are_wider(
    norm: Callable[[], nn.Module],
) -> None:
    def returned() -> Returned:
        x = torch.ones(2, 4, 6, 8, dtype=torch.bfloat16, requires_grad=True)
        with Layouts() as mode:
            norm()(x).backward(torch.ones_like(x))
        return mode.seen

    real = returned()
    with fake_tensors():
        assert real == returned()


def test_weights_of_copied_layers_are_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "def build():\n"
        "    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)\n"
        "    return nn.TransformerEncoder(layer, 2), torch.randn(2, 16, 64)\n"
    )
    spec = WorkloadSpec(str(path))
    graph = profile_workload(spec)
    assert any("under fake tensors" in note for note in graph.notes)
    assert not [s for s in graph.storages if s.kind == "buffer"]
    measured = measured_peak(spec.build())
    assert simulate(graph).peak_bytes == pytest.approx(measured, rel=0.003)


class Asking(nn.Module):
    """Takes the branch that a float says: fake tensors cannot know it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        return torch.tanh(x) if x.sum().item() < 1e9 else x


def check_traced_on_real_tensors(model: nn.Module) -> None:
    batch = torch.randn(256, 64)
    graph = ckplan.profile(model, batch, loss=mean_square)
    assert any("traced on real" in note for note in graph.notes)
    measured = measured_peak(Workload(model, batch, mean_square))
    assert simulate(graph).peak_bytes == pytest.approx(measured, rel=0.003)


def test_a_model_that_asks_for_values_is_traced_on_real_tensors() -> None:
    check_traced_on_real_tensors(Asking())


@functools.lru_cache(maxsize=4)
def positions(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Kept by the function, as positions in an image are."""
    angles = torch.arange(length) / length
    return angles.sin(), angles.cos()


class Positioned(nn.Module):
    """Adds them, and may ask for values then."""

    def __init__(self, *, asking: bool) -> None:
        super().__init__()
        self.inner = Asking() if asking else nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sin, cos = positions(64)
        return self.inner(x * cos + sin)


ROPE: dict[int, torch.Tensor] = {}
SEEN: list[torch.Tensor] = []


class Cached(nn.Module):
    """Keeps positions in a dict of its module, ones in its own, and what it saw."""

    own: dict[str, tuple[torch.Tensor, int]] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if 64 not in ROPE:
            ROPE[64] = torch.arange(64) / 64
        if "ones" not in self.own:
            self.own["ones"] = torch.ones(64), 1
        SEEN.append(x.detach())
        return self.inner(x * ROPE[64] + self.own["ones"][0])


def test_no_dict_or_list_of_a_module_keeps_a_fake_tensor() -> None:
    ROPE[7], first = torch.ones(7), torch.zeros(3)
    SEEN[:] = [first]
    model, batch = Cached(), torch.randn(256, 64)
    graph = ckplan.profile(model, batch, loss=mean_square)
    assert "traced under fake tensors" in graph.notes
    held = [*ROPE.values(), *SEEN, *(one for one, _ in Cached.own.values())]
    assert not any(isinstance(one, FakeTensor) for one in held)
    assert torch.equal(ROPE[7], torch.ones(7))
    assert SEEN[0] is first
    assert mean_square(model(batch), batch).item() > 0
    SEEN.clear()


@pytest.mark.parametrize("in_place", ["register_hook", "after"])
def test_hooks_on_parameters_that_no_copy_has_are_told(in_place: str) -> None:
    model, batch = nn.Linear(8, 8), torch.randn(4, 8)
    assert not any("hooks on" in note for note in ckplan.profile(model, batch).notes)
    if in_place == "after":  # an optimizer in backward
        model.bias.register_post_accumulate_grad_hook(lambda _: None)
    else:
        model.bias.register_hook(lambda grad: grad)
    told = [n for n in ckplan.profile(model, batch).notes if "hooks on" in n]
    assert len(told) == 1
    assert "such as that of bias" in told[0]


class Growing(nn.Module):
    """Fills tensors that were empty."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        with torch.no_grad():
            bank = torch.empty(0)
            torch.cat([hidden.detach()] * 8, out=bank)
            more = torch.empty(0).resize_(4 * bank.numel()).zero_()
            scale = 1 + bank.mean() + more.mean()
        return self.down(hidden.tanh() * scale)


def test_bytes_that_are_added_to_a_tensor_count() -> None:
    model, batch = Growing(), torch.randn(256, 64)
    graph = ckplan.profile(model, batch, loss=mean_square, optimizer="sgd")
    sizes = sorted(one.bytes for one in graph.storages)
    assert sizes[-2:] == [8 * 256 * 256 * 4, 32 * 256 * 256 * 4]
    assert simulate(graph).peak_bytes > sum(sizes[-2:])


@pytest.mark.parametrize("asking", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_no_cache_of_a_function_keeps_a_fake_tensor(asking: bool, frozen: bool) -> None:
    positions.cache_clear()
    if frozen:  # the collector then lists only what is newer
        gc.freeze()
    model, batch = Positioned(asking=asking), torch.randn(256, 64)
    graph = ckplan.profile(model, batch, loss=mean_square)
    assert ("traced under fake tensors" in graph.notes) is not asking
    assert mean_square(model(batch), batch).item() > 0


class Constants(nn.Module):
    """Asks for floats that follow from no data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        full = bool(torch.all(torch.ones(x.shape[0]) == 1))
        return functional.dropout(self.inner(x), self.rates[1] if full else 0.0)


def test_constants_are_known_under_fake_tensors(tmp_path: Path) -> None:
    graph = ckplan.profile(Constants(), torch.randn(4, 64))
    assert "traced under fake tensors" in graph.notes
    assert any(op.name == "bernoulli_" for op in graph.ops)
    body = "    width = int(torch.linspace(0, 8, 3)[2].item())\n"
    body += "    return nn.Linear(width, 8), torch.ones(4, 8)\n"
    target = write(tmp_path, f"def build():\n{body}")
    assert "traced under fake tensors" in traced(target).notes


def test_what_chance_decided_or_a_step_changed_is_not_known() -> None:
    with fake_tensors():
        for unknown in (torch.rand(2), torch.empty(2), torch.zeros(2).normal_()):
            with pytest.raises(DataDependentOutputException):
                unknown.sum().item()
        constant = torch.ones(2)
        assert constant.sum().item() == 2
        constant.mul_(torch.rand(2))
        with pytest.raises(DataDependentOutputException):
            constant.sum().item()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.1)}),
    ],
)
def test_fused_steps_run_no_kernel_and_nothing_is_known_after_them(
    kind: Any, options: dict[str, Any]
) -> None:
    with fake_tensors():
        large, known = torch.empty(1 << 40), torch.ones(2)
        for parameter in (large, known):
            parameter.grad = torch.ones_like(parameter)
        assert known.sum().item() == 2
        kind([large, known], fused=True, **options).step()
        with pytest.raises(DataDependentOutputException):
            known.sum().item()


class AskingExpanded(Asking):
    """Saves a tensor whose elements share their memory, on real tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        row = super().forward(x)[:1].expand(x.shape)
        return torch.exp(row * x)


def test_saved_tensors_that_overlap_are_recorded_on_real_tensors() -> None:
    check_traced_on_real_tensors(AskingExpanded())


class Masked(nn.Module):
    """Asks for the value of a small integer tensor, which is known."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if bool(mask.all()) else self.inner(x * mask)


@pytest.mark.parametrize("full", [True, False])
def test_small_integers_are_known_under_fake_tensors(full: bool) -> None:
    mask = torch.ones(4, 64, dtype=torch.int64)
    mask[:, 60:] = int(full)
    graph = ckplan.profile(Masked(), {"x": torch.randn(4, 64), "mask": mask})
    assert "traced under fake tensors" in graph.notes
    assert full == all(op.name != "mul" for op in graph.ops[: graph.num_forward])


class Places(nn.Module):
    """Puts features in the places of a token, and asks how many places there are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.image = nn.Embedding(9, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        mask = ids == 3
        counts = torch.tensor([row.sum() for row in mask])
        spans = torch.repeat_interleave(torch.arange(len(counts)), counts)
        x = self.embed(ids)
        assert x[mask].shape[0] == len(mask.nonzero()) == len(spans) == len(image)
        x = x.masked_scatter(mask.unsqueeze(-1), self.image(image))
        return x[mask].square().mean()


def test_sizes_that_follow_from_known_values_are_known_under_fake_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = torch.tensor([[3, 1, 3, 2], [3, 3, 1, 0]])
    graph = ckplan.profile(Places(), (ids, torch.randn(4, 8)))
    assert "traced under fake tensors" in graph.notes

    def real(*how: Any, check: bool, first: object = None) -> Any:
        del check, first
        return trace_on_real_tensors(*how, why="asked for")

    monkeypatch.setattr("ckplan.tracing.profile.trace", real)
    other = ckplan.profile(Places(), (ids, torch.randn(4, 8)))
    assert "asked for" in other.notes
    names = [(op.name, op.reads, op.outputs, op.workspace) for op in graph.ops]
    assert [(op.name, op.reads, op.outputs, op.workspace) for op in other.ops] == names
    assert graph.storages == other.storages


def test_what_memory_held_by_chance_has_no_say_in_sizes() -> None:
    with fake_tensors():
        mask = torch.empty(4, dtype=torch.bool)
        with pytest.raises(DynamicOutputShapeException):
            torch.randn(4, 2)[mask]
        assert torch.randn(4, 2)[mask.fill_(True)].shape == (4, 2)


def test_ops_that_take_seconds_are_scaled_and_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    monkeypatch.setattr(calibrate, "LARGEST_FLOPS", 2 * 32 * 64 * 64)
    graph = ckplan.profile(model, torch.randn(32, 64), fresh=True)
    assert "seconds of 2 ops scaled from the others, not measured" in graph.notes
    assert all(op.seconds > 0 for op in graph.ops if op.flops)


def test_calls_are_numbered_and_backward_ops_belong_to_them() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.cell(torch.tanh(self.cell(x)))

    graph = ckplan.profile(Twice(), torch.randn(4, 8))
    cells = [i for i, call in enumerate(graph.calls) if call.fqn == "cell"]
    assert [graph.calls[i].number for i in cells] == [0, 1]
    backward = graph.ops[graph.num_forward : graph.backward_stop]
    first = [next(k for k, op in enumerate(backward) if op.call == i) for i in cells]
    assert first[1] < first[0]


def write(folder: Path, source: str) -> str:
    path = folder / "model.py"
    path.write_text("import torch\nfrom torch import nn\n" + source)
    return str(path)


def traced(target: str, **options: Any) -> Graph:
    return profile_workload(WorkloadSpec(target, options))


@pytest.mark.parametrize(
    ("returned", "note"),
    [
        ("m, x", "loss: the sum of"),
        ("m, (x,)", "loss: the sum of"),
        ("m, {'input': x}", "loss: the sum of"),
        ("m, x, lambda out, batch: (out - batch).abs().mean()", "loss function"),
        ("{'model': m, 'batch': x, 'loss': lambda o, b: o.mean()}", "loss function"),
        (
            "{'model': m, 'batch': x, 'optimizer': torch.optim.Adam(m.parameters())}",
            "loss: the sum of",
        ),
        ("nn.Sequential(m, nn.Flatten(0), nn.Linear(4 * 8, 1)), x", "the output"),
    ],
)
def test_every_form_of_a_workload_is_understood(
    tmp_path: Path, returned: str, note: str
) -> None:
    body = f"    m, x = nn.Linear(8, 8), torch.randn(rows, 8)\n    return {returned}\n"
    target = write(tmp_path, f"def build(rows=4):\n{body}")
    assert any(note in found for found in traced(target, rows=4).notes)


def test_a_factory_can_be_named_and_found_by_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "    return nn.Linear(8, 8), torch.randn(4, 8)\n"
    target = write(tmp_path, f"def small():\n{body}")
    assert traced(f"{target}:small").model == "Linear"
    (tmp_path / "ckplan_test_package").mkdir()
    (tmp_path / "ckplan_test_package" / "__init__.py").touch()
    Path(target).rename(tmp_path / "ckplan_test_package" / "models.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert traced("ckplan_test_package.models:small").model == "Linear"


@pytest.mark.parametrize(
    "source",
    [
        "net = nn.Linear(8, 8)\n",
        "class Net(nn.Linear):\n    def __init__(self): super().__init__(8, 8)\n",
    ],
)
def test_a_bare_module_needs_only_an_input(tmp_path: Path, source: str) -> None:
    spec = WorkloadSpec(write(tmp_path, source), inputs=("4x8:float32",))
    assert profile_workload(spec).num_backward > 0
    with pytest.raises(WorkloadError, match="has no factory"):
        WorkloadSpec(write(tmp_path, source)).build()


def test_a_module_can_be_named_and_a_factory_makes_its_own_batch(
    tmp_path: Path,
) -> None:
    source = "from torch import nn\none = nn.Linear(8, 8)\nother = nn.Linear(8, 4)\n"
    source += "def build(): return one, None\n"
    path = write(tmp_path, source)
    found = WorkloadSpec(f"{path}:other", inputs=("4x8:float32",)).build()
    assert found.model(*found.batch).shape == (4, 4)
    for name, inputs, message in (
        ("other", (), "other has no batch"),
        ("build", ("4x8:float32",), "cannot use --input with build"),
        ("nobody", ("4x8:float32",), "has no function"),
    ):
        with pytest.raises(WorkloadError, match=message):
            WorkloadSpec(f"{path}:{name}", inputs=inputs).build()


def test_options_are_read_as_yaml_scalars() -> None:
    found = parse_options(["layers=24", "drop=0.1", "name=gpt2", "tied=true"])
    assert found == {"layers": 24, "drop": 0.1, "name": "gpt2", "tied": True}
    with pytest.raises(WorkloadError, match="--set"):
        parse_options(["layers"])
    assert parse_input("2x3:int64").dtype == torch.int64
    with pytest.raises(WorkloadError, match="bananas"):
        parse_input("2x3:bananas")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("-2.5E6", -2.5e6),
        ("24", 24),
        ("0.5", 0.5),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("", ""),
        ("e-3", "e-3"),
        ("2024-13-01", "2024-13-01"),  # a day that is not there
        ("{", "{"),
    ],
)
def test_options_are_what_people_mean(text: str, value: object) -> None:
    assert parse_options([f"x={text}"]) == {"x": value}


def test_a_file_may_change_the_path_and_fail_for_its_own_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "moves.py").write_text("import sys\nsys.path.clear()\n1 / 0\n")
    (tmp_path / "needy.py").write_text("import nobody_has_this\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(WorkloadError, match="raised ModuleNotFoundError: No module"):
        WorkloadSpec("needy:build").build()
    with pytest.raises(WorkloadError, match="raised ZeroDivisionError"):
        WorkloadSpec(str(tmp_path / "moves.py")).build()


class Remembering(nn.Module):
    """Calls a kernel that returns one tensor of its own every time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table, copy = torch.ops.ckplan_remembering.table(x.detach())
        return x * copy + table


def test_what_a_kernel_returns_though_it_was_not_given_it_is_read() -> None:
    library = torch.library.Library("ckplan_remembering", "DEF")
    library.define("table(Tensor x) -> (Tensor, Tensor)")
    tables: list[torch.Tensor] = []

    def table(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tables.append(torch.ones_like(x) if not tables else tables[0])
        return tables[0], x.clone()

    library.impl("table", table, "CPU")
    model = nn.Sequential(nn.Linear(8, 8), Remembering(), Remembering())
    graph = ckplan.profile(model, torch.randn(4, 8), replay=False)
    first, second = (op for op in graph.ops if op.name == "table")
    assert first.outputs[0] == second.outputs[0]
    assert first.outputs[0] in second.reads


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def build():\n    raise KeyError('x')\n", "raised KeyError"),
        ("def build():\n    return 3\n", "is of type int"),
        ("def build():\n    return 3, torch.ones(1)\n", "a model of type int"),
        (
            "def build():\n    return nn.Linear(1, 1), 3\n",
            "has a batch without tensors",
        ),
        (
            "def build():\n    x = torch.ones(1, 1, device='meta')\n"
            "    return nn.Linear(1, 1), x\n",
            "on another device",
        ),
        (
            "def build():\n    return nn.Linear(8, 8), torch.eye(8).to_sparse()\n",
            "layout sparse_coo",
        ),
        (
            "def build():\n    m = nn.Linear(1, 1).requires_grad_(False)\n"
            "    return m, torch.ones(1, 1)\n",
            "requires no gradient",
        ),
        (
            "def build():\n    loss = lambda o, b: o\n"
            "    return nn.Linear(2, 2), torch.ones(1, 2), loss\n",
            "is not a scalar",
        ),
        ("def build(:\n", "is not valid Python"),
        ("def other():\n    return 1\n", "has no factory"),
    ],
)
def test_bad_workloads_are_told_in_words(
    tmp_path: Path, source: str, message: str
) -> None:
    with pytest.raises(WorkloadError, match=message) as caught:
        traced(write(tmp_path, source))
    assert len(str(caught.value).splitlines()) == 3


class Jagged(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begins = torch.tensor([0, 1, 4], device=x.device)
        rows = torch.nested.nested_tensor_from_jagged(x, begins)
        return super().forward(rows).values()


class Nested(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.nested.as_nested_tensor([x[:1], x[1:]])
        return torch.nested.to_padded_tensor(super().forward(rows), 0.0)


class Transformed(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grads: torch.Tensor = torch.func.grad(lambda x: (x @ self.weight).sin().sum())(
            x
        )
        return grads


class Flex(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        heads = super().forward(x).view(1, 1, 4, 4)
        found = flex_attention(heads, heads, heads)
        assert isinstance(found, torch.Tensor)
        return found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("kind", "used"),
    [
        (Jagged, "nested tensors"),
        (Nested, "nested"),
        (Transformed, "torch.func.grad"),
        (Flex, "FlexAttention"),
    ],
)
def test_what_cannot_be_watched_is_called_by_its_name(
    kind: type[nn.Linear], used: str, device: str
) -> None:
    with pytest.raises(WorkloadError, match=f"uses {used}") as caught:
        ckplan.profile(kind(4, 4), torch.randn(4, 4), device=device)
    assert f"look at {__file__}" in str(caught.value)


@pytest.mark.parametrize("wants_values", [False, True])
def test_what_a_function_caches_over_steps_counts_until_it_is_replaced(
    *, wants_values: bool
) -> None:
    model = CachedByFunction(wants_values=wants_values)
    batch = torch.randn(1024, 64)
    graph = ckplan.profile(model, batch, loss=mean_square, in_step=False)
    step = make_step(Workload(model, batch, mean_square), Training("adamw"))
    CachedByFunction.positions.cache_clear()
    held = [*model.parameters(), batch]
    measured = peak_bytes_of(lambda: (step.run(), step.run()), held)
    assert simulate(graph).peak_bytes == pytest.approx(measured, abs=2048)
    CachedByFunction.positions.cache_clear()


def test_of_what_leaves_tensors_behind_no_first_step_is_known() -> None:
    def known_of(model: nn.Module) -> frozenset[str] | None:
        workload = Workload(model, torch.randn(16, 64), mean_square)
        build, first = functools.partial(copied, workload), FirstStep()
        here = find_target("cpu", None)
        trace(build, Training("adamw"), here, check=False, first=first)
        return first.gradients

    assert known_of(nn.Linear(64, 8)) == {"weight", "bias"}
    assert known_of(CachedByFunction(wants_values=False)) is None
    CachedByFunction.positions.cache_clear()
