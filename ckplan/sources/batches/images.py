"""Batches of images and videos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckplan.sources.batches.context import Context

ARGUMENTS = ("pixel_values", "flattened_patches", "pixel_values_videos")
"""Arguments of forward that carry images."""
_DEFAULT_SIDE = 224
_DENSE_SIDE = 512  # for detection and segmentation
_OBJECTS = 5  # labelled objects per image
_DENSE = ("object-detection", "segmentation")


def image_shape(context: Context) -> tuple[int, int, int]:
    """Channels, height and width: of ``--batch``, the configuration, or assumed."""
    channels = context.number("num_channels", "in_channels", "in_chans", default=3)
    side = _side(context)
    if side is None:
        dense = any(task in context.task for task in _DENSE)
        side = (_DENSE_SIDE, _DENSE_SIDE) if dense else (_DEFAULT_SIDE, _DEFAULT_SIDE)
    channels, height, width = context.sizes.shape((channels, *side), "image")
    return channels, height, width


def _side(context: Context) -> tuple[int, int] | None:
    """Height and width that the configuration or its processor's file names."""
    for name in ("image_size", "img_size"):
        for config in context.configs:
            size = _as_side(getattr(config, name, None))
            if size is not None:
                return size
    crops = ("crop_size",) if context.processor.get("do_center_crop") else ()
    found = (_as_side(context.processor.get(name)) for name in (*crops, "size"))
    return next((size for size in found if size is not None), None)


def _as_side(size: object) -> tuple[int, int] | None:
    if isinstance(size, int) and size > 0:
        return size, size
    if isinstance(size, (list, tuple)) and len(size) >= 2:
        return int(size[-2]), int(size[-1])
    if isinstance(size, Mapping):
        if {"height", "width"} <= size.keys():
            return int(size["height"]), int(size["width"])
        return _as_side(size.get("shortest_edge"))
    return None


def pixels(context: Context) -> dict[str, torch.Tensor]:
    """The pixel argument of forward alone, without labels."""
    name = context.main_input
    if name == "flattened_patches":
        return _flattened(context)
    if "pixel" not in name and name != "inputs":
        name = "pixel_values"
    if context.takes("spatial_shapes"):
        return _packed_patches(context)
    shape = image_shape(context)
    frames = context.number("num_frames", "frames_per_clip", default=0)
    video = name.endswith("videos") or "video" in context.task
    if video or (frames and type(context.model).__name__.startswith("VideoMAE")):
        return {name: torch.randn(context.rows, frames or 16, *shape)}
    return {name: torch.randn(context.rows, *shape)}


def _flattened(context: Context) -> dict[str, torch.Tensor]:
    """Patches as rows; the first two numbers of each are its position."""
    count = context.sizes.take(1, 2048, "patches per image")
    side = context.number("patch_size", default=16)
    patches = torch.randn(context.rows, count, 3 * side * side + 2)
    positions = torch.arange(count) % 32 + 1.0
    patches[..., 0], patches[..., 1] = positions, positions
    return {"flattened_patches": patches}


def _packed_patches(context: Context) -> dict[str, torch.Tensor]:
    """Patches of images of any shape, as of SigLIP 2."""
    count = context.number("num_patches", default=256)
    side = int(count**0.5)
    patch = context.number("patch_size", default=16)
    width = context.number("num_channels", default=3) * patch * patch
    return {
        "pixel_values": torch.randn(context.rows, side * side, width),
        "pixel_attention_mask": torch.ones(context.rows, side * side, dtype=torch.long),
        "spatial_shapes": torch.full((context.rows, 2), side),
    }


def classification(context: Context) -> dict[str, Any]:
    """One label per image."""
    if context.main_input == "input_ids" and not context.takes("pixel_values"):
        length = context.sizes.take(1, context.length, "pixels per image")
        batch: dict[str, Any] = {"input_ids": context.ids(context.rows, length)}
    else:
        batch = dict(pixels(context))
    if context.takes("labels"):
        batch["labels"] = context.row_labels()
    return batch


def semantic_segmentation(context: Context) -> dict[str, Any]:
    """One label per pixel."""
    batch = dict(pixels(context))
    height, width = image_shape(context)[1:]
    return {**batch, "labels": context.classes(context.rows, height, width)}


def detection(context: Context) -> dict[str, Any]:
    """Five boxes with classes per image."""
    batch: dict[str, Any] = dict(pixels(context))
    if not context.takes("labels"):
        return batch
    context.sizes.assume(f"objects per image: {_OBJECTS}", "a factory of your own")
    batch["labels"] = [
        {
            "class_labels": context.classes(_OBJECTS),
            "boxes": torch.rand(_OBJECTS, 4) * 0.25 + 0.25,
        }
        for _ in range(context.rows)
    ]
    return batch


def instance_segmentation(context: Context) -> dict[str, Any]:
    """Five masks with classes per image."""
    if not context.takes("mask_labels"):
        batch, side = detection(context), image_shape(context)[1:]
        for labels in batch["labels"]:
            labels["masks"] = torch.randint(2, (_OBJECTS, *side)).float()
        return batch
    context.sizes.assume(f"objects per image: {_OBJECTS}", "a factory of your own")
    batch = dict(pixels(context))
    side, rows = image_shape(context)[1:], range(context.rows)
    batch["mask_labels"] = [torch.randint(2, (_OBJECTS, *side)).float() for _ in rows]
    batch["class_labels"] = [context.classes(_OBJECTS) for _ in rows]
    if context.takes("task_inputs"):
        words = context.number("task_seq_len", default=77)
        batch["task_inputs"] = torch.randint(100, (context.rows, words))
        queries = context.number("text_encoder_n_ctx", default=16)
        count = context.number("num_queries", default=150) - queries
        batch["text_inputs"] = torch.randint(100, (context.rows, count, words))
    return batch


def depth(context: Context) -> dict[str, Any]:
    """A depth for every pixel; most models have no loss for it."""
    return dict(pixels(context))


def masked_image(context: Context) -> dict[str, Any]:
    """Images with half of their patches masked."""
    batch: dict[str, Any] = dict(pixels(context))
    if context.takes("bool_masked_pos"):
        patch = context.number("patch_size", "encoder_stride", default=16)
        shape = image_shape(context)
        frames = context.number("num_frames", default=0)
        count = (shape[1] // patch) * (shape[2] // patch)
        if frames and type(context.model).__name__.startswith("VideoMAE"):
            count *= frames // context.number("tubelet_size", default=2)
        mask = (torch.arange(count) % 2).bool()
        batch["bool_masked_pos"] = mask.repeat(context.rows, 1)
    return batch
