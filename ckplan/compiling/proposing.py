"""What the solver is asked for, to propose plans for compiled code."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from ckplan.compiling import nodes
from ckplan.compiling.graph import CompiledStep
from ckplan.compiling.layouts import saving
from ckplan.compiling.partition import JointGraph
from ckplan.graph.graph import Graph
from ckplan.plan.region import Region

CANDIDATES = 32
"""Budgets, evenly spaced, for which the solver proposes a plan."""
NEAR_FLOOR = 8
"""More of them between the two smallest, and as many in the quarter above: there, the
solver nests regions, which are flattened, and a plan without them is often smaller."""


def fused(step: CompiledStep) -> Graph:
    """A step whose ops take what they add to backward, whose kernels they join."""
    graph = step.graph
    ops = (
        replace(op, seconds=seconds, launch_seconds=launch)
        for op, (seconds, launch) in zip(graph.ops, step.rebuilt, strict=True)
    )
    return replace(graph, ops=tuple(ops))


def saving_nodes(
    step: CompiledStep, joint: JointGraph, names: Collection[str], whole: Region
) -> tuple[Region, ...]:
    """All of forward as one region, ``whole``, that saves the storages of nodes."""
    every = joint.module.graph.nodes
    made = frozenset(nodes.base_of(one).name for one in every if one.name in names)
    return saving(step, (whole,), made)


def budgets_to_try(low: int, high: int) -> Iterator[int]:
    """Budgets for the solver: evenly spaced, and closer near the floor."""
    parts = CANDIDATES - 1
    for place in range(CANDIDATES):
        yield low + (high - low) * place // parts
    for place in range(1, NEAR_FLOOR):
        yield low + (high - low) * place // (parts * NEAR_FLOOR)
    for place in range(1, NEAR_FLOOR):
        yield low + (high - low) * place // (4 * NEAR_FLOOR)
