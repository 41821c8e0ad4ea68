"""A step whose head and loss are torch's fused one, as another graph.

``torch.nn.functional.linear_cross_entropy`` with ``LinearCrossEntropyOptions()`` makes
the loss and all gradients in forward, by chunks of tokens, and holds the gradients
until backward multiplies them. It sums the gradient of the weight over chunks, so that
its bits are not the plain ones.
"""

from __future__ import annotations

from dataclasses import replace

from ckplan.graph.graph import Graph
from ckplan.simulating.heads import HeadOps, find_head, refuse
from ckplan.simulating.moving import is_on_gpu
from ckplan.simulating.tile_buffers import INDEX_BYTES, STATISTIC_BYTES
from ckplan.simulating.tiling import costed, forget_logits, move_gradients

_WIDE = 4  # bytes of a number in float32, in which 16-bit heads add up


def fused_graph(graph: Graph, call: int) -> Graph:
    """The step with the head of a call, and its loss, in torch's fused loss.

    Args:
        graph: The step.
        call: The call of the head.

    Raises:
        PlanError: The head is not understood, or the fused loss refuses it: a soft cap
            or label smoothing.
    """
    found = find_head(graph, call)
    if found.is_capped or found.has_sums:
        what = "a soft cap" if found.is_capped else "label smoothing"
        raise refuse(graph, call, f"torch's fused loss has no {what}")
    ops, storages = list(graph.ops), list(graph.storages)
    forget_logits(graph, found, storages)
    move_gradients(found, ops, storages, weights_in=found.log_softmax)
    ahead = () if found.hidden_gradient is None else (found.hidden_gradient,)
    parts = (found.product, *found.elementwise, *ahead, *found.weight_gradients)
    every = (found.log_softmax, *parts)
    chunks = -(-found.tokens // chunk_rows(graph, found))
    return replace(
        graph,
        ops=tuple(
            costed(
                graph.ops,
                enumerate(ops),
                {found.log_softmax: (every, chunks), found.backward: ((), 0)},
                {
                    found.log_softmax: _workspace_bytes(graph, found),
                    found.backward: _copied_bytes(graph, found),
                },
                parts,
            )
        ),
        storages=tuple(storages),
        encodings=(),
    )


def chunk_rows(graph: Graph, found: HeadOps) -> int:
    """Tokens of a chunk: logits of a chunk are about as large as the hidden state.

    Half of them, but for 16-bit heads on the CPU: ``chunking_method="auto"``.
    """
    pieces = -(-found.words // found.features)
    rows = 1 << (-(-found.tokens // pieces) - 1).bit_length()
    if found.item_bytes == _WIDE or is_on_gpu(graph):
        rows //= 2
    return max(1, min(rows, found.tokens))


def _workspace_bytes(graph: Graph, found: HeadOps) -> int:
    """Most bytes of the function, without the gradients that it leaves."""
    rows, words, features = chunk_rows(graph, found), found.words, found.features
    by_token = found.tokens * (1 + INDEX_BYTES + STATISTIC_BYTES)
    logits, hidden = rows * words, rows * features
    if found.item_bytes == _WIDE:
        return by_token + _WIDE * (logits + hidden)
    if is_on_gpu(graph):  # the product's float32, and its 16 bits for the gradients
        more = found.item_bytes * (logits + hidden)
        return by_token + more + _WIDE * (logits + hidden)
    # On the CPU, the weight is cast, a chunk's gradient of it made, cast and added, in
    # float32; the gradient of the hidden state is in 16 bits only at the end.
    whole = 4 * words * features + found.tokens * features
    whole += 2 * words * found.has_bias
    late = found.item_bytes * found.tokens * features
    return by_token + _WIDE * (logits + hidden + whole) - late


def _copied_bytes(graph: Graph, found: HeadOps) -> int:
    """Bytes of gradients of parameters: autograd copies what the function still has."""
    made = (s for n in found.weight_gradients for s in graph.ops[n].creates)
    return sum(graph.storages[one].bytes for one in made)
