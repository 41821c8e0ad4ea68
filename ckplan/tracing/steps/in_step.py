"""Seconds of a whole step on this machine, kept, and taken into its graph.

Ops are measured alone. In a step they take other seconds: the model's own Python runs
between them, caches are as other ops left them, and memory that the C library gave back
comes empty. So the phases of a measured step scale the seconds of their ops, and what
plans added to it gives the costs of recomputation (``fitting``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace

from ckplan.graph.graph import Graph
from ckplan.graph.records import EngineCosts
from ckplan.tracing.costs.apply_overhead import engine_digest
from ckplan.tracing.costs.cost_cache import Cost, CostCache
from ckplan.tracing.steps.fitting import Added, fit

NOTE_IN_STEP = (
    "seconds: ops in the proportions measured alone, phases and recomputation as in "
    "steps on this machine"
)


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of the phases of one step, with all batches that it accumulates."""

    forward: float
    backward: float
    optimizer: float


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What steps on this machine cost, without a plan and with one."""

    unplanned: StepSeconds
    engine: EngineCosts


_PHASES = tuple(one.name for one in fields(StepSeconds))
_KEPT = (*_PHASES, *(one.name for one in fields(EngineCosts)))


def fitted_costs(
    graph: Graph, unplanned: StepSeconds, plans: Sequence[Added]
) -> StepCosts:
    """The costs with which the graph predicts measured steps.

    Args:
        graph: The step, whose ops and engine were measured alone.
        unplanned: Its measured phases.
        plans: What was added by plans; ``ops_seconds`` are of ops as in ``graph``.
    """
    start, engine = graph.num_forward, graph.engine
    alone = sum(graph.critical_seconds[:start])
    scale = unplanned.forward / graph.num_batches / alone if alone else 1.0
    in_forward = [one._replace(ops_seconds=scale * one.ops_seconds) for one in plans]
    prior = replace(engine, again=engine.again / (scale or 1.0))  # as long as alone
    return StepCosts(unplanned, fit(prior, in_forward))


def with_step_costs(graph: Graph, costs: StepCosts) -> Graph:
    """The step with the seconds and the engine that were measured in steps."""
    start, stop = graph.num_forward, graph.backward_stop
    batches, phases = graph.num_batches, costs.unplanned
    spans = (
        (0, start, phases.forward / batches),
        (start, stop, phases.backward / batches),
        (stop, len(graph.ops), phases.optimizer),
    )
    ops = list(graph.ops)
    for first, last, seconds in spans:
        alone = sum(op.seconds for op in ops[first:last])
        scale = seconds / alone if alone else 1.0
        for number in range(first, last):
            more = ops[number].seconds * scale
            ops[number] = replace(ops[number], seconds=round(more, 9))
    notes = (*graph.notes, NOTE_IN_STEP)
    return replace(graph, ops=tuple(ops), engine=costs.engine, notes=notes)


def known_step_costs(graph: Graph, cache: CostCache) -> StepCosts | None:
    """What is kept for this step on this machine, or None."""
    keys = _keys(graph)
    known = cache.known(keys)
    return _costs_of(known, keys) if len(known) == len(keys) else None


def keep_step_costs(graph: Graph, costs: StepCosts, cache: CostCache) -> StepCosts:
    """Keep what was measured.

    Returns:
        The medians of the last few runs.
    """
    keys, found = _keys(graph), (*astuple(costs.unplanned), *astuple(costs.engine))
    new = {k: Cost(v, 0, 0, measured=True) for k, v in zip(keys, found, strict=True)}
    return _costs_of(cache.learn(new), keys)


def _costs_of(known: dict[str, Cost], keys: Sequence[str]) -> StepCosts:
    numbers = [known[key].seconds for key in keys]
    phases, engine = numbers[: len(_PHASES)], numbers[len(_PHASES) :]
    return StepCosts(StepSeconds(*phases), EngineCosts(*engine))


def _keys(graph: Graph) -> list[str]:
    """Keys in the cost cache: equal for steps of equal ops under the same engine."""
    found = hashlib.sha256(f"{engine_digest()} {graph.num_batches}".encode())
    found.update(f"{graph.num_batches}".encode())
    for op in graph.ops:
        made = [graph.storages[storage].bytes for storage in op.creates]
        found.update(repr((op.name, op.flops, op.moved_bytes, made)).encode())
    digest = found.hexdigest()[:32]
    return [f"step {digest} {what}" for what in _KEPT]
