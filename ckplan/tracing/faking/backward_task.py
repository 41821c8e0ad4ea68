"""One backward that runs, and the edges of the graph that it begins at."""

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
    """What a hook made of a saved tensor, until the node is done with it."""

    __slots__ = ("__weakref__", "packed", "unpack")

    def __init__(self, packed: object, unpack: Hook) -> None:
        self.packed = packed
        self.unpack: Hook | None = unpack

    def let_go(self) -> None:
        """Free the packed object."""
        self.packed = self.unpack = None


@dataclass
class BackwardTask:
    """A backward that runs, as others may ask the engine about it."""

    number: int
    run: BackwardPass
    keeps_graph: bool
    takes_checkpoints: bool  # that run backward themselves
    callbacks: list[Callable[[], object]] = field(default_factory=list)


def edge_of(one: torch.Tensor | GradientEdge, roots: Sequence[Edge] = ()) -> Edge:
    """Return the edge of the graph that a tensor stands for."""
    if isinstance(one, GradientEdge):
        return one.node, one.output_nr
    edge = None
    with suppress(AttributeError):  # of what torch.func wrapped while it lasted
        edge = get_gradient_edge(one)
    if one.grad_fn is None and (edge is None or leaf_of(edge.node) is not one):
        # Torch asks a view, which is of what is wrapped.
        for node in reachable_nodes([root for root, _ in roots]):
            if leaf_of(node) is one:
                return node, 0
    if edge is None:  # nothing leads there
        edge = get_gradient_edge(torch.empty(0, requires_grad=True))
    return edge.node, edge.output_nr
