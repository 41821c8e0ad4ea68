"""The plans that steps are measured with."""

from __future__ import annotations

from ckplan.graph.graph import Graph
from ckplan.graph.records import OUTSIDE_CALLS
from ckplan.plan.region import Region
from ckplan.simulating.simulate import Simulator
from ckplan.solving.baselines import can_recompute, find_repeated_layers
from ckplan.solving.menu import Menus


def trial_plans(graph: Graph) -> list[tuple[Region, ...]]:
    """Plans on every layer: nothing kept, and what is dear to recompute kept.

    Empty if no layer can be recomputed.
    """
    simulator = Simulator(graph)
    layers = find_repeated_layers(graph, Menus(simulator))
    saving = [one for one in layers if graph.saved_in(one)]  # not under no_grad
    layers = [one for one in saving if can_recompute(simulator, Region(one))]
    layers = layers or _calls_to_recompute(simulator, OUTSIDE_CALLS)
    if not layers:
        return []
    nothing = tuple(Region(layer) for layer in layers)
    dear = tuple(Region(layer, save=_dear_outputs(graph, layer)) for layer in layers)
    kept = all(can_recompute(simulator, region) for region in dear)
    return [nothing, dear] if kept and dear != nothing else [nothing]


def _calls_to_recompute(simulator: Simulator, parent: int) -> list[int]:
    """The outermost calls inside a call that can be recomputed and save tensors."""
    found: list[int] = []
    for call in simulator.graph.children[parent]:
        if parent != OUTSIDE_CALLS and can_recompute(simulator, Region(call)):
            found += [call] if simulator.graph.saved_in(call) else []
        else:
            found += _calls_to_recompute(simulator, call)
    return found


def _dear_outputs(graph: Graph, layer: int) -> frozenset[tuple[int, int]]:
    """Outputs of the ops that take more seconds per byte than the layer as a whole."""
    call = graph.calls[layer]
    sizes = {
        op: sum(graph.storages[s].bytes for s in graph.creates[op])
        for op in range(call.start, call.stop)
    }
    seconds = graph.critical_seconds
    whole = sum(seconds[op] for op in sizes) / max(sum(sizes.values()), 1)
    dear = [op for op, size in sizes.items() if size and seconds[op] > whole * size]
    return frozenset((op, n) for op in dear for n in range(len(graph.ops[op].outputs)))
