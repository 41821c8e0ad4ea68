"""A step with nominal seconds, to search for the least peak by what ops do alone.

Menus, recurrences and local search weigh bytes against seconds. With the seconds of a
machine, the smallest plan that they reach would vary with the machine. Here an op takes
a constant time, a time per byte that it moves and a time per FLOP, so the plan depends
on nothing but the recorded ops and their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ckplan.graph.graph import Graph
from ckplan.graph.records import EngineCosts, Op
from ckplan.plan.region import Region
from ckplan.simulating.effect import Effect
from ckplan.simulating.simulate import Simulator
from ckplan.simulating.view import RegionView

_PER_OP, _PER_BYTE, _PER_FLOP = 1e-6, 1e-12, 5e-14  # seconds
_CODING_SHARE = 1 / 8  # of the op: to encode its output, or to decode it


class NominalSimulator(Simulator):
    """Simulates a graph with nominal seconds; shares bytes with another simulator."""

    def __init__(self, measured: Simulator) -> None:
        """Build the graph with nominal seconds.

        Args:
            measured: The simulator of the same step with its own seconds.
        """
        super().__init__(_with_nominal_seconds(measured.graph))
        self._measured = measured

    def view(self, call: int, last: int | None = None) -> RegionView:
        """The values and saved tensors of a call, or of a run of sibling calls."""
        return self._measured.view(call, last)

    def effect(self, region: Region) -> Effect:
        """The effect of one region on the unplanned step, cached.

        Raises:
            PlanError: The region cannot be rebuilt.
        """
        if region not in self._effects:
            effect, graph = self._measured.effect(region), self.graph
            seconds = sum(graph.ops[op].seconds for op in effect.steps)
            codings = (graph.encoding_of[place].seconds for place in _encoded([region]))
            self._effects[region] = replace(
                effect,
                seconds=seconds + sum(codings),
                engine_seconds=0.0,
            )
        return self._effects[region]


def _encoded(regions: Iterable[Region]) -> Iterator[tuple[int, int]]:
    for region in regions:
        yield from sorted(region.encode)
        yield from _encoded(region.inner)


def _with_nominal_seconds(graph: Graph) -> Graph:
    ops = tuple(
        replace(op, seconds=_nominal_seconds(op), launch_seconds=0.0)
        for op in graph.ops
    )
    encodings = []
    for one in graph.encodings:
        coding = _CODING_SHARE * ops[one.op].seconds
        encodings.append(replace(one, encode_seconds=coding, decode_seconds=coding))
    return replace(graph, ops=ops, encodings=tuple(encodings), engine=EngineCosts())


def _nominal_seconds(op: Op) -> float:
    return _PER_OP + _PER_BYTE * op.moved_bytes + _PER_FLOP * op.flops
