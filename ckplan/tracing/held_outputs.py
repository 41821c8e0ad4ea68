"""Tell which outputs a loop holds longer than its backward needs them."""

from __future__ import annotations

from dataclasses import replace

from ckplan.graph.graph import Graph
from ckplan.graph.records import BEFORE_STEP, Storage
from ckplan.simulating.simulate import simulate
from ckplan.units import format_bytes

_LEAST_SHARE = 0.01  # of the peak that a note is worth


def held_outputs(graph: Graph) -> Graph:
    """Add a note on tensors whose ``del`` would lower the peak of the step.

    These are tensors that the loop still holds when backward begins, and those that it
    holds from the step before.
    """
    held = [number for number in range(len(graph.storages)) if _is_held(graph, number)]
    if not held:
        return graph
    storages = list(graph.storages)
    for number in held:
        one = storages[number]
        last = one.maker if one.maker >= 0 else BEFORE_STEP
        last = max((last, *_reads(graph, number)))
        storages[number] = replace(one, last=min(last, one.last))
    peak_bytes = simulate(graph).peak_bytes
    saved_bytes = (
        peak_bytes - simulate(replace(graph, storages=tuple(storages))).peak_bytes
    )
    if saved_bytes < _LEAST_SHARE * peak_bytes:
        return graph
    largest = max(held, key=lambda number: graph.storages[number].bytes)
    note = (
        f"the loop holds tensors longer than it reads them, such as "
        f"{_named(graph, largest)}: `del` after their last use, before backward and "
        f"before the next forward, saves {format_bytes(saved_bytes)} of the peak"
    )
    return replace(graph, notes=(*graph.notes, note))


def _is_held(graph: Graph, number: int) -> bool:
    one = graph.storages[number]
    if one.kind == "activation" and one.maker == BEFORE_STEP:
        return True
    made = 0 <= one.maker < graph.num_forward and one.kind == "activation"
    return made and one.last >= graph.num_forward


def _reads(graph: Graph, number: int) -> list[int]:
    """Ops of forward that use a storage."""
    return [
        place
        for place, op in enumerate(graph.ops[: graph.num_forward])
        if number in op.reads or number in op.writes or number in op.outputs
    ]


def _named(graph: Graph, number: int) -> str:
    one: Storage = graph.storages[number]
    line = graph.line_of(number)
    what = f"{one.tensor or 'a tensor'} ({format_bytes(one.bytes)})"
    if one.maker == BEFORE_STEP:
        return f"{what} from the step before"
    return f"{what} of {line}" if line else what
