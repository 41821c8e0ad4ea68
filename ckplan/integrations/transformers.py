"""A plan for the Trainer of transformers.

Trainer(..., callbacks=[PlanCallback("plan.yaml")])
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback

from ckplan.applying import apply, remove
from ckplan.plan.plan import Plan


class PlanCallback(TrainerCallback):
    """Puts a plan on the model while it is trained.

    Args:
        plan: Made for the model that the Trainer is given.
    """

    def __init__(self, plan: Plan | str | Path) -> None:
        self.plan = plan

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any
    ) -> None:
        """Apply it."""
        del args, state, control, others
        apply(model, self.plan)

    def on_train_end(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any
    ) -> None:
        """Take it off."""
        del args, state, control, others
        remove(model)
