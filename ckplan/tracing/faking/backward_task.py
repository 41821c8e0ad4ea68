"""One running backward, and the graph edges of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ckplan.tracing.faking.backward_pass import (
    BackwardPass,
    Edge,
    Hook,
    leaf_of,
    reachable_nodes,
)


class HookedTensor:
    """The packed object of a saved tensor, held until its node has run."""

    __slots__ = ("__weakref__", "packed", "unpack")

    def __init__(self, packed: object, unpack: Hook) -> None:
        self.packed = packed
        self.unpack: Hook | None = unpack

    def let_go(self) -> None:
        """Free the packed object."""
        self.packed = self.unpack = None


@dataclass
class BackwardTask:
    """A running backward, with the state that callers query from the engine."""

    number: int
    run: BackwardPass
    keeps_graph: bool
    takes_checkpoints: bool  # whether checkpoints can run backward inside it
    callbacks: list[Callable[[], object]] = field(default_factory=list)


def edge_of(one: torch.Tensor | GradientEdge, roots: Sequence[Edge] = ()) -> Edge:
    """Return the graph edge of a tensor."""
    if isinstance(one, GradientEdge):
        return one.node, one.output_nr
    edge = None
    with suppress(AttributeError):  # a tensor left over from a wrapper of torch.func
        edge = get_gradient_edge(one)
    if one.grad_fn is None and (edge is None or leaf_of(edge.node) is not one):
        # Torch takes the edge of a view of the wrapped tensor.
        for node in reachable_nodes([root for root, _ in roots]):
            if leaf_of(node) is one:
                return node, 0
    if edge is None:  # no path leads to the tensor
        edge = get_gradient_edge(torch.empty(0, requires_grad=True))
    return edge.node, edge.output_nr
