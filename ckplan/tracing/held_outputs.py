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
    needed = _used_in_backward(graph)
    held = [
        number
        for number in range(len(graph.storages))
        if _is_held(graph, number) and number not in needed
    ]
    if not held:
        return graph
    storages, last_use = list(graph.storages), _last_uses(graph)
    for number in held:
        one = storages[number]
        last = max(last_use.get(number, BEFORE_STEP), one.maker)
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


def _used_in_backward(graph: Graph) -> set[int]:
    """Storages that backward uses without autograd having saved them.

    Such as the buckets of gradients that DDP makes in forward.
    """
    later = graph.ops[graph.num_forward :]
    used = {one for op in later for one in (*op.reads, *op.writes)}
    return used.difference(saved.storage for saved in graph.saved)


def _last_uses(graph: Graph) -> dict[int, int]:
    """Storage -> the last op of forward that uses it, or is run before it is saved."""
    found: dict[int, int] = {}
    for place, op in enumerate(graph.ops[: graph.num_forward]):
        found.update(dict.fromkeys((*op.reads, *op.writes, *op.outputs), place))
    for saved in graph.saved:
        before = found.get(saved.storage, BEFORE_STEP)
        found[saved.storage] = max(before, saved.packed_at - 1)
    return found


def _named(graph: Graph, number: int) -> str:
    one: Storage = graph.storages[number]
    line = graph.line_of(number)
    what = f"{one.tensor or 'a tensor'} ({format_bytes(one.bytes)})"
    if one.maker == BEFORE_STEP:
        return f"{what} from the step before"
    return f"{what} of {line}" if line else what
