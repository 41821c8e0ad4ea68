"""Images as patches, or in tiles and frames: the layouts that forward may take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import unfold

from ckplan.sources.batches.context import Context

_PATCHES = 16  # default height and width of an image, in merged patches


def grids(context: Context) -> Iterator[dict[str, Any]]:
    """Patches of all images and their grids, as of Qwen2-VL.

    Flat patches come first, then patches with a height and a width, then flat patches
    of two equal frames.
    """
    patch = context.number("patch_size", default=14)
    merge = context.number("spatial_merge_size", "merge_size", default=2)
    frames = context.number("temporal_patch_size", default=1)
    channels = context.number("in_channels", "in_chans", "num_channels", default=3)
    side = _PATCHES * merge
    context.sizes.assume(f"image: {side}x{side} patches", "a factory of your own")
    count = context.rows * side * side
    sizes: dict[str, Any] = {
        "image_grid_thw": torch.tensor([[1, side, side]] * context.rows)
    }
    if context.takes("image_merge_sizes"):
        sizes["image_merge_sizes"] = torch.full((context.rows,), merge)
    width = channels * patch * patch
    yield {"pixel_values": torch.randn(count, frames * width), **sizes}
    yield {"pixel_values": torch.randn(count, channels, patch, patch), **sizes}
    if frames == 1:
        yield {"pixel_values": torch.randn(count, 2 * width), **sizes}


def in_a_row(context: Context) -> dict[str, Any]:
    """Patches of all images side by side in one of them, as of MiniCPM-V."""
    patch = context.number("patch_size", default=14)
    channels = context.number("num_channels", default=3)
    context.sizes.assume(
        f"image: {_PATCHES}x{_PATCHES} patches", "a factory of your own"
    )
    width = context.rows * _PATCHES * _PATCHES * patch
    return {
        "pixel_values": torch.randn(1, channels, patch, width),
        "target_sizes": torch.full((context.rows, 2), _PATCHES, dtype=torch.int32),
    }


def placed(context: Context) -> Iterator[dict[str, Any]]:
    """Flat patches of every image with the column and row of each, as of Gemma 4.

    First patches that the model pools, then such as are pooled already.
    """
    patch = context.number("patch_size", default=16)
    pooled = context.number("pooling_kernel_size", default=1)
    side = _PATCHES // pooled * pooled or pooled
    context.sizes.assume(f"image: {side}x{side} patches", "a factory of your own")
    for merged in dict.fromkeys((1, pooled)):
        count, width = side // merged, 3 * (patch * merged) ** 2
        places = torch.cartesian_prod(torch.arange(count), torch.arange(count))
        yield {
            "pixel_values": torch.randn(context.rows, count * count, width),
            "image_position_ids": places.repeat(context.rows, 1, 1),
        }


def tiles(data: dict[str, Any], side: int | None = None) -> Iterator[dict[str, Any]]:
    """Images as they are; else each as the one tile or frame of its row.

    Last, the patches of each image, flat, if they have a side in pixels.
    """
    yield data
    pixels = data.get("pixel_values")
    if pixels is None or pixels.dim() != 4:
        return
    yield {**data, "pixel_values": pixels.unsqueeze(1)}
    if side and min(pixels.shape[2:]) >= side:
        flat = unfold(pixels, side, stride=side).transpose(1, 2).contiguous()
        yield {**data, "pixel_values": flat}
