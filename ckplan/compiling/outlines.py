"""Forward and backward of a division of the joint graph, as far as estimates need them.

They run the ops of torch's own division, in its order, but for that of the parts of a
tuple. To make them takes a tenth of the time. What is compiled, torch divides.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from torch import fx

from ckplan.compiling import nodes
from ckplan.compiling.handing import before_gradients, read_by_backward
from ckplan.compiling.masks import pack_masks
from ckplan.compiling.partition import JointGraph
from ckplan.compiling.torch_names import TANGENTS, module_of


def outlined(
    joint: JointGraph, saved: Collection[str], as_bits: bool = False
) -> JointGraph:
    """A joint graph divided so that forward saves the nodes named; not to be compiled.

    Args:
        joint: The joint graph.
        saved: Names of nodes of forward. Those that backward does not need are not
            saved.
        as_bits: Whether masks are saved as bits.
    """
    graph, count = joint.module.graph, joint.num_outputs
    read = read_by_backward(graph, saved)
    handed = [node for node in graph.nodes if node in read]
    returned = nodes.returned(graph)
    forward = _forward(graph, [*returned[:count], *handed])
    backward = _backward(graph, returned[count:], handed)
    parts = module_of(forward, joint.module), module_of(backward, joint.module)
    if as_bits:
        pack_masks(parts, count)
    return replace(joint, forward=parts[0], backward=parts[1])


def _forward(graph: fx.Graph, returned: Sequence[object]) -> fx.Graph:
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    ours = [*before_gradients(graph)]
    changes = [node for node in ours if nodes.name_of_op(node) == "copy_"]
    needed = _needed([*filter(_is_node, returned), *changes], ())
    for node in ours:
        if node in needed or node.op == "placeholder":
            copies[node] = nodes.copied(node, made, copies)
    made.output(fx.map_arg(tuple(returned), copies.__getitem__))
    return made


def _backward(
    graph: fx.Graph, returned: Sequence[object], handed: Sequence[fx.Node]
) -> fx.Graph:
    """Each gradient in order, and what forward made of it just before its first use."""
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    needed = _needed(filter(_is_node, returned), handed)
    inputs = graph.find_nodes(op="placeholder")
    tangents = [node for node in inputs if node.name.startswith(TANGENTS)]
    for node in (*handed, *(n for n in inputs if n in needed), *tangents):
        if node not in copies:
            copies[node] = made.placeholder(node.name)
            copies[node].meta = node.meta
    order = {node: number for number, node in enumerate(graph.nodes)}
    users = [order[user] for node in tangents for user in node.users]
    for node in [*graph.nodes][min(users, default=0) :]:
        before = _needed([node] if node in needed else [], copies)
        for one in sorted(before, key=order.__getitem__):
            parts = (user for user in one.users if user.target is operator.getitem)
            for new in (one, *parts):
                if new in needed and new not in copies:
                    copies[new] = nodes.copied(new, made, copies)
    made.output(fx.map_arg(tuple(returned), copies.__getitem__))
    return made


def _needed(wanted: Iterable[fx.Node], known: Collection[fx.Node]) -> set[fx.Node]:
    """Nodes and all that they are made of, as far as it is not known."""
    found: set[fx.Node] = set()
    todo = [*wanted]
    while todo:
        node = todo.pop()
        if node not in found and node not in known:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _is_node(value: object) -> bool:
    return isinstance(value, fx.Node)
