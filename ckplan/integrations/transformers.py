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
    """Applies a plan to the model while it is trained.

    Args:
        plan: A plan for the Trainer's model, or the path of its file.
    """

    def __init__(self, plan: Plan | str | Path) -> None:
        self.plan = plan

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any
    ) -> None:
        """Apply the plan."""
        del args, state, control, others
        apply(model, self.plan)

    def on_train_end(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any
    ) -> None:
        """Remove the plan."""
        del args, state, control, others
        remove(model)
