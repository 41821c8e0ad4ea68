"""A plan for the Trainer of transformers, and thereby those of TRL.

Trainer(..., callbacks=[PlanCallback(budget="12GiB")])
Trainer(..., callbacks=[PlanCallback("plan.yaml")])
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from ckplan.integrations.loop import LoopPlanner
from ckplan.plan.plan import Plan


class PlanCallback(TrainerCallback):
    """Applies a plan to the model while it is trained.

    With a budget, the second step of the optimizer is recorded, without a plan, and the
    plan is solved from it and applied.

    Args:
        plan: A plan for the Trainer's model, or the path of its file.
        budget: Instead of a plan, the limit on peak memory: ``"12GiB"`` or ``"80%"``.

    Raises:
        CkplanError: There is not exactly one of the two.
    """

    def __init__(
        self, plan: Plan | str | Path | None = None, *, budget: str | int | None = None
    ) -> None:
        self._planner = LoopPlanner(plan, budget)

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        **others: Any,
    ) -> None:
        """Apply the plan, or begin to record."""
        del state, control, others
        amp = "bf16" if args.bf16 else "fp16" if args.fp16 else None
        setting = {
            "micro_batch": args.per_device_train_batch_size,
            "accumulate": args.gradient_accumulation_steps,
            "amp": amp,
        }
        self._planner.begin(model, optimizer, setting)

    def on_train_end(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any
    ) -> None:
        """Remove the plan."""
        del args, state, control, others
        self._planner.end(model)
