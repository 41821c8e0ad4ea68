"""Compare plans inside ``torch.compile`` with what torch itself offers there.

Every row is one division of the same joint graphs, lowered and replayed: torch's own,
its ``activation_memory_budget`` at several values, layers recomputed, everything
recomputed, and the plan for a budget. Peaks are replayed, seconds estimated by the same
rule for all: the fused runs of that division, see ``compiling/graph.py``. Beside them
is what any division runs again that saves no more bytes, see ``compiling/cuts.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ckplan import units
from ckplan.compiling import nodes
from ckplan.compiling.partition import JointGraph, read_changed
from ckplan.compiling.parts import Parts
from ckplan.compiling.proposing import TORCH_BUDGETS
from ckplan.compiling.replay import Replayed, replay
from ckplan.compiling.search import Progress
from ckplan.compiling.step import parts_of, under_autocast
from ckplan.compiling.torch_errors import require_hook
from ckplan.errors import InfeasibleError
from ckplan.training.loading import WorkloadSpec, as_spec


@dataclass(frozen=True, kw_only=True)
class ComparedStep:
    """One way to divide a compiled step, as its generated code was replayed."""

    name: str
    peak_bytes: int  # parameters and batch included
    saved_bytes: int  # between forward and backward, outputs included
    step_seconds: float  # estimated, of one core
    overhead: float  # of them, relative to torch's own division
    least_overhead: (
        float  # contractions that run again where no more is saved, at least
    )
    fits: bool
    draws_again: bool  # backward draws random numbers anew: gradients are wrong
    reads_changed: bool  # backward reads what forward changes: so they are, too

    @property
    def is_wrong(self) -> bool:
        """Whether its gradients are wrong."""
        return self.draws_again or self.reads_changed


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
    amp: str | None = None,
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
        amp: ``bf16`` or ``fp16``: forward and loss run under autocast to this type.
        seed: Seed of all random numbers.
        progress: Told the stage of the work, the items done and their total.

    Raises:
        ApplyError: This torch lacks the hook.
        WorkloadError: The step does not train.
        CkplanError: The workload or the budget cannot be used.
    """
    require_hook()
    torch.manual_seed(seed)
    parts = parts_of(under_autocast(as_spec(spec).build(), amp), progress)
    budget_bytes = units.parse_budget(budget, parts.unplanned_peak_bytes)
    rows = _Rows(parts, budget_bytes)
    planners = parts.planners
    rows.add("torch", {k: (p.joint, p.unplanned) for k, p in planners.items()})
    others = list(_others(parts))
    for number, (name, saved, share) in enumerate(others):
        if progress is not None:
            progress("replaying generated code", number, len(others))
        rows.lower(name, saved, share)
    rows.lower("this plan", _plan(parts, budget_bytes))
    return CompiledComparison(parts.model, budget_bytes, tuple(rows.steps))


_Choice: TypeAlias = Mapping[str, frozenset[str] | None]
"""What each graph saves, by its key; None: torch's own choice."""


class _Rows:
    """Collects compared steps; their overheads are what plans have."""

    def __init__(self, parts: Parts, budget_bytes: int) -> None:
        self.steps: list[ComparedStep] = []
        self._parts, self._budget_bytes = parts, budget_bytes

    def lower(self, name: str, saved: _Choice, share: float | None = None) -> None:
        """Divide, lower and replay all graphs, and add the row."""
        found = {}
        for key, planner in self._parts.planners.items():
            joint, lowered = planner.traced.lower(saved[key], share)
            assert joint is not None, "internal error: the step had a backward before"
            assert lowered is not None
            found[key] = joint, replay(lowered, joint.num_outputs)
        self.add(name, found)

    def add(self, name: str, found: Mapping[str, tuple[JointGraph, Replayed]]) -> None:
        """Add the row of a division that was replayed."""
        parts = self._parts
        joints = {key: joint for key, (joint, _) in found.items()}
        replayed = {key: one for key, (_, one) in found.items()}
        planners = parts.planners
        seconds = {
            k: planners[k].proposer.estimates.seconds_in(j) for k, j in joints.items()
        }
        overheads = {
            k: planners[k].proposer.estimates.overhead_in(j) for k, j in joints.items()
        }
        least = {
            k: one.proposer.least_overhead(replayed[k].saved_bytes)
            for k, one in planners.items()
        }
        peak_bytes = parts.peak_bytes(replayed)
        backward = [one.backward.graph.nodes for one in joints.values()]
        self.steps.append(
            ComparedStep(
                name=name,
                peak_bytes=peak_bytes,
                saved_bytes=sum(replayed[run.key].saved_bytes for run in parts.runs),
                step_seconds=sum(seconds[run.key] for run in parts.runs),
                overhead=parts.overhead_of(overheads),
                least_overhead=parts.overhead_of(least),
                fits=peak_bytes <= self._budget_bytes,
                draws_again=any(map(nodes.is_draw, chain(*backward))),
                reads_changed=any(map(reads_changed, joints.values())),
            )
        )


def reads_changed(joint: JointGraph) -> bool:
    """Whether backward of a divided graph reads what forward changes."""
    return bool(read_changed((joint.forward, joint.backward)))


def _others(parts: Parts) -> Iterator[tuple[str, _Choice, float | None]]:
    """Name, saved values and torch's budget of the ways beside torch's own."""
    for share in TORCH_BUDGETS:
        yield f"torch, {share:g}", dict.fromkeys(parts.planners), share
    for name in ("every layer", "everything"):
        if any(name in one.proposer.ways for one in parts.planners.values()):
            yield name, {k: c.saved for k, c in parts.alike(name).items()}, None


def _plan(parts: Parts, budget_bytes: int) -> _Choice:
    """The values that the plan for a budget saves, or the smallest plan."""
    planners = parts.planners
    while True:
        try:
            shares = parts.share(budget_bytes)
        except InfeasibleError:
            return {key: one.smallest.saved for key, one in planners.items()}
        if all(planners[key].check(one, None) for key, one in shares.items()):
            return {key: one.saved for key, one in shares.items()}
