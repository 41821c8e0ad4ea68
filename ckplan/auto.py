"""All at once: profile, solve, apply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckplan.applying import apply
from ckplan.solving.solve import solve_plan
from ckplan.tracing.profile import profile

if TYPE_CHECKING:
    from torch import nn


def auto(model: nn.Module, batch: Any, budget: str | int, **how: Any) -> nn.Module:
    """Make the training steps of a model fit a budget, at the least extra time.

    Takes seconds: the step is recorded and solved. Ops that were measured on this
    machine before are not measured again.

    Args:
        model: In the mode it is trained in; rewritten in place.
        batch: One batch, as large as any to come.
        budget: Limit on the whole peak: ``"12GiB"``, ``"80%"`` of the unplanned peak.
        how: Keywords of ``profile``, which explains them: ``loss``, ``optimizer``,
            ``amp``, ``accumulate``, ``clip``, ``scaler``, ``device``, ``gpu`` and more.
            With ``shard``, ``world_size`` and ``units`` the plan is for one of several
            ranks; the model is to be wrapped afterwards.

    Returns:
        The same model; ``ckplan.status(model).plan`` is its plan.

    Raises:
        CkplanError: There is no such card or device, or it cannot be sharded so.
        WorkloadError: The model cannot be trained on this batch.
        InfeasibleError: No plan fits; the model is left as it was.
    """
    return apply(model, solve_plan(profile(model, batch, **how), budget))
