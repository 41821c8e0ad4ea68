"""A plan for the Trainer of Lightning.

Trainer(..., callbacks=[PlanCallback("plan.yaml", module="model")])
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule

from ckplan.applying import apply, remove
from ckplan.plan.plan import Plan


class PlanCallback(Callback):
    """Applies a plan to a model while it is trained.

    Args:
        plan: A plan for the model, or the path of its file.
        module: Path of the model inside the LightningModule; by default, the latter.
    """

    def __init__(self, plan: Plan | str | Path, module: str = "") -> None:
        self.plan = plan
        self.module = module

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Apply the plan."""
        del trainer
        apply(pl_module.get_submodule(self.module), self.plan)

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Remove the plan."""
        del trainer
        remove(pl_module.get_submodule(self.module))
