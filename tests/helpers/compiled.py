"""Small models to compile, and their planners without compiling a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ckplan.compiling.lowering import DynamoGraph
from ckplan.compiling.replay import replay
from ckplan.compiling.search import CompiledPlanner
from ckplan.training.allocator import log_allocations


class Block(nn.Module):
    """Without biases: Inductor has a kernel for the gradient of each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(self.up(x).square()))


class Deep(nn.Module):
    """Residual blocks with dropout; returns a loss."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(width) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Convolutions(nn.Module):
    """Residual stages of convolution, batch norm and dropout; returns a loss."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        widths = [3, *[width] * (depth - 1)]
        self.stages = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Dropout(0.1),
            )
            for before in widths
        )
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.stages
        x = first(x)
        for stage in others:
            x = x + stage(x)
        return self.head(x.mean((2, 3))).square().mean()


class LossOf(nn.Module):
    """A model of transformers as one that returns its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss


def deep(depth: int = 2) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Deep(depth=depth), torch.randn(1024, 32)


def tiny_gpt2() -> tuple[nn.Module, torch.Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    special = {"bos_token_id": 1, "eos_token_id": 1, "use_cache": False}
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128}
    model = GPT2LMHeadModel(GPT2Config(**sizes, n_positions=128, **special))
    model.loss_type = "ForCausalLM"
    return LossOf(model.train()), torch.randint(128, (8, 128))


class Steps(NamedTuple):
    """One training step, and the bytes that it allocates at once."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    random_state: torch.Tensor
    peak_bytes: int

    def differs_from(self, other: Steps) -> list[str]:
        found = [
            name
            for name, gradient in self.gradients.items()
            if not torch.equal(gradient, other.gradients[name])
        ]
        found += [] if torch.equal(self.loss, other.loss) else ["the loss"]
        same = torch.equal(self.random_state, other.random_state)
        return found if same else [*found, "the random state"]


def run_steps(call: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> Steps:
    """Run a step twice with equal seeds, the second time measured."""

    def once() -> torch.Tensor:
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        loss = call(x)
        loss.backward()
        return loss.detach()

    once()
    model.zero_grad(set_to_none=True)
    with log_allocations() as log:
        loss = once()
    named = model.named_parameters()
    gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
    return Steps(loss, gradients, torch.get_rng_state(), log.peak_bytes)


class Trained(NamedTuple):
    """Losses of steps of AdamW, and the bytes that some allocate at once."""

    losses: list[float]
    peaks: list[int]


def train(
    call: Callable[..., Any], model: nn.Module, steps: int, every: int = 1
) -> Trained:
    """Train on random batches of the size of ``deep``'s; log every so many steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(2)
    found = Trained([], [])
    for number in range(steps):
        optimizer.zero_grad(set_to_none=True)
        x = torch.randn(1024, 32)
        is_logged = number % every == 0
        with log_allocations() if is_logged else nullcontext() as log:
            loss = call(x)
            loss.backward()
        optimizer.step()
        found.losses.append(loss.item())
        del loss  # else it is freed within the next step
        if log is not None:
            found.peaks.append(log.peak_bytes)
    return found


def count_lowered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """From now on, what code is generated of, in order: arguments of ``lower``."""
    found: list[Any] = []
    lower = DynamoGraph.lower

    def counted(self: DynamoGraph, *args: Any, **kwargs: Any) -> Any:
        found.append(args)
        return lower(self, *args, **kwargs)

    monkeypatch.setattr(DynamoGraph, "lower", counted)
    return found


def planner_of(
    model: nn.Module,
    *batch: Any,
    options: dict[str, Any] | None = None,
    quick: bool = True,
) -> CompiledPlanner:
    """The planner of a model's compiled step; the model itself runs uncompiled."""
    found: list[CompiledPlanner] = []

    def only_plan(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        traced = DynamoGraph(graph, inputs, options or {})
        joint, lowered = traced.lower(None)
        assert joint is not None
        assert lowered is not None
        unplanned = replay(lowered, joint.num_outputs)
        found.append(CompiledPlanner(traced, joint, quick=quick, unplanned=unplanned))
        return graph.forward

    torch.compile(model, backend=only_plan, fullgraph=True, dynamic=False)(*batch)
    (planner,) = found
    return planner
