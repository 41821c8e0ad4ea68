"""Gradients that are sums, computed apart from the contraction that they begin with.

A weight that is used twice, as that of a head that is the embedding's, has two
gradients. Inductor computes the contraction of the first and the sum as one kernel,
``addmm``, which waits for the other: to the end of backward, with the gradient of all
logits. Apart, as uncompiled code has them, the sum may round otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import fx

from ckplan.compiling import nodes

_ATEN = torch.ops.aten
_SUM = _ATEN.add.Tensor
_CONTRACTION = "mm"  # Inductor adds to no other
_LEAST_SHARE = 1 / 8
"""Of the bytes that forward saves: what takes less may wait, and all bits stay."""


def sums_that_wait(gradients: Iterable[object], saved_bytes: int) -> frozenset[str]:
    """Names of the sums whose contraction would wait with too much.

    Args:
        gradients: What a joint graph returns as those; its sizes are numbers.
        saved_bytes: By forward for backward.
    """
    least_bytes = _LEAST_SHARE * saved_bytes
    return frozenset(
        one.name
        for one in _sums(gradients)
        if least_bytes <= _waiting_bytes(_in_order(one)[0])
    )


def compute_apart(graph: fx.Graph, names: Collection[str]) -> None:
    """Compute the sums named apart from the contractions that they begin with.

    The negative is subtracted, which gives the same numbers, and is no sum that
    Inductor would join.
    """
    for one in [node for node in graph.nodes if node.name in names]:
        first, last = _in_order(one)
        with graph.inserting_before(one):
            negative = graph.call_function(_ATEN.neg.default, (first,))
            negative.meta = {**one.meta, "val": torch.neg(first.meta["val"])}
            instead = graph.call_function(_ATEN.sub.Tensor, (last, negative))
            instead.meta = dict(one.meta)
        one.replace_all_uses_with(instead)
        graph.erase_node(one)


def _in_order(summed: fx.Node) -> list[fx.Node]:
    """The two summands, first the one that is there first."""
    one, other = summed.all_input_nodes
    return [other, one] if other < one else [one, other]


def _sums(gradients: Iterable[object]) -> Iterator[fx.Node]:
    """Gradients that are sums of two tensors, and such sums inside them."""
    todo = [one for one in gradients if isinstance(one, fx.Node)]
    while todo:
        node = todo.pop()
        if node.target is _SUM and len(node.all_input_nodes) == 2 and not node.kwargs:
            todo += node.all_input_nodes
            yield node


def _waiting_bytes(summand: fx.Node) -> int:
    """Bytes that a contraction reads, if it would wait; parameters are there anyway."""
    contraction = nodes.base_of(summand)
    if nodes.name_of_op(contraction) != _CONTRACTION or len(contraction.users) > 1:
        return -1
    read = set(map(nodes.base_of, contraction.all_input_nodes))
    return sum(nodes.num_bytes(one) for one in read if one.op != "placeholder")
