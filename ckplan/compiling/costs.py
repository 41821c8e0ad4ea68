"""Seconds and scratch memory of the ops of a compiled step.

On a CPU, seconds of contractions and scratch memory of kernels that are not generated
are measured, and so are random numbers, masks, and moves of bytes; other seconds of
generated kernels are estimates. Contractions are measured with results in memory that
the process has, as the C library hands out what was freed: into new memory they take up
to half as long again. Those that backward runs again on what it has just made find that
in the caches. On a card, both follow from its figures, and nothing runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ckplan.compiling import nodes
from ckplan.compiling.kernels import Kernels, stores_mask
from ckplan.compiling.masks import becomes_bits, num_packed
from ckplan.compiling.workspaces import KernelBytes
from ckplan.gpus import Gpu
from ckplan.graph.records import (
    MULTIPLIES,
    NO_WORKSPACE,
    OUTSIDE_CALLS,
    Workspace,
)
from ckplan.tracing.costs.byte_seconds import byte_seconds
from ckplan.tracing.costs.calibrate import calibrate
from ckplan.tracing.costs.cost_cache import cost_cache
from ckplan.tracing.costs.mask_seconds import ESTIMATED, mask_seconds
from ckplan.tracing.costs.roofline import rate_of_kernel
from ckplan.tracing.costs.timing import Memory
from ckplan.tracing.cuda.workspaces import workspace_of
from ckplan.tracing.recording.recording import RawOp, TensorMeta

COSTS = "estimated for compiled code"
"""Source of the seconds on a CPU."""
_MEASURED: dict[tuple[int, str], tuple[float, float]] = {}
"""Seconds of contractions, run first and run again, by threads and arguments."""


class CpuCosts:
    """On the CPU, with the threads that torch has."""

    device, source = "cpu", COSTS

    def __init__(self, kernel_bytes: Mapping[str, int]) -> None:
        self._kernels = KernelBytes(kernel_bytes)
        self._threads = torch.get_num_threads()
        self._keys: dict[fx.Node, tuple[int, str]] = {}  # of contractions
        self._masks = ESTIMATED
        self._byte_seconds = byte_seconds()

    def measure(self, *parts: fx.Graph) -> None:
        """Measure contractions, and what kernels allocate that are not generated."""
        found = [node for part in parts for node in nodes.ops_of(part)]
        for node in found:
            self.workspace_of(node)
        self._kernels.measure()
        if any(nodes.num_drawn(node) or stores_mask(node) for node in found):
            self._masks = mask_seconds()
        self._keys |= {node: self._key(node) for node in filter(nodes.is_alone, found)}
        new = {key: one for one, key in self._keys.items() if key not in _MEASURED}
        if not new:
            return
        cpu = torch.device(self.device)
        ops = [*map(_as_recorded, new.values())]
        first, again = (
            calibrate(ops, cpu, None, cost_cache(cpu), memory)
            for memory in (Memory.USED, Memory.CACHED)
        )
        for key, one, other in zip(new, first, again, strict=True):
            _MEASURED[key] = one.seconds, min(one.seconds, other.seconds)

    def seconds(self, run: Sequence[fx.Node], kernels: Kernels) -> tuple[float, float]:
        """Seconds of a run of nodes, and 0.0: the processor itself runs it."""
        if any(map(nodes.is_alone, run)):
            return sum(self._of_contraction(one)[0] for one in run), 0.0
        each = self._arithmetic(run)
        each += self._masks.write * _num_stored(run)
        each += self._masks.pack * sum(map(num_packed, run))
        each += self._masks.read * kernels.truths_read(run)
        each += self._masks.unpack * kernels.bits_read(run)
        moving = self._byte_seconds * kernels.crossing_bytes(run)
        return max(each / self._threads, moving), 0.0

    def again(self, node: fx.Node) -> float:
        """Seconds of a contraction that backward runs again; 0.0 of other nodes."""
        return self._of_contraction(node)[1]

    def _of_contraction(self, node: fx.Node) -> tuple[float, float]:
        return _MEASURED[self._keys[node]] if nodes.is_alone(node) else (0.0, 0.0)

    def rebuilt(self, run: Sequence[fx.Node], kernels: Kernels) -> tuple[float, float]:
        """Seconds that the run adds to backward, where it is fused with others.

        A mask that is drawn there is neither kept in forward nor read again, which
        takes about as long.
        """
        if any(map(nodes.is_alone, run)):
            return sum(map(self.again, run)), 0.0
        each = self._arithmetic(run)
        each -= sum(map(self._keeping, filter(stores_mask, run)))
        moving = self._byte_seconds * kernels.crossing_bytes(run) / 2
        return max(each / self._threads, moving), 0.0

    def _keeping(self, mask: fx.Node) -> float:
        """Seconds to keep a mask under a plan: to write it, and to read it again."""
        masks = self._masks
        if becomes_bits(mask):
            return (masks.pack + masks.unpack) * nodes.numel(mask)
        return (masks.write + masks.read) * nodes.numel(mask)

    def _arithmetic(self, run: Sequence[fx.Node]) -> float:
        drawn = sum(map(nodes.num_drawn, run)) * self._masks.draw
        return drawn + sum(map(nodes.arithmetic_seconds, run))

    def _key(self, node: fx.Node) -> tuple[int, str]:
        given = pytree.tree_map_only(torch.Tensor, _meta, _values(node))
        return self._threads, f"{node.target} {given}"

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

    def seconds(self, run: Sequence[fx.Node], kernels: Kernels) -> tuple[float, float]:
        """Seconds of the device, and of the processor that launches kernels.

        Arithmetic of generated kernels, random numbers included, takes less than to
        move their bytes.
        """
        alone = next(filter(nodes.is_alone, run), None)
        rate = "fp32" if alone is None else _rate_of(alone)
        flops = sum(map(nodes.flops_of, run))
        moved_bytes = kernels.crossing_bytes(run)
        device = self._gpu.device_seconds(flops, moved_bytes, rate)
        return device, self._gpu.launch_seconds * kernels.launches(run)

    def again(self, node: fx.Node) -> float:
        """Seconds of a contraction that backward runs again; 0.0 of other nodes."""
        if not nodes.is_alone(node):
            return 0.0
        moved_bytes = _as_recorded(node).moved_bytes
        flops, rate = nodes.flops_of(node), _rate_of(node)
        return self._gpu.device_seconds(flops, moved_bytes, rate)

    def rebuilt(self, run: Sequence[fx.Node], kernels: Kernels) -> tuple[float, float]:
        """The same of a run in a kernel of backward, unless it is one of its own."""
        device, launch = self.seconds(run, kernels)
        is_alone = any(map(nodes.is_alone, run))
        return (device, launch) if is_alone else (device / 2, 0.0)

    def workspace_of(self, node: fx.Node) -> Workspace:
        """What a kernel that is not generated allocates, as uncompiled."""
        if not nodes.is_alone(node):
            return NO_WORKSPACE
        return workspace_of(_as_recorded(node), self._gpu)


class NoCosts:
    """None at all: for the names of a step."""

    device, source = "cpu", "none"

    def measure(self, *parts: fx.Graph) -> None:
        """Measure nothing."""

    def seconds(self, run: Sequence[fx.Node], kernels: Kernels) -> tuple[float, float]:
        """No seconds."""
        return 0.0, 0.0

    def rebuilt(self, run: Sequence[fx.Node], kernels: Kernels) -> tuple[float, float]:
        """No seconds."""
        return 0.0, 0.0

    def workspace_of(self, node: fx.Node) -> Workspace:
        """No bytes."""
        return NO_WORKSPACE


def costs_of(
    gpu: Gpu | None, kernel_bytes: Mapping[str, int] | None
) -> CpuCosts | CardCosts:
    """Costs on a card, or on this CPU, where kernels of a replay are known."""
    return CpuCosts(kernel_bytes or {}) if gpu is None else CardCosts(gpu)


def _num_stored(run: Sequence[fx.Node]) -> int:
    return sum(map(nodes.numel, filter(stores_mask, run)))


def _rate_of(node: fx.Node) -> str:
    floats = (
        value.dtype
        for value in pytree.tree_leaves(_values(node))
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point
    )
    return rate_of_kernel(nodes.name_of_op(node), next(floats, torch.float32))


def _as_recorded(node: fx.Node) -> RawOp:
    """A node as an op of an uncompiled step is recorded."""
    leaves, spec = pytree.tree_flatten(_values(node))
    args = tuple(_meta(one) if _is_tensor(one) else one for one in leaves)
    made = tuple(map(_meta, filter(_is_tensor, pytree.tree_leaves(node.meta["val"]))))
    moved = (one.num_bytes for one in (*args, *made) if isinstance(one, TensorMeta))
    nothing: tuple[int, ...] = ()
    return RawOp(
        node.target,
        OUTSIDE_CALLS,
        *(nothing, nothing, nothing),
        args,
        spec,
        made,
        flops=nodes.flops_of(node),
        moved_bytes=sum(moved),
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
