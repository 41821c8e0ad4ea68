"""Contractions that backward runs again at least, whatever forward saves.

A division keeps values of forward, and backward computes from them what else it needs.
At a price per byte kept, the cheapest division is a minimum cut of the joint graph: a
value that backward needs is kept, or its op runs again, which needs its inputs. For
every price, its cost less the price of the bytes that may be kept is a lower bound (the
Lagrange dual); the largest counts. Everything that Inductor fuses is free here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import fx

from ckplan.compiling import nodes
from ckplan.compiling.partition import JointGraph, before_gradients, made_once
from ckplan.solving.mincut import INFINITE, SINK, SOURCE, Network

_PER_SECOND = 10**21  # units of capacities
_LEAST_PRICE, _HIGHEST_PRICE = 1e-15, 1.0  # seconds per byte


class Cut(NamedTuple):
    """A division that costs least at some price of bytes."""

    kept_bytes: int
    seconds: float  # of ops that run again


class _Edge(NamedTuple):
    """What cutting an edge costs: bytes that have a price, and units of seconds."""

    kept_bytes: int = 0
    units: int = 0


class Cuts:
    """The divisions of a joint graph that cost least for what they keep."""

    def __init__(self, joint: JointGraph, seconds: Callable[[fx.Node], float]) -> None:
        """Find none yet.

        Args:
            joint: The joint graph.
            seconds: Of a node that runs again; 0.0 if it is fused with others.
        """
        graph, self._seconds = joint.module.graph, seconds
        forward = {*before_gradients(graph)}
        self._values = [
            node
            for node in graph.nodes
            if node in forward
            and node.op in ("call_function", "get_attr")
            and not nodes.is_view(node)
        ]
        self._returned = {
            nodes.base_of(node).name
            for node in nodes.outputs(joint.forward.graph)[: joint.num_outputs]
        }
        self._network = Network()
        self._needed, self._again = dict[fx.Node, int](), dict[fx.Node, int]()
        self._edges: list[_Edge | None] = []  # None: it may not be cut
        self._connect(graph, forward)
        self._known: dict[float, Cut] = {}

    def seconds_at_least(self, kept_bytes: int) -> float:
        """Seconds that run again in any division that keeps no more bytes."""
        least, most = self._at(_HIGHEST_PRICE), self._at(_LEAST_PRICE)
        if most.kept_bytes <= kept_bytes:
            return most.seconds
        if least.kept_bytes >= kept_bytes:
            return least.seconds
        while True:  # the line through two divisions, until no other is below it
            price = (least.seconds - most.seconds) / (
                most.kept_bytes - least.kept_bytes
            )
            line = most.seconds + price * (most.kept_bytes - kept_bytes)
            between = self._at(price)
            cost = between.seconds + price * (between.kept_bytes - kept_bytes)
            if cost >= line * (1 - 1e-9) or between in (least, most):
                return line
            if between.kept_bytes > kept_bytes:
                most = between
            else:
                least = between

    def _at(self, price: float) -> Cut:
        """The cheapest division if a kept byte costs so many seconds."""
        if price not in self._known:
            capacities = [
                INFINITE
                if edge is None
                else round(price * edge.kept_bytes * _PER_SECOND) + edge.units
                for edge in self._edges
            ]
            side = self._network.source_side(capacities)
            again = [one for one in self._values if side[self._again[one]]]
            kept = (
                one
                for one in self._values
                if side[self._needed[one]] and not side[self._again[one]]
            )
            self._known[price] = Cut(
                sum(map(self._bytes, kept)), sum(map(self._seconds, again))
            )
        return self._known[price]

    def _connect(self, graph: fx.Graph, forward: set[fx.Node]) -> None:
        changed = nodes.changed_inputs(graph)
        for node in self._values:
            self._needed[node] = self._network.add_node()
            self._again[node] = self._network.add_node()
        for node in self._values:
            needed, again = self._needed[node], self._again[node]
            kept = _Edge(kept_bytes=self._bytes(node))
            ran = _Edge(units=round(self._seconds(node) * _PER_SECOND))
            self._add(needed, again, kept if nodes.is_tensor(node) else None)
            self._add(again, SINK, None if made_once(node, changed) else ran)
            for base in self._bases(node):
                self._add(again, self._needed[base])
        backward = (n for n in nodes.ops_of(graph) if n not in forward)
        wanted = (base for node in backward for base in self._bases(node))
        for base in dict.fromkeys(wanted):
            self._add(SOURCE, self._needed[base])

    def _bases(self, node: fx.Node) -> list[fx.Node]:
        bases = dict.fromkeys(map(nodes.base_of, node.all_input_nodes))
        return [base for base in bases if base in self._needed]

    def _add(self, tail: int, head: int, edge: _Edge | None = None) -> None:
        self._network.add_edge(tail, head)
        self._edges.append(edge)

    def _bytes(self, node: fx.Node) -> int:
        """Bytes that a kept value takes; what forward returns is there anyway."""
        return 0 if node.name in self._returned else nodes.num_bytes(node)
