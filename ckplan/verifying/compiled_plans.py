"""What the plans of a compiled step say, of all its graphs together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ckplan.compiling import Backend
from ckplan.compiling.parts import Parts
from ckplan.errors import PlanError, WorkloadError
from ckplan.plan.plan import Plan


@dataclass(frozen=True)
class PlannedStep:
    """What the plans of a step say, of all its graphs together."""

    plan: Plan
    peak_bytes: int
    unplanned_peak_bytes: int
    held_bytes: int
    overhead: float | None
    graphs: int
    uncompiled_bytes: dict[str, int] = field(default_factory=dict)


def planned_step(planned: Backend, bare: Parts | None) -> PlannedStep:
    """What the plans of a backend say of its step.

    Args:
        planned: The backend, after a step.
        bare: The graphs without regions, if eager code follows some.

    Raises:
        PlanError: Those regions are for code that compiles without them.
        WorkloadError: It planned none, or several that are not of one step.
    """
    if planned.parts is not None:
        return _parted(planned, bare)
    if len(planned.chosen) != 1:
        raise WorkloadError(
            f"cannot verify compiled steps of {len(planned.chosen)} graphs",
            needed="a step that trains and compiles as one graph",
            hint="TORCH_LOGS=graph_breaks shows where the model's graph breaks",
        )
    (chosen,) = planned.chosen
    return PlannedStep(
        plan=chosen.plan,
        peak_bytes=chosen.replayed.peak_bytes,
        unplanned_peak_bytes=chosen.unplanned.peak_bytes,
        held_bytes=chosen.replayed.held_bytes,
        overhead=chosen.candidate.overhead,
        graphs=1,
    )


def _parted(planned: Backend, bare: Parts | None) -> PlannedStep:
    """Of several graphs: seconds are those of the graphs alone."""
    parts = planned.parts
    assert parts is not None
    (plan,) = planned.plans
    assert plan.predicted is not None
    unplanned_bytes = plan.predicted.unplanned_peak_bytes
    if bare is not None:
        _check_same_graphs(parts, bare)
        unplanned_bytes = bare.unplanned_peak_bytes
        predicted = replace(plan.predicted, unplanned_peak_bytes=unplanned_bytes)
        plan = replace(plan, predicted=predicted)
    chosen = planned.shares.items()
    return PlannedStep(
        plan=plan,
        peak_bytes=planned.peak_bytes,
        unplanned_peak_bytes=unplanned_bytes,
        held_bytes=parts.held_bytes,
        overhead=parts.overhead_of(
            {key: one.candidate.overhead for key, one in chosen}
        ),
        graphs=len(parts.runs),
        uncompiled_bytes=dict(parts.code_bytes),
    )


def _check_same_graphs(parts: Parts, bare: Parts) -> None:
    digest, other = (one.joined.graph.fingerprint["compiled"] for one in (parts, bare))
    if digest != other:
        uncompiled = ", ".join(bare.code_bytes)
        titles = ", ".join(one.title for one in parts.eager)
        raise PlanError(
            f"cannot plan {titles} for eager code: it compiles without these regions",
            needed=f"regions for what runs uncompiled: {uncompiled or 'nothing here'}",
            hint="leave the others out of the plan for eager code",
        )
