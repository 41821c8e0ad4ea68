"""All at once: profile, solve, apply."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckplan.applying import apply
from ckplan.solving.solve import solve_plan
from ckplan.tracing.profile import profile

if TYPE_CHECKING:
    from torch import Tensor, nn


def auto(
    model: nn.Module,
    batch: Any,
    budget: str | int,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: str | None = None,
    amp: str | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    scaler: bool = False,
    shard: str | None = None,
    world_size: int = 1,
) -> nn.Module:
    """Make the training steps of a model fit a budget, at the least extra time.

    Takes seconds: the step is recorded and solved. Ops that were measured on this
    machine before are not measured again.

    Args:
        model: In the mode it is trained in; rewritten in place.
        batch: One batch, as large as any to come.
        budget: Limit on the whole peak: ``"12GiB"``, ``"80%"`` of the unplanned peak.
        loss: ``loss(output, batch)``; by default what ``profile`` says.
        optimizer: ``adamw`` by default; see ``profile``.
        amp: ``bf16`` or ``fp16``: forward and loss run under autocast.
        accumulate: Backwards before the optimizer takes a step.
        clip: Largest norm of all gradients together: ``clip_grad_norm_``.
        scaler: Whether the loss goes through a gradient scaler.
        shard: Plan for one of several ranks: ``ddp``, ``fsdp2``, ...; see ``profile``.
            The model is to be wrapped afterwards.
        world_size: How many ranks there are.

    Returns:
        The same model; ``ckplan.status(model).plan`` is its plan.

    Raises:
        WorkloadError: The model cannot be trained on this batch.
        InfeasibleError: No plan fits; the model is left as it was.
    """
    graph = profile(
        model,
        batch,
        loss=loss,
        optimizer=optimizer,
        amp=amp,
        accumulate=accumulate,
        clip=clip,
        scaler=scaler,
        shard=shard,
        world_size=world_size,
    )
    return apply(model, solve_plan(graph, budget))
