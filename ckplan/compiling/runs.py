"""Divide a graph of forward or backward into runs of nodes that Inductor can fuse."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

from torch import fx

from ckplan.compiling import nodes


def runs_of(graph: fx.Graph, joins_constants: bool) -> Iterator[list[fx.Node]]:
    """Runs of consecutive nodes of one module that Inductor can fuse.

    A node without modules, such as one that Inductor added, joins the run before it. So
    may a constant: equal ones are one node, with the modules of its first use.
    Runs of views and numbers alone are left out.
    """
    run: list[fx.Node] = []
    of_run: object = None
    around: nodes.Modules = ()
    for node in nodes.ops_of(graph):
        if node.all_input_nodes or not joins_constants:
            around = nodes.modules_around(node) or around
        alone = nodes.is_alone(node) and node
        if node.target is operator.getitem and node.args[0] in run:
            key = of_run  # an output of the node before it
        else:
            key = (around, alone)
        if key != of_run and run:
            yield from _with_bytes(run)
            run = []
        run.append(node)
        of_run = key
    yield from _with_bytes(run)


def _with_bytes(run: list[fx.Node]) -> Iterator[list[fx.Node]]:
    if any(nodes.num_bytes(node) and not nodes.is_view(node) for node in run):
        yield run


def main_of(run: Sequence[fx.Node]) -> fx.Node:
    """The node that a run is named after: a contraction, else the first kernel."""
    alone = (node for node in run if nodes.is_alone(node))
    made = (node for node in run if not nodes.is_view(node))
    return next(alone, None) or next(made)


def leaves(node: fx.Node, run: set[fx.Node]) -> bool:
    """Whether a node outside the run uses a node's value or a view of it."""
    seen, todo = {node}, [node]
    while todo:
        for user in todo.pop().users:
            if nodes.is_view(user):
                if user not in seen:
                    seen.add(user)
                    todo.append(user)
            elif user not in run:
                return True
    return False
