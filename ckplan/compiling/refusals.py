"""What cannot be planned, and how errors name a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ckplan import units
from ckplan.compiling.lowering import DynamoGraph
from ckplan.compiling.nodes import line_of
from ckplan.errors import ApplyError, PlanError
from ckplan.plan.plan import COMPILED, Plan
from ckplan.training.allocator import CPU
from ckplan.training.workload import tensors_of

_CUDA_GRAPHS = "triton.cudagraphs"  # option of Inductor
_MODES = (None, "default", "reduce-overhead")


def check_inputs(
    inputs: Sequence[Any], mode: str | None, options: Mapping[str, Any]
) -> None:
    """Refuse what the replay was not shown to be exact for."""
    tuned = [name for name, on in options.items() if on and "max_autotune" in name]
    if tuned:
        raise ApplyError(
            f"cannot plan code that is compiled with the option {tuned[0]}",
            needed="kernels that do not depend on what autotuning measures",
            hint="leave out the option",
        )
    if mode not in _MODES:
        raise ApplyError(
            f"cannot plan code that is compiled with mode {mode!r}",
            needed=f"one of {', '.join(map(str, _MODES))}",
            hint="leave out mode",
        )
    places = {one.device for one in tensors_of(inputs)} - {CPU}
    if len(places) > 1 or any(one.type != "cuda" for one in places):
        named = ", ".join(sorted(map(str, places)))
        raise ApplyError(
            f"cannot plan compiled code for {named}",
            needed="a model and a batch on the CPU, or on one CUDA device",
            hint="ckplan.apply, uncompiled",
        )
    if places and (mode == "reduce-overhead" or options.get(_CUDA_GRAPHS)):
        raise ApplyError(
            "cannot plan CUDA graphs: what their memory holds is not known",
            needed="mode='default'",
            hint="leave out mode",
        )


def refuse_dynamic(inputs: Sequence[Any]) -> None:
    """Refuse one of several graphs of a step if its shapes are dynamic."""
    if any(isinstance(value, torch.SymInt) for value in inputs):
        raise ApplyError(
            "cannot plan several graphs of one step with dynamic shapes",
            needed="a graph per batch shape, or a step that compiles as one graph",
            hint="dynamic=False, and batches of few different shapes",
        )


def place_of(graph: fx.GraphModule) -> str:
    """Where in the user's code a graph begins: the source of its first op."""
    for node in graph.graph.nodes:
        if node.op != "placeholder" and (line := line_of(node)):
            return f"'{line}'"
    return "an unknown line"


def trains(traced: DynamoGraph) -> bool:
    """Whether a graph is for training."""
    return torch.is_grad_enabled() and any(map(_needs_gradient, traced.inputs))


def _needs_gradient(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def check_same_graph(plan: Plan, digest: str, device: str = "cpu") -> None:
    """Refuse a plan for another compiled step, or one that compiled code cannot follow.

    Args:
        plan: The plan.
        digest: Of the joint graph.
        device: The type of device of the step.

    Raises:
        PlanError: It is for another step, for uncompiled code, or it moves tensors.
    """
    made_for = plan.fingerprint.get("compiled")
    its_device = plan.fingerprint.get("device", device)
    if made_for is None:
        what = "it is for uncompiled code"
    elif its_device != device:
        what = f"it is for {its_device}, and the model is on {device}"
    elif made_for != digest:
        what = f"it is for the compiled graph {made_for}, this is {digest}"
    else:
        _refuse_levers(plan)
        return
    raise PlanError(
        f"cannot compile with the plan of '{plan.model}': {what}",
        needed="a plan for this model, batch and torch, compiled" + _made_with(plan),
        hint="ckplan.compile(model, budget), or ckplan.apply for uncompiled code",
    )


def _made_with(plan: Plan) -> str:
    """The batch and torch of a plan for compiled code, as far as it names them."""
    known = plan.fingerprint
    if "compiled" not in known:
        return ""
    found = [f"{name} {shape}" for name, shape in known.get("batch", {}).items()]
    found += [f"torch {known['torch']}"] if "torch" in known else []
    return f"; its own: {', '.join(found)}" if found else ""


def _refuse_levers(plan: Plan) -> None:
    plan = plan.for_code(COMPILED)
    moving = next((one for one in plan.regions if one.offload), None)
    if moving is not None:
        raise PlanError(
            f"cannot compile with the plan of '{plan.model}': {moving.title} moves "
            f"{moving.offload[0]}",
            needed="a plan without offload: compiled code keeps or recomputes",
            hint="leave offload out, or ckplan.apply for uncompiled code",
        )
    if plan.calls_in_tiles:
        raise PlanError(
            f"cannot compile with the plan of '{plan.model}': {plan.calls_in_tiles[0]} "
            "runs in tiles",
            needed="a plan without tiles: compiled code keeps or recomputes",
            hint="leave tiles out, or ckplan.apply for uncompiled code",
        )


def check_within_budget(plan: Plan, peak_bytes: int) -> None:
    """Refuse a plan whose replayed peak is beyond its budget.

    Raises:
        PlanError: It is.
    """
    if plan.budget_bytes is not None and peak_bytes > plan.budget_bytes:
        peak, budget = map(units.format_bytes, (peak_bytes, plan.budget_bytes))
        raise PlanError(
            f"the plan exceeds its budget: the code that this torch generates "
            f"takes {peak} of {budget}",
            needed="a plan whose generated code was replayed; solve only simulates it",
            hint=f"ckplan verify TARGET --compile --budget {plan.budget_bytes} --save "
            f"plan.yaml, or ckplan.compile(model, {plan.budget_bytes})",
        )
