"""Gradients that torch's own memory budget gets wrong, and plans do not.

A small model with dropout, compiled for the CPU in four ways. Every step has the same
seed. Along its own gradient, a loss rises by the gradient's norm; that is compared with
central differences of the same compiled loss, in float64. Where they disagree, backward
drew other dropout masks than forward. Rows of torch use nothing of ckplan. Under
"changed buffer", a small model has no dropout, but a buffer that its forward uses and
then changes, which backward may read as changed. Under "upsampled", one brings features
of two resolutions together; until 2.13, torch can let kernels read what others have yet
to write (issue 185509 of pytorch); it did on another machine than the page's.

    python scripts/compiled_gradients.py

Exit code 1 if gradients under ckplan's plan are not those of the loss, or if they
differ from the unplanned compiled ones where those are right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from _measuring import ROOT, SEED, Report, finish, make_parser, make_table, run, say

sys.path.insert(0, str(ROOT / "tests" / "helpers"))

EPSILON = 1e-4
TOLERANCE = 1e-3
WAYS = ("torch", "torch, budget 0.5", "torch, budget 0", "ckplan, 85%")
CHANGED = "changed buffer: "
UPSAMPLED = "upsampled: "
MODELS = (
    WAYS,
    *((f"{name}torch", f"{name}ckplan, 100%") for name in (CHANGED, UPSAMPLED)),
)
"""The ways of each model; gradients are compared with those of the first."""
HEADERS = (
    "compiled by",
    "loss",
    "norm of the gradient",
    "by differences",
    "right",
    "gradients equal to torch's",
)


def build() -> tuple[Any, Any]:
    """Two residual layers with dropout, and a batch."""
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
            self.drop = nn.Dropout(0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.up(x))
            return x + self.down(self.drop(h * h.exp()))

    torch.manual_seed(SEED)
    model = nn.Sequential(Layer(), Layer()).double()
    return model, torch.randn(512, 16, dtype=torch.float64)


def build_changed() -> tuple[Any, Any]:
    """A layer scaled by a buffer that forward then doubles, and a batch."""
    import torch
    from changed_buffer import Normed

    return Normed().double(), torch.ones(3, 4, dtype=torch.float64)


def build_upsampled() -> tuple[Any, Any]:
    """Convolutions of two resolutions, and images."""
    import torch
    from upsampled import Upsampled

    torch.manual_seed(SEED)
    return Upsampled().double(), torch.randn(2, 3, 64, 64, dtype=torch.float64)


def measured(way: str) -> dict[str, Any]:
    """Loss, gradients, and the slope of the loss along them."""
    import torch
    from torch._functorch import config

    import ckplan

    torch._dynamo.reset()
    builders = {CHANGED: build_changed, UPSAMPLED: build_upsampled}
    builds = [one for name, one in builders.items() if way.startswith(name)] or [build]
    model, x = builds[0]()

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    how: dict[str, Any] = {"fullgraph": True, "dynamic": False}
    if "ckplan" in way:
        how["backend"] = ckplan.backend(way.rpartition(" ")[2])
    call = torch.compile(loss_of, **how)
    share = float(way.rpartition(" ")[2]) if "budget" in way else 1.0
    with config.patch(activation_memory_budget=share):
        loss, gradients = _step(call, model, x)
        norm = sum(float(g.square().sum()) for g in gradients) ** 0.5
        unit = [g / norm if norm else g for g in gradients]

        def at(distance: float) -> float:
            with torch.no_grad():
                for p, g in zip(model.parameters(), unit, strict=True):
                    p += distance * g
            found, _ = _step(call, model, x)
            with torch.no_grad():
                for p, g in zip(model.parameters(), unit, strict=True):
                    p -= distance * g
            return found

        slope = (at(EPSILON) - at(-EPSILON)) / (2 * EPSILON)
    return {"loss": loss, "gradients": gradients, "norm": norm, "slope": slope}


def _step(call: Callable[..., Any], model: Any, x: Any) -> tuple[float, list[Any]]:
    import torch

    model.zero_grad(set_to_none=True)
    torch.manual_seed(SEED)
    buffers = [one.clone() for one in model.buffers()]
    loss = call(x)
    loss.backward()
    for one, before in zip(model.buffers(), buffers, strict=True):
        one.copy_(before)
    return float(loss.detach()), [p.grad.clone() for p in model.parameters()]


def main() -> int:
    """Measure all ways."""
    import torch

    args = make_parser(__doc__).parse_args()
    found = {}
    own_of = {way: ways[0] for ways in MODELS for way in ways}
    for way in own_of:
        say(way)
        found[way] = measured(way)
    rows, broken = [], []
    for way, one in found.items():
        own = found[own_of[way]]["gradients"]
        right = abs(one["slope"] - one["norm"]) < TOLERANCE * one["norm"]
        equal = sum(map(torch.equal, one["gradients"], own))
        numbers = (f"{one[key]:.6f}" for key in ("loss", "norm", "slope"))
        rows.append([way, *numbers, "yes" if right else "no", f"{equal} of {len(own)}"])
        if "ckplan" in way and not (right and (way not in WAYS or equal == len(own))):
            broken.append(f"{way}: wrong gradients")
    report = Report(
        name="compiled_gradients",
        title="Gradients under memory budgets in compiled code",
        doc=__doc__,
        parts=[make_table(HEADERS, rows)],
        broken=broken,
    )
    return finish(report, args, whole=True)


if __name__ == "__main__":
    run(main)
