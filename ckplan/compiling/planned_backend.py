"""``ckplan.compile`` and ``ckplan.backend``: a model compiled within a budget."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from ckplan import units
from ckplan.compiling.lowering import DynamoGraph
from ckplan.compiling.partition import Partitioner
from ckplan.compiling.replay import replay
from ckplan.compiling.search import Chosen, CompiledPlanner, Progress
from ckplan.compiling.torch_names import (
    compilation,
    compile_errors,
    compile_with,
    errors_pass,
    require_compiler,
    require_hook,
)
from ckplan.errors import ApplyError, CkplanError
from ckplan.plan.file import load
from ckplan.plan.plan import Plan

_MODES = (None, "default", "reduce-overhead")


def compile(
    model: Callable[..., Any],
    plan_or_budget: Plan | Path | str | int,
    *,
    reserve: str | int = 0,
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
            parameters and batch: ``"12GiB"``, ``"80%"`` of the unplanned compiled step,
            or bytes. Or a plan for compiled code, or the path of its YAML file.
        reserve: Size subtracted from the budget, for memory that is not part of forward
            and backward, such as the optimizer's state.
        progress: Told the stage of planning, the items done and their total.
        how: Keyword arguments of ``torch.compile``, except ``backend``. By default,
            the model must compile as a whole (``fullgraph=True``), and every batch
            shape is compiled and planned by itself (``dynamic=False``).

    Returns:
        The compiled model.

    Raises:
        ApplyError: This torch lacks the hook, or the step is not on a CPU; or there is
            no C++ compiler. This and the next two are raised by the first forward.
        WorkloadError: The model does not compile as one graph.
        PlanError: The plan is for uncompiled code or another graph, or exceeds its
            budget.
        InfeasibleError: No plan fits; the smallest replayed peak is named.
    """
    how = {"fullgraph": True, "dynamic": False, **how}
    planned = backend(plan_or_budget, reserve=reserve, progress=progress)
    compiled = torch.compile(model, backend=planned, **how)
    if isinstance(compiled, nn.Module):
        compiled.forward = _with_short_errors(compiled.forward)
        return compiled
    return _with_short_errors(compiled)


def backend(
    plan_or_budget: Plan | Path | str | int,
    *,
    reserve: str | int = 0,
    progress: Progress | None = None,
) -> Backend:
    """Make a backend for ``torch.compile(model, backend=...)``; see ``compile``.

    One backend is for one graph, recompiled for other shapes as torch wants. A step
    that graph breaks divide into several is refused, because each part would need to
    know what the others keep alive.
    """
    require_hook()
    if isinstance(plan_or_budget, Path) or _is_plan_file(plan_or_budget):
        plan_or_budget = load(Path(str(plan_or_budget)))
    if not isinstance(plan_or_budget, (Plan, str, int)):
        raise CkplanError(
            f"cannot compile within a {type(plan_or_budget).__name__}",
            needed="a budget, a plan, or the path of its file",
            hint="ckplan.compile(model, '80%')",
        )
    return Backend(plan_or_budget, units.parse_bytes(reserve), progress)


class Backend:
    """A backend for ``torch.compile`` that plans the graph it is given."""

    __name__ = "ckplan"

    def __init__(
        self,
        plan_or_budget: Plan | str | int,
        reserve_bytes: int,
        progress: Progress | None,
    ) -> None:
        self._wanted = plan_or_budget
        self._reserve_bytes = reserve_bytes
        self._progress = progress
        self.chosen: list[Chosen] = []  # one per shape compiled for training
        self._compilations: list[tuple[int | None, int | None]] = []  # of those

    @property
    def plans(self) -> list[Plan]:
        """The plans so far, one per shape compiled for training."""
        return [one.plan for one in self.chosen]

    def __call__(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Plan and compile a graph of Dynamo."""
        with errors_pass():
            _check(inputs, mode, options or {})
            require_compiler()
            traced = DynamoGraph(graph, inputs, dict(options or {}))
            chosen = self._choose(traced)
        if chosen is not None:
            self.chosen.append(chosen)
            self._compilations.append(compilation())
        saved = None if chosen is None else chosen.saved
        partitioner = None if saved is None else Partitioner(saved, _key(saved))
        return compile_with(graph, inputs, partitioner, dict(traced.options))

    def _choose(self, traced: DynamoGraph) -> Chosen | None:
        if not (torch.is_grad_enabled() and any(map(_needs_gradient, traced.inputs))):
            return None
        self._check_is_whole(traced.module)
        joint, lowered = traced.lower(None)
        if joint is None or lowered is None:
            return None  # no output depends on what requires a gradient
        unplanned = replay(lowered, joint.num_outputs)
        planner = CompiledPlanner(traced, joint, unplanned, progress=self._progress)
        if isinstance(self._wanted, Plan):
            return planner.follow(self._wanted)
        budget_bytes = units.parse_budget(self._wanted, unplanned.peak_bytes)
        left = budget_bytes - self._reserve_bytes
        if left <= 0:
            budget, reserve = map(
                units.format_bytes, (budget_bytes, self._reserve_bytes)
            )
            raise CkplanError(
                f"cannot plan for the budget {budget}: all of it is reserved "
                f"({reserve})",
                needed="a reserve that is smaller than the budget",
                hint="a larger budget, or a smaller reserve",
            )
        return planner.solve(left)

    def _check_is_whole(self, graph: fx.GraphModule) -> None:
        """Refuse the second graph of a step."""
        this = compilation()
        others = self._compilations
        if others and (this in others or this[0] != others[0][0]):
            raise ApplyError(
                "cannot plan several graphs of one step within one budget: the second "
                f"begins at {_place_of(graph)}",
                needed="a step that compiles as one graph, and a backend of its own",
                hint="fullgraph=True or TORCH_LOGS=graph_breaks, which show the break; "
                "under DDP, torch._dynamo.config.optimize_ddp=False",
            )


def _place_of(graph: fx.GraphModule) -> str:
    """Where in the user's code a graph begins: the source of its first op."""
    for node in graph.graph.nodes:
        lines = (node.stack_trace or "").splitlines()
        code = [line.strip() for line in lines if line.strip(" ^~")]
        if node.op != "placeholder" and code:
            return f"'{code[-1]}'"
    return "an unknown line"


def _with_short_errors(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        with compile_errors("the model"):
            return call(*args, **kwargs)

    return checked


def _needs_gradient(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _is_plan_file(wanted: object) -> bool:
    return isinstance(wanted, str) and wanted.endswith((".yaml", ".yml"))


def _key(saved: frozenset[str]) -> str:
    """Identify a choice to Inductor's caches, which also know the graph."""
    text = "\n".join(sorted(saved))
    return f"ckplan {hashlib.sha256(text.encode()).hexdigest()}"


def _check(inputs: Sequence[Any], mode: str | None, options: Mapping[str, Any]) -> None:
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
    for value in inputs:
        if isinstance(value, torch.SymInt):
            raise ApplyError(
                "cannot plan a graph with dynamic shapes: its bytes are not known",
                needed="a graph per batch shape",
                hint="dynamic=False, and batches of few different shapes",
            )
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            raise ApplyError(
                f"cannot plan compiled code for {value.device.type}: the replay of "
                "generated code was measured on CPUs alone",
                needed="a model and a batch on the CPU",
                hint="ckplan.apply, which plans uncompiled code on GPUs",
            )
