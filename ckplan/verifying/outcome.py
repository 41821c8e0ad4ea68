"""What was found of a planned step, measured or not."""

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
    """What the plan said, and what became of it."""

    predicted_peak_bytes: int | None
    budget_bytes: int | None
    fits: bool
    regions_ran: int
    regions_idle: tuple[str, ...]  # regions of the plan that never ran
    regions_kept: tuple[str, ...]  # that dropped nothing as their ops differed
    other: tuple[str, ...]  # in what the plan is another workload's
    notes: tuple[str, ...] = ()
    curves: Curves = field(default_factory=dict)  # live bytes over the steps

    @property
    @abstractmethod
    def passed(self) -> bool:
        """Whether all is as it should be."""

    def as_json(self) -> dict[str, Any]:
        """The same as plain values, for ``--json``."""
        plain = asdict(replace(self, curves={}))
        del plain["curves"]
        timeline = curves_json(self.curves)
        return {"passed": self.passed, **plain, "timeline": timeline}


def outcome_fields(
    plan: Plan | None,
    peak_bytes: int,
    regions: Sequence[RegionStatus],
    here: Mapping[str, Any],
) -> dict[str, Any]:
    """The fields of any outcome, but for notes and curves.

    Args:
        plan: What was put on the workload.
        peak_bytes: Of the planned step.
        regions: What they did.
        here: The fingerprint of the workload.
    """
    predicted = plan.predicted if plan else None
    budget_bytes = plan.budget_bytes if plan else None
    idle = tuple(r.call for r in regions if not r.runs)
    now = plan_fingerprint(here)
    return {
        "predicted_peak_bytes": predicted.peak_bytes if predicted else None,
        "budget_bytes": budget_bytes,
        "fits": budget_bytes is None or peak_bytes <= budget_bytes,
        "regions_ran": len(regions) - len(idle),
        "regions_idle": idle,
        "regions_kept": tuple(r.call for r in regions if r.kept),
        "other": differences(plan.fingerprint, now) if plan else (),
    }
