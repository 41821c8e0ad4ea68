"""One training step, the same for tracing and for measuring.

``zero_grad(set_to_none=True); forward; loss; backward; optimizer.step()``. The model's
output lives until backward ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckplan.errors import WorkloadError
from ckplan.training.workload import Workload, tensors_of

OPTIMIZERS = ("adamw", "sgd", "none", "own")
LOSS_IS_GIVEN = "loss: the workload's loss function"
LOSS_IS_OUTPUT_LOSS = "loss: output.loss"
LOSS_IS_OUTPUT = "loss: the output"
LOSS_IS_SUM = "loss: the sum of the output's floating tensors, as none was given"


@dataclass(frozen=True)
class TrainingStep:
    """A workload with its optimizer, ready to run."""

    workload: Workload
    optimizer: torch.optim.Optimizer | None

    def forward(self) -> tuple[Any, torch.Tensor]:
        """Run the model and its loss.

        Returns:
            The output, to be held until backward ends, and the scalar loss.

        Raises:
            WorkloadError: The loss is no scalar or needs no gradient.
        """
        output = call_model(self.workload)
        loss, _ = loss_of(self.workload, output)
        return output, loss

    def zero_grad(self) -> None:
        """Drop all gradients."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        self.workload.model.zero_grad(set_to_none=True)

    def update(self) -> None:
        """Let the optimizer take its step."""
        if self.optimizer is not None:
            self.optimizer.step()

    def run(self, between: Callable[[], None] | None = None) -> torch.Tensor:
        """One whole step; ``between`` runs after backward, with the gradients there."""
        self.zero_grad()
        output, loss = self.forward()
        loss.backward()
        value = loss.detach()
        del output, loss
        if between is not None:
            between()
        self.update()
        return value


def call_model(workload: Workload) -> Any:
    """Pass the batch as the contract says: keywords, positionals, or alone."""
    batch = workload.batch
    if isinstance(batch, Mapping):
        return workload.model(**batch)
    if isinstance(batch, (tuple, list)):
        return workload.model(*batch)
    return workload.model(batch)


def loss_of(workload: Workload, output: Any) -> tuple[torch.Tensor, str]:
    """The scalar to differentiate, and which rule chose it."""
    loss, rule = _pick_loss(workload, output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else f"a {type(loss).__name__}"
        )
        raise WorkloadError(
            f"the loss is no scalar: {found}",
            needed="one number, as a tensor",
            hint="return (model, batch, loss_fn) with loss_fn(output, batch).mean()",
        )
    if not loss.requires_grad:
        raise WorkloadError(
            "the loss needs no gradient: nothing in the step can be trained",
            needed="a loss that depends on a parameter with requires_grad",
            hint="look for torch.no_grad(), .detach() or frozen parameters",
        )
    return loss, rule


def _pick_loss(workload: Workload, output: Any) -> tuple[Any, str]:
    if workload.loss is not None:
        return workload.loss(output, workload.batch), LOSS_IS_GIVEN
    own = output.get("loss") if isinstance(output, Mapping) else None
    own = getattr(output, "loss", None) if own is None else own
    if isinstance(own, torch.Tensor):
        return own, LOSS_IS_OUTPUT_LOSS
    if isinstance(output, torch.Tensor) and output.numel() == 1:
        return output, LOSS_IS_OUTPUT
    floating = [t for t in tensors_of(output) if t.is_floating_point()]
    if not floating:
        raise WorkloadError(
            f"the model's output, a {type(output).__name__}, has no floating tensor",
            needed="an output.loss, a scalar, or floating tensors to sum",
            hint="return (model, batch, loss_fn) from the factory",
        )
    return functools.reduce(torch.add, (t.sum() for t in floating)), LOSS_IS_SUM


def make_step(workload: Workload, optimizer: str | None) -> TrainingStep:
    """Give a workload its optimizer.

    Args:
        workload: On its device, in the mode it is trained in.
        optimizer: One of ``OPTIMIZERS``; by default the workload's own if it has one,
            else AdamW.

    Raises:
        WorkloadError: An unknown name, or ``own`` where the workload has none.
    """
    chosen = optimizer or ("own" if workload.optimizer is not None else "adamw")
    if chosen not in OPTIMIZERS:
        raise WorkloadError(
            f"unknown optimizer '{chosen}'",
            needed="one of " + ", ".join(OPTIMIZERS),
            hint="--optimizer adamw",
        )
    if chosen == "own" and workload.optimizer is None:
        raise WorkloadError(
            "the workload has no optimizer of its own",
            needed="a factory that returns a dict with the key 'optimizer'",
            hint="--optimizer adamw",
        )
    trained = [p for p in workload.model.parameters() if p.requires_grad]
    if chosen == "own":
        return TrainingStep(workload, workload.optimizer)
    if chosen == "none" or not trained:
        return TrainingStep(workload, None)
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[chosen]
    return TrainingStep(workload, kind(trained, lr=1e-3))
