"""Plan a model inside the loop that trains it: record, solve, apply."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckplan.applying import apply, remove, status
from ckplan.errors import ApplyError, CkplanError
from ckplan.plan.plan import Plan
from ckplan.plan.updates import group_size_of
from ckplan.solving.solve import solve_plan
from ckplan.tracing.record import LoopRecorder
from ckplan.training.grouped_updates import update_in_groups


class LoopPlanner:
    """Puts a plan on the model of a loop: a given one, or one made in the loop.

    With a budget, the first two steps run without a plan. The second one is recorded.
    When it ends, the plan is solved and applied, and the loop goes on.

    Args:
        plan: A plan for the model, or the path of its file.
        budget: Instead of it, the limit on peak memory: ``"12GiB"``, or ``"80%"`` of
            the unplanned peak.

    Raises:
        CkplanError: There is not exactly one of the two.
    """

    def __init__(
        self, plan: Plan | str | Path | None, budget: str | int | None
    ) -> None:
        if (plan is None) == (budget is None):
            given = "no plan and no budget" if plan is None else "a plan and a budget"
            raise CkplanError(
                f"cannot plan in a loop: there is {given}",
                needed="a plan, or a budget for a plan that is made in the loop",
                hint="PlanCallback(budget='12GiB') or PlanCallback('plan.yaml')",
            )
        self.plan = plan
        self.budget = budget
        self._recorder: LoopRecorder | None = None

    def begin(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        setting: Mapping[str, Any] | None = None,
    ) -> None:
        """Apply the plan, or begin to record.

        Optimizers update groups of parameters if the plan was made for that. A plan of
        ``ckplan tune`` has a setting, too. What the loop does otherwise is said, as it
        is too late to change it.

        Args:
            model: The model.
            optimizer: Its optimizer, or those of the loop in the order in which they
                step.
            setting: What the loop does, by the names of ``training:`` in plan files.

        Raises:
            CkplanError: The plan is not for the model, or the optimizer does not train
                it. Later, in the optimizer's second step: no plan fits the budget.
        """
        if self.plan is not None:
            apply(model, self.plan)
            planned = status(model).plan
            _group_updates(planned, optimizer)
            _warn_of_other_setting(planned.workload, setting or {})
            return

        def recorded() -> None:
            assert self._recorder is not None, "internal error: nothing is recorded"
            recorder = self._recorder
            self.stop()
            apply(model, solve_plan(recorder.graph, self.budget))

        while _open:
            _open[-1].stop()  # a Trainer that raised tells no callback
        self._recorder = LoopRecorder(model, optimizer, on_done=recorded)
        self._recorder.__enter__()
        _open.append(self)

    def end(self, model: nn.Module) -> None:
        """Remove the plan; stop recording."""
        self.stop()
        remove(model)

    def stop(self) -> None:
        """Stop recording, as when the loop has raised."""
        if self._recorder is not None:
            self._recorder.__exit__()
            self._recorder = None
        if self in _open:
            _open.remove(self)


def _group_updates(
    planned: Plan,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> None:
    """Let optimizers update groups of parameters, where a plan has their size."""
    size = group_size_of(planned)
    if size is not None:
        every = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        for one in every:
            try:
                update_in_groups(getattr(one, "optimizer", one), size)
            except ApplyError as error:  # gradients are exact, memory is another
                warnings.warn(str(error), stacklevel=4)


def _warn_of_other_setting(planned: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Say what a loop does otherwise than the setting that a plan was tuned for."""
    if "micro_batch" not in planned:
        return
    wanted = {"accumulate": 1, "amp": None, **planned}
    others = [
        f"{key} {value if value is not None else 'none'} in place of "
        f"{wanted[key] if wanted[key] is not None else 'none'}"
        for key, value in here.items()
        if wanted[key] != value
    ]
    if others:
        warnings.warn(
            f"the plan was tuned for another setting than this Trainer's: "
            f"{', '.join(others)}; gradients are exact, the speed is another",
            stacklevel=4,
        )


_open: list[LoopPlanner] = []  # that record
