"""The training step of a workload as one compiled graph, and its ``Graph``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx, nn

from ckplan import units
from ckplan.compiling.graph import as_graph
from ckplan.compiling.lowering import DynamoGraph, Lowered
from ckplan.compiling.partition import JointGraph
from ckplan.compiling.planned_backend import Backend
from ckplan.compiling.replay import replay
from ckplan.compiling.torch_names import (
    compile_errors,
    errors_pass,
    require_hook,
)
from ckplan.errors import WorkloadError
from ckplan.graph.graph import Graph
from ckplan.training.loading import WorkloadSpec, as_spec
from ckplan.training.losses import arguments_of, pick_loss
from ckplan.training.workload import Workload

_T = TypeVar("_T")


def loss_of_model(model: nn.Module, workload: Workload) -> torch.Tensor:
    """The loss; ``model`` is an argument, so that paths of modules begin at it."""
    return _loss(model, workload.batch, workload)


def _loss(model: nn.Module, batch: Any, workload: Workload) -> torch.Tensor:
    if workload.step is not None:
        return workload.step(model, batch)
    args, kwargs = arguments_of(batch)
    loss: torch.Tensor = pick_loss(workload, model(*args, **kwargs))[0]
    return loss


def compiled_loss(workload: Workload, backend: Any) -> Callable[[], torch.Tensor]:
    """Forward and loss of a workload, compiled as one graph."""

    def step_loss(model: nn.Module) -> torch.Tensor:
        return loss_of_model(model, workload)

    call = torch.compile(step_loss, backend=backend, fullgraph=True, dynamic=False)

    def loss() -> torch.Tensor:
        with compile_errors("the step"):
            return call(workload.model)

    return loss


def parted_loss(workload: Workload, backend: Any) -> Callable[[], torch.Tensor]:
    """Forward and loss of a workload that may break into several compiled graphs.

    Args:
        workload: Its parameters, buffers and batch are what the step holds.
        backend: That of torch by name; or a ``Backend``, which divides its budget.
    """

    def step_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return _loss(model, batch, workload)

    model, given = workload.model, (workload.model, workload.batch)
    how = {"fullgraph": False, "dynamic": False}
    call = torch.compile(step_loss, backend=backend, **how)

    def loss() -> torch.Tensor:
        with compile_errors("the step"):
            if isinstance(backend, Backend):
                backend.find_parts(step_loss, model, how, given, {})
            return call(*given)

    return loss


def profile_compiled(spec: WorkloadSpec | str | Path, *, seed: int = 0) -> Graph:
    """Trace a workload's compiled step, forward, loss and backward, as a ``Graph``.

    No kernel is generated for it; forward runs once, uncompiled. The unplanned step is
    the one that torch chooses, which computes some values again as it is.

    Args:
        spec: Where the workload comes from.
        seed: Seed of all random numbers.

    Raises:
        ApplyError: This torch lacks the hook.
        WorkloadError: The step does not train.
        CkplanError: The workload cannot be built.
    """
    require_hook()
    torch.manual_seed(seed)
    workload = as_spec(spec).build()

    def describe(_: DynamoGraph, joint: JointGraph, lowered: Lowered) -> Graph:
        peak_bytes = replay(lowered, joint.num_outputs).peak_bytes
        peak = units.format_bytes(peak_bytes)
        note = f"replay of the generated code: {peak} ({peak_bytes} B) unplanned"
        traced = as_graph(joint, type(workload.model).__name__).graph
        return replace(traced, notes=(*traced.notes, note))

    return trace_step(workload, describe)


def trace_step(
    workload: Workload, use: Callable[[DynamoGraph, JointGraph, Lowered], _T]
) -> _T:
    """Trace a compiled step, which runs once, uncompiled; return what ``use`` makes.

    Args:
        workload: Its forward and loss are compiled as one graph.
        use: Given the graph, the joint graph as torch divides it, and its code.

    Raises:
        WorkloadError: The step does not train, or does not compile as one graph.
    """
    found: list[_T] = []

    def only_trace(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with errors_pass():
            traced = DynamoGraph(graph, inputs, {})
            joint, lowered = traced.lower(None)
            if joint is None or lowered is None:
                raise WorkloadError(
                    "cannot trace a compiled step: nothing requires a gradient",
                    needed="a loss that depends on a parameter with requires_grad",
                    hint="look for torch.no_grad(), .detach() or frozen parameters",
                )
            found.append(use(traced, joint, lowered))
            return graph.forward

    compiled_loss(workload, only_trace)()
    return found[0]
