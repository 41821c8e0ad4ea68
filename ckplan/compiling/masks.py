"""Masks that forward saves as bits: eight truth values in a byte.

What a joint graph saves of a dropout or a relu, it saves as a byte each, and code that
Inductor generates for a CPU writes these far slower than it computes bits of them. The
bits are made in forward and undone in backward, inside the kernels that use them, so
what a plan saves of masks takes an eighth, and less time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import fx

from ckplan.compiling import nodes
from ckplan.compiling.torch_names import Parts, decompositions, make_fx
from ckplan.encodings import PLANES, pack_planes, unpack_planes

NUM_TRUTHS = "ckplan_truths"
"""Where bits, in forward and as input of backward, keep how many values they are."""
_TRACED = "ckplan_masks"
"""Where a fake mode keeps the graphs that pack and unpack masks, by their shape."""


def is_mask(node: fx.Node) -> bool:
    """Whether a node's value is a tensor of truth values."""
    return nodes.is_tensor(node) and node.meta["val"].dtype == torch.bool


def num_packed(node: fx.Node) -> int:
    """How many truth values are packed in a node; 0 of others."""
    return int(node.meta.get(NUM_TRUTHS, 0))


def becomes_bits(node: fx.Node) -> bool:
    """Whether forward saves a node's value as bits, if it saves it.

    Rows of eight planes of a mask in the order of memory: so kernels stay vectorized.
    """
    if node.op != "call_function" or nodes.is_view(node) or not is_mask(node):
        return False
    mask = node.meta["val"]
    is_known = mask.device.type == "cpu" and all(type(one) is int for one in mask.shape)
    if not (is_known and mask.numel() and mask.ndim and mask.is_contiguous()):
        return False
    return mask.numel() % (PLANES * mask.shape[-1]) == 0


def saved_bytes(node: fx.Node) -> int:
    """Bytes that a node's value takes where a plan saves it."""
    num_bytes = nodes.num_bytes(node)
    return num_bytes // PLANES if becomes_bits(node) else num_bytes


def pack_masks(parts: Parts, num_outputs: int) -> None:
    """Let forward return bits of the masks that it saves, and backward take them.

    Args:
        parts: Forward and backward.
        num_outputs: Of forward, before what it saves.
    """
    forward, backward = (part.graph for part in parts)
    returned = nodes.returned(forward)
    kept = {one for one in returned[:num_outputs] if isinstance(one, fx.Node)}
    inputs = {one.name: one for one in backward.find_nodes(op="placeholder")}
    order = {node: place for place, node in enumerate(backward.nodes)}
    new: dict[fx.Node, fx.Node] = {}
    for mask in nodes.outputs(forward):
        if mask in kept or mask in new or not becomes_bits(mask):
            continue
        new[mask] = _packed(forward, mask)
        given = inputs[mask.name]
        first = min(given.users, key=order.__getitem__)
        _unpack(backward, given, new[mask], first)
    if new:
        (output,) = forward.find_nodes(op="output")
        output.args = (fx.map_arg(returned, lambda one: new.get(one, one)),)


def _packed(forward: fx.Graph, mask: fx.Node) -> fx.Node:
    """Pack a mask just after it is made."""
    packing, _ = _traced_for(mask.meta["val"])
    with forward.inserting_before(mask.next):  # in order
        bits = _inlined(forward, packing, mask, mask)
    bits.meta[NUM_TRUTHS] = nodes.numel(mask)
    return bits


def _unpack(backward: fx.Graph, mask: fx.Node, bits: fx.Node, first: fx.Node) -> None:
    """Let backward take bits in place of a mask, and unpack them at its first use."""
    _, unpacking = _traced_for(mask.meta["val"])
    with backward.inserting_before(mask):
        given = backward.placeholder(bits.name)
    given.meta = dict(bits.meta)
    with backward.inserting_before(first):
        again = _inlined(backward, unpacking, given, first)
    mask.replace_all_uses_with(again)
    backward.erase_node(mask)


def _inlined(into: fx.Graph, graph: fx.Graph, given: fx.Node, of: fx.Node) -> fx.Node:
    """Copy a graph of one input and one output; its nodes are of a node's modules."""
    (placed,) = graph.find_nodes(op="placeholder")
    copies = {placed: given}
    for node in nodes.ops_of(graph):
        copies[node] = nodes.copied(node, into, copies)
        copies[node].meta = {**of.meta, **node.meta}
    return copies[_made_by(graph)]


def _traced_for(mask: torch.Tensor) -> tuple[fx.Graph, fx.Graph]:
    """Graphs that pack a fake mask, and that unpack it."""
    known = vars(mask.fake_mode).setdefault(_TRACED, {})
    if mask.shape not in known:
        packing, packed = _graph_of(pack_planes, mask)
        unpacking, _ = _graph_of(partial(unpack_planes, shape=mask.shape), packed)
        known[mask.shape] = packing, unpacking
    found: tuple[fx.Graph, fx.Graph] = known[mask.shape]
    return found


def _graph_of(
    function: Callable[[torch.Tensor], torch.Tensor], fake: torch.Tensor
) -> tuple[fx.Graph, torch.Tensor]:
    """The ops of a function, and what it returns."""
    with fake.fake_mode:
        graph = make_fx(function, decomposition_table=decompositions())(fake).graph
    return graph, _made_by(graph).meta["val"]


def _made_by(graph: fx.Graph) -> fx.Node:
    """The only node that a graph returns, which is no tuple."""
    (output,) = graph.find_nodes(op="output")
    (made,) = output.all_input_nodes
    return made
