"""Call the model on its batch, and find the loss."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckplan.errors import WorkloadError
from ckplan.training.workload import Workload, tensors_of

LOSS_IS_GIVEN = "loss: the workload's loss function"
LOSS_IS_OF_STEP = "loss: of the workload's step function"
LOSS_IS_OUTPUT_LOSS = "loss: output.loss"
LOSS_IS_OUTPUT = "loss: the output"
LOSS_IS_SCALAR = "loss: the only scalar of the output"
LOSS_IS_SUM = "loss: the sum of the output's floating tensors, as none was given"


def call_model(workload: Workload) -> Any:
    """Call the model on the batch: as keywords, positionals, or one argument.

    Raises:
        WorkloadError: The model's forward does not take these arguments.
    """
    model = workload.model
    args, kwargs = arguments_of(workload.batch)
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        why = why_not_callable(model.forward, args, kwargs)
        if why is None:
            raise
        names = ", ".join(inspect.signature(model.forward).parameters)
        given = ", ".join(map(str, kwargs)) or f"{len(args)} positional"
        raise WorkloadError(
            f"the batch ({given}) does not fit {type(model).__name__}.forward: {why}",
            needed=f"arguments of forward({names})",
            hint="labels belong into 'target', which loss_fn(output, target) gets; "
            "'step' gets the model and the batch: see configs/README.md",
        ).with_traceback(error.__traceback__) from None


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """How the model gets a batch: as keywords, positionals, or one argument."""
    if isinstance(batch, Mapping):
        return (), batch
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}


def output_and_loss(workload: Workload) -> tuple[Any, torch.Tensor, str]:
    """Run the model and its loss.

    Returns:
        The output, or None if the workload's own step holds it; the scalar loss; and
        the rule that chose it.

    Raises:
        WorkloadError: The batch does not fit the model, the loss is not a scalar, or it
            requires no gradient.
    """
    if workload.step is not None:
        loss = workload.step(workload.model, workload.batch)
        return None, check_loss(loss), LOSS_IS_OF_STEP
    output = call_model(workload)
    return output, *loss_of(workload, output)


def loss_of(workload: Workload, output: Any) -> tuple[torch.Tensor, str]:
    """The scalar loss of an output, and the rule that chose it."""
    loss, rule = pick_loss(workload, output)
    return check_loss(loss), rule


def check_loss(loss: object) -> torch.Tensor:
    """Return a loss that backward can start from.

    Raises:
        WorkloadError: It is not a scalar, or requires no gradient.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else f"a {type(loss).__name__}"
        )
        raise WorkloadError(
            f"the loss is not a scalar: {found}",
            needed="a tensor with one element",
            hint="take the mean in loss_fn, or return the loss from step",
        )
    if not loss.requires_grad:
        raise WorkloadError(
            "the loss requires no gradient: the step trains nothing",
            needed="a loss that depends on a parameter with requires_grad",
            hint="look for torch.no_grad(), .detach() or frozen parameters",
        )
    return loss


def pick_loss(workload: Workload, output: Any) -> tuple[Any, str]:
    """The loss, unchecked, and the rule that chose it."""
    if workload.loss is not None:
        return _given_loss(workload, workload.loss, output), LOSS_IS_GIVEN
    output_loss = output.get("loss") if isinstance(output, Mapping) else None
    output_loss = getattr(output, "loss", None) if output_loss is None else output_loss
    if isinstance(output_loss, torch.Tensor):
        return output_loss, LOSS_IS_OUTPUT_LOSS
    if isinstance(output, torch.Tensor) and output.numel() == 1:
        return output, LOSS_IS_OUTPUT
    floating = [t for t in tensors_of(output) if t.is_floating_point()]
    scalars = [t for t in floating if t.numel() == 1 and t.requires_grad]
    if len(scalars) == 1 < len(floating):
        return scalars[0], LOSS_IS_SCALAR
    if len(scalars) > 1:
        raise WorkloadError(
            f"which is the loss? The model's output, a {type(output).__name__}, has "
            f"{len(scalars)} scalars",
            needed="an output with a 'loss', an output with one scalar, or a loss_fn",
            hint="return (model, batch, lambda output, batch: output[0])",
        )
    if not floating:
        raise WorkloadError(
            f"the model's output, a {type(output).__name__}, has no floating tensor",
            needed="an output.loss, a scalar, or floating tensors to sum",
            hint="return (model, batch, loss_fn) from the factory",
        )
    return functools.reduce(torch.add, (t.sum() for t in floating)), LOSS_IS_SUM


def _given_loss(
    workload: Workload, loss: Callable[[Any, Any], torch.Tensor], output: Any
) -> Any:
    name = "batch" if workload.target is None else "target"
    args = output, workload.batch if workload.target is None else workload.target
    try:
        return loss(*args)
    except TypeError as error:
        called = loss.forward if isinstance(loss, torch.nn.Module) else loss
        why = why_not_callable(called, args, {})
        if why is None:
            raise
        raise WorkloadError(
            f"loss_fn cannot be called: {why}",
            needed=f"a function that takes the model's output and the {name}",
            hint=f"loss_fn=lambda output, {name}: ...",
        ).with_traceback(error.__traceback__) from None


def why_not_callable(
    function: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str | None:
    """Why a function does not take these arguments; None if it does."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:  # a builtin without a signature
        return None
    return None
