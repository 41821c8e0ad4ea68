"""Bytes that CUDA's kernels and allocator use beyond the tensors themselves.

The caching allocator rounds sizes up to multiples of 512 bytes. Workspaces of single
kernels are in ``workspaces``, those of cuBLAS in ``cublas``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from ckplan.gpus import Gpu
from ckplan.graph.graph import Graph
from ckplan.graph.records import BEFORE_STEP, Encoding, Op, Storage
from ckplan.tracing.costs.cost_cache import Cost
from ckplan.tracing.cuda.cublas import kept_bytes
from ckplan.tracing.cuda.translation import Capability
from ckplan.tracing.cuda.workspaces import hidden_bytes, workspace_of
from ckplan.tracing.recording.recording import RawOp, TensorMeta
from ckplan.units import in_blocks


def in_allocator_blocks(graph: Graph, capability: Capability) -> Graph:
    """Round a graph's bytes to the allocator's blocks and add cuBLAS's workspaces.

    Each workspace that cuBLAS keeps is a storage that is alive during the whole step.
    Workspaces that backward's thread needs only if it recomputes forward's ops are
    storages that are never alive.
    """
    end = len(graph.ops)
    storages = [replace(one, bytes=in_blocks(one.bytes)) for one in graph.storages]
    names = [op.name for op in graph.ops]
    kept = [
        Counter(kept_bytes(capability, thread))
        for thread in (names[: graph.num_forward], names[graph.num_forward :], names)
    ]
    forward, backward, again = kept
    for sizes, last in ((forward + backward, end), (again - backward, BEFORE_STEP)):
        storages += [
            Storage(size, "temporary", BEFORE_STEP, last)
            for size in sorted(sizes.elements(), reverse=True)
        ]
    return replace(
        graph,
        ops=tuple(map(_op_in_blocks, graph.ops)),
        storages=tuple(storages),
        encodings=tuple(map(_encoding_in_blocks, graph.encodings)),
    )


def with_workspaces(
    ops: Iterable[RawOp], costs: Iterable[Cost], gpu: Gpu
) -> list[Cost]:
    """Costs with the bytes that kernels are known to need.

    Args:
        ops: Recorded ops.
        costs: The cost of each op, with seconds only.
        gpu: The card that the ops run on.
    """
    found: list[Cost] = []
    for op, cost in zip(ops, costs, strict=True):
        workspace, hidden = workspace_of(op, gpu), hidden_bytes(op)
        if workspace.bytes or hidden:
            held = _made_bytes(op) + hidden
            peak = held + workspace.bytes
            cost = Cost(
                cost.seconds, peak, held, cost.measured, cost.launch_seconds, workspace
            )
        found.append(cost)
    return found


def _made_bytes(op: RawOp) -> int:
    """Bytes of an op's outputs; 0 if they alias its inputs."""
    changed = any(one.alias_info is not None for one in op.func._schema.returns)
    return 0 if changed else sum(map(_spanned_bytes, op.returned))


def _spanned_bytes(tensor: TensorMeta) -> int:
    """Bytes from the first element to the last, including gaps."""
    dims = zip(tensor.shape, tensor.stride, strict=True)
    last = sum((size - 1) * stride for size, stride in dims)
    return (last + 1) * tensor.dtype.itemsize if tensor.numel else 0


def _op_in_blocks(op: Op) -> Op:
    return replace(op, workspace=op.workspace.map(in_blocks))


def _encoding_in_blocks(one: Encoding) -> Encoding:
    return replace(
        one,
        bytes=in_blocks(one.bytes),
        encode_workspace_bytes=in_blocks(one.encode_workspace_bytes),
        decode_workspace_bytes=in_blocks(one.decode_workspace_bytes),
    )
