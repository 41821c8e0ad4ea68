"""What CUDA's kernels and allocator hold beyond the tensors themselves.

The caching allocator hands out blocks of 512 bytes. What single kernels need is in
``workspaces``, what cuBLAS keeps in ``cublas``.
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
    """A graph as CUDA's allocator sees it: in blocks, and with cuBLAS's workspaces.

    What cuBLAS keeps are storages of their own, alive during the whole step; those that
    backward's thread takes only if it runs forward's ops again, never.
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
        ops: Recorded.
        costs: One for each, of which only the seconds are known.
        gpu: The card that they run on.
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
    """What an op returns, if it makes that."""
    changed = any(one.alias_info is not None for one in op.func._schema.returns)
    return 0 if changed else sum(map(_spanned_bytes, op.returned))


def _spanned_bytes(tensor: TensorMeta) -> int:
    """From the first element to the last one, gaps included."""
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
