"""``diffusers:``: the denoiser of a folder of diffusers, and the denoising loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckplan.errors import WorkloadError
from ckplan.sources.batches.sizes import Sizes
from ckplan.sources.dtypes import parse_dtype
from ckplan.sources.json_file import read_json
from ckplan.sources.lora import parse_lora, with_lora
from ckplan.sources.losses import denoising
from ckplan.sources.packages import require
from ckplan.sources.source import CONFIG_FILE, Ask, Made, check_fields

_DENOISERS = ("unet", "transformer", "prior")
_TIMES = 1000
_WORDS = 77  # tokens of the text encoder, as of CLIP
_SIDE = 64
_CAPTION_WIDTH = ("cross_attention_dim", "joint_attention_dim", "caption_channels")


def open_source(ask: Ask) -> Callable[[], Made]:
    """Read the denoiser's configuration and return a factory.

    Raises:
        WorkloadError: diffusers is missing, the folder holds no denoiser, or an option
            is wrong.
    """
    Sizes.of(ask.options.get("batch"))
    parse_dtype(ask.options.get("dtype"))
    if ask.options.get("lora") is not None:
        parse_lora(ask.options["lora"])
        require("peft", "--lora")
    diffusers = require("diffusers", f"diffusers:{ask.name}")
    config = {**_configuration(Path(ask.name))}
    model_class = getattr(diffusers, str(config.get("_class_name")), None)
    if model_class is None or not hasattr(model_class, "from_config"):
        raise WorkloadError(
            f"cannot use 'diffusers:{ask.name}': diffusers {diffusers.__version__} has "
            f"no model class {config.get('_class_name')!r}",
            needed="the _class_name of a model in its configuration",
            hint="a newer diffusers",
        )
    known = inspect.signature(model_class.__init__).parameters
    check_fields(ask.changes, {**known, **config})
    return partial(_build, model_class, {**config, **ask.changes}, ask.options)


def _configuration(folder: Path) -> Mapping[str, Any]:
    """The configuration of a model, or of the denoiser of a pipeline."""
    if folder.name == CONFIG_FILE:
        folder = folder.parent
    places = [folder, *(folder / name for name in _DENOISERS)]
    found = [place / CONFIG_FILE for place in places if (place / CONFIG_FILE).is_file()]
    if not found:
        raise WorkloadError(
            f"cannot find a denoiser in 'diffusers:{folder}': none of "
            + ", ".join(str(place / CONFIG_FILE) for place in places)
            + " is there",
            needed=f"a folder with the {CONFIG_FILE} of a model or a pipeline",
            hint="the folder that save_pretrained() or save_config() wrote",
        )
    content = read_json(found[0], written_by="save_config()")
    return content if isinstance(content, dict) else {}


def _build(
    model_class: Any, config: Mapping[str, Any], options: Mapping[str, Any]
) -> Made:
    sizes = Sizes.of(options.get("batch"))
    dtype = parse_dtype(options.get("dtype")) or torch.float32
    model = model_class.from_config(dict(config)).to(dtype).train()
    rows = sizes.rows
    arguments = inspect.signature(model.forward).parameters
    name = next((n for n in ("sample", "hidden_states") if n in arguments), None)
    if name is None or "timestep" not in arguments:
        raise WorkloadError(
            f"cannot make a batch for a {model_class.__name__}: it takes no noisy "
            "sample and no timestep",
            needed="a denoiser, such as a UNet2DConditionModel",
            hint="a factory in a file of yours: ckplan profile model.py",
        )
    noisy = torch.randn(rows, *_shape(model, sizes), dtype=dtype)
    batch: dict[str, Any] = {name: noisy, "timestep": torch.randint(_TIMES, (rows,))}
    batch.update(_conditions(model, arguments, sizes, noisy))
    sizes.check_all_used()
    lacking = [
        n
        for n, p in arguments.items()
        if p.default is p.empty and n not in batch and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    if lacking:
        raise WorkloadError(
            f"cannot make a batch for a {model_class.__name__}: it needs "
            + ", ".join(lacking),
            needed="a denoiser of images with at most a caption and a class",
            hint="a factory in a file of yours: ckplan profile model.py",
        )
    sizes.assumptions.append("loss: mean squared error of the predicted noise")
    if options.get("lora") is not None:
        targets = options["lora"]
        wanted = (
            targets if "," in str(targets) else f"{targets},to_k,to_q,to_v,to_out.0"
        )
        model = with_lora(model, wanted)
    noise = torch.randn_like(noisy)
    return Made(model, batch, denoising, tuple(sizes.assumptions), noise)


def _shape(model: Any, sizes: Sizes) -> tuple[int, ...]:
    """Channels and sizes of one sample."""
    config = model.config
    channels = config.get("in_channels", 3)
    if "img_ids" in inspect.signature(model.forward).parameters:
        return sizes.shape(((_SIDE // 2) ** 2, channels), "packed sample")
    side = config.get("sample_size") or _SIDE
    sides = (side, side) if isinstance(side, int) else tuple(side)
    return sizes.shape((channels, *sides), "sample")


def _conditions(
    model: Any, arguments: Mapping[str, Any], sizes: Sizes, noisy: torch.Tensor
) -> Iterator[tuple[str, Any]]:
    """What the denoiser is told beside the sample: captions, classes, positions."""
    config, rows, dtype = model.config, len(noisy), noisy.dtype
    width = next((config.get(n) for n in _CAPTION_WIDTH if config.get(n)), None)
    width = config.get("encoder_hid_dim") or width
    width = max(width) if isinstance(width, (list, tuple)) else width
    if "encoder_hidden_states" in arguments and width:
        sizes.assume(f"caption: {_WORDS} tokens", "a factory of your own")
        yield "encoder_hidden_states", torch.randn(rows, _WORDS, width, dtype=dtype)
    pooled = config.get("pooled_projection_dim")
    if "pooled_projections" in arguments and pooled:
        yield "pooled_projections", torch.randn(rows, pooled, dtype=dtype)
    classes = config.get("num_class_embeds") or config.get("num_embeds_ada_norm")
    if "class_labels" in arguments and classes:
        yield "class_labels", torch.randint(classes, (rows,))
    if config.get("addition_embed_type") == "text_time":
        times = 6
        total = config["projection_class_embeddings_input_dim"]
        text = total - times * config["addition_time_embed_dim"]
        extra = {
            "text_embeds": torch.randn(rows, text, dtype=dtype),
            "time_ids": torch.zeros(rows, times, dtype=dtype),
        }
        yield "added_cond_kwargs", extra
    if "img_ids" in arguments:
        yield "img_ids", torch.zeros(noisy.shape[1], 3, dtype=dtype)
        yield "txt_ids", torch.zeros(_WORDS, 3, dtype=dtype)
    if config.get("guidance_embeds"):
        yield "guidance", torch.ones(rows, dtype=dtype)
