"""Predictions of a trace for the steps of a verification."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ckplan.errors import PlanError
from ckplan.graph.records import MEASURED
from ckplan.plan.plan import differences, plan_fingerprint
from ckplan.plan.resolve import resolve
from ckplan.plan.updates import with_planned_update
from ckplan.simulating.allocations import Reserved, reserved_on_card
from ckplan.simulating.curve import PLANNED, UNPLANNED, Curve, predicted_curve
from ckplan.simulating.simulate import Simulator
from ckplan.verifying.phases import PhaseSeconds, predicted_seconds

if TYPE_CHECKING:
    from ckplan.graph.graph import Graph
    from ckplan.plan.plan import Plan
    from ckplan.training.step import Training


class Predicted(NamedTuple):
    """Predictions for the steps; empty if the trace is of another workload."""

    curves: Mapping[str, Curve] = MappingProxyType({})
    notes: tuple[str, ...] = ()  # why there are no predictions
    reserved: Reserved | None = None  # of the planned step on a GPU
    unplanned: PhaseSeconds | None = None
    planned: PhaseSeconds | None = None


def predict(
    trace: Graph | None,
    plan: Plan | None,
    training: Training,
    workload_fingerprint: Mapping[str, Any],
) -> Predicted:
    """Predict live bytes and seconds, unplanned and planned.

    Args:
        trace: A trace that may be of the verified workload.
        plan: The applied plan, or None.
        training: Training options.
        workload_fingerprint: The fingerprint of the workload.
    """
    if trace is None or "shard" in trace.options:  # of one rank: see `in_one_process`
        return Predicted()
    try:
        trace = trace if plan is None else with_planned_update(trace, plan)
    except PlanError as error:
        return Predicted(notes=(f"no predicted timeline: {error.what}",))
    different = differences(
        plan_fingerprint(trace.fingerprint), plan_fingerprint(workload_fingerprint)
    )
    # A card changes costs, not bytes; a workload is compared by its fingerprint; of
    # several lengths, the trace has the longest.
    apart = "gpu", "workload", "lengths"
    options = {k: v for k, v in trace.options.items() if k not in apart}
    if options != training.as_options():
        different = (*different, f"options: {options}")
    if different:
        first = different[0].replace(": plan ", ": trace ")
        why = f"no predicted timeline: the trace differs in {first}"
        return Predicted(notes=(why,))
    simulator = Simulator(trace)
    try:
        regions = resolve(plan, trace) if plan is not None else ()
        planned = simulator.run(regions)
    except PlanError as error:
        return Predicted(notes=(f"no predicted timeline: {error.what}",))
    unplanned = simulator.run()
    curves = {UNPLANNED: predicted_curve(unplanned), PLANNED: predicted_curve(planned)}
    of_other = f"predicted seconds are those of a {trace.costs}"
    return Predicted(
        curves,
        () if trace.costs == MEASURED else (of_other,),
        reserved_on_card(planned),
        predicted_seconds(unplanned, trace),
        predicted_seconds(planned, trace),
    )


def curves_by_step(**kinds: Mapping[str, Curve]) -> dict[str, dict[str, Curve]]:
    """Regroup curves by kind as curves by step: unplanned, then planned."""
    found: dict[str, dict[str, Curve]] = {}
    for which in (UNPLANNED, PLANNED):
        for kind, curves in kinds.items():
            if which in curves:
                found.setdefault(which, {})[kind.replace("_", " ")] = curves[which]
    return found
