"""The values of a forward to keep: a closure problem, solved by minimum cuts.

    min  sum t_o z_o + sum c_v e_v + price * (sum b_v y_v + sum s_v e_v)
    s.t. y_v + e_v + z_w >= 1      for every value v that backward needs, w its maker
         y_v + e_v + z_w >= z_o    for every input v of op o, w its maker
         0 <= y, e, z <= 1;        a value overwritten in place has y = 0

y: the value is kept; e: it is kept in a smaller form of s bytes, which takes c seconds
to encode and decode; z: the op is recomputed. The constraints are those of a minimum
cut, so the optimum is integral at every price. The optima over all prices are the lower
convex hull of (bytes kept, recompute seconds). With the bytes of the whole forward they
are the lower bound of ``bound.py``; with those of one unit, the options of ``menu.py``.

With several moments, every moment has its own variables, and an op recomputed after a
later moment is also recomputed after the first: z'_o <= z_o. Seconds are those of the
first moment; bytes are a weighted sum over moments.

Network: source -> needed value (uncuttable), value -> coded value (cut: encoded,
price * s + c), coded value -> its maker (cut: kept, price * b), op -> its inputs
(uncuttable), op -> sink (cut: recomputed, t). External values have an edge to the sink
(cut: retained, price * b; uncuttable if the forward overwrote them). A copy is a value
that was overwritten and is alive again because its maker was recomputed earlier. It
saves the maker's inputs but not its seconds, so op -> sink becomes op -> ran -> sink,
with copy -> ran uncuttable and copy -> op (cut: alive, price * b). An op of a later
moment has an uncuttable edge to itself at the first moment instead of one to the sink.
A one-time cost is due if a needed value is not kept: value -> gone (cut: kept) comes
first, then gone -> cost (uncuttable) -> sink (cut: paid).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckplan.graph.records import Encoding
from ckplan.simulating.program import EXTERNAL, Flow
from ckplan.solving.mincut import INFINITE, SINK, SOURCE, Network

NANOSECOND = 1e-9


@dataclass(frozen=True, slots=True)
class Demand:
    """The values that must be available after one moment, and their bytes."""

    needed: Sequence[int]  # values that backward reads afterwards
    bytes_of: Mapping[int, int]
    """Bytes that keeping a value costs: 0 for a value that is alive in any case. Values
    that cannot be kept are missing."""
    copies: Collection[
        int
    ] = ()  # values of bytes_of that are alive after their maker reran
    weight: int = 1  # factor of its bytes in the sum
    one_time_costs_of: Mapping[int, Collection[int]] = field(default_factory=dict)
    """Needed value -> numbers of the one-time costs that are due if it is not kept."""


class OneTimeCost(NamedTuple):
    """A cost in nanoseconds that is paid once, however many values cause it."""

    nanoseconds: int
    others: Sequence[int] = ()  # numbers of costs due with it


@dataclass(frozen=True, slots=True)
class SavedSet:
    """A set of values to keep, and its cost in bytes and nanoseconds."""

    kept: frozenset[int]  # at the first moment
    encoded: frozenset[int]  # kept in a smaller form at the first moment
    kept_bytes: int  # weighted sum over moments
    nanoseconds: int  # of recomputed ops, and of encoding and decoding


_MAX_STATES_PER_SET = 16  # partial choices visited, per choice to list
_Choice = tuple[frozenset[int], frozenset[int], int, int]  # fields of a SavedSet


class ClosureProblem:
    """The closure problem of one flow, solved at many prices."""

    def __init__(
        self,
        flow: Flow,
        demands: Sequence[Demand],
        nanoseconds: Callable[[int], int],
        encodings: Mapping[int, Encoding] | None = None,
        one_time_costs: Sequence[OneTimeCost] = (),
    ) -> None:
        """Build the network.

        Args:
            flow: A complete forward.
            demands: One for every moment, earliest first. The first one contains the
                needed values of all others.
            nanoseconds: Cost of recomputing a step of the flow.
            encodings: Encodings by the value that each can replace.
            one_time_costs: The costs that demands refer to by index.
        """
        self._network = Network()
        self._costs: list[tuple[int, int] | None] = []  # edge -> bytes, nanoseconds
        self._nodes: dict[tuple[str, int, int], int] = {}  # kind, moment, item
        self._flow = flow
        self._demands = demands
        self._encodings = encodings or {}
        self._one_time_costs = one_time_costs
        self._times: dict[int, int] = {}
        for moment in range(len(demands)):
            for value, readers in self._add_steps(moment, nanoseconds).items():
                self._add_value(moment, value, readers)

    def _add_steps(
        self, moment: int, nanoseconds: Callable[[int], int]
    ) -> dict[int, list[int]]:
        """Add the steps that can be recomputed; return the readers of each value."""
        flow, demand = self._flow, self._demands[moment]
        needed = dict.fromkeys(demand.needed)
        readers = {value: [SOURCE] for value in needed}
        stack = [flow.maker_of[value] for value in needed]
        while stack:
            step = stack.pop()
            if step == EXTERNAL or ("step", moment, step) in self._nodes:
                continue
            node = self._node("step", moment, step)
            if moment:
                self._edge(node, self._node("step", 0, step), None)
            else:
                self._times[step] = nanoseconds(step)
                ran = node
                if any(value in demand.copies for value in flow.outputs[step]):
                    ran = self._node("ran", moment, step)
                    self._edge(node, ran, None)
                self._edge(ran, SINK, (0, self._times[step]))
            for read in flow.inputs[step]:
                if read not in needed:  # needed values are available anyway
                    readers.setdefault(read, []).append(node)
                stack.append(flow.maker_of[read])
        return readers

    def _add_value(self, moment: int, value: int, readers: Sequence[int]) -> None:
        """Add a value; a value with one reader is on its side of every cut."""
        demand = self._demands[moment]
        if len(readers) == 1:
            node = self._nodes["value", moment, value] = readers[0]
        else:
            node = self._node("value", moment, value)
            for reader in readers:
                self._edge(reader, node, None)
        known = value in demand.bytes_of
        keep = (demand.weight * demand.bytes_of[value], 0) if known else None
        maker = self._flow.maker_of[value]
        if maker == EXTERNAL:
            self._edge(node, SINK, keep)
            return
        if value in demand.one_time_costs_of:
            gone = self._node("gone", moment, value)
            self._edge(node, gone, keep)
            for number in demand.one_time_costs_of[value]:
                self._edge(gone, self._add_one_time_cost(number), None)
            node, keep = gone, None
        if value in self._encodings:
            coded = self._node("coded", moment, value)
            size = demand.weight * self._encodings[value].bytes
            self._edge(node, coded, (size, 0 if moment else self._coding_time(value)))
            node = coded
        if value in demand.copies and not moment:
            self._edge(node, self._node("ran", moment, maker), None)
        self._edge(node, self._node("step", moment, maker), keep)

    def _add_one_time_cost(self, number: int) -> int:
        """Add a cost and those due with it, if they are new; return its node."""
        if ("cost", 0, number) in self._nodes:
            return self._nodes["cost", 0, number]
        node, cost = self._node("cost", 0, number), self._one_time_costs[number]
        if cost.nanoseconds:
            self._edge(node, SINK, (0, cost.nanoseconds))
        for other in cost.others:
            self._edge(node, self._add_one_time_cost(other), None)
        return node

    def solve(self, nanoseconds: int, num_bytes: int) -> SavedSet:
        """The optimum at the price of ``nanoseconds`` per ``num_bytes``."""
        capacities = [
            INFINITE if cost is None else cost[0] * nanoseconds + cost[1] * num_bytes
            for cost in self._costs
        ]
        return self._read(self._network.source_side(capacities))

    def fastest(self) -> SavedSet:
        """Fewest recompute seconds, then fewest bytes."""
        most = sum(cost[0] for cost in self._costs if cost)
        return self.solve(1, 1 + most)

    def smallest(self) -> SavedSet:
        """Fewest bytes kept, then fewest seconds."""
        most = sum(cost[1] for cost in self._costs if cost)
        return self.solve(1 + most, 1)

    def hull(self, most_cuts: int) -> list[SavedSet]:
        """Vertices of the lower convex hull, fewest seconds first.

        Args:
            most_cuts: Most cuts to compute, widest gaps in seconds first.
        """
        fast, small = self.fastest(), self.smallest()
        found = [fast] if small.kept_bytes >= fast.kept_bytes else [fast, small]
        gaps = [(0, 0, fast, small)]
        for cut in range(most_cuts):
            if not gaps:
                break
            _, _, fast, small = heapq.heappop(gaps)
            middle = self.vertex_between(fast, small)
            if middle is not None:
                found.append(middle)
                for a, b in ((fast, middle), (middle, small)):
                    gain = a.nanoseconds - b.nanoseconds
                    heapq.heappush(gaps, (gain, 2 * cut + (a is fast), a, b))
        return sorted(found, key=lambda choice: (choice.nanoseconds, choice.kept_bytes))

    def enumerate_all(self, most: int) -> list[SavedSet]:
        """All choices without idle parts at one moment, fewest seconds first.

        From the last op back, every needed value is kept, kept in a smaller form, or
        recomputed, which adds its maker's inputs to the needed values.

        Args:
            most: Most choices to list; the result is empty if there are more.
        """
        makers = self._flow.maker_of
        (demand,) = self._demands
        rank = [0] * len(makers)
        in_order = sorted(range(len(makers)), key=makers.__getitem__)
        for place, value in enumerate(in_order):
            rank[value] = place
        found: dict[_Choice, None] = {}
        none = frozenset[int]()
        stack = [(frozenset(demand.needed), none, (none, none, 0, 0))]
        looked_at = 0
        while stack and len(found) <= most:
            looked_at += 1
            if (
                looked_at > _MAX_STATES_PER_SET * most
            ):  # too many partial choices: few values can be kept
                return []
            needed, ran, choice = stack.pop()
            if not needed:
                found[choice] = None
                continue
            value = max(needed, key=rank.__getitem__)
            maker, left = makers[value], needed - {value}
            kept, encoded, num_bytes, taken = choice
            if value in demand.bytes_of:
                now = kept if maker == EXTERNAL else kept | {value}
                more = num_bytes + demand.bytes_of[value]
                stack.append((left, ran, (now, encoded, more, taken)))
            if value in self._encodings:
                more = num_bytes + self._encodings[value].bytes
                later = taken + self._coding_time(value)
                stack.append((left, ran, (kept, encoded | {value}, more, later)))
            if maker in ran:
                stack.append((left, ran, choice))
            elif maker != EXTERNAL:
                inputs, later = self._flow.inputs[maker], taken + self._times[maker]
                rerun = kept, encoded, num_bytes, later
                stack.append((left.union(inputs), ran | {maker}, rerun))
        if len(found) > most:
            return []
        sets = [SavedSet(*choice) for choice in found]
        return sorted(sets, key=lambda c: (c.nanoseconds, c.kept_bytes))

    def vertex_between(self, fast: SavedSet, small: SavedSet) -> SavedSet | None:
        """A vertex below the line through two others; None if there is none."""
        seconds = small.nanoseconds - fast.nanoseconds
        saved = fast.kept_bytes - small.kept_bytes
        if seconds <= 0 or saved <= 0:
            return None
        middle = self.solve(seconds, saved)
        line = seconds * fast.kept_bytes + saved * fast.nanoseconds
        below = seconds * middle.kept_bytes + saved * middle.nanoseconds < line
        return middle if below else None

    def _read(self, source_side: list[bool]) -> SavedSet:
        kept: set[int] = set()
        encoded: set[int] = set()
        for (kind, moment, item), node in self._nodes.items():
            if kind != "value" or moment or not source_side[node]:
                continue
            maker = self._flow.maker_of[item]
            coded = self._nodes.get(("coded", moment, item))
            gone = self._nodes.get(("gone", moment, item))
            if gone is not None and not source_side[gone]:
                kept.add(item)
            elif coded is not None and not source_side[coded]:
                encoded.add(item)
            elif maker != EXTERNAL and not source_side[self._nodes["step", 0, maker]]:
                kept.add(item)
        cut = [
            cost
            for cost, (tail, head) in zip(self._costs, self._network.edges, strict=True)
            if cost and source_side[tail] and not source_side[head]
        ]
        return SavedSet(
            frozenset(kept),
            frozenset(encoded),
            sum(size for size, _ in cut),
            sum(time for _, time in cut),
        )

    def _coding_time(self, value: int) -> int:
        return round(self._encodings[value].seconds / NANOSECOND)

    def _node(self, kind: str, moment: int, item: int) -> int:
        key = (kind, moment, item)
        if key not in self._nodes:
            self._nodes[key] = self._network.add_node()
        return self._nodes[key]

    def _edge(self, tail: int, head: int, cost: tuple[int, int] | None) -> None:
        self._network.add_edge(tail, head)
        self._costs.append(cost)
