"""What a training step holds beside forward and backward, and what a budget leaves.

The optimizer's state is alive all the time, accumulated gradients while backward runs,
and temporaries of the optimizer while nothing else runs.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

import torch

from ckplan import units
from ckplan.compiling.optimizers import OptimizerBytes, optimizer_bytes
from ckplan.errors import CkplanError, InfeasibleError


@dataclass(frozen=True)
class Outside:
    """Memory outside compiled code."""

    reserve_bytes: int
    optimizer: InitVar[torch.optim.Optimizer | None]
    accumulates: bool  # gradients are there before backward
    name: str = field(init=False)  # of the kind of optimizer
    bytes: OptimizerBytes | None = field(init=False)  # of the optimizer

    def __post_init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Count now: while Dynamo compiles a model, it compiles no optimizer."""
        found = None if optimizer is None else optimizer_bytes(optimizer)
        object.__setattr__(self, "name", type(optimizer).__name__)
        object.__setattr__(self, "bytes", found)

    def peak_bytes(self, step_peak_bytes: int, held_bytes: int) -> int:
        """Most bytes alive at once in a whole training step.

        Args:
            step_peak_bytes: Of forward and backward, with parameters and batch.
            held_bytes: By those alone.
        """
        found = self.bytes
        if found is None:
            return step_peak_bytes
        in_backward = step_peak_bytes + found.reserved_bytes(self.accumulates)
        return max(in_backward, found.peak_bytes(held_bytes))

    def budget_bytes(
        self, wanted: str | int, unplanned_bytes: int, held_bytes: int
    ) -> int:
        """The budget of the whole step in bytes.

        Args:
            wanted: The budget; percent are of the whole unplanned step.
            unplanned_bytes: Peak of the unplanned forward and backward.
            held_bytes: By parameters, buffers and batch.
        """
        whole = self.peak_bytes(unplanned_bytes, held_bytes)
        return units.parse_budget(wanted, whole)

    def left_by(self, budget_bytes: int, held_bytes: int) -> int:
        """What a budget of the whole step leaves for forward and backward.

        Args:
            budget_bytes: The budget.
            held_bytes: By parameters, buffers and batch.

        Raises:
            CkplanError: All of it is reserved.
            InfeasibleError: The optimizer's step alone takes more.
        """
        left = budget_bytes - self.reserve_bytes
        budget, reserve = map(units.format_bytes, (budget_bytes, self.reserve_bytes))
        if left <= 0:
            raise CkplanError(
                f"cannot plan for the budget {budget}: all of it is reserved "
                f"({reserve})",
                needed="a reserve that is smaller than the budget",
                hint="a larger budget, or a smaller reserve",
            )
        found = self.bytes
        if found is None:
            return left
        if found.peak_bytes(held_bytes) > left:
            alone = found.peak_bytes(held_bytes) + self.reserve_bytes
            raise InfeasibleError(
                f"no plan fits {budget}: the step of {self.name} alone takes more",
                needed=f"at least {units.format_bytes(alone)} ({alone} B)",
                hint="an optimizer with fused=True or less state",
            )
        return left - found.reserved_bytes(self.accumulates)
