"""Batches of text with images or sound in it, whose tokens hold a place for them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from ckplan.errors import WorkloadError
from ckplan.sources.batches import audio, images, patches
from ckplan.sources.batches.context import Context
from ckplan.sources.batches.sizes import as_text
from ckplan.sources.batches.text import decoder_labels, tokens

_TEXT = 128  # text tokens per row beside an image
_QUESTION = 32  # tokens of a question to a query transformer
_IMAGE_TOKENS: tuple[str, ...] = (
    "image_token_id",
    "image_token_index",
    "media_placeholder_token_id",
)
_VIDEO_TOKENS = ("video_token_id", "video_token_index")
_SIZED = ("pixtral", "emu3")  # encoders that are told the sizes of images
_AUDIO_TOKENS = ("audio_token_id", "audio_token_index")


def contrastive(context: Context) -> dict[str, Any]:
    """Images and texts in pairs, with the contrastive loss of the model."""
    batch: dict[str, Any] = {**images.pixels(context), **_short_text(context)}
    if context.takes("return_loss"):
        batch["return_loss"] = True
    return batch


def _short_text(context: Context) -> dict[str, Any]:
    limit = min([_TEXT, *context.position_limits])
    length = context.sizes.take(4, limit, "tokens per text")
    return tokens(context, context.rows, length)


def image_text(context: Context) -> dict[str, Any]:
    """One image per row, its placeholders, then text; every token is a label.

    ``--batch ROWSxTOKENS``: all tokens of a row, those of the image included.
    """
    ways = _visual(context.rows_only())
    getter, names = "get_image_features", _IMAGE_TOKENS
    if _reader(context, getter) is None and _reader(context, "get_video_features"):
        getter, names = "get_video_features", _VIDEO_TOKENS
    batch = _with_places(context, ways, getter, names, "image")
    return _with_actions(context, batch) if context.takes("state", "actions") else batch


def _with_actions(context: Context, batch: dict[str, Any]) -> dict[str, Any]:
    """What a robot sees through one camera, its state, and its next actions: labels."""
    rows, steps = context.rows, context.number("chunk_size", "action_horizon")
    for name, value in list(batch.items()):
        if name == "pixel_values":
            batch[name] = value.unsqueeze(1)
        elif not context.takes(name):
            del batch[name]
    if context.takes("pixel_attention_mask"):
        batch["pixel_attention_mask"] = torch.ones(rows, 1, dtype=torch.bool)
    batch["state"] = torch.randn(rows, context.number("max_state_dim", "state_dim"))
    width = context.number("max_action_dim", "action_dim")
    return {**batch, "actions": torch.randn(rows, steps, width)}


def audio_text(context: Context) -> dict[str, Any]:
    """One recording per row, its placeholders, then text; every token is a label.

    A model that takes no sound, but images, gets an image instead.
    """
    if not context.takes_one(*audio.ARGUMENTS) and context.takes_one(*images.ARGUMENTS):
        return image_text(context)
    reader = _reader(context, "get_audio_features") or context.model.forward
    named = inspect.signature(reader).parameters
    heard = audio.with_masks(context, audio.sound(context.rows_only()), named)
    ways = audio.layouts(heard)
    return _with_places(context, ways, "get_audio_features", _AUDIO_TOKENS, "audio")


def speech_to_text(context: Context) -> dict[str, Any]:
    """Sound and a transcript, which a decoder writes, or a language model."""
    if context.takes("input_ids") and not context.takes("decoder_input_ids"):
        return audio_text(context)
    return audio.speech_to_text(context)


def _with_places(
    context: Context,
    layouts: Iterable[dict[str, Any]],
    getter: str,
    token_names: tuple[str, ...],
    what: str,
) -> dict[str, Any]:
    """Text behind the places of an image or a recording, in the layout that is read."""
    token = context.number(*token_names, default=-1)
    reader = _reader(context, getter)
    if reader is None or (token < 0 and what != "audio"):
        data = next(iter(layouts))
        told = audio.num_features(context, data) if what == "audio" else None
        if token < 0 or told is None:
            return _beside(context, data)
        count = told
    else:
        data, count = _read(context, layouts, reader)
    if token < 0:
        return _along(context, data, count)
    length = context.sizes.take(1, count + _TEXT, "tokens per row")
    if length <= count:
        raise WorkloadError(
            f"cannot use {length} tokens per row: the {what} alone takes {count}",
            needed=f"more than {count} tokens",
            hint=f"--batch {as_text((context.rows, count + _TEXT))}",
        )
    context.sizes.assumptions.append(
        f"one {what} of {count} tokens in every row, first of all tokens"
    )
    places = torch.full((context.rows, count), token)
    ids = torch.cat([places, context.ids(context.rows, length - count)], dim=1)
    batch = {**data, "input_ids": ids, "labels": ids.clone()}
    if context.takes("mm_token_type_ids"):
        batch["mm_token_type_ids"] = (ids == token).long()
    if context.takes("token_type_ids"):
        batch["token_type_ids"] = (ids == token).long()
    return batch


def _reader(context: Context, getter: str) -> Any:
    """The function that makes features; None if the model has none.

    The inner model's own function names its arguments; the outer one may hand on any.
    """
    inner = getattr(context.model, "model", None)
    inside = inner.children() if isinstance(inner, torch.nn.Module) else ()
    parts = (inner, context.model, *inside)
    return next(
        (getattr(part, getter) for part in parts if hasattr(part, getter)), None
    )


def _along(context: Context, data: dict[str, Any], count: int) -> dict[str, Any]:
    """As much text as sound, for models that add the two up, token by token."""
    ids = context.ids(context.rows, context.sizes.take(1, count, "tokens per row"))
    return {**data, "input_ids": ids, "labels": ids.clone()}


def _beside(context: Context, data: dict[str, Any]) -> dict[str, Any]:
    """Text without placeholders, for models that read images by other ways."""
    if context.takes("decoder_input_ids") and not context.takes("input_ids"):
        return {**data, "labels": decoder_labels(context, 4, _TEXT)}
    limit = min([_TEXT, *context.position_limits])
    length = context.sizes.take(1, limit, "tokens per row")
    batch = {**data, **tokens(context, context.rows, length)}
    batch.update(_where(context, length))
    if context.takes("labels"):
        batch["labels"] = batch["input_ids"].clone()
    return batch


def _where(context: Context, length: int) -> dict[str, Any]:
    """Which tokens stand for the image, or see it, for models that are told."""
    found: dict[str, Any] = {}
    if context.takes("image_embeds_position_mask"):  # as of Kosmos-2
        count = context.number("latent_query_num")
        found["image_embeds_position_mask"] = (torch.arange(length) < count).repeat(
            context.rows, 1
        )
    if context.takes("image_attention_mask"):  # as of Idefics
        shape = context.rows, length, 1
        found["image_attention_mask"] = torch.ones(shape, dtype=torch.long)
    return found


def _read(
    context: Context, layouts: Iterable[dict[str, Any]], reader: Any
) -> tuple[dict[str, Any], int]:
    """The first layout that the model reads, and its number of placeholders.

    Raises:
        Exception: What the model raised at the first, if it reads none of them.
    """
    reason: Exception | None = None
    for data in layouts:
        try:
            return data, _places(context, data, reader)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise  # it reads this one, on real tensors
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            reason = reason or error
    assert reason is not None
    raise reason


def _places(context: Context, data: dict[str, Any], reader: Any) -> int:
    """Number of placeholders per row: the features that the model makes of one."""
    training = context.model.training
    context.model.eval()
    try:
        with torch.no_grad():
            found = reader(**_taken(reader, data))
    finally:
        context.model.train(training)
    return _feature_rows(found) // context.rows


def _taken(function: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Those arguments that a function names."""
    named = inspect.signature(function).parameters
    return {name: value for name, value in data.items() if name in named}


def _feature_rows(found: Any) -> int:
    """All rows of features, in the forms that models return them in."""
    pooled = getattr(found, "pooler_output", None)
    if pooled is None:
        pooled = getattr(found, "last_hidden_state", found)
    found = pooled
    if isinstance(found, (list, tuple)):
        if isinstance(found[0], torch.Tensor):
            return sum(_feature_rows(one) for one in found)
        return _feature_rows(found[0])
    return int(found.numel() // found.shape[-1])


def _visual(context: Context) -> Iterator[dict[str, Any]]:
    """Pixels in the layouts that forward may take."""
    if context.takes("image_grid_thw", "pixel_values"):
        yield from patches.grids(context)
    elif context.takes("target_sizes", "pixel_values"):
        yield patches.in_a_row(context)
    elif context.takes("image_position_ids", "pixel_values"):
        yield from patches.placed(context)
    else:
        side = context.number("patch_size", default=0)
        yield from patches.tiles(_pixels(context), side)


def _pixels(context: Context) -> dict[str, Any]:
    shape = images.image_shape
    batch: dict[str, Any] = dict(images.pixels(context))
    pixels = batch.get("pixel_values")
    name = type(context.model).__name__
    if pixels is None:
        return batch
    tiles_of = getattr(_module_of(context), "image_size_to_num_patches", None)
    if tiles_of is not None:  # the image in tiles, after the whole of it
        height, width = shape(context)[1:]
        grids = context.config.image_grid_pinpoints
        count = int(tiles_of([height, 2 * width], grids, height))
        batch["pixel_values"] = pixels.unsqueeze(1).repeat(1, count, 1, 1, 1)
        batch["image_sizes"] = torch.tensor([[height, 2 * width]] * context.rows)
    elif context.takes("aspect_ratio_ids"):  # one image of one tile, as of Mllama
        batch["pixel_values"] = pixels[:, None, None]
        batch["aspect_ratio_ids"] = torch.ones(context.rows, 1, dtype=torch.long)
        tiles = context.number("max_num_tiles", default=4)
        mask = (torch.arange(tiles) == 0).long()
        batch["aspect_ratio_mask"] = mask.repeat(context.rows, 1, 1)
        batch["pixel_values"] = batch["pixel_values"].repeat(1, 1, tiles, 1, 1, 1)
    elif context.takes("high_res_pixel_values"):
        side = context.config.high_res_vision_config.image_size
        batch["high_res_pixel_values"] = torch.randn(context.rows, 3, side, side)
    elif context.takes("qformer_input_ids"):
        reader = context.config.qformer_config
        batch["qformer_input_ids"] = context.ids(context.rows, _QUESTION, config=reader)
        if "video" in context.config.model_type:
            batch["pixel_values"] = pixels.unsqueeze(1)
    elif name.startswith(("Idefics", "SmolVLM")):
        batch["pixel_values"] = pixels.unsqueeze(1)
    elif _requires_mask_of_tiles(context):
        batch["pixel_values"] = pixels.unsqueeze(1)
        batch["pixel_attention_mask"] = torch.ones(context.rows, 1, dtype=torch.bool)
    elif any(one.model_type in _SIZED for one in context.configs):
        batch["image_sizes"] = torch.tensor([shape(context)[1:]] * context.rows)
    return batch


def _requires_mask_of_tiles(context: Context) -> bool:
    reader = _reader(context, "get_image_features")
    named = inspect.signature(reader).parameters if reader is not None else {}
    mask = named.get("pixel_attention_mask")
    return mask is not None and mask.default is inspect.Parameter.empty


def _module_of(context: Context) -> Any:
    return sys.modules[type(context.model).__module__]
