"""Workspaces of group norms on a GPU, in bytes beyond their outputs.

They are exact, except for images of one pixel, for which torch 2.14 needs less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ckplan.gpus import Gpu
from ckplan.graph.records import Workspace
from ckplan.tracing.cuda.layouts import (
    Blocks,
    contiguous_copies,
    suggests_channels_last,
)
from ckplan.tracing.recording.recording import RawOp, TensorMeta
from ckplan.units import in_blocks

_FLOAT_BYTES = 4
_LOW = (torch.float16, torch.bfloat16)
_CASTS = torch.__version__ >= (2, 14)  # statistics to 16 bits
_KEEPS_LAYOUTS = torch.__version__ >= (2, 15)


def forward(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
    """A factor and an offset per example and channel; group statistics in float32."""
    del gpu
    input_, *affine = tensors
    last = _KEEPS_LAYOUTS and suggests_channels_last(input_)
    channels, groups = _exactly(input_, op.returned[1])
    scaled = _by_pixel(input_, last) or (affine and _has_pixels(input_))
    aside: Blocks = (channels, channels) if scaled else ()
    if _CASTS and input_.dtype in _LOW:
        aside += (groups, groups)
    return Workspace(contiguous_copies([input_], last), aside)


def backward(op: RawOp, tensors: Sequence[TensorMeta], gpu: Gpu) -> Workspace:
    """Two sums per example and channel; two per group for the input's gradient."""
    del gpu
    gradient, input_, mean, _, *weight = tensors
    last = _KEEPS_LAYOUTS and suggests_channels_last(input_)
    channels, groups = _exactly(input_, mean)
    scaled = weight and _has_pixels(input_) and not _by_pixel(input_, last)
    into_input, *_ = op.arguments[0][-1]
    aside: Blocks = (channels,) * (3 if scaled and into_input else 2)
    if into_input:
        aside += (groups, groups)
    return Workspace(contiguous_copies([gradient, input_], last), aside)


def _by_pixel(input_: TensorMeta, last: bool) -> bool:
    """Whether the channels-last kernel runs; small images fit both layouts."""
    both = len(input_.shape) > 3 and (input_.shape[1] == 1 or not _has_pixels(input_))
    return last or (_KEEPS_LAYOUTS and both)


def _has_pixels(image: TensorMeta) -> bool:
    """Whether an image has more than one pixel."""
    return math.prod(image.shape[2:]) > 1


def _exactly(input_: TensorMeta, mean: TensorMeta) -> tuple[int, int]:
    """Bytes of one number per example and channel, and of one per group."""
    width = max(input_.dtype.itemsize, _FLOAT_BYTES)
    channels = math.prod(input_.shape[:2])
    return in_blocks(channels * width), in_blocks(mean.numel * width)
