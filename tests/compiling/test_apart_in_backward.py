"""What a backward that computes again keeps apart: layers, sums, and memory."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from compiled import planner_of, run_steps
from torch import nn
from torch.nn import functional

import ckplan
from ckplan.compiling import inductor, sums
from ckplan.compiling.lowering import Lowered
from ckplan.compiling.proposing import Candidate
from ckplan.compiling.replay import Replayed, replay
from ckplan.compiling.search import CompiledPlanner
from ckplan.compiling.torch_names import PRIMALS, TANGENTS
from ckplan.plan.region import Region

ROWS, WIDTH, HIDDEN, WORDS, WIDE = 64, 32, 512, 256, 90
LOGITS = 4 * 4 * ROWS * WORDS  # bytes


class Masked(nn.Module):
    """Attention, written out, of layers that read one mask; returns a loss."""

    mask: torch.Tensor

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))
        self.register_buffer("mask", torch.randn(8, ROWS, ROWS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            query, key, value = layer(norm(x)).chunk(3, -1)
            scores = query @ key.transpose(-1, -2) + self.mask
            x = x + scores.softmax(-1) @ value
        return x.square().mean()


class Gated(Masked):
    """The same with gated hidden values between, of another size than all else."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__(depth)
        self.gates = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDE) for _ in range(depth))
        self.downs = nn.ModuleList(nn.Linear(WIDE, WIDTH) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, (gate, down) in enumerate(zip(self.gates, self.downs, strict=True)):
            query, key, value = self.layers[number](self.norms[number](x)).chunk(3, -1)
            scores = query @ key.transpose(-1, -2) + self.mask
            x = x + scores.softmax(-1) @ value
            one, other = gate(x).chunk(2, -1)
            x = x + down(functional.silu(one) * other)
        return x.square().mean()


class Tied(nn.Module):
    """A head whose weight is the embedding's; returns a loss. Nothing has a bias."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, HIDDEN, bias=False),
                nn.Tanh(),
                nn.Linear(HIDDEN, WIDTH, bias=False),
            )
            for _ in range(depth)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = functional.linear(x, self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def masked() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Masked(), torch.randn(8, ROWS, WIDTH)


def tied() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Tied(), torch.randint(WORDS, (4, ROWS))


class Keeping:
    """The configuration of Inductor, which stays as it is."""

    def patch(self, **_: object) -> AbstractContextManager[None]:
        return nullcontext()


def saving_least(planner: CompiledPlanner) -> Candidate:
    """Of the solver's plans that save something, that which saves the fewest bytes."""
    found = [one for one in planner.proposer._proposed() if one.saved_bytes]
    return min(found, key=lambda one: one.saved_bytes)


def code_of(planner: CompiledPlanner, saved: frozenset[str] | None) -> Lowered:
    """Generated anew, whatever was before."""
    _, lowered = planner.traced.lower(saved)
    assert lowered is not None
    return lowered


def replayed(planner: CompiledPlanner, saved: frozenset[str] | None) -> Replayed:
    return replay(code_of(planner, saved), planner.joint.num_outputs)


def test_layers_that_read_one_mask_are_not_computed_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = planner_of(*masked())
    saved = saving_least(planner).saved
    near = replayed(planner, saved)
    monkeypatch.setattr(inductor, "_NEAR", 10**6)  # 64 is Inductor's own limit
    far = replayed(planner, saved)
    assert near.backward_peak_bytes < 0.8 * far.backward_peak_bytes
    assert near.saved_bytes == far.saved_bytes


def test_code_that_torch_divides_is_as_torch_generates_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = planner_of(*masked())
    codes = []
    for near, config in ((16, inductor.inductor_config), (0, Keeping())):
        monkeypatch.setattr(inductor, "_NEAR", near)
        monkeypatch.setattr(inductor, "inductor_config", config)
        lowered = code_of(planner, None)
        both = lowered.forward.source, lowered.backward.source
        codes.append([one.partition("\n")[2] for one in both])  # without a number
    assert codes[0] == codes[1]


def test_memory_does_not_wait_for_a_later_value_of_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    planner = planner_of(Gated(), torch.randn(8, ROWS, WIDTH))
    values = planner.joint.backward.graph.find_nodes(op="placeholder")
    made = [one for one in values if not one.name.startswith((PRIMALS, TANGENTS))]
    saved = frozenset(one.name for one in made if one.meta["val"].shape[-1] < WIDE)
    assert len(saved) < len(made)  # hidden values are computed again
    freed = replayed(planner, saved).backward_peak_bytes
    monkeypatch.setattr(inductor, "inductor_config", Keeping())
    kept = replayed(planner, saved).backward_peak_bytes
    assert kept - freed >= 4 * 8 * ROWS * WIDE


def test_a_gradient_of_logits_does_not_wait_for_that_of_the_embedding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = planner_of(*tied())
    saved = saving_least(planner).saved
    apart = replayed(planner, saved)
    monkeypatch.setattr(sums, "_LEAST_SHARE", float("inf"))
    waiting = replayed(planner, saved)
    assert waiting.backward_peak_bytes - apart.backward_peak_bytes >= 0.9 * LOGITS
    assert apart.saved_bytes == waiting.saved_bytes


def test_a_sum_is_apart_only_where_what_would_wait_counts() -> None:
    planner = planner_of(*tied())
    deep = saving_least(planner)
    paths = [call.fqn for call in planner.step.graph.calls]
    mild = planner.proposer.candidate([Region(paths.index("embedding"))])
    assert deep.saved_bytes < 8 * LOGITS < mild.saved_bytes
    for one, is_apart in ((deep, True), (mild, False)):
        source = code_of(planner, one.saved).backward.source
        assert ("extern_kernels.addmm" in source) != is_apart


def test_a_sum_that_is_apart_is_that_of_uncompiled_code() -> None:
    model, ids = tied()
    planner = planner_of(copy.deepcopy(model), ids)
    budget_bytes = planner.replayed(saving_least(planner).saved).peak_bytes
    other = copy.deepcopy(model)
    own = run_steps(torch.compile(other, fullgraph=True, dynamic=False), other, ids)
    torch._dynamo.reset()
    uncompiled = run_steps(model, model, ids)
    planned = run_steps(ckplan.compile(model, budget_bytes), model, ids)
    assert planned.peak_bytes < own.peak_bytes
    assert set(planned.differs_from(own)) <= {"embedding.weight"}
    for name, gradient in planned.gradients.items():
        for like in (own, uncompiled):
            torch.testing.assert_close(gradient, like.gradients[name])


def test_sums_of_three_gradients_are_apart_as_far_as_one_waits() -> None:
    class Thrice(Tied):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            again = self.embedding(ids.flip(0))
            return super().forward(ids) + again.square().mean()

    torch.manual_seed(0)
    model, ids = Thrice(), torch.randint(WORDS, (4, ROWS))
    planner = planner_of(copy.deepcopy(model), ids)
    saved = saving_least(planner).saved
    assert "extern_kernels.addmm" not in code_of(planner, saved).backward.source
    model(ids).backward()
    expected = model.embedding.weight.grad
    model.zero_grad()
    budget_bytes = planner.replayed(saved).peak_bytes
    ckplan.compile(model, budget_bytes)(ids).backward()
    torch.testing.assert_close(model.embedding.weight.grad, expected)


def test_a_sum_is_apart_for_all_sizes_as_for_the_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sums, "_LEAST_SHARE", 0.0)
    model, _ = tied()
    other = copy.deepcopy(model)
    backend = ckplan.backend("70%")
    call = torch.compile(model, backend=backend, fullgraph=True)
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    for rows in (4, 3, 8):
        ids = torch.randint(WORDS, (rows, ROWS))
        torch._dynamo.mark_dynamic(ids, 0, min=2, max=8)
        found, expected = (
            run_steps(one, m, ids) for one, m in ((call, model), (other, other))
        )
        for name, gradient in found.gradients.items():
            torch.testing.assert_close(gradient, expected.gradients[name])
    assert counters["unique_graphs"] == before + 1
    (chosen,) = backend.chosen
    assert found.peak_bytes == chosen.replayed.step_peak_bytes
