"""``torchvision:``: a model of torchvision with random weights and its usual loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch

from ckplan.errors import WorkloadError, did_you_mean
from ckplan.sources.batches.sizes import Sizes
from ckplan.sources.dtypes import parse_dtype
from ckplan.sources.losses import cross_entropy, sum_of_losses
from ckplan.sources.packages import require
from ckplan.sources.source import Ask, Made

_SHAPES = {
    "classification": (3, 224, 224),
    "inception_v3": (3, 299, 299),
    "video": (3, 16, 112, 112),
    "segmentation": (3, 520, 520),  # as of torchvision's references
    "detection": (3, 800, 800),
}
_OBJECTS = 5  # labelled boxes per image
_NOT_TRAINED = ("quantization", "optical_flow")


def open_source(ask: Ask) -> Callable[[], Made]:
    """Import torchvision and return a factory.

    Raises:
        WorkloadError: torchvision is missing, it has no such model or one that is not
            trained in this way, or an option is wrong.
    """
    Sizes.of(ask.options.get("batch"))
    dtype = parse_dtype(ask.options.get("dtype"))
    models = require("torchvision", f"torchvision:{ask.name}").models
    if ask.name not in models.list_models():
        near = did_you_mean(ask.name, models.list_models())
        raise WorkloadError(
            f"cannot build 'torchvision:{ask.name}': torchvision has no such model",
            needed=f"one of its {len(models.list_models())} models",
            hint=f"did you mean '{near}'?"
            if near
            else "python -c 'import torchvision.models as m; print(*m.list_models())'",
        )
    kind = _kind_of(models.get_model_builder(ask.name).__module__)
    if kind in _NOT_TRAINED:
        raise WorkloadError(
            f"cannot make a batch for 'torchvision:{ask.name}', a model for {kind}",
            needed="a model for images or videos: " + ", ".join(_LOSSES),
            hint="a factory in a file of yours: ckplan profile model.py",
        )
    return partial(_build, models, ask, dtype, kind)


def _kind_of(module: str) -> str:
    part = module.removeprefix("torchvision.models").lstrip(".").split(".")[0]
    return part if part in (*_SHAPES, *_NOT_TRAINED) else "classification"


def _build(models: Any, ask: Ask, dtype: torch.dtype | None, kind: str) -> Made:
    if kind in ("segmentation", "detection"):
        changes = {"weights_backbone": None, **ask.changes}
    else:
        changes = dict(ask.changes)
    model = models.get_model(ask.name, weights=None, **changes).train()
    sizes = Sizes.of(ask.options.get("batch"))
    rows = sizes.rows
    shape = sizes.shape(_SHAPES.get(ask.name, _SHAPES[kind]), kind)
    sizes.check_all_used()
    images = torch.randn(rows, *shape)
    if dtype is not None:
        model, images = model.to(dtype), images.to(dtype)
    batch, target, loss, note = _LOSSES[kind](model, images, changes)
    notes = (*sizes.assumptions, f"loss: {note}")
    return Made(model, batch, loss, notes, target)


_Loss: TypeAlias = tuple[Any, Any, Callable[..., torch.Tensor], str]
"""A batch, what the loss alone gets, the loss, and its name."""


def _classified(model: Any, images: torch.Tensor, changes: Any) -> _Loss:
    del model
    classes = changes.get("num_classes", 1000)
    labels = torch.randint(classes, (len(images),))
    return (images,), labels, cross_entropy, f"cross entropy of {classes} classes"


def _video(model: Any, images: torch.Tensor, changes: Any) -> _Loss:
    return _classified(model, images, {"num_classes": 400, **changes})


def _segmented(model: Any, images: torch.Tensor, changes: Any) -> _Loss:
    del model
    classes = changes.get("num_classes") or 21
    labels = torch.randint(classes, (len(images), *images.shape[-2:]))
    loss = partial(cross_entropy, kind="pixel")
    return (images,), labels, loss, f"cross entropy of {classes} classes per pixel"


def _detected(model: Any, images: torch.Tensor, changes: Any) -> _Loss:
    del model, changes
    height, width = images.shape[-2:]
    corners = torch.rand(len(images), _OBJECTS, 2) * 0.5
    scale = torch.tensor([width, height])
    found = []
    for corner in corners:
        boxes = torch.cat([corner * scale, (corner + 0.25) * scale], dim=1)
        found.append({"boxes": boxes, "labels": torch.ones(_OBJECTS, dtype=torch.long)})
    note = f"sum of the detector's losses, {_OBJECTS} objects per image"
    return (list(images), found), None, sum_of_losses, note


_LOSSES = {
    "classification": _classified,
    "video": _video,
    "segmentation": _segmented,
    "detection": _detected,
}
