"""Estimates which nodes Inductor fuses to one kernel, and what crosses kernels.

Nodes between the same contractions are one kernel if one reads what the other makes, or
if both read the same values, one by one. What crosses kernels is written once, and read
once by each. Inductor decides by more than that; its own code is what is replayed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator

from torch import fx

from ckplan.compiling import nodes
from ckplan.compiling.masks import is_mask, num_packed

_SMALL = 64  # bytes, such as of a seed


class Kernels:
    """The kernels of one graph of forward or backward."""

    def __init__(self, graph: fx.Graph) -> None:
        """Group the nodes of a graph."""
        self._joined: dict[fx.Node, fx.Node] = {}  # towards the first of its kernel
        self._depth = _depths(graph)
        readers: dict[tuple[fx.Node, int], fx.Node] = {}
        for node in nodes.ops_of(graph):
            self._join_inputs(node, readers)
        self._bytes, self._first = dict[fx.Node, int](), set[fx.Node]()
        self._truths, self._bits = dict[fx.Node, int](), dict[fx.Node, int]()
        seen: set[fx.Node] = set()
        read: set[tuple[fx.Node, fx.Node]] = set()
        for node in nodes.ops_of(graph):
            if nodes.is_view(node):
                continue
            kernel = self._kernel(node)
            if kernel not in seen:
                seen.add(kernel)
                self._first.add(node)
            others = {*map(nodes.base_of, node.all_input_nodes)}
            new = {(kernel, one) for one in others if self._kernel(one) is not kernel}
            new -= read
            read |= new
            moved = sum(nodes.num_bytes(one) for _, one in new)
            kept = [one for _, one in new if one.op == "placeholder"]
            self._truths[node] = sum(map(nodes.numel, filter(is_mask, kept)))
            self._bits[node] = sum(map(num_packed, kept))
            leaves = nodes.is_tensor(node) and self._leaves(node)
            self._bytes[node] = moved + (nodes.num_bytes(node) if leaves else 0)

    def crossing_bytes(self, run: Iterable[fx.Node]) -> int:
        """Bytes that nodes read first in their kernel, and that leave it."""
        return sum(self._bytes.get(node, 0) for node in run)

    def truths_read(self, run: Iterable[fx.Node]) -> int:
        """Truth values that nodes read first in their kernel, of those of a mask kept.

        One that is drawn in the same graph is used where it is drawn.
        """
        return sum(self._truths.get(node, 0) for node in run)

    def bits_read(self, run: Iterable[fx.Node]) -> int:
        """The same of the truth values of masks that are kept as bits."""
        return sum(self._bits.get(node, 0) for node in run)

    def launches(self, run: Iterable[fx.Node]) -> int:
        """How many kernels begin among nodes."""
        return sum(node in self._first for node in run)

    def _join_inputs(
        self, node: fx.Node, readers: dict[tuple[fx.Node, int], fx.Node]
    ) -> None:
        if nodes.is_view(node) or nodes.is_alone(node):
            return
        part_of, depth = node.target is operator.getitem, self._depth[node]
        for base in dict.fromkeys(map(nodes.base_of, node.all_input_nodes)):
            here = self._depth.get(base) == depth
            if part_of or (here and not _is_of_contraction(base)):
                self._join(node, base)
            if not part_of and nodes.numel(base) == nodes.numel(node):
                self._join(node, readers.setdefault((base, depth), node))

    def _kernel(self, node: fx.Node) -> fx.Node:
        while self._joined.get(node, node) is not node:
            node = self._joined[node]
        return node

    def _join(self, node: fx.Node, other: fx.Node) -> None:
        one, first = self._kernel(node), self._kernel(other)
        if one is not first:
            self._joined[one] = first

    def _leaves(self, node: fx.Node) -> bool:
        kernel = self._kernel(node)
        return any(
            user.op == "output" or self._kernel(user) is not kernel
            for user in _users(node)
        )


def stores_mask(node: fx.Node) -> bool:
    """Whether a graph of generated code returns a node's truth values."""
    return is_mask(node) and any(user.op == "output" for user in _users(node))


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """What uses a node or a view of it."""
    for user in node.users:
        if nodes.is_view(user):
            yield from _users(user)
        else:
            yield user


def _depths(graph: fx.Graph) -> dict[fx.Node, int]:
    """The most contractions on a path to each node.

    What no tensor is needed for, such as random numbers, is made where it is used, and
    there bits of masks are read.
    """
    found: dict[fx.Node, int] = {}
    free: dict[fx.Node, None] = {}
    for node in nodes.ops_of(graph):
        given = [one for one in node.all_input_nodes if not _is_small(one)]
        if all(one in free for one in given):
            free[node] = None
        depth = max((found.get(one, 0) for one in given), default=0)
        found[node] = depth + nodes.is_alone(node)
    for node in reversed(free):
        at = [found[one] for one in node.users if one in found]
        found[node] = min(at, default=0)
    return found


def _is_small(node: fx.Node) -> bool:
    return nodes.num_bytes(node) <= _SMALL or num_packed(node) > 0


def _is_of_contraction(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        made = node.args[0]
        return isinstance(made, fx.Node) and nodes.is_alone(made)
    return nodes.is_alone(node)
