"""What CUDA's kernels and allocator hold beyond the tensors themselves.

The caching allocator hands out blocks of 512 bytes. A cuBLAS handle keeps a workspace
for each thread that multiplies matrices: one for forward, one for backward. Workspaces
of kernels are written down here as far as torch's source fixes their size; those of
cuDNN's convolutions, which it chooses when it runs, are not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ckplan.caching_allocator import in_blocks
from ckplan.graph import Graph
from ckplan.records import BEFORE_STEP, Encoding, Op, Storage
from ckplan.tracing.cost_cache import Cost
from ckplan.tracing.cuda.words import Capability
from ckplan.tracing.recording import RawOp, TensorMeta
from ckplan.units import round_up

CUBLAS_WORKSPACE_BYTES = (2 * 4096 + 8 * 16) << 10
"""Of one handle; torch's own default, ``:4096:2:16:8``."""
CUBLAS_WORKSPACE_BYTES_SINCE_HOPPER = (8 * 4096) << 10
MULTIPLIES = {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "addbmm"}
"""Ops that go to cuBLAS."""
_FLOAT_BYTES = 4
_FLASH_ROWS = 128  # lengths are rounded up to this
_EFFICIENT_ROWS = 64
_WIDTHS = 32


def cublas_bytes(capability: Capability) -> int:
    """The workspace of one cuBLAS handle on a GPU of this capability."""
    if capability >= (9, 0):
        return CUBLAS_WORKSPACE_BYTES_SINCE_HOPPER
    return CUBLAS_WORKSPACE_BYTES


def as_allocated(graph: Graph, capability: Capability) -> Graph:
    """A graph as CUDA's allocator sees it: in blocks, and with cuBLAS's workspaces.

    What cuBLAS holds is one storage more, alive during the whole step.
    """
    end = len(graph.ops)
    storages = [replace(one, bytes=in_blocks(one.bytes)) for one in graph.storages]
    held = cublas_bytes(capability) * _num_threads(graph)
    if held:
        storages.append(Storage(held, "temporary", BEFORE_STEP, end))
    return replace(
        graph,
        ops=tuple(map(_op_in_blocks, graph.ops)),
        storages=tuple(storages),
        encodings=tuple(map(_encoding_in_blocks, graph.encodings)),
    )


def with_workspaces(ops: Iterable[RawOp], costs: Iterable[Cost]) -> list[Cost]:
    """Costs with the bytes that kernels are known to need.

    Args:
        ops: Recorded.
        costs: One for each, of which only the seconds are known.
    """
    found: list[Cost] = []
    for op, cost in zip(ops, costs, strict=True):
        peak, held = workspace_bytes(op), hidden_bytes(op)
        if peak or held:
            made = sum(one.num_bytes for one in op.returned)
            held += made
            cost = replace(cost, peak_bytes=max(made + peak, held), held_bytes=held)
        found.append(cost)
    return found


def workspace_bytes(op: RawOp) -> int:
    """What the kernel of an op needs while it runs, beyond what it returns."""
    needs = _WORKSPACES.get(op.func.overloadpacket.__name__)
    return needs(op, _tensors(op)) if needs else 0


def hidden_bytes(op: RawOp) -> int:
    """What an op returns in storages larger than the tensors in them.

    A reduced loss keeps the storage that its elements were computed in.
    """
    name = op.func.overloadpacket.__name__
    reduced = name in _HIDING and op.returned and not op.returned[0].shape
    return _tensors(op)[0].num_bytes if reduced else 0


# -- one op each ---------------------------------------------------------------------


def _flash_backward(op: RawOp, tensors: Sequence[TensorMeta]) -> int:
    """Sums of the softmax and gradients of queries in float32; heads unfolded."""
    del op
    query, key = tensors[1], tensors[2]
    batch, heads, length, width = query.shape
    rows = batch * heads * round_up(length, _FLASH_ROWS)
    wide = round_up(width, _WIDTHS) if width <= 192 else 256
    sums = rows * _FLOAT_BYTES
    gradients = rows * wide * _FLOAT_BYTES
    unfolded = 0
    if key.shape[1] != heads:
        unfolded = 2 * batch * heads * key.shape[2] * width * key.dtype.itemsize
    return in_blocks(sums) + in_blocks(gradients) + unfolded


def _efficient_backward(op: RawOp, tensors: Sequence[TensorMeta]) -> int:
    """The same for the memory-efficient kernel, in tiles of 64 rows."""
    del op
    batch, heads, length, width = tensors[1].shape
    rows = batch * heads * round_up(length, _EFFICIENT_ROWS)
    sums = batch * heads * length * _FLOAT_BYTES
    return in_blocks(sums) + rows * round_up(width, _EFFICIENT_ROWS) * _FLOAT_BYTES


def _safe_softmax(op: RawOp, tensors: Sequence[TensorMeta]) -> int:
    """Which scores are -inf, one byte each, and which rows are nothing else."""
    del op
    count = math.prod(tensors[0].shape)
    return in_blocks(count) + count // max(tensors[0].shape[-1], 1)


def _sorted_indices(op: RawOp, tensors: Sequence[TensorMeta]) -> int:
    """Indices and where they were, sorted into copies of both."""
    del op
    integers = [t for t in tensors if not t.dtype.is_floating_point]
    return 4 * max((math.prod(t.shape) * 8 for t in integers), default=0)


def _elements(times: int) -> Callable[[RawOp, Sequence[TensorMeta]], int]:
    """So many tensors like the first argument, where a loss is reduced."""

    def needs(op: RawOp, tensors: Sequence[TensorMeta]) -> int:
        reduced = op.returned and op.returned[0].shape != tensors[0].shape
        return times * tensors[0].num_bytes if reduced else 0

    return needs


_WORKSPACES: dict[str, Callable[[RawOp, Sequence[TensorMeta]], int]] = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_safe_softmax": _safe_softmax,
    "embedding_dense_backward": _sorted_indices,
    "index_put": _sorted_indices,
    "index_put_": _sorted_indices,
    "_index_put_impl_": _sorted_indices,
    "mse_loss": _elements(2),
    "smooth_l1_loss": _elements(2),
    "huber_loss": _elements(1),
    "soft_margin_loss": _elements(1),
    "binary_cross_entropy": _elements(1),
    "binary_cross_entropy_with_logits": _elements(2),
    "logsumexp": _elements(1),
}
_HIDING = {"mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy"}


def _tensors(op: RawOp) -> list[TensorMeta]:
    return [leaf for leaf in op.args if isinstance(leaf, TensorMeta)]


def _num_threads(graph: Graph) -> int:
    """Threads that multiply matrices: autograd's is another than forward's."""
    forward = any(op.name in MULTIPLIES for op in graph.ops[: graph.num_forward])
    backward = any(op.name in MULTIPLIES for op in graph.ops[graph.num_forward :])
    return forward + backward


def _op_in_blocks(op: Op) -> Op:
    return replace(op, workspace_bytes=in_blocks(op.workspace_bytes))


def _encoding_in_blocks(one: Encoding) -> Encoding:
    return replace(
        one,
        bytes=in_blocks(one.bytes),
        encode_workspace_bytes=in_blocks(one.encode_workspace_bytes),
        decode_workspace_bytes=in_blocks(one.decode_workspace_bytes),
    )
