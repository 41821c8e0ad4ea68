"""One training step, the same for tracing and for measuring.

The step is ``zero_grad(set_to_none=True); forward; loss; backward; optimizer.step()``.
Forward and loss run under autocast if requested. Forward, loss and backward repeat if
gradients accumulate. The model's output lives until backward ends. Gradients are
unscaled and clipped, if requested, before the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ckplan.errors import WorkloadError
from ckplan.training.losses import output_and_loss
from ckplan.training.optimizers import (
    PREDICTED_ONLY,
    Scaler,
    check_optimizer,
    make_optimizer,
)
from ckplan.training.workload import Workload
from ckplan.units import is_above_zero, is_count

AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}


def amp_name(amp: str | torch.dtype | None) -> str | None:
    """What options call a type of autocast; what is none stays as it is.

    >>> amp_name(torch.bfloat16), amp_name("fp16"), amp_name(None)
    ('bf16', 'fp16', None)
    """
    if not isinstance(amp, torch.dtype):
        return amp
    return next((name for name, dtype in AMP.items() if dtype == amp), str(amp))


@dataclass(frozen=True, slots=True)
class Training:
    """Training options that the workload does not define itself.

    Raises:
        WorkloadError: ``amp`` is none of ``AMP``, ``accumulate`` is no whole number
            from one on, ``clip`` no number above zero, or there is no such optimizer.
    """

    optimizer: str | None = None  # see optimizers.py; default: own, else adamw
    amp: str | None = None  # autocast type of forward and loss
    accumulate: int = 1  # backwards before the optimizer takes a step
    clip: float | None = None  # largest norm of all gradients together
    scaler: bool = False  # whether a gradient scaler scales the loss

    def __post_init__(self) -> None:
        """Validate the options."""
        if self.amp is not None and self.amp not in AMP:
            raise WorkloadError(
                f"cannot train under autocast to '{self.amp}'",
                needed=" or ".join(AMP),
                hint="--amp bf16",
            )
        if not is_count(self.accumulate):
            raise WorkloadError(
                f"cannot accumulate gradients of {self.accumulate!r} batches",
                needed="a whole number, one or more",
                hint="--accumulate 4",
            )
        if self.clip is not None and not is_above_zero(self.clip):
            raise WorkloadError(
                f"cannot clip gradients to the norm {self.clip!r}",
                needed="a norm above zero",
                hint="--clip 1.0",
            )
        if self.optimizer is not None:
            check_optimizer(self.optimizer)

    @property
    def predicted_only(self) -> bool:
        """Whether the optimizer only predicts memory and cannot train."""
        return self.optimizer == PREDICTED_ONLY

    def as_options(self) -> dict[str, Any]:
        """The options that a trace records."""
        found: dict[str, Any] = {"optimizer": self.optimizer or "default"}
        if self.amp is not None:
            found["amp"] = self.amp
        if self.accumulate > 1:
            found["accumulate"] = self.accumulate
        if self.clip is not None:
            found["clip"] = self.clip
        if self.scaler:
            found["scaler"] = True
        return found


DEFAULT_TRAINING = Training()


@dataclass(frozen=True)
class TrainingStep:
    """A workload with its optimizer, ready to run."""

    workload: Workload
    optimizer: torch.optim.Optimizer | None
    training: Training = DEFAULT_TRAINING
    on_phase: Callable[[str], object] | None = (
        None  # told each phase of ``curve.PHASES``
    )
    scaler: Scaler | None = None
    before_backward: Callable[[torch.Tensor], object] | None = None  # given the loss

    def forward(self) -> tuple[Any, torch.Tensor, str]:
        """Run the model and its loss.

        Returns:
            The output, to be retained until backward ends; the scalar loss, scaled if
            requested; and the rule that chose the loss.

        Raises:
            WorkloadError: The loss is not a scalar or requires no gradient.
        """
        with self.autocast():
            output, loss, rule = output_and_loss(self.workload)
            if self.training.accumulate > 1:
                loss = loss / self.training.accumulate
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        return output, loss, rule

    def accumulate(self) -> torch.Tensor:
        """Forward and backward of one batch; returns the loss, detached."""
        self._enter("forward")
        output, loss, _ = self.forward()
        self._enter("backward")
        self.backward(loss)
        value = loss.detach()
        del output, loss
        return value

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward; gradients are added to existing ones."""
        if self.before_backward is not None:
            self.before_backward(loss)
        loss.backward()

    def _enter(self, phase: str) -> None:
        if self.on_phase is not None:
            self.on_phase(phase)

    def autocast(self) -> AbstractContextManager[Any]:
        """Context manager of forward and loss: autocast, or none."""
        if self.training.amp is None:
            return nullcontext()
        device = next(iter(self.workload.model.parameters())).device.type
        return torch.autocast(device, AMP[self.training.amp])

    def zero_grad(self) -> None:
        """Free all gradients."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        self.workload.model.zero_grad(set_to_none=True)

    def update(self) -> None:
        """Unscale and clip gradients if requested, then run the optimizer's step."""
        self._enter("optimizer")
        if self.optimizer is None:
            return
        if self.training.clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            parameters = self.workload.model.parameters()
            torch.nn.utils.clip_grad_norm_(parameters, self.training.clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def run(self, after_backward: Callable[[], None] | None = None) -> torch.Tensor:
        """Run one whole step; ``after_backward`` is called before the optimizer."""
        self.zero_grad()
        for _ in range(self.training.accumulate):
            value = self.accumulate()
        if after_backward is not None:
            after_backward()
        self.update()
        return value


def make_step(
    workload: Workload, training: Training, device: str | None = None
) -> TrainingStep:
    """Combine a workload and its optimizer.

    Args:
        workload: Workload on its device, in train or eval mode as needed.
        training: Training options.
        device: Device type that its tensors emulate; by default their own.

    Raises:
        WorkloadError: The optimizer is ``own``, but the workload has none.
    """
    chosen = training.optimizer or (
        "own" if workload.optimizer is not None else "adamw"
    )
    if chosen == "own" and workload.optimizer is None:
        raise WorkloadError(
            "the workload has no optimizer of its own",
            needed="a factory that returns a dict with the key 'optimizer'",
            hint="--optimizer adamw",
        )
    trained = [p for p in workload.model.parameters() if p.requires_grad]
    if chosen == "own":
        optimizer = workload.optimizer
    elif chosen == "none" or not trained:
        optimizer = None
    else:
        own_device = trained[0].device.type
        optimizer = make_optimizer(chosen, trained, device or own_device)
    scales = training.scaler and optimizer is not None
    scaler = Scaler(trained[0].device.type) if scales and trained else None
    return TrainingStep(workload, optimizer, training, scaler=scaler)
