"""Fields that the results of verifications and dry runs share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckplan.plan.plan import differences, plan_fingerprint
from ckplan.simulating.curve import Curves, curves_json

if TYPE_CHECKING:
    from ckplan.applying.hooks.choices import RegionStatus
    from ckplan.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class AbstractOutcome(ABC):
    """Predictions of the plan, and their outcome."""

    predicted_peak_bytes: int | None
    budget_bytes: int | None
    fits: bool
    regions_ran: int
    regions_idle: tuple[str, ...]  # regions of the plan that never ran
    regions_kept: tuple[
        str, ...
    ]  # regions that kept their tensors because their ops differed
    regions_recorded: tuple[str, ...]  # regions that every forward records anew
    other: tuple[str, ...]  # differences between fingerprints of plan and workload
    notes: tuple[str, ...] = ()
    curves: Curves = field(default_factory=dict)  # live bytes over the steps

    @property
    @abstractmethod
    def passed(self) -> bool:
        """Whether the plan is verified."""

    def as_json(self) -> dict[str, Any]:
        """The same as plain values, for ``--json``."""
        plain = asdict(replace(self, curves={}))
        del plain["curves"]
        timeline = curves_json(self.curves)
        return {"passed": self.passed, **plain, "timeline": timeline}


def in_one_process(plan: Plan | None) -> tuple[Plan | None, tuple[str, ...]]:
    """A plan without the bytes of one of several ranks, and what is said of that."""
    if plan is None or "shard" not in plan.workload:
        return plan, ()
    ranks = plan.workload.get("world_size", "several")
    note = f"the plan is for one of {ranks} ranks under {plan.workload['shard']}; the "
    note += "steps are those of one process, so its budget and its peak are not "
    note += "compared with theirs"
    return replace(plan, budget_bytes=None, predicted=None), (note,)


def outcome_fields(
    plan: Plan | None,
    peak_bytes: int,
    regions: Sequence[RegionStatus],
    workload_fingerprint: Mapping[str, Any],
) -> dict[str, Any]:
    """The fields of any outcome, except notes and curves.

    Args:
        plan: The applied plan, or None.
        peak_bytes: Peak of the planned step.
        regions: Status of the regions of the plan.
        workload_fingerprint: The fingerprint of the workload.
    """
    predicted = plan.predicted if plan else None
    budget_bytes = plan.budget_bytes if plan else None
    idle = tuple(r.call for r in regions if not r.runs)
    now = plan_fingerprint(workload_fingerprint)
    return {
        "predicted_peak_bytes": predicted.peak_bytes if predicted else None,
        "budget_bytes": budget_bytes,
        "fits": budget_bytes is None or peak_bytes <= budget_bytes,
        "regions_ran": len(regions) - len(idle),
        "regions_idle": idle,
        "regions_kept": tuple(r.call for r in regions if r.kept),
        "regions_recorded": tuple(r.call for r in regions if not r.repeatable),
        "other": differences(plan.fingerprint, now) if plan else (),
    }
