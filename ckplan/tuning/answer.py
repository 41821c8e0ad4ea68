"""From the best setting to its plan, and what the graph says of its batch."""

from __future__ import annotations

from ckplan.errors import CkplanError
from ckplan.graph.batch import batch_dim, batch_shapes
from ckplan.graph.graph import Graph
from ckplan.plan.plan import Plan, Prediction, plan_fingerprint
from ckplan.plan.resolve import describe
from ckplan.plan.workload import plan_workload
from ckplan.solving.planner import Planner
from ckplan.tuning.plan_levers import has_plan_levers, simulator_of
from ckplan.tuning.tuned import Tuned


def plan_of(tuned: Tuned) -> Plan:
    """The plan of the best setting; it remembers the setting as its ``training``."""
    graph, regions = tuned.graph, tuned.best.regions
    simulator = simulator_of(tuned.best.way, graph)
    timeline, unplanned = simulator.run(regions), simulator.run()
    bound = {"any_schedule": Planner(graph).bound(timeline.peak_bytes)}
    return Plan(
        model=graph.model,
        fingerprint=plan_fingerprint(graph.fingerprint),
        budget_bytes=tuned.limit.bytes,
        predicted=Prediction(
            peak_bytes=timeline.peak_bytes,
            peak_at=timeline.peak_at,
            overhead=timeline.overhead,
            unplanned_peak_bytes=unplanned.peak_bytes,
            moved_bytes=timeline.moves.moved_bytes,
            stall_seconds=timeline.stall_seconds,
            host_bytes=timeline.moves.host_bytes,
        ),
        bound={} if has_plan_levers(tuned.best.way) else bound,  # of recomputation
        regions=describe(graph, regions),
        workload={**plan_workload(graph.options), "micro_batch": tuned.best.batch},
    )


def tokens_per_sample(graph: Graph) -> int:
    """The size beside the rows of the batch's first tensor of two dimensions.

    Raises:
        CkplanError: The batch has none.
    """
    for shape in batch_shapes(graph):
        if len(shape) == 2 and shape[not batch_dim(graph)] > 1:
            return shape[not batch_dim(graph)]
    raise CkplanError(
        f"cannot count the tokens of {graph.model}: no tensor of its batch is rows "
        "times tokens",
        needed="a batch such as int64[8,1024]",
        hint="leave out --tokens: samples per second",
    )
