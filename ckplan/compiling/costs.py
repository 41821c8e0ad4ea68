"""Seconds and scratch memory of the ops of a compiled step.

On a CPU, seconds are estimates for one core, and scratch memory of kernels that are not
generated is measured. On a card, both follow from its figures, and nothing runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ckplan.compiling import nodes
from ckplan.compiling.workspaces import KernelBytes
from ckplan.gpus import Gpu
from ckplan.graph.records import MULTIPLIES, NO_WORKSPACE, OUTSIDE_CALLS, Workspace
from ckplan.tracing.costs.roofline import rate_of_kernel
from ckplan.tracing.cuda.workspaces import workspace_of
from ckplan.tracing.recording.recording import RawOp, TensorMeta

COSTS = "estimated for compiled code"
"""Source of the seconds on a CPU."""


class CpuCosts:
    """On one CPU core."""

    device, source = "cpu", COSTS

    def __init__(self, kernel_bytes: Mapping[str, int]) -> None:
        self._kernels = KernelBytes(kernel_bytes)

    def measure(self, *parts: fx.Graph) -> None:
        """Measure what kernels allocate that are not generated."""
        for node in (node for part in parts for node in nodes.ops_of(part)):
            self.workspace_of(node)
        self._kernels.measure()

    def seconds(self, run: Sequence[fx.Node], moved_bytes: int) -> tuple[float, float]:
        """Seconds of a run of nodes, and 0.0: the core itself runs it."""
        arithmetic = sum(map(nodes.arithmetic_seconds, run))
        return max(arithmetic, nodes.moving_seconds(moved_bytes)), 0.0

    def workspace_of(self, node: fx.Node) -> Workspace:
        """What a kernel that is not generated allocates beyond its outputs."""
        if not nodes.is_alone(node) or nodes.name_of_op(node) in MULTIPLIES:
            return NO_WORKSPACE
        most_bytes = self._kernels.bytes_of(node.target, *_values(node))
        beyond = most_bytes - nodes.num_bytes(node)
        return Workspace(after=(beyond,)) if beyond > 0 else NO_WORKSPACE


class CardCosts:
    """On a card: its roofline, and one launch for every fused kernel."""

    device = "cuda"

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.source = f"roofline {gpu.name}, for compiled code"

    def measure(self, *parts: fx.Graph) -> None:
        """Measure nothing: there is no card."""

    def seconds(self, run: Sequence[fx.Node], moved_bytes: int) -> tuple[float, float]:
        """Seconds of the device, and of the processor that launches the kernel.

        Arithmetic of generated kernels, random numbers included, takes less than to
        move their bytes.
        """
        alone = next(filter(nodes.is_alone, run), None)
        rate = "fp32" if alone is None else _rate_of(alone)
        flops = sum(map(nodes.flops_of, run))
        device = self._gpu.device_seconds(flops, moved_bytes, rate)
        return device, self._gpu.launch_seconds

    def workspace_of(self, node: fx.Node) -> Workspace:
        """What a kernel that is not generated allocates, as uncompiled."""
        if not nodes.is_alone(node):
            return NO_WORKSPACE
        return workspace_of(_as_recorded(node), self._gpu)


def _rate_of(node: fx.Node) -> str:
    floats = (
        value.dtype
        for value in pytree.tree_leaves(_values(node))
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point
    )
    return rate_of_kernel(nodes.name_of_op(node), next(floats, torch.float32))


def _as_recorded(node: fx.Node) -> RawOp:
    """A node as an op of an uncompiled step is recorded."""
    args, spec = pytree.tree_flatten(_values(node))
    made = filter(_is_tensor, pytree.tree_leaves(node.meta["val"]))
    nothing: tuple[int, ...] = ()
    return RawOp(
        node.target,
        OUTSIDE_CALLS,
        *(nothing, nothing, nothing),
        tuple(_meta(one) if _is_tensor(one) else one for one in args),
        spec,
        tuple(map(_meta, made)),
        flops=0,
        moved_bytes=0,
        accumulates=False,
        in_grad_mode=False,
    )


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _values(node: fx.Node) -> tuple[object, object]:
    """Arguments of a node, with fake tensors in place of nodes."""
    found: tuple[object, object] = fx.map_arg(
        (node.args, node.kwargs), lambda one: one.meta["val"]
    )
    return found
