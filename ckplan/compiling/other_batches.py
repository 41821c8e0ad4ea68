"""Batches of other sizes than one that has a plan: they need no search of their own.

An epoch often ends with a batch of fewer rows. It gets what torch chooses, if that
fits, or else what the plan of the larger batch saves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ckplan import units
from ckplan.compiling import nodes
from ckplan.compiling.lowering import DynamoGraph
from ckplan.compiling.partition import JointGraph, cached_partitioner
from ckplan.compiling.refusals import place_of
from ckplan.compiling.search import Chosen, CompiledPlanner
from ckplan.compiling.workspaces import bytes_of_all
from ckplan.plan.plan import Plan
from ckplan.training.workload import device_of, tensors_of


def is_alike(one: JointGraph, other: JointGraph) -> bool:
    """Whether two graphs run the same ops, on tensors of whatever sizes."""
    return _ops_of(one) == _ops_of(other)


def _ops_of(joint: JointGraph) -> list[tuple[str, str]]:
    return [(node.name, str(node.target)) for node in joint.module.graph.nodes]


def as_a_larger_one(
    planner: CompiledPlanner, known: Iterable[Chosen], budget_bytes: int
) -> Chosen | None:
    """The plan of a batch of which a larger one has a plan; None if none fits.

    Args:
        planner: Plans the batch.
        known: The plans of others.
        budget_bytes: Limit on the bytes alive.
    """
    held_bytes = planner.unplanned.held_bytes
    larger = (one for one in known if one.replayed.held_bytes > held_bytes)
    alike = (one for one in larger if is_alike(one.planner.joint, planner.joint))
    like = min(alike, key=lambda one: one.replayed.held_bytes, default=None)
    if like is None:
        return None
    tries = [planner.proposer.candidate(())]
    if like.saved is not None:
        tries.append(planner.proposer.saving(like.saved))
    for one in tries:
        if planner.replayed(one.saved).peak_bytes <= budget_bytes:
            return planner.chosen(one, budget_bytes)
    return None


def compiled_as_planned(
    planner: CompiledPlanner, plan: Plan, before: Sequence[Chosen]
) -> tuple[Chosen, Callable[..., Any]]:
    """Compile with a plan that was made for one batch, and what that saves with others.

    What runs other ops than that batch is divided as torch chooses.

    Args:
        planner: Plans the batch.
        plan: The plan.
        before: What was compiled with it before; the first is that for which it is.

    Raises:
        PlanError: The first batch is another one, or exceeds the plan's budget. Of
            later ones that exceed it, a warning tells.
    """
    first = before[0] if before else None
    if first is None or planner.joint.digest == first.planner.joint.digest:
        saved = planner.saved_under(plan)
        call, lowered = planner.traced.compile(cached_partitioner(saved))
        return planner.followed(plan, saved, lowered), call
    saved = first.saved if is_alike(first.planner.joint, planner.joint) else None
    call, lowered = planner.traced.compile(cached_partitioner(saved))
    planner.replays.is_real(saved, lowered)
    chosen = Chosen(plan.budget_bytes, saved, planner.replayed(saved), planner, plan)
    _warn_if_larger(chosen)
    return chosen, call


def compiled_as_known(
    traced: DynamoGraph, known: Iterable[Chosen]
) -> Callable[..., Any]:
    """Compile a graph that the first forward of a step that breaks did not have.

    It saves what a graph saves that runs the same ops on tensors of other sizes; if
    there is none, what torch chooses. A warning tells where memory may be another.

    Args:
        traced: The graph.
        known: The plans of those that the first forward had.
    """
    joint = traced.trace()
    if joint is None or not any(nodes.ops_of(joint.backward.graph)):
        return traced.compile(cached_partitioner(None))[0]
    alike = (one for one in known if is_alike(one.planner.joint, joint))
    like = next(alike, None)
    if like is None or _bytes_of(traced) > _bytes_of(like.planner.traced):
        what = "without a plan" if like is None else "for more than is planned"
        warnings.warn(
            "a graph that the first forward did not have is compiled "
            f"{what}, from {place_of(traced.module)} on: results are the same, memory "
            "is not; ckplan.compile anew plans for it",
            stacklevel=2,
        )
    saved = None if like is None else like.saved
    return traced.compile(cached_partitioner(saved))[0]


def _bytes_of(traced: DynamoGraph) -> int:
    return bytes_of_all(tensors_of(traced.inputs), device_of(traced.inputs).type)


def _warn_if_larger(chosen: Chosen) -> None:
    """Warn that a batch takes more than the plan that it follows may."""
    peak_bytes, most = chosen.replayed.peak_bytes, chosen.budget_bytes
    if most is not None and peak_bytes > most:
        warnings.warn(
            f"a batch takes {units.format_bytes(peak_bytes)}, more than the "
            f"{units.format_bytes(most)} that the plan of '{chosen.plan.model}' may: "
            "results are the same, memory is not",
            stacklevel=2,
        )
