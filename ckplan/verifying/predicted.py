"""What a trace predicts for the steps that a verification takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckplan.curve import PLANNED, UNPLANNED, Curve, predicted_curve
from ckplan.errors import PlanError
from ckplan.plan import differences, plan_fingerprint
from ckplan.resolve import resolve
from ckplan.simulate import Simulator

if TYPE_CHECKING:
    from ckplan.graph import Graph
    from ckplan.plan import Plan
    from ckplan.training.step import Training


def predict(
    trace: Graph | None,
    plan: Plan | None,
    training: Training,
    here: Mapping[str, Any],
) -> tuple[dict[str, Curve], tuple[str, ...]]:
    """Predict live bytes, unplanned and planned.

    Args:
        trace: Maybe of the workload that was verified.
        plan: What was put on it.
        training: How it was trained.
        here: The fingerprint of the workload.

    Returns:
        The curves, none where the trace is of another workload, and what to say of it.
    """
    if trace is None:
        return {}, ()
    other = differences(plan_fingerprint(trace.fingerprint), plan_fingerprint(here))
    options = {k: v for k, v in trace.options.items() if k != "gpu"}  # costs, not bytes
    if options != training.as_options():
        other = (*other, f"options: {options}")
    if other:
        first = other[0].replace(": plan ", ": trace ")
        return {}, (f"no predicted timeline: the trace differs in {first}",)
    simulator = Simulator(trace)
    try:
        regions = resolve(plan, trace) if plan is not None else ()
        planned = simulator.run(regions)
    except PlanError as error:
        return {}, (f"no predicted timeline: {error.what}",)
    return {
        UNPLANNED: predicted_curve(simulator.run()),
        PLANNED: predicted_curve(planned),
    }, ()


def side_by_side(**kinds: Mapping[str, Curve]) -> dict[str, dict[str, Curve]]:
    """Curves by kind as curves by step: unplanned, then planned."""
    found: dict[str, dict[str, Curve]] = {}
    for which in (UNPLANNED, PLANNED):
        for kind, curves in kinds.items():
            if which in curves:
                found.setdefault(which, {})[kind.replace("_", " ")] = curves[which]
    return found
