"""Caches of keys and values, or hidden states, that live until backward ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckplan.graph.graph import Graph
from ckplan.graph.records import OUTSIDE_CALLS, Storage

_FEWEST = 4  # tensors of one type, which layers hand out until backward ends


def held_caches(graph: Graph) -> frozenset[int]:
    """Tensors that layers hand out and the output holds until backward ends.

    They are keys and values of a cache (``use_cache=True``), or hidden states: several
    activations of one type, made by several calls, that not autograd alone holds.
    """
    of_type: dict[object, list[int]] = {}
    for number, one in enumerate(graph.storages):
        if _is_handed_out(graph, one):
            of_type.setdefault((one.tensor, graph.ops[one.maker].name), []).append(
                number
            )
    groups = [group for group in of_type.values() if len(group) >= _FEWEST]
    return frozenset(number for group in groups for number in group)


def _is_handed_out(graph: Graph, one: Storage) -> bool:
    if one.kind != "activation" or not 0 <= one.maker < graph.num_forward:
        return False
    call = graph.ops[one.maker].call
    inside = call != OUTSIDE_CALLS and graph.calls[call].parent != OUTSIDE_CALLS
    wide = one.tensor is not None and len(one.tensor.shape) >= 3
    return inside and wide and one.last >= graph.backward_stop - 1


def without_caches(graph: Graph) -> Graph:
    """The step whose output does not hold what ``held_caches`` finds."""
    caches = held_caches(graph)
    last = {number: graph.storages[number].maker for number in caches}
    for moment, op in enumerate(graph.ops[: graph.num_forward]):
        last |= {number: moment for number in (*op.reads, *op.writes) if number in last}
    return with_storages(
        graph,
        lambda number, one: replace(one, last=last[number]) if number in last else one,
    )


def with_storages(graph: Graph, change: Callable[[int, Storage], Storage]) -> Graph:
    """The step with other storages.

    Args:
        graph: The step.
        change: Given the number of a storage and what it is.
    """
    changed = (change(number, one) for number, one in enumerate(graph.storages))
    return replace(graph, storages=tuple(changed))
