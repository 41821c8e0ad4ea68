"""Profile, solve and apply in one call."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckplan import autotune
from ckplan.applying import apply
from ckplan.errors import CkplanError
from ckplan.solving.solve import solve_plan
from ckplan.tracing.profile import profile
from ckplan.training.losses import LOSS_IS_SUM
from ckplan.tuning.answer import plan_of

if TYPE_CHECKING:
    from torch import nn


def auto(
    model: nn.Module,
    batch: Any,
    budget: str | int | None = None,
    *,
    tune: bool = False,
    total_batch: int | None = None,
    allow: str | Sequence[str] = (),
    **how: Any,
) -> nn.Module:
    """Plan a model's training step for a budget, with the least extra time.

    Warns if it knows no loss and sums the output.

    This takes seconds: it records the step and solves it. Ops that were measured on
    this machine before are not measured again.

    Args:
        model: The model in training mode; changed in place.
        batch: One batch, as large as the largest batch of training.
        budget: Limit on peak memory: ``"12GiB"``, or ``"80%"`` of the unplanned peak;
            by default the memory of the card that ``gpu`` names.
        tune: Also search the batch, accumulation and more: see ``tune``. The setting is
            ``ckplan.status(model).plan.workload``: train with its ``micro_batch``.
        total_batch: With ``tune``, see there.
        allow: Levers that plans may use, as of ``solve``; with ``tune``, see there.
        how: Keyword arguments of ``profile``: ``loss_fn``, ``target``, ``step``,
            ``optimizer``, ``amp``, ``accumulate``, ``clip``, ``scaler``, ``device``,
            ``gpu`` and more. With ``shard``, ``world_size`` and ``units``, the plan is
            for one of several ranks. Wrap the model afterwards.

    Returns:
        The same model; ``ckplan.status(model).plan`` is its plan.

    Raises:
        CkplanError: The card or device is unknown, neither a budget nor a card is
            given, or the sharding is not possible.
        WorkloadError: The model cannot be trained on this batch.
        InfeasibleError: No plan fits; the model is unchanged.
    """
    if budget is None and how.get("gpu") is None:
        raise CkplanError(
            "cannot plan without a limit: auto() has neither a budget nor a card",
            needed="budget='12GiB' or budget='80%', or gpu=, a card of `ckplan gpus`",
            hint="ckplan.auto(model, batch, budget='12GiB')",
        )
    if tune:
        more: dict[str, Any] = {"total_batch": total_batch, "allow": allow}
        tuned = autotune.tune(model, batch, budget=budget, **more, **how)
        return apply(model, plan_of(tuned))
    if total_batch is not None:
        raise CkplanError(
            "cannot keep a total batch: auto() plans for the batch that it is given",
            needed="total_batch= with tune=True",
            hint="ckplan.auto(model, batch, budget, tune=True, total_batch=512)",
        )
    graph = profile(model, batch, **how)
    if LOSS_IS_SUM in graph.notes:
        warnings.warn(f"{LOSS_IS_SUM}: give loss_fn=", stacklevel=2)
    return apply(model, solve_plan(graph, budget, allow=allow))
