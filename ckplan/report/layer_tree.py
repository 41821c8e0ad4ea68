"""The calls of a step as a tree of equal calls, with the plan's effect on each.

A saved activation is *kept* if a region of the plan does not drop it, else *dropped*;
bytes that recomputation produces are *rebuilt*. Sums are over all calls of a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckplan.graph.graph import Graph
from ckplan.graph.records import BEFORE_STEP, OUTSIDE_CALLS
from ckplan.plan.region import Region
from ckplan.report.layers import AbstractCost, costs_inside, patterns
from ckplan.simulating.simulate import Timeline


@dataclass(frozen=True, slots=True)
class PlannedCost(AbstractCost):
    """Bytes that calls save and rebuild under a plan, and recompute seconds."""

    kept_bytes: int = 0
    dropped_bytes: int = 0
    rebuilt_bytes: int = 0
    forward_seconds: float = 0.0
    recompute_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TreeRow:
    """Equal calls at one place of the tree."""

    depth: int
    name: str  # a pattern of plans
    module: str
    count: int
    cost: PlannedCost
    action: str  # action of the plan on these calls; "" if none


def layer_tree(
    graph: Graph, timeline: Timeline, regions: Sequence[Region]
) -> list[TreeRow]:
    """Return the rows of the tree, parents before children."""
    inside = _costs(graph, timeline)
    actions = {region.call: _action(region) for region in regions}

    def rows(parents: Sequence[int], depth: int) -> Iterator[TreeRow]:
        calls_by_key: dict[object, list[int]] = defaultdict(list)
        for call in (c for parent in parents for c in graph.children[parent]):
            key = (graph.signature(call), inside[call].kept_bytes, actions.get(call))
            calls_by_key[key].append(call)
        for calls in calls_by_key.values():
            cost = sum((inside[call] for call in calls), PlannedCost())
            if cost == PlannedCost():
                continue
            names = [name for name, _ in patterns(graph, calls)]
            name = names[0] if len(names) == 1 else f"{names[0]}, ..."
            first = calls[0]
            action, module = actions.get(first, ""), graph.calls[first].module
            yield TreeRow(depth, name, module, len(calls), cost, action)
            yield from rows(calls, depth + 1)

    return list(rows([OUTSIDE_CALLS], 0))


def _action(region: Region) -> str:
    counts = (("keeps", region.save), ("encodes", region.encode))
    parts = [f"{verb} {len(found)} tensors" for verb, found in counts if found]
    parts += [f"{len(region.inner)} regions inside"] if region.inner else []
    return ", ".join([region.by, *parts])


def _costs(graph: Graph, timeline: Timeline) -> list[PlannedCost]:
    """Cost of every call including its children; the last is outside all calls."""
    own = [PlannedCost()] * (len(graph.calls) + 1)
    for number, op in enumerate(graph.ops[: graph.num_forward]):
        seconds = graph.critical_seconds[number]
        own[op.call] += PlannedCost(forward_seconds=seconds)
    dropped = {index for effect in timeline.effects for index in effect.dropped}
    for storage, saves in graph.saved_of.items():
        one = graph.storages[storage]
        if one.kind == "activation" and one.maker != BEFORE_STEP:
            is_kept = any(index not in dropped for index in saves)
            own[graph.ops[one.maker].call] += (
                PlannedCost(kept_bytes=one.bytes)
                if is_kept
                else PlannedCost(dropped_bytes=one.bytes)
            )
    for effect in timeline.effects:
        for step in effect.steps:
            made = sum(graph.storages[s].bytes for s in graph.creates[step])
            own[graph.ops[step].call] += PlannedCost(
                rebuilt_bytes=made, recompute_seconds=graph.critical_seconds[step]
            )
    return costs_inside(graph, own)
