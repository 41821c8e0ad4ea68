"""Warnings of applying a plan and running a planned model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import suppress
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from ckplan.applying.hooks.choices import Choice
from ckplan.applying.recording.recorder import Recorder
from ckplan.errors import did_you_mean
from ckplan.plan.names import OpName
from ckplan.plan.plan import Plan, differences, plan_fingerprint
from ckplan.training.fingerprint import (
    batch_shapes,
    count_elements,
    parameter_shapes,
    torch_version,
)
from ckplan.training.step import AMP
from ckplan.units import format_bytes


def missing_ops(choice: Choice, region: Recorder) -> str:
    """Message of planned ops that a forward did not run, with a near name."""
    first = choice.missing[0]
    there = [str(OpName(*key)) for key in region.names.seen]
    near = did_you_mean(first, there)
    names = ", ".join(choice.missing[:3]) + ", ..." * (len(choice.missing) > 3)
    hint = f" (did you mean {near!r}?)" if near else ""
    return f"{choice.name} runs no op {names}{hint}"


IDLE = "did not run in the first step"
"""Message of regions whose calls never came."""


def idle_regions(choices: Iterable[Choice]) -> str:
    """Message of regions that have not run yet; empty if all have."""
    names = [choice.name for choice in choices if not choice.runs]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} {IDLE}" if names else ""


def warn_of_differences(plan: Plan, model: nn.Module) -> None:
    """Warn of another torch than planned, and of other parameters.

    Names and shapes alone are read, before the first step.
    """
    here = {"parameters": parameter_shapes(model)}
    planned = plan.fingerprint.get("torch", torch_version())
    if planned != torch_version():
        warnings.warn(
            f"the plan was made with torch {planned}, and this is torch "
            f"{torch_version()}: ops that it names may be missing",
            stacklevel=4,
        )
    for difference in differences(plan.fingerprint, plan_fingerprint(here)):
        kind, count = type(model).__name__, len(here["parameters"])
        warnings.warn(
            f"the plan was made for another model: {difference}, "
            f"of a {kind} with {count} parameters\n"
            "  needed: the model that was profiled, with the same names and shapes\n"
            "  try:    profile and solve this one; its bytes are not the plan's",
            stacklevel=4,
        )


def warn_of_other_device(plan: Plan, model: nn.Module) -> bool:
    """Warn if the model runs on another device than planned; return whether.

    Called when the model runs, since users often apply a plan before moving it.
    """
    planned = plan.fingerprint.get("device")
    first = next(model.parameters(), None)
    here = planned if first is None or is_fake(first) else first.device.type
    other = bool(planned) and here != planned
    if other:
        warnings.warn(
            f"the plan was made for {planned}, and the model runs on {here}: other ops "
            "run there, so ops that the plan names may be missing (see ckplan.status), "
            "and its bytes are not these",
            stacklevel=4,
        )
    return other


def warn_of_smaller_batch(
    plan: Plan, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Warn if a tuned plan's first batch has fewer rows than its setting."""
    rows = plan.workload.get("micro_batch")
    planned = plan.fingerprint.get("batch", {})
    if rows is None:
        return
    for name, here in _shapes_by_name(model, args, kwargs).items():
        before = count_elements(planned.get(name, ""))
        if 0 < count_elements(here) < before:
            warnings.warn(
                f"the plan was tuned for a micro-batch of {rows}, and {name} is "
                f"{here}, planned was {planned[name]}: a batch this small needs less "
                "recomputation, or none",
                stacklevel=4,
            )
            return


def other_autocast(plan: Plan, device: str) -> str:
    """Message of a forward under another autocast than a plan says; "" if it is not."""
    planned = plan.workload.get("amp")
    if planned is None and "micro_batch" not in plan.workload:
        return ""  # nobody said how the step trains
    here = None
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        here = next((name for name, one in AMP.items() if one == dtype), str(dtype))
    if here == planned:
        return ""
    said, found = (
        f"autocast to {name}" if name else "no autocast" for name in (planned, here)
    )
    return f"the plan is for a step with {said}, and forward runs with {found}"


def warn_of_larger_batch(
    plan: Plan, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Warn if a batch has more elements than planned; return whether."""
    planned = plan.fingerprint.get("batch", {})
    for name, here in _shapes_by_name(model, args, kwargs).items():
        before = count_elements(planned.get(name, ""))
        times = count_elements(here) / before if before else 0.0
        if times > 1:
            what = f"{name} is {here}, planned was {planned[name]}"
            if plan.predicted is not None:
                most = format_bytes(round(times * plan.predicted.peak_bytes))
                what += f"; the peak may grow up to {most}"
            warnings.warn(f"the batch is larger than planned: {what}", stacklevel=4)
            return True
    return False


def _shapes_by_name(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, str]:
    """Shapes of arguments by position and by name, whichever of both was planned."""
    shapes = batch_shapes(args, kwargs)
    with suppress(TypeError, ValueError):  # a forward without a signature
        found = signature(model.forward).parameters.values()
        named = [one.name for one in found if one.kind in _POSITIONAL]
        for place, name in enumerate(named):
            here = shapes.get(name, shapes.get(str(place)))
            if here is not None:
                shapes |= {name: here, str(place): here}
    return shapes


_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
