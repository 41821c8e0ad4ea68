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
    """Puts a plan on a model while it is trained.

    Args:
        plan: Made for the model.
        module: Where the LightningModule has the model; by default it is the model.
    """

    def __init__(self, plan: Plan | str | Path, module: str = "") -> None:
        self.plan = plan
        self.module = module

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Apply it."""
        del trainer
        apply(pl_module.get_submodule(self.module), self.plan)

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Take it off."""
        del trainer
        remove(pl_module.get_submodule(self.module))
