"""The ``Graph`` of a compiled step for CUDA, on a machine without a card.

Autograd of torch refuses fake CUDA tensors where there is no card. So the step is
traced on fake CPU tensors, and the compiler calls the ops that a card would run (see
``tracing/cuda/``). No code is generated: peaks are simulated, and nothing is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ckplan.compiling.card_plans import CardStep, divided_plans
from ckplan.compiling.finding import run_uncompiled
from ckplan.compiling.graph import as_graph
from ckplan.compiling.lowering import DynamoGraph
from ckplan.compiling.partition import JointGraph
from ckplan.compiling.search import Progress
from ckplan.compiling.torch_errors import errors_pass, refuse_read_values
from ckplan.errors import CkplanError, GraphBreakError, WorkloadError
from ckplan.gpus import Gpu
from ckplan.graph.graph import Graph
from ckplan.tracing.costs.apply_overhead import on_host
from ckplan.tracing.cuda import compiled_as_cuda, cpu_as_cuda
from ckplan.tracing.cuda.memory import in_allocator_blocks
from ckplan.tracing.faking.fake_mode import fake_tensors
from ckplan.training.failures import first_line
from ckplan.training.fingerprint import fingerprint
from ckplan.training.randomness import seed_everything
from ckplan.training.workload import Workload, mode_notes

_SIMULATED = "simulated, not replayed: `verify --compile` does, on the card itself"
NOTE_NO_OPTIMIZER = (
    "the optimizer is not part of it: leave room with `solve --reserve SIZE`"
)


def profile_for_card(
    make: Callable[[], Workload],
    step_of: Callable[[Workload, Any], tuple[Callable[[], object], Callable[..., Any]]],
    gpu: Gpu,
    *,
    seed: int = 0,
    host: float = 1.0,
    plans: bool = True,
    progress: Progress | None = None,
) -> Graph:
    """Trace a workload's compiled step as that of a card, running no kernel.

    Args:
        make: Makes the workload.
        step_of: Given a workload and a backend, what runs its compiled step, and what
            runs it uncompiled.
        gpu: The card; seconds come from its roofline.
        seed: Seed of all random numbers.
        host: Speed of the processor beside the card, relative to this one.
        plans: Whether to divide the joint graph by every plan that a budget may get;
            without them, no plan is known.
        progress: Told of the work.

    Returns:
        The step, forward, loss and backward; its bytes in blocks of CUDA's allocator.

    Raises:
        WorkloadError: The step does not train, is not one graph, or does not run on
            fake tensors.
    """
    with fake_tensors() as (fake, _), cpu_as_cuda(gpu.capability, gpu):
        seed_everything(seed)
        workload = make()
    with fake, compiled_as_cuda(gpu.capability) as words:
        joint = _joint_graph(workload, step_of, gpu)
    step = as_graph(joint, type(workload.model).__name__, gpu=gpu)

    def finish(graph: Graph) -> Graph:
        return on_host(in_allocator_blocks(graph, gpu.capability), host)

    generated = []
    if plans:
        generated = divided_plans(CardStep(joint, step, gpu, finish), progress)
    shapes = fingerprint(workload, torch.device("cuda"))["batch"]
    notes = (
        f"traced under fake tensors, translated to CUDA on {gpu.name}",
        *(f"as CUDA does it: {what}" for what in words),
        f"peaks are {_SIMULATED}",
        *mode_notes(workload.model),
        NOTE_NO_OPTIMIZER,
    )
    known = {**step.graph.fingerprint, "batch": shapes}
    graph = replace(step.graph, fingerprint=known, notes=notes)
    return replace(finish(graph), generated=tuple(generated))


def _joint_graph(workload: Workload, step_of: Any, gpu: Gpu) -> JointGraph:
    """The joint graph of the step; if it breaks, after a forward that may settle it."""
    found: list[JointGraph | None] = []

    def only_trace(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with errors_pass():
            refuse_read_values(graph)
            try:
                found.append(DynamoGraph(graph, inputs, {}).trace())
            except Exception as error:  # whatever AOTAutograd cannot trace
                raise _not_traced(gpu, _said(error)) from error
        return graph.forward

    compiled, uncompiled = step_of(workload, only_trace)
    try:
        try:
            compiled()
        except GraphBreakError:
            run_uncompiled(uncompiled, workload.model, (), {})
            torch._dynamo.reset()
            found.clear()
            compiled()
    except GraphBreakError as error:
        why = error.what.removeprefix("cannot compile the step as one graph: ")
        raise _not_traced(gpu, f"it is not one graph: {why}") from error
    except CkplanError:
        raise
    except Exception as error:
        raise _not_traced(gpu, _said(error)) from error
    if not found or found[-1] is None:
        raise WorkloadError(
            "cannot trace a compiled step: nothing requires a gradient",
            needed="a loss that depends on a parameter with requires_grad",
            hint="look for torch.no_grad(), .detach() or frozen parameters",
        )
    return found[-1]


def _not_traced(gpu: Gpu, why: str) -> WorkloadError:
    return WorkloadError(
        f"cannot trace the compiled step for {gpu.name} without a card: {why}",
        needed="a step that compiles as one graph, of ops that run on fake tensors",
        hint="ckplan profile without --compile; or without --gpu, for the CPU",
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
