"""A plan for the Trainer of Lightning.

Trainer(..., callbacks=[PlanCallback(budget="12GiB", module="model")])
Trainer(..., callbacks=[PlanCallback("plan.yaml", module="model")])
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule

from ckplan.integrations.loop import LoopPlanner
from ckplan.plan.plan import Plan


class PlanCallback(Callback):
    """Applies a plan to a model while it is trained.

    With a budget, the second step of the optimizer is recorded, without a plan, and the
    plan is solved from it and applied. Of several optimizers, the last one ends a step.

    Args:
        plan: A plan for the model, or the path of its file.
        module: Path of the model inside the LightningModule; by default, the latter.
        budget: Instead of a plan, the limit on peak memory: ``"12GiB"`` or ``"80%"``.

    Raises:
        CkplanError: There is not exactly one of plan and budget.
    """

    def __init__(
        self,
        plan: Plan | str | Path | None = None,
        module: str = "",
        *,
        budget: str | int | None = None,
    ) -> None:
        self.module = module
        self._planner = LoopPlanner(plan, budget)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Apply the plan, or begin to record."""
        model = pl_module.get_submodule(self.module)
        amp = {"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(str(trainer.precision))
        setting = {"accumulate": trainer.accumulate_grad_batches, "amp": amp}
        self._planner.begin(model, trainer.optimizers, setting)

    def on_fit_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Remove the plan."""
        del trainer
        self._planner.end(pl_module.get_submodule(self.module))

    def on_exception(
        self, trainer: Any, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop recording."""
        del trainer, pl_module, exception
        self._planner.stop()
