"""``timm:``: an image classifier of timm with random weights, and cross entropy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ckplan.errors import WorkloadError, did_you_mean
from ckplan.sources.batches.sizes import Sizes
from ckplan.sources.dtypes import parse_dtype
from ckplan.sources.losses import cross_entropy
from ckplan.sources.packages import require
from ckplan.sources.source import Ask, Made


def open_source(ask: Ask) -> Callable[[], Made]:
    """Import timm and return a factory.

    Raises:
        WorkloadError: timm is missing, it has no such model, or an option is wrong.
    """
    Sizes.of(ask.options.get("batch"))
    dtype = parse_dtype(ask.options.get("dtype"))
    timm = require("timm", f"timm:{ask.name}")
    if not timm.is_model(ask.name):
        near = did_you_mean(ask.name, timm.list_models())
        raise WorkloadError(
            f"cannot build 'timm:{ask.name}': there is no such model",
            needed=f"one of timm's {len(timm.list_models())} models",
            hint=f"did you mean '{near}'?"
            if near
            else "python -c 'import timm; print(*timm.list_models())'",
        )
    return partial(_build, timm, ask, dtype)


def _build(timm: Any, ask: Ask, dtype: torch.dtype | None) -> Made:
    model = timm.create_model(ask.name, pretrained=False, **ask.changes)
    model.train()
    sizes = Sizes.of(ask.options.get("batch"))
    shape = tuple((getattr(model, "pretrained_cfg", {}) or {})["input_size"])
    images = torch.randn(sizes.rows, *sizes.shape(shape, "image"))
    sizes.check_all_used()
    classes = model.num_classes
    if not classes:
        raise WorkloadError(
            f"cannot train 'timm:{ask.name}': it has no classifier",
            needed="a number of classes",
            hint="--set num_classes=1000",
        )
    labels = torch.randint(classes, (sizes.rows,))
    sizes.assumptions.append(f"loss: cross entropy of {classes} classes")
    if dtype is not None:
        model, images = model.to(dtype), images.to(dtype)
    notes = tuple(sizes.assumptions)
    return Made(model, (images,), cross_entropy, notes, labels)
