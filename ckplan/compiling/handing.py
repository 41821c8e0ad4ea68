"""What forward hands to backward: which nodes it may need, and how many bytes.

Nodes of a joint graph that need no gradient are forward's. Backward reads some of them,
saved or computed again; what is drawn, or made of what forward changes, only saved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from torch import fx

from ckplan.compiling import nodes
from ckplan.compiling.torch_names import TANGENTS


def before_gradients(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that need no gradient, in order: all of forward."""
    after: set[fx.Node] = set()
    for node in graph.nodes:
        is_gradient = node.op == "placeholder" and node.name.startswith(TANGENTS)
        if is_gradient or not after.isdisjoint(node.all_input_nodes):
            after.add(node)
        else:
            yield node


def read_by_backward(graph: fx.Graph, saved: Collection[str]) -> set[fx.Node]:
    """What a division that saves the nodes named hands to backward, without inputs.

    Of what is named, backward may need only some.
    """
    changed, forward = nodes.changed_inputs(graph), {*before_gradients(graph)}
    seen: set[fx.Node] = set()
    found: set[fx.Node] = set()
    todo = [node for node in graph.nodes if node not in forward]
    while todo:
        for node in todo.pop().all_input_nodes:
            if node in seen or node not in forward or node.op == "placeholder":
                continue
            seen.add(node)
            if node.name in saved or made_once(node, changed):
                found.add(node)
            else:
                todo.append(node)
    return found


def bytes_handed(
    graph: fx.Graph,
    saved: Collection[str],
    bytes_of: Callable[[fx.Node], int] = nodes.num_bytes,
) -> int:
    """Bytes that a division hands to backward at least, without inputs.

    Of what makes several tensors, or has views, those count that backward reads.

    Args:
        graph: Of the joint graph.
        saved: Names of nodes that forward saves.
        bytes_of: What a saved node takes.
    """
    found: dict[fx.Node, int] = {}
    for node in read_by_backward(graph, saved):
        base = nodes.base_of(node)
        if base.op != "placeholder":  # some views of others are expanded
            num_bytes = min(map(bytes_of, (node, base)))
            found[base] = max(found.get(base, 0), num_bytes)
    return sum(found.values())


def made_once(node: fx.Node, changed: Collection[fx.Node]) -> bool:
    """Whether backward could not make the value again: drawn, or its input is gone."""
    return _runs_once(node, changed) or any(
        _runs_once(one, changed)
        for one in node.all_input_nodes
        if not nodes.is_tensor(one)
    )


def _runs_once(node: fx.Node, changed: Collection[fx.Node]) -> bool:
    if nodes.is_draw(node):
        return True
    bases = map(nodes.base_of, node.all_input_nodes)
    return not nodes.is_view(node) and any(base in changed for base in bases)
