"""Models for ``overheads.py``: steps from 30 ms to 3 s on one core.

Three are in no test, and are made here.
"""

from __future__ import annotations

from typing import Any

import torch
from _measuring import location_of
from torch import nn

from ckplan.training.loading import WorkloadSpec

_SMALL = {"layers": 4, "batch": 2}
_ZOO = {
    "mistral": {"batch": 2},
    "t5": {"batch": 2},
    "bloom": {"batch": 2},
    "convnext": {},
    "swin": {"batch": 4},
    "mixer": {},
}
_MADE_HERE = ("gated", "towers", "pyramid")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"batch": 4}),
    "gpt2-small": ("gpt2", {**_SMALL, "length": 128}),
    "bert": ("bert", {"batch": 4}),
    "bert-small": ("bert", {"layers": 4, "vocab": 4096}),
    "llama": ("llama", {"batch": 2}),
    "llama-small": ("llama", {**_SMALL, "length": 128, "vocab": 4096}),
    "vit": ("vit", {"batch": 4}),
    "vit-small": ("vit", _SMALL),
    "mlp": ("mlp", {"layers": 4}),
    "resnet50": ("resnet50", {"batch": 8, "size": 96}),
    "unet": ("unet", {"batch": 1}),
    **{name: (name, options) for name, options in _ZOO.items()},
    **{name: ("", {}) for name in _MADE_HERE},
}  # name -> workload or model of the zoo, and its options


def spec_of(name: str) -> WorkloadSpec:
    """One of these models, as ``ckplan profile`` takes it."""
    file, options = MODELS[name]
    return WorkloadSpec(location_of(file) if file else f"{__file__}:{name}", options)


class Gated(nn.Module):
    """A residual block: a product of two linear layers, one through a sigmoid."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.left, self.right = (nn.Linear(width, 2 * width) for _ in range(2))
        self.out = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape [..., width], as ``x``."""
        y = self.norm(x)
        return x + self.out(self.left(y) * self.right(y).sigmoid())


def gated() -> tuple[nn.Module, torch.Tensor]:
    """Eight of them."""
    return nn.Sequential(*(Gated(320) for _ in range(8))), torch.randn(512, 320)


class Towers(nn.Module):
    """Two towers of convolutions over a signal; their product is pooled."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(*(self._block(width) for _ in range(depth))) for _ in range(2)
        )

    @staticmethod
    def _block(width: int) -> nn.Module:
        convolution = nn.Conv1d(width, width, 5, padding=2)
        return nn.Sequential(convolution, nn.GroupNorm(4, width), nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From [batch, width, length] to [batch, width]."""
        one, other = (tower(x) for tower in self.towers)
        return (one * other.tanh()).mean(-1)


def towers() -> tuple[nn.Module, torch.Tensor]:
    """Five blocks in each."""
    return Towers(64, 5), torch.randn(8, 64, 512)


class Pyramid(nn.Module):
    """Attention at lengths that halve, with a residual stream that is pooled."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, batch_first=True)
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From [batch, length, width] to [batch, length / 2 ** depth, width]."""
        for layer in self.layers:
            x = layer(x)
            x = 0.5 * (x[:, ::2] + x[:, 1::2])
        return x


def pyramid() -> tuple[nn.Module, torch.Tensor]:
    """Five layers, from 512 to 16 places."""
    return Pyramid(192, 5), torch.randn(4, 512, 192)
