"""The training step of a workload, compiled, and its ``Graph``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from ckplan import units
from ckplan.compiling.elsewhere import profile_for_card
from ckplan.compiling.finding import find_parts, run_uncompiled
from ckplan.compiling.lowering import DynamoGraph
from ckplan.compiling.parts import Parts, only
from ckplan.compiling.planned_backend import Backend
from ckplan.compiling.search import CompiledPlanner, Progress, plan_graph
from ckplan.compiling.torch_errors import (
    compile_errors,
    errors_pass,
    require_hook,
)
from ckplan.errors import CkplanError, GraphBreakError, WorkloadError
from ckplan.graph.graph import Graph
from ckplan.tracing.target import find_target, local_card
from ckplan.training.fingerprint import fingerprint
from ckplan.training.loading import WorkloadSpec, as_spec
from ckplan.training.losses import arguments_of, pick_loss
from ckplan.training.remembered import describe_workload
from ckplan.training.step import AMP, Training
from ckplan.training.workload import Workload, mode_notes


def loss_of_model(model: nn.Module, workload: Workload) -> torch.Tensor:
    """Forward and loss of a workload on its batch."""
    return _loss(model, workload.batch, workload)


def _loss(model: nn.Module, batch: Any, workload: Workload) -> torch.Tensor:
    if workload.step is not None:
        return workload.step(model, batch)
    args, kwargs = arguments_of(batch)
    loss: torch.Tensor = pick_loss(workload, model(*args, **kwargs))[0]
    return loss


def under_autocast(
    workload: Workload, amp: str | None, device: str = "cpu"
) -> Workload:
    """The workload, with forward and loss under autocast.

    Args:
        workload: As it is without.
        amp: The type, as ``Training.amp``; None: without autocast.
        device: ``cpu`` or ``cuda``: whose ops are cast.

    Raises:
        WorkloadError: There is no such type.
    """
    Training(amp=amp)  # raises where there is no such type
    if amp is None:
        return workload
    dtype = AMP[amp]

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast(device, dtype):
            return _loss(model, batch, workload)

    return replace(workload, step=step)


def compiled_loss(workload: Workload, backend: Any) -> Callable[[], torch.Tensor]:
    """Forward and loss of a workload, compiled as one graph."""
    step, given, _ = _breaking(workload)
    call = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)

    def loss() -> torch.Tensor:
        with compile_errors("the step"):
            return call(*given)

    return loss


def _steps(
    workload: Workload, backend: Any
) -> tuple[Callable[[], object], Callable[[], object]]:
    """The step of a workload, compiled as one graph, and uncompiled."""
    return compiled_loss(workload, backend), partial(
        loss_of_model, workload.model, workload
    )


def parted_loss(workload: Workload, backend: Any) -> Callable[[], torch.Tensor]:
    """Forward and loss of a workload that may break into several compiled graphs.

    Args:
        workload: Its parameters, buffers and batch are what the step holds.
        backend: That of torch by name; or a ``Backend``, which divides its budget.
    """
    step, given, how = _breaking(workload)
    call = torch.compile(step, backend=backend, **how)

    def loss() -> torch.Tensor:
        with compile_errors("the step"):
            if isinstance(backend, Backend):
                backend.find_parts(step, workload.model, how, given, {})
            return call(*given)

    return loss


def _breaking(
    workload: Workload,
) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...], dict[str, Any]]:
    """A step that may break, what it is given, and how it is compiled.

    The model is an argument, so that paths of modules begin at it; and so is the batch.
    """

    def step_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return _loss(model, batch, workload)

    given = workload.model, workload.batch
    return step_loss, given, {"fullgraph": False, "dynamic": False}


def parts_of(workload: Workload, progress: Progress | None = None) -> Parts:
    """The graphs of a step: one, or those that graph breaks divide it into.

    Forward runs uncompiled, once for one graph. If that breaks, it runs as it is, which
    may settle it, and otherwise three times more.

    Raises:
        ApplyError: No graph requires a gradient, or its code cannot be replayed.
        WorkloadError: The step does not train.
    """
    model = type(workload.model).__name__
    step, given, how = _breaking(workload)
    try:
        return only(_alone(workload, model, progress))
    except GraphBreakError:
        run_uncompiled(step, workload.model, given, {})
    try:
        return only(_alone(workload, model, progress))
    except GraphBreakError:
        with compile_errors("the step"):
            return find_parts(step, workload.model, given, {}, how, progress)


def profile_compiled(
    spec: WorkloadSpec | str | Path,
    *,
    seed: int = 0,
    amp: str | None = None,
    generate: bool = False,
    device: str | None = None,
    gpu: str | None = None,
    host: float = 1.0,
    plans: bool = True,
    progress: Progress | None = None,
) -> Graph:
    """Trace a workload's compiled step, forward, loss and backward, as a ``Graph``.

    No kernel is compiled for it; see ``parts_of``. The unplanned step is the one that
    torch chooses, which computes some values again as it is. Several graphs are joined
    to one, and one plan is for all of them.

    Args:
        spec: Where the workload comes from.
        seed: Seed of all random numbers.
        amp: ``bf16`` or ``fp16``: forward and loss run under autocast to this type.
        generate: Generate and replay the code of every plan that a budget may get: what
            ``solve`` finds is exact then, without torch. Not for a card.
        device: ``cpu`` or ``cuda``; by default ``cuda`` if a card is named. For that,
            nothing runs and nothing is replayed: see ``elsewhere.py``.
        gpu: A card of ``ckplan gpus``; its roofline gives seconds.
        host: Speed of the processor beside the card, relative to this one.
        plans: Of a card, whether to look for plans.
        progress: Told of the work.

    Raises:
        ApplyError: This torch lacks the hook, or see ``parts_of``.
        WorkloadError: The step does not train, or there is no such type.
        CkplanError: The workload cannot be built.
    """
    require_hook()
    target = find_target(device or ("cpu" if gpu is None else "cuda"), gpu, host)
    spec = as_spec(spec)
    known: dict[str, Any] = {"workload": describe_workload(spec, seed), "amp": amp}
    options = {key: value for key, value in known.items() if value}
    if target.device.type == "cuda":
        load, card = spec.load(), target.gpu or local_card(target.device)
        graph = profile_for_card(
            lambda: under_autocast(load(), amp, "cuda"),
            _steps,
            card,
            seed=seed,
            host=host,
            plans=plans,
            progress=progress,
        )
        return replace(graph, options={**graph.options, **options})
    if gpu is not None:
        raise CkplanError(
            f"cannot trace a compiled step with bytes of the CPU and seconds of {gpu}",
            needed="a step that is compiled for the one or the other",
            hint="leave out --device, or --gpu",
        )
    torch.manual_seed(seed)
    workload = under_autocast(spec.build(), amp)
    parts = parts_of(workload, progress)
    peak_bytes = parts.unplanned_peak_bytes
    peak = units.format_bytes(peak_bytes)
    notes = [f"replay of the generated code: {peak} ({peak_bytes} B) unplanned"]
    notes += mode_notes(workload.model)
    if parts.notice is not None:
        notes.append(parts.notice)
    elif len(parts.runs) > 1:
        notes.append(f"{len(parts.runs)} compiled graphs; nothing runs uncompiled")
    graph = parts.joined.graph
    shapes = fingerprint(workload, torch.device("cpu"))["batch"]
    return replace(
        graph,
        fingerprint={**graph.fingerprint, "batch": shapes},
        options={**graph.options, **options},
        notes=tuple(notes),
        generated=parts.generated() if generate else (),
    )


def _alone(
    workload: Workload, model: str, progress: Progress | None
) -> CompiledPlanner:
    """Trace a step that compiles as one graph; its forward runs once, uncompiled.

    Raises:
        GraphBreakError: It does not compile as one graph.
        WorkloadError: It does not train.
    """
    found: list[CompiledPlanner] = []

    def only_trace(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with errors_pass():
            traced = DynamoGraph(graph, inputs, {})
            planner = plan_graph(traced, model, progress, quick=True)
            if planner is not None:
                found.append(planner)
            return graph.forward

    compiled_loss(workload, only_trace)()
    if not found:
        raise WorkloadError(
            "cannot trace a compiled step: nothing requires a gradient",
            needed="a loss that depends on a parameter with requires_grad",
            hint="look for torch.no_grad(), .detach() or frozen parameters",
        )
    return found[0]
