"""Divisions of the joint graph by minimum cuts: of least seconds, or of fewest bytes.

A division keeps values of forward, and backward computes from them what else it needs:
a value that backward needs is kept, or its op runs again, which needs its inputs.
Everything that Inductor fuses is free here.

At a price per byte kept, the cheapest division is a minimum cut. For every price, its
cost less the price of the bytes that may be kept bounds the contractions that run again
in any division (the Lagrange dual); the largest counts.

Where it is known which contractions and draws run again, a minimum cut of bytes alone
tells the fewest that spare the others: where a plan keeps the input of a layer and what
its last product makes, say, their sum is enough, of which a norm makes both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from torch import fx

from ckplan.compiling import nodes
from ckplan.compiling.handing import before_gradients, made_once
from ckplan.compiling.partition import JointGraph
from ckplan.solving.mincut import INFINITE, SINK, SOURCE, Network

_PER_SECOND = 10**21  # units of capacities
_LEAST_PRICE, _HIGHEST_PRICE = 1e-15, 1.0  # seconds per byte


class Cut(NamedTuple):
    """A division that costs least at some price of bytes."""

    kept_bytes: int
    seconds: float  # of ops that run again


class _Edge(NamedTuple):
    """An edge that is cut where a value is kept, or else where its op runs again."""

    node: fx.Node
    keeps: bool


class Cuts:
    """The divisions of a joint graph that cost least for what they keep."""

    def __init__(
        self,
        joint: JointGraph,
        seconds: Callable[[fx.Node], float],
        bytes_of: Callable[[fx.Node], int] = nodes.num_bytes,
    ) -> None:
        """Find none yet.

        Args:
            joint: The joint graph.
            seconds: Of a node that runs again; 0.0 if it is fused with others.
            bytes_of: What a node takes that forward saves.
        """
        graph, self._seconds = joint.module.graph, seconds
        self._bytes_of = bytes_of
        self._forward = {*before_gradients(graph)}
        self._values = [
            node
            for node in graph.nodes
            if node in self._forward
            and node.op in ("call_function", "get_attr")
            and not nodes.is_view(node)
        ]
        self._returned = {
            nodes.base_of(node).name
            for node in nodes.outputs(joint.forward.graph)[: joint.num_outputs]
        }
        changed = nodes.changed_inputs(graph)
        self._made_once = {one for one in self._values if made_once(one, changed)}
        self._network = Network()
        self._needed, self._again = dict[fx.Node, int](), dict[fx.Node, int]()
        self._edges: list[_Edge | None] = []  # None: it may not be cut
        self._wanted: list[fx.Node] = []  # by backward
        self._connect(graph)
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

    def narrowed(
        self,
        saved: Collection[str],
        nameable: Collection[str],
        draws_again: bool = True,
    ) -> frozenset[str]:
        """The fewest bytes for which no other contractions and draws run again.

        Of several such choices, the one whose values are nearest to backward: so no
        layer has to be made again from the values of one before it.

        Args:
            saved: Names of nodes that forward saves; no views.
            nameable: Names of nodes that it may save instead.
            draws_again: Whether draws run again where they do now; or none at all.

        Returns:
            Names of nodes.
        """
        again = self._run_again(saved)

        def capacity(edge: _Edge) -> int:
            node = edge.node
            if edge.keeps:
                can = node.name in nameable or node in self._made_once
                return self._bytes(node) if can else INFINITE
            if nodes.num_drawn(node) and not draws_again:
                return INFINITE
            fused = not nodes.is_alone(node) and not nodes.num_drawn(node)
            return 0 if fused or node in again else INFINITE

        kept, _ = self._divided(capacity)
        return frozenset(node.name for node in kept)

    def _run_again(self, saved: Collection[str]) -> set[fx.Node]:
        """What runs again in backward if forward saves the nodes named."""
        found: set[fx.Node] = set()
        todo = [*self._wanted]
        while todo:
            node = todo.pop()
            if node not in found and node.name not in saved:
                found.add(node)
                todo += self._bases(node)
        return found

    def _at(self, price: float) -> Cut:
        """The cheapest division if a kept byte costs so many seconds."""
        if price not in self._known:

            def capacity(edge: _Edge) -> int:
                if edge.keeps:
                    return round(price * self._bytes(edge.node) * _PER_SECOND)
                return round(self._seconds(edge.node) * _PER_SECOND)

            kept, again = self._divided(capacity)
            self._known[price] = Cut(
                sum(map(self._bytes, kept)), sum(map(self._seconds, again))
            )
        return self._known[price]

    def _divided(
        self, capacity: Callable[[_Edge], int]
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        """What is kept, and what runs again, under a minimum cut."""
        side = self._network.source_side(
            [INFINITE if edge is None else capacity(edge) for edge in self._edges]
        )
        needed = [one for one in self._values if side[self._needed[one]]]
        again = [one for one in self._values if side[self._again[one]]]
        return [one for one in needed if not side[self._again[one]]], again

    def _connect(self, graph: fx.Graph) -> None:
        for node in self._values:
            self._needed[node] = self._network.add_node()
            self._again[node] = self._network.add_node()
        for node in self._values:
            needed, again = self._needed[node], self._again[node]
            kept, ran = _Edge(node, keeps=True), _Edge(node, keeps=False)
            self._add(needed, again, kept if nodes.is_tensor(node) else None)
            self._add(again, SINK, None if node in self._made_once else ran)
            for base in self._bases(node):
                self._add(again, self._needed[base])
        backward = (n for n in nodes.ops_of(graph) if n not in self._forward)
        wanted = (base for node in backward for base in self._bases(node))
        self._wanted = [*dict.fromkeys(wanted)]
        for base in self._wanted:
            self._add(SOURCE, self._needed[base])

    def _bases(self, node: fx.Node) -> list[fx.Node]:
        bases = dict.fromkeys(map(nodes.base_of, node.all_input_nodes))
        return [base for base in bases if base in self._needed]

    def _add(self, tail: int, head: int, edge: _Edge | None = None) -> None:
        self._network.add_edge(tail, head)
        self._edges.append(edge)

    def _bytes(self, node: fx.Node) -> int:
        """Bytes that a kept value takes; what forward returns is there anyway."""
        return 0 if node.name in self._returned else self._bytes_of(node)
