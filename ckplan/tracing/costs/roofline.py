"""Seconds of every op from the roofline of a card, without measuring.

The seconds are lower bounds, as no kernel reaches the peak rate or the full bandwidth.
A planner mainly needs the ratios between ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ckplan.encodings import LAUNCHES, encoded_bytes
from ckplan.gpus import Gpu
from ckplan.tracing.costs.calibrate import EncodingCost
from ckplan.tracing.costs.cost_cache import Cost
from ckplan.tracing.recording.recording import RawOp, TensorMeta

_RATES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def roofline(ops: Sequence[RawOp], gpu: Gpu) -> list[Cost]:
    """Device and launch seconds of every op; workspaces are not known."""
    return [
        Cost(
            gpu.device_seconds(op.flops, op.moved_bytes, rate_of(op)),
            peak_bytes=0,
            held_bytes=0,
            measured=False,
            launch_seconds=gpu.launch_seconds,
        )
        for op in ops
    ]


def roofline_encodings(
    encoding_costs: Mapping[tuple[str, TensorMeta], EncodingCost], gpu: Gpu
) -> dict[tuple[str, TensorMeta], EncodingCost]:
    """Costs of encodings on a card: the time to move both forms, or to launch."""

    def on_card(form: str, meta: TensorMeta, cost: EncodingCost) -> EncodingCost:
        moved_bytes = meta.num_bytes + encoded_bytes(form, meta.numel)
        device = gpu.device_seconds(0, moved_bytes, "fp32")
        seconds = max(device, LAUNCHES * gpu.launch_seconds)
        return replace(cost, encode_seconds=seconds, decode_seconds=seconds)

    return {key: on_card(*key, cost) for key, cost in encoding_costs.items()}


def rate_of(op: RawOp) -> str:
    """The rate of ``gpus.RATES`` for an op, under torch's current settings.

    By default torch allows TF32 for fp32 only in convolutions.
    """
    floats = (
        leaf.dtype
        for leaf in op.args
        if isinstance(leaf, TensorMeta) and leaf.dtype.is_floating_point
    )
    return rate_of_kernel(op.func.overloadpacket.__name__, next(floats, torch.float32))


def rate_of_kernel(name: str, dtype: torch.dtype) -> str:
    """The rate of ``gpus.RATES`` for a kernel; see ``rate_of``.

    Args:
        name: Of its op, such as ``addmm``.
        dtype: Of the first tensor of floats that it reads.
    """
    if dtype != torch.float32:
        return _RATES.get(dtype, "fp32")
    if "conv" in name:
        return "tf32" if torch.backends.cudnn.allow_tf32 else "fp32"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"
