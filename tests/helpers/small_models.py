"""Small models of many kinds, as workloads, and plans for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import ckplan
from ckplan.plan.outputs import name_ops
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.region import Region
from ckplan.plan.resolve import describe, resolve
from ckplan.training.workload import Workload


class Residual(nn.Module):
    """Norm, two linear layers with dropout and a residual."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.up(self.norm(x)))
        return x + self.drop(self.down(self.drop(hidden)))


class Convolution(nn.Module):
    """Batch norm with running statistics, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.norm(self.conv(x)))
        out = self.norm(self.conv(out))
        out += x
        return self.relu(out)


class Attention(nn.Module):
    """Views, several outputs of one op, a call with keywords."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 4, width // 4).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape)) * scale


class Masked(nn.Module):
    """Bool masks and indices of pooling, in another memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(8, 8, 3, padding=1), nn.MaxPool2d(2)
        self.drop = nn.Dropout2d(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.conv(x.to(memory_format=torch.channels_last))
        out = self.pool(out.masked_fill(out < 0, 0.01) * torch.sigmoid(out))
        return self.drop(functional.dropout(out, 0.1)).repeat_interleave(2, -1)


class Unrolled(nn.Module):
    """A cell that is called several times."""

    def __init__(
        self, kind: Callable[[], nn.Module] = Residual, times: int = 4
    ) -> None:
        super().__init__()
        self.cell, self.times = kind(), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.cell(x)
        return x


class Recurrent(nn.Module):
    """A kernel that keeps a workspace if grad mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(64, 64, num_layers=2, dropout=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.cells(x)[0])


class Squashed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, y = ctx.saved_tensors
        return grad * (y + x * (1 - y * y))


class OwnFunction(nn.Module):
    """A function of Python's, whose tensors are saved outside of any call of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(Squashed.apply(self.up(x)))


def stack(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(kind() for _ in range(3)))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (stack(Residual), (256, 64)),
    "convolution": (stack(Convolution), (4, 8, 32, 32)),
    "masked": (stack(Masked), (4, 8, 64, 32)),
    "attention": (stack(Attention), (8, 32, 64)),
    "unrolled": (Unrolled, (256, 64)),
    "recurrent": (stack(Recurrent), (32, 8, 64)),
    "function": (stack(OwnFunction), (256, 64)),
}


def build(name: str) -> Workload:
    torch.manual_seed(0)
    make, shape = {**MODELS, "listed": (Listed, (256, 64))}[name]
    return Workload(make(), torch.randn(shape), lambda out, _: out.square().mean())


def plans(name: str) -> list[Plan]:
    """Plans: keep nothing, rerun, keep every second op, keep all, and encode."""
    calls = "cell" if name == "unrolled" else "[0..2]"
    workload = build(name)
    graph = ckplan.profile(workload.model, workload.batch, loss=workload.loss)
    first = calls.replace("[0..2]", "0")
    call = next(i for i, c in enumerate(graph.calls) if c.fqn == first)
    ops = tuple(name_ops(graph, call))
    forms = frozenset((one.op, one.output) for one in graph.encodings_in(call))
    (coded,) = describe(graph, [Region(call, encode=forms)])
    regions = [
        PlannedRegion(calls),
        PlannedRegion(calls, "rerun"),
        PlannedRegion(calls, save=ops[::2]),
        PlannedRegion(calls, save=ops),
        PlannedRegion("."),
        PlannedRegion(calls, encode=coded.encode),
    ]
    return [Plan(regions=(region,)) for region in regions]


class Listed(nn.Module):
    """Blocks in a list, with code of the parent between them."""

    def __init__(self, fewer: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(5))
        self.fewer = fewer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in list(self.blocks)[: 2 if self.fewer else None]:
            x = functional.gelu(block(x)) * 0.5 + x
        return x


RUNS = {
    "residual": [("0", "1")],
    "convolution": [("0", "2")],
    "attention": [("1", "2")],
    "masked": [("0", "2")],
    "unrolled": [("cell#0", "cell#1"), ("cell#2", "cell#3")],
    "listed": [("blocks.0", "blocks.1"), ("blocks.2", "blocks.4")],
}


def run_plans(name: str) -> list[Plan]:
    """Keep nothing, and keep every third op, of runs."""
    workload = build(name)
    graph = ckplan.profile(workload.model, workload.batch, loss=workload.loss)
    nothing = tuple(PlannedRegion("", run=run) for run in RUNS[name])
    some = []
    for region in resolve(Plan(regions=nothing), graph):
        ops = name_ops(graph, region.call, region.last)
        (planned,) = describe(graph, [region])
        some.append(PlannedRegion("", save=tuple(ops[::3]), run=planned.run))
    return [Plan(regions=nothing), Plan(regions=tuple(some))]
