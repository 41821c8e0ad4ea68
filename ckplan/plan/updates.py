"""The step that a plan is for, where the plan lets the optimizer update groups."""

from __future__ import annotations

from ckplan import units
from ckplan.graph.graph import Graph
from ckplan.graph.grouped_updates import with_grouped_update
from ckplan.plan.plan import Plan


def group_size_of(plan: Plan) -> str | None:
    """The size of the groups of parameters that a plan wants, such as ``64MiB``."""
    return str(plan.workload.get("optimizer", "")).partition("=")[2] or None


def with_planned_update(graph: Graph, plan: Plan) -> Graph:
    """The step with the optimizer's update in groups, if a plan wants it so.

    Args:
        graph: The step; one of another optimizer is returned as it is.
        plan: The plan.

    Raises:
        PlanError: The update of this optimizer cannot run in groups here.
    """
    size = group_size_of(plan)
    name = str(plan.workload.get("optimizer")).partition(":")[0]
    whole = {name, f"{name}:foreach"} | ({"default"} if name == "adamw" else set())
    if size is None or graph.options.get("optimizer", "default") not in whole:
        return graph
    return with_grouped_update(graph, size, units.parse_bytes(size))
