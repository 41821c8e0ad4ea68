"""Compare plans inside ``torch.compile`` with what torch itself offers there.

Every row is one division of the same joint graph, lowered and replayed: torch's own,
its ``activation_memory_budget`` at several values, layers recomputed, everything
recomputed, and the plan for a budget. Peaks are replayed, seconds estimated by the same
rule for all: the fused runs of that division, see ``compiling/graph.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ckplan import units
from ckplan.compiling import nodes
from ckplan.compiling.graph import as_graph
from ckplan.compiling.lowering import DynamoGraph, Lowered
from ckplan.compiling.partition import JointGraph
from ckplan.compiling.replay import Replayed, replay
from ckplan.compiling.search import CompiledPlanner, Progress
from ckplan.compiling.step import trace_step
from ckplan.compiling.torch_names import require_hook
from ckplan.errors import InfeasibleError
from ckplan.training.loading import WorkloadSpec, as_spec

TORCH_BUDGETS = (0.75, 0.5, 0.25, 0.0)
"""Values of ``torch._functorch.config.activation_memory_budget`` that are compared."""


@dataclass(frozen=True, kw_only=True)
class ComparedStep:
    """One way to divide a compiled step, as its generated code was replayed."""

    name: str
    peak_bytes: int  # parameters and batch included
    saved_bytes: int  # between forward and backward, outputs included
    step_seconds: float  # estimated, of one core
    overhead: float  # of them, relative to torch's own division
    fits: bool
    draws_again: bool  # backward draws random numbers anew: gradients are wrong


@dataclass(frozen=True)
class CompiledComparison:
    """The ways to divide one compiled step, under one budget."""

    model: str
    budget_bytes: int
    steps: tuple[ComparedStep, ...]  # torch's own first, the plan last

    def as_json(self) -> dict[str, Any]:
        """The same as plain values, for ``--json``."""
        return asdict(self)


def compare_compiled(
    spec: WorkloadSpec | str | Path,
    budget: str | int = "80%",
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> CompiledComparison:
    """Compare a plan for a compiled step with torch's own choices.

    No kernel is compiled or run, except once those whose scratch memory is measured.
    If no plan fits, the smallest one stands in the last row.

    Args:
        spec: Where the workload comes from.
        budget: Limit on the replayed peak: bytes, ``"12GiB"``, or ``"80%"`` of the
            unplanned compiled step's.
        seed: Seed of all random numbers.
        progress: Told the stage of the work, the items done and their total.

    Raises:
        ApplyError: This torch lacks the hook.
        WorkloadError: The step does not train, or does not compile as one graph.
        CkplanError: The workload or the budget cannot be used.
    """
    require_hook()
    torch.manual_seed(seed)
    workload = as_spec(spec).build()
    model = type(workload.model).__name__

    def compare(
        traced: DynamoGraph, joint: JointGraph, lowered: Lowered
    ) -> CompiledComparison:
        unplanned = replay(lowered, joint.num_outputs)
        budget_bytes = units.parse_budget(budget, unplanned.peak_bytes)
        planner = CompiledPlanner(traced, joint, unplanned, model, progress, quick=True)
        rows = _Rows(budget_bytes)
        rows.add("torch", joint, unplanned)
        for number, (name, saved, share) in enumerate(_others(planner)):
            if progress is not None:
                progress("replaying generated code", number, len(TORCH_BUDGETS) + 2)
            rows.lower(name, traced, saved, share)
        rows.lower("this plan", traced, *_plan(planner, budget_bytes))
        return CompiledComparison(model, budget_bytes, tuple(rows.steps))

    return trace_step(workload, compare)


class _Rows:
    """Collects compared steps; the first is what overheads are relative to."""

    def __init__(self, budget_bytes: int) -> None:
        self.steps: list[ComparedStep] = []
        self._budget_bytes = budget_bytes

    def lower(
        self,
        name: str,
        traced: DynamoGraph,
        saved: frozenset[str] | None,
        share: float | None,
    ) -> None:
        """Divide, lower and replay, and add the row."""
        joint, lowered = traced.lower(saved, share)
        assert joint is not None, "internal error: the step had a backward before"
        assert lowered is not None
        self.add(name, joint, replay(lowered, joint.num_outputs))

    def add(self, name: str, joint: JointGraph, found: Replayed) -> None:
        """Add the row of a division that was replayed."""
        seconds = as_graph(joint, name).graph.step_seconds
        first = self.steps[0].step_seconds if self.steps else seconds
        self.steps.append(
            ComparedStep(
                name=name,
                peak_bytes=found.peak_bytes,
                saved_bytes=found.saved_bytes,
                step_seconds=seconds,
                overhead=seconds / first - 1,
                fits=found.peak_bytes <= self._budget_bytes,
                draws_again=any(map(nodes.is_draw, joint.backward.graph.nodes)),
            )
        )


def _others(
    planner: CompiledPlanner,
) -> Iterator[tuple[str, frozenset[str] | None, float | None]]:
    """Name, saved values and torch's budget of the ways beside torch's own."""
    for share in TORCH_BUDGETS:
        yield f"torch, {share:g}", None, share
    for layers in planner.every_layer:
        yield "every layer", layers.saved, None
    yield "everything", frozenset(), None


def _plan(
    planner: CompiledPlanner, budget_bytes: int
) -> tuple[frozenset[str] | None, None]:
    """The values that the plan for a budget saves, or the smallest plan."""
    try:
        return planner.solve(budget_bytes).saved, None
    except InfeasibleError:
        return planner.smallest.saved, None
