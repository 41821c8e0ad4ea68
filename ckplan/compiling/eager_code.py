"""The regions of a plan for code that the compiler leaves uncompiled.

One plan is for both: regions with ``for: eager`` are applied to the model, whose hooks
run uncompiled, and the others are followed by what is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ckplan.applying import applied_plan, apply
from ckplan.errors import PlanError
from ckplan.plan.file import load
from ckplan.plan.plan import COMPILED, EAGER, Plan, PlannedRegion
from ckplan.units import parse_budget

_ANY_PEAK_BYTES = 1 << 40  # of a step that is not known yet


def read_wanted(plan_or_budget: Any) -> Any:
    """A plan, also in place of the path of its file; anything else as it is.

    Raises:
        CkplanError: The file, or a budget, cannot be read.
    """
    is_named = isinstance(plan_or_budget, str) and plan_or_budget.endswith(
        (".yaml", ".yml")
    )
    if isinstance(plan_or_budget, Path) or is_named:
        return load(Path(plan_or_budget))
    if isinstance(plan_or_budget, str | int):
        parse_budget(plan_or_budget, _ANY_PEAK_BYTES)
    return plan_or_budget


def apply_eager_code(
    model: object, wanted: Any, how: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Apply the regions of a plan for compiled code that are for eager code.

    Args:
        model: What is compiled.
        wanted: A plan, or a budget.
        how: Keyword arguments of ``torch.compile``.

    Returns:
        What the compiler follows, and how it compiles: such a step may break.

    Raises:
        PlanError: The regions cannot be applied, or the step must be one graph.
    """
    if not has_eager_code(wanted):
        return wanted, {"fullgraph": True, "dynamic": False, **how}
    if not isinstance(model, nn.Module) or how.get("fullgraph"):
        raise PlanError(
            f"cannot compile with the plan of '{wanted.model}': "
            f"{wanted.for_code(EAGER).regions[0].title} is for eager code",
            needed="a module that may break into several graphs",
            hint="ckplan.compile(model, plan, fullgraph=False)",
        )
    apply(model, wanted.for_code(EAGER))
    return wanted.for_code(COMPILED), {"fullgraph": False, "dynamic": False, **how}


def has_eager_code(wanted: object) -> bool:
    """Whether a plan for compiled code has regions for eager code."""
    if not isinstance(wanted, Plan) or wanted.code == EAGER:
        return False
    return any(one.code == EAGER for one in wanted.regions)


def check_has_no_eager_code(wanted: object) -> None:
    """Refuse a plan whose regions for eager code nothing would follow.

    Raises:
        PlanError: It has some.
    """
    if has_eager_code(wanted):
        raise PlanError(
            "a backend cannot follow this plan: it has regions for eager code, which a "
            "backend is not given",
            needed="the model that they are for",
            hint="ckplan.compile(model, plan)",
        )


def eager_regions(model: nn.Module) -> tuple[PlannedRegion, ...]:
    """The regions applied to a model, as those of a plan for compiled code."""
    plan = applied_plan(model)
    found = () if plan is None else plan.for_code(EAGER).regions
    return tuple(replace(one, code=EAGER) for one in found)
