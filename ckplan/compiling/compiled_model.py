"""``ckplan.compile``: a model compiled within a budget."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckplan.compiling.eager_code import apply_eager_code, read_wanted
from ckplan.compiling.finding import run_uncompiled
from ckplan.compiling.planned_backend import Backend, backend
from ckplan.compiling.search import Progress
from ckplan.compiling.torch_errors import with_short_errors
from ckplan.errors import CkplanError
from ckplan.plan.plan import Plan


def compile(
    model: Callable[..., Any],
    plan_or_budget: Plan | Path | str | int,
    *,
    reserve: str | int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: bool = False,
    progress: Progress | None = None,
    **how: Any,
) -> Any:
    """Compile a model as ``torch.compile`` does, its training step within a budget.

    The first forward plans: the values that forward saves are chosen such that the
    generated code, replayed, stays within the budget. What backward computes again is
    fused into kernels that run anyway. Loss and gradients are those of the compiled
    unplanned step, dropout included.

    Args:
        model: The model, or a function that calls it. Compile what returns the loss:
            memory of what runs outside is not known.
        plan_or_budget: A limit on the bytes alive in forward and backward, with
            parameters and batch: ``"12GiB"``, ``"80%"`` of the unplanned compiled step
            at its largest batch so far, or bytes; on a card, of blocks of its
            allocator. Or a plan for compiled code, or the path of its YAML file. Its
            regions for eager code are applied to the model, as ``ckplan.apply`` does;
            such a model may break into several graphs by default.
        reserve: Size subtracted from the budget, for memory that is not part of forward
            and backward.
        optimizer: Its state, and what its step allocates, count against the budget.
        accumulate: Several backwards come before a step of the optimizer, so gradients
            are there before backward; needs the optimizer.
        progress: Told the stage of planning, the items done and their total.
        how: Keyword arguments of ``torch.compile``, except ``backend``. By default,
            the model must compile as a whole (``fullgraph=True``), if not before, then
            after a forward that runs uncompiled; and every batch shape is compiled by
            itself (``dynamic=False``), a smaller one than before without a search; with
            a plan, others follow it. Code for all sizes (``dynamic=True``)
            has the plan for the largest that is known: that of ``mark_dynamic``, or of
            the batch that it is compiled for. With ``fullgraph=False``, a module
            may break into several graphs, which share the budget; the first forward
            then runs three times more, uncompiled.

    Returns:
        The compiled model.

    Raises:
        ApplyError: This torch lacks the hook; or there is no C++ compiler, or the step
            is neither on the CPU nor on one CUDA device. The first forward raises
            these.
        WorkloadError: The model does not compile as one graph.
        PlanError: The plan is for uncompiled code or another graph, or exceeds its
            budget.
        InfeasibleError: No plan fits; the smallest replayed peak is named.
    """
    if "backend" in how or not callable(model):
        what = (
            "a backend" if "backend" in how else f"the {type(model).__name__} {model!r}"
        )
        raise CkplanError(
            f"cannot compile with {what}: ckplan.compile is given a model and a budget",
            needed="a model, or a function that calls it; no backend",
            hint="torch.compile(model, backend=ckplan.backend(budget))",
        )
    wanted, how = apply_eager_code(model, read_wanted(plan_or_budget), how)
    planned = backend(
        wanted,
        reserve=reserve,
        optimizer=optimizer,
        accumulate=accumulate,
        progress=progress,
    )
    planned.model = getattr(model, "__name__", type(model).__name__)
    compiled = torch.compile(model, backend=planned, **how)
    if not isinstance(compiled, nn.Module):
        return with_short_errors(compiled)
    prepare = settle = None
    if how["fullgraph"]:
        settle = functools.partial(run_uncompiled, model, model)
    else:
        prepare = functools.partial(_find_parts, planned, model, how)
    compiled.forward = with_short_errors(compiled.forward, prepare, settle)
    return compiled


def _find_parts(
    planned: Backend, model: nn.Module, how: Mapping[str, Any], args: Any, kwargs: Any
) -> None:
    """Plan all graphs before the first forward; warn of what runs uncompiled."""
    parts = planned.find_parts(model, model, how, args, kwargs)
    if parts is not None and parts.notice is not None:
        warnings.warn(parts.notice, stacklevel=4)
