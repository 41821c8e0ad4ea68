"""Seconds of a whole step on this machine, kept, and taken into its graph.

Ops are measured alone. In a step they take other seconds: the model's own Python runs
between them, caches are as other ops left them, and memory that the C library gave back
comes empty. So the phases of a measured step scale the seconds of their ops, those of
forward in proportions that were measured there, too, and what plans added gives the
costs of recomputation (``fitting``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import islice

from ckplan.graph.graph import Graph
from ckplan.graph.records import EngineCosts
from ckplan.tracing.costs.apply_overhead import engine_digest
from ckplan.tracing.costs.cost_cache import Cost, CostCache

NOTE_IN_STEP = (
    "seconds: phases, ops of forward and recomputation as in steps on this machine"
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
    of_ops: Mapping[str, float]  # factors of seconds measured alone, by name of the op


_PHASES = tuple(one.name for one in fields(StepSeconds))
_ENGINE = tuple(one.name for one in fields(EngineCosts))


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
    for number in range(start):
        more = ops[number].seconds * costs.of_ops.get(ops[number].name, 1.0)
        ops[number] = replace(ops[number], seconds=more)
    for first, last, seconds in spans:
        whole = sum(op.seconds for op in ops[first:last])
        scale = seconds / whole if whole else 1.0
        for number in range(first, last):
            more = ops[number].seconds * scale
            ops[number] = replace(ops[number], seconds=round(more, 9))
    notes = (*graph.notes, NOTE_IN_STEP)
    return replace(graph, ops=tuple(ops), engine=costs.engine, notes=notes)


def known_step_costs(graph: Graph, cache: CostCache) -> StepCosts | None:
    """What is kept for this step on this machine, or None."""
    keys = _keys(graph)
    known = cache.known(keys)
    return _costs_of(graph, known, keys) if len(known) == len(keys) else None


def keep_step_costs(graph: Graph, costs: StepCosts, cache: CostCache) -> StepCosts:
    """Keep what was measured.

    Returns:
        The medians of the last few runs.
    """
    keys = _keys(graph)
    of_ops = (costs.of_ops.get(name, 1.0) for name in _names(graph))
    found = (*astuple(costs.unplanned), *astuple(costs.engine), *of_ops)
    return _costs_of(graph, cache.learn(_as_costs(keys, found)), keys)


def known_phases(graph: Graph, cache: CostCache) -> StepSeconds | None:
    """The phases that are kept for this step without a plan, or None."""
    keys = _keys(graph)[: len(_PHASES)]
    known = cache.known(keys)
    return _phases_of(known, keys) if len(known) == len(keys) else None


def keep_phases(graph: Graph, found: StepSeconds, cache: CostCache) -> StepSeconds:
    """Keep the phases of this step; returns the medians of the last few runs."""
    keys = _keys(graph)[: len(_PHASES)]
    return _phases_of(cache.learn(_as_costs(keys, astuple(found))), keys)


def _as_costs(keys: Sequence[str], seconds: Iterable[float]) -> dict[str, Cost]:
    pairs = zip(keys, seconds, strict=True)
    return {key: Cost(one, 0, 0, measured=True) for key, one in pairs}


def _phases_of(known: Mapping[str, Cost], keys: Sequence[str]) -> StepSeconds:
    return StepSeconds(*(known[key].seconds for key in keys))


def _costs_of(graph: Graph, known: dict[str, Cost], keys: Sequence[str]) -> StepCosts:
    phases = _phases_of(known, keys[: len(_PHASES)])
    numbers = iter([known[key].seconds for key in keys[len(_PHASES) :]])
    engine = EngineCosts(*islice(numbers, len(_ENGINE)))
    return StepCosts(phases, engine, dict(zip(_names(graph), numbers, strict=True)))


def _names(graph: Graph) -> list[str]:
    """Of the ops of forward, each once."""
    return sorted({op.name for op in graph.ops[: graph.num_forward]})


def _keys(graph: Graph) -> list[str]:
    """Keys in the cost cache: equal for steps of equal ops under the same engine."""
    found = hashlib.sha256(f"{engine_digest()} {graph.num_batches}".encode())
    for op in graph.ops:
        made = [graph.storages[storage].bytes for storage in op.creates]
        found.update(repr((op.name, op.flops, op.moved_bytes, made)).encode())
    digest = found.hexdigest()[:32]
    kept = (*_PHASES, *_ENGINE, *(f"op {name}" for name in _names(graph)))
    return [f"step {digest} {what}" for what in kept]
