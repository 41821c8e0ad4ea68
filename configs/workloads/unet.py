"""Diffusion U-Net with attention at its two coarse scales, predicting the noise.

Profile it with ``ckplan profile configs/workloads/unet.py --set size=128``.
"""

from collections.abc import Callable

import torch
from diffusers import UNet2DModel
from diffusers.models.unets.unet_2d import UNet2DOutput
from torch.nn import functional

Batch = dict[str, torch.Tensor]


def build(
    *, layers: int = 2, width: int = 64, batch: int = 4, size: int = 64
) -> tuple[UNet2DModel, Batch, Callable[[UNet2DOutput, Batch], torch.Tensor]]:
    """Return the model, one batch of noise at the last timestep, and the loss."""
    model = UNet2DModel(
        sample_size=size,
        layers_per_block=layers,
        block_out_channels=(width, 2 * width, 2 * width, 4 * width),
        down_block_types=("DownBlock2D",) * 2 + ("AttnDownBlock2D",) * 2,
        up_block_types=("AttnUpBlock2D",) * 2 + ("UpBlock2D",) * 2,
    )
    noise = torch.randn(batch, 3, size, size)
    return model, {"sample": noise, "timestep": torch.full((batch,), 999)}, noise_loss


def noise_loss(output: UNet2DOutput, batch: Batch) -> torch.Tensor:
    """Compare with the sample: at the last timestep it is the noise to predict."""
    return functional.mse_loss(output.sample, batch["sample"])
