"""MLPs of 1x1 convolutions, as in PoolFormer, ConvNeXt and MobileNet."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class PointwiseMlp(nn.Module):
    """A 1x1 convolution, an activation, a 1x1 convolution."""

    def __init__(
        self,
        width: int,
        hidden: int,
        mix: nn.Module | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.up = nn.Conv2d(width, hidden, 1, bias=bias)
        self.mix = mix or nn.GELU()
        self.down = nn.Conv2d(hidden, width, 1, bias=bias)

    def forward(self, picture: Tensor) -> Tensor:
        made: Tensor = self.down(self.mix(self.up(picture)))
        return made


class GatedPointwise(nn.Module):
    """Two convolutions of the input."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Conv2d(width, hidden, 1)
        self.up = nn.Conv2d(width, hidden, 1, bias=False)
        self.down = nn.Conv2d(hidden, width, 1)

    def forward(self, picture: Tensor) -> Tensor:
        made: Tensor = self.down(F.silu(self.gate(picture)) * self.up(picture))
        return made


class LayerNorm2d(nn.LayerNorm):
    """Of channels; what it makes has its channels last."""

    def forward(self, picture: Tensor) -> Tensor:
        made: Tensor = super().forward(picture.permute(0, 2, 3, 1))
        return made.permute(0, 3, 1, 2)


def depthwise_first(width: int, hidden: int) -> nn.Sequential:
    """The branch of a ConvNeXt block with convolutions for its MLP."""
    return nn.Sequential(
        nn.Conv2d(width, width, 7, padding=3, groups=width),
        LayerNorm2d(width),
        nn.Conv2d(width, hidden, 1),
        nn.GELU(),
        nn.Conv2d(hidden, width, 1),
    )


def frozen_weight(mlp: PointwiseMlp) -> PointwiseMlp:
    """One weight has no gradient; its bias has."""
    mlp.up.weight.requires_grad_(requires_grad=False)
    return mlp
