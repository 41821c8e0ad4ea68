"""Minimum s-t cut by Dinic's algorithm, on integer capacities of any size.

E. A. Dinic, "Algorithm for solution of a problem of maximum flow in networks with power
estimation", Soviet Mathematics Doklady 11 (1970). Networks here are nearly acyclic, so
few phases are needed. Parts that are connected only by source and sink are cut
separately, and equal parts are cut once: a model of many equal layers costs as much as
one layer.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SOURCE, SINK = 0, 1
INFINITE = -1
"""Capacity of an edge that may not be cut."""


class Network:
    """A directed network; every cut has its own capacities."""

    def __init__(self) -> None:
        self.edges: list[tuple[int, int]] = []  # tail, head
        self._num_nodes = 2
        self._parts: list[_Part] = []  # empty after an edge was added

    def add_node(self) -> int:
        """Add a node and return it; ``SOURCE`` and ``SINK`` exist from the start."""
        self._num_nodes += 1
        return self._num_nodes - 1

    def add_edge(self, tail: int, head: int) -> None:
        """Add an edge; the capacities of ``source_side`` are in order of addition."""
        self.edges.append((tail, head))
        self._parts = []

    def source_side(self, capacities: Sequence[int]) -> list[bool]:
        """The smallest source side of a minimum cut, as a flag for every node.

        Args:
            capacities: One for each edge, in order; ``INFINITE`` for no limit.
        """
        self._parts = self._parts or self._divide()
        found: dict[tuple[_Shape, tuple[int, ...]], list[bool]] = {}
        sides = [False] * self._num_nodes
        sides[SOURCE] = True
        for part in self._parts:
            own = tuple([capacities[edge] for edge in part.edges])
            if (part.shape, own) not in found:
                found[part.shape, own] = part.shape.source_side(own)
            local = found[part.shape, own]
            for node, side in zip(part.nodes, local[SINK + 1 :], strict=True):
                sides[node] = side
        return sides

    def _divide(self) -> list[_Part]:
        """The connected parts without source and sink, in order of their first node.

        This does not use networkx, whose import would delay ``solve``.
        """
        leader = list(range(self._num_nodes))

        def find(node: int) -> int:
            while leader[node] != node:
                leader[node] = node = leader[leader[node]]
            return node

        for edge in self.edges:
            if SOURCE not in edge and SINK not in edge:
                one, other = map(find, edge)
                leader[max(one, other)] = min(one, other)
        nodes: dict[int, list[int]] = defaultdict(list)
        for node in range(SINK + 1, self._num_nodes):
            nodes[find(node)].append(node)
        edges: dict[int, list[int]] = defaultdict(list)
        for number, edge in enumerate(self.edges):
            inner = max(edge)  # source and sink have the smallest numbers
            if inner > SINK:
                edges[find(inner)].append(number)
        shapes: dict[tuple[tuple[int, int], ...], _Shape] = {}
        return [self._part(own, edges[first], shapes) for first, own in nodes.items()]

    def _part(
        self,
        nodes: list[int],
        edges: list[int],
        shapes: dict[tuple[tuple[int, int], ...], _Shape],
    ) -> _Part:
        number = {node: place for place, node in enumerate((SOURCE, SINK, *nodes))}
        local = tuple(
            [
                (number[tail], number[head])
                for tail, head in (self.edges[edge] for edge in edges)
            ]
        )
        if local not in shapes:
            shapes[local] = _Shape(len(number), local)
        return _Part(tuple(nodes), tuple(edges), shapes[local])


@dataclass(frozen=True, slots=True)
class _Part:
    """Nodes and edges that reach other parts only through source and sink."""

    nodes: tuple[int, ...]
    edges: tuple[int, ...]
    shape: _Shape


class _Shape:
    """A network that equal parts share."""

    def __init__(self, num_nodes: int, edges: Iterable[tuple[int, int]]) -> None:
        self._heads: list[int] = []  # edge -> node; edge ^ 1 is its reverse
        self._edges: list[list[int]] = [[] for _ in range(num_nodes)]  # of a node
        for tail, head in edges:
            edge = len(self._heads)
            self._heads += (head, tail)
            self._edges[tail].append(edge)
            self._edges[head].append(edge + 1)

    def source_side(self, capacities: Sequence[int]) -> list[bool]:
        """The smallest source side of a minimum cut; see ``Network.source_side``."""
        infinite = 1 + sum(c for c in capacities if c != INFINITE)
        left: list[int] = []
        for capacity in capacities:
            left += (infinite if capacity == INFINITE else capacity, 0)
        while True:
            level = self._levels(left)
            if level[SINK] < 0:
                return [depth >= 0 for depth in level]
            self._block(left, level)

    def _levels(self, left: list[int]) -> list[int]:
        """Distance from the source over edges with capacity left; -1 if none.

        The search stops at the sink: nodes as far away lie on no shortest path.
        """
        heads = self._heads
        level = [-1] * len(self._edges)
        level[SOURCE] = 0
        queue = deque((SOURCE,))
        while queue:
            node = queue.popleft()
            after = level[node] + 1
            for edge in self._edges[node]:
                head = heads[edge]
                if level[head] < 0 and left[edge]:
                    level[head] = after
                    if head == SINK:
                        return level
                    queue.append(head)
        return level

    def _block(self, left: list[int], level: list[int]) -> None:
        """Saturate every shortest path: a blocking flow, by depth-first search."""
        heads, edges = self._heads, self._edges
        tried = [0] * len(edges)
        path: list[int] = []
        node = SOURCE
        while True:
            if node == SINK:
                flow = min([left[edge] for edge in path])
                cut = 0
                for place in range(len(path) - 1, -1, -1):
                    left[path[place]] -= flow
                    left[path[place] ^ 1] += flow
                    if not left[path[place]]:
                        cut = place
                node = heads[path[cut] ^ 1]
                del path[cut:]
                continue
            own, after = edges[node], level[node] + 1
            for place in range(tried[node], len(own)):
                edge = own[place]
                if left[edge] and level[heads[edge]] == after:
                    tried[node] = place
                    path.append(edge)
                    node = heads[edge]
                    break
            else:
                if not path:
                    return
                node = heads[path.pop() ^ 1]
                tried[node] += 1
