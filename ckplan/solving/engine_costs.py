"""One-time costs of the bound: least engine time for dropping a tensor.

A region watches every tensor that its forward saves. A region that drops a tensor
contains the op that made it and the call that saved it, and is a whole call or a run of
whole siblings. So the smallest region that can drop a tensor is known. The engine time
for watching it is due once for all tensors that need this region.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

from ckplan.graph.graph import Graph
from ckplan.graph.records import Saved
from ckplan.solving.closure_problem import NANOSECOND, OneTimeCost


class MinEngineCosts:
    """The one-time costs of one graph."""

    def __init__(self, graph: Graph) -> None:
        """Know no cost yet: each is computed at its first use."""
        self.known: list[OneTimeCost] = []
        self._graph = graph
        seconds = graph.engine.watch_seconds if graph.engine_is_critical else 0.0
        self._nanoseconds = round(seconds / NANOSECOND)
        self._of_unit: dict[tuple[int, int], int] = {}
        self._of_saved: dict[int, int] = {}

    def cost_of_dropping(self, saved: Saved) -> int | None:
        """Index in ``known`` of the cost of dropping a tensor; None if free."""
        maker = self._graph.storages[saved.storage].maker
        if not self._nanoseconds or not 0 <= maker < self._graph.num_forward:
            return None
        unit = self._least_unit(maker, saved)
        return None if unit is None else self._watching(*unit)

    def _least_unit(self, maker: int, saved: Saved) -> tuple[int, int] | None:
        """First and last call of the least unit with an op and its saved output."""
        graph, calls = self._graph, self._graph.calls
        made, kept = graph.path(graph.ops[maker].call), graph.path(saved.call)
        common = sum(a == b for a, b in zip(made, kept, strict=False))
        if not common:
            return None
        parent = made[common - 1]
        children = graph.children[parent]
        if common < len(made):
            low = bisect_left(children, made[common])
        else:  # an op of the parent's own: a run begins before it
            low = bisect_right(children, maker, key=lambda c: calls[c].stop) - 1
        if common < len(kept):
            high = bisect_left(children, kept[common])
        else:  # and ends after it
            high = bisect_left(children, saved.packed_at, key=lambda c: calls[c].start)
        if low < 0 or high == len(children):
            return parent, parent
        return children[low], children[high]

    def _watching(self, first: int, last: int) -> int:
        """Index of the cost of a call, or of a run of calls."""
        if (first, last) not in self._of_unit:
            cost = self._call(first) if first == last else self._run(first, last)
            self._of_unit[first, last] = self._add(cost)
        return self._of_unit[first, last]

    def _call(self, call: int) -> OneTimeCost:
        inside, own = self._graph.children[call], self._own[call]
        if not inside:
            return OneTimeCost(self._nanoseconds * len(own))
        return self._together(inside, own)

    def _run(self, first: int, last: int) -> OneTimeCost:
        graph, calls = self._graph, self._graph.calls
        parent = calls[first].parent
        siblings = graph.children[parent]
        run = siblings[bisect_left(siblings, first) : bisect_right(siblings, last)]
        start, stop = calls[first].start, calls[last].stop
        own = [s for s in self._own[parent] if start < graph.saved[s].packed_at < stop]
        return self._together(run, own)

    def _together(self, calls: Sequence[int], own: Sequence[int]) -> OneTimeCost:
        """The cost of calls and of tensors that their parent saves itself."""
        return OneTimeCost(
            0, [*(self._watching(c, c) for c in calls), *map(self._one, own)]
        )

    def _one(self, saved: int) -> int:
        """Index of the cost of a tensor that a call with children saves itself."""
        if saved not in self._of_saved:
            self._of_saved[saved] = self._add(OneTimeCost(self._nanoseconds))
        return self._of_saved[saved]

    def _add(self, cost: OneTimeCost) -> int:
        self.known.append(cost)
        return len(self.known) - 1

    @cached_property
    def _own(self) -> dict[int, list[int]]:
        """Call -> indices of the tensors that it saves itself, in order."""
        found: dict[int, list[int]] = defaultdict(list)
        for index, saved in enumerate(self._graph.saved):
            found[saved.call].append(index)
        return found
