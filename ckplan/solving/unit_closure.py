"""The closure problem of one unit: the values that it keeps."""

from __future__ import annotations

from collections.abc import Collection

from ckplan.graph.graph import Graph
from ckplan.graph.records import BEFORE_STEP
from ckplan.simulating.program import EXTERNAL
from ckplan.simulating.view import RegionView
from ckplan.solving.closure_problem import NANOSECOND, ClosureProblem, Demand


def alive_regardless(graph: Graph, view: RegionView) -> set[int]:
    """Storages that stay alive until backward under any region on this unit."""
    made_here = {index for index, _ in view.made}
    return {
        storage
        for storage in view.storages
        if graph.storages[storage].maker == BEFORE_STEP
        or graph.storages[storage].last >= graph.num_forward
        or not made_here.issuperset(graph.saved_of.get(storage, ()))
    }


def unit_closure_problem(
    graph: Graph, view: RegionView, resident: Collection[int] = ()
) -> ClosureProblem:
    """Build the closure problem of a unit; storages ``resident`` are alive anyway."""
    flow = view.flow
    alive = alive_regardless(graph, view).union(resident)
    bytes_of = {
        value: 0 if storage in alive else graph.storages[storage].bytes
        for storage, value in flow.current.items()
        if _can_be_kept(view, value)
    }
    encodings = {
        flow.returned[one.op - view.start][one.output]: one
        for one in graph.encodings_in(*view.unit)
    }
    more = graph.engine.rerun_seconds
    if view.varies:
        more += graph.engine.record_seconds
    more *= graph.engine_share

    def nanoseconds(step: int) -> int:
        seconds = graph.critical_seconds[view.start + step]
        return round((graph.engine.again * seconds + more) / NANOSECOND)

    return ClosureProblem(
        flow,
        [Demand([value for _, _, value in view.packed], bytes_of)],
        nanoseconds,
        encodings,
    )


def keepable_outputs(view: RegionView) -> list[tuple[int, int]]:
    """(op, output) of every value of a unit that a plan can keep, in order."""
    flow = view.flow
    found = {
        (view.start + maker, flow.returned[maker].index(value))
        for value in flow.current.values()
        if (maker := flow.maker_of[value]) != EXTERNAL and _can_be_kept(view, value)
    }
    return sorted(found)


def _can_be_kept(view: RegionView, value: int) -> bool:
    """Whether a plan can name the value, and a forward can keep it.

    Only outputs of ops have names. Of those inside a function of torch, as in an LSTM,
    a forward that is not recorded op by op meets what autograd saves alone.
    """
    flow = view.flow
    maker = flow.maker_of[value]
    if maker == EXTERNAL:
        return True
    is_met = (
        not view.graph.ops[view.start + maker].is_inside or value in view.packed_values
    )
    return is_met and value in flow.returned[maker]
