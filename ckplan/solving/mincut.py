"""Minimum s-t cut by Dinic's algorithm, on integer capacities of any size.

E. A. Dinic, "Algorithm for solution of a problem of maximum flow in networks with power
estimation", Soviet Mathematics Doklady 11 (1970). Networks here have hundreds to
thousands of nodes and are nearly acyclic, so few phases are needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

SOURCE, SINK = 0, 1
INFINITE = -1
"""Capacity of an edge that may not be cut."""


class Network:
    """A directed network whose capacities may be set anew for every cut."""

    def __init__(self) -> None:
        self._heads: list[int] = []  # edge -> node; edge ^ 1 is its reverse
        self._edges: list[list[int]] = [[], []]  # node -> edges

    def add_node(self) -> int:
        """A new node; ``SOURCE`` and ``SINK`` are there already."""
        self._edges.append([])
        return len(self._edges) - 1

    def add_edge(self, tail: int, head: int) -> int:
        """A new edge; returns its position in the capacities of ``source_side``."""
        edge = len(self._heads)
        self._heads += (head, tail)
        self._edges[tail].append(edge)
        self._edges[head].append(edge + 1)
        return edge // 2

    def source_side(self, capacities: Sequence[int]) -> list[bool]:
        """The smallest source side of a minimum cut, as a flag for every node.

        Args:
            capacities: One for each edge, in order; ``INFINITE`` for no limit.
        """
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

        It stops at the sink: what is as far lies on no shortest path.
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
                flow = min(left[edge] for edge in path)
                cut = 0
                for place in range(len(path) - 1, -1, -1):
                    left[path[place]] -= flow
                    left[path[place] ^ 1] += flow
                    if not left[path[place]]:
                        cut = place
                node = heads[path[cut] ^ 1]
                del path[cut:]
                continue
            while tried[node] < len(edges[node]):
                edge = edges[node][tried[node]]
                if left[edge] and level[heads[edge]] == level[node] + 1:
                    break
                tried[node] += 1
            else:
                if not path:
                    return
                node = heads[path.pop() ^ 1]
                tried[node] += 1
                continue
            path.append(edge)
            node = heads[edge]
