"""Common strategies in the same simulator: the longer list of ``ckplan compare``.

===================  ==================================================================
``every n calls``    uniform segments of n layers, each rerun as a whole; the last is
                     kept (Megatron-LM's ``uniform`` method); for many layers, the
                     shortest segments for every number of segments
``sqrt(n) segments`` the same with n the square root of the number of layers
``first k calls``    as few of the first layers as the budget needs, each rerun
                     (Megatron-LM's ``block`` method)
``rotor``            Beaumont et al., "Optimal checkpointing for heterogeneous chains",
                     2019, over whole layers: the cheapest set to rerun that fits,
                     without menus, and without its nesting
``save matmuls``     in every layer, outputs of matrix products, convolutions and
                     attention are kept, the rest rebuilt (selective checkpointing)
``save every 2nd``   the same for every second matrix product, and attention
``tf speed``         the same as ``save matmuls`` over the whole forward: the ``speed``
                     mode of the gradient-checkpointing package for TensorFlow
``tf memory``        over the whole forward, about sqrt(n) articulation points of the
                     graph are kept: its ``memory`` mode
===================  ==================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ckplan.graph.graph import Graph
from ckplan.graph.records import OUTSIDE_CALLS
from ckplan.plan.region import RERUN, Region
from ckplan.simulating.simulate import Simulator
from ckplan.solving.baselines import (
    can_recompute,
    find_repeated_layers,
    min_regions_to_fit,
    run_lengths,
)
from ckplan.solving.chain import regions_of
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.menu import Menus
from ckplan.solving.planner import Planner
from ckplan.solving.segmentation import segmentation_frontier
from ckplan.solving.solution import Baseline

_PRODUCTS = ("addmm", "mm", "bmm", "baddbmm", "linear", "matmul")
_CONVOLUTIONS = ("convolution", "conv", "mkldnn_convolution", "cudnn_convolution")
_ATTENTION = "scaled_dot_product"


def all_baselines(planner: Planner, limit: MemoryLimit) -> tuple[Baseline, ...]:
    """All baselines, those that ``solve`` shows first."""
    others = strategy_baselines(planner.simulator, planner.menus, limit)
    return (*planner.standard_baselines.baselines(limit), *others)


def strategy_baselines(
    simulator: Simulator, menus: Menus, limit: MemoryLimit
) -> tuple[Baseline, ...]:
    """Every strategy that the model allows, each with its peak and overhead."""
    found: list[Baseline] = []
    seen: set[tuple[Region, ...]] = set()
    for name, regions in _plans(simulator, menus, limit):
        plan = tuple(region for region in regions if can_recompute(simulator, region))
        if not plan or plan in seen:
            continue
        seen.add(plan)
        found.append(Baseline.of(name, simulator.run(plan), limit))
    return tuple(found)


def _plans(
    simulator: Simulator, menus: Menus, limit: MemoryLimit
) -> Iterator[tuple[str, Sequence[Region]]]:
    graph = simulator.graph
    layers = find_repeated_layers(graph, menus)
    if layers:
        root = max(1, math.isqrt(len(layers)))
        yield "sqrt(n) segments", _segments(graph, layers, root)
        for n in run_lengths(len(layers))[1:-1]:
            yield f"every {n} calls", _segments(graph, layers, n)
        yield "first k calls", _first(simulator, layers, limit)
        yield "rotor", _rotor(simulator, menus, layers, limit)
        for name, every in (("save matmuls", 1), ("save every 2nd", 2)):
            yield name, [_saving_products(graph, layer, every) for layer in layers]
    for whole in graph.children[OUTSIDE_CALLS][:1]:
        yield "tf speed", [_saving_products(graph, whole, 1)]
        yield "tf memory", [_saving_articulations(graph, whole)]


def _segments(graph: Graph, layers: Sequence[int], length: int) -> list[Region]:
    """Regions on runs of ``length`` sibling layers; the last run is kept."""
    runs: list[list[int]] = []
    for layer in layers:
        together = runs and graph.calls[runs[-1][0]].parent == graph.calls[layer].parent
        if together and len(runs[-1]) < length:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return [Region(run[0], RERUN, last=run[-1]) for run in runs[:-1]]


def _first(
    simulator: Simulator, layers: Sequence[int], limit: MemoryLimit
) -> list[Region]:
    regions = [Region(layer, RERUN) for layer in layers]
    regions = [region for region in regions if can_recompute(simulator, region)]
    return regions[: min_regions_to_fit(simulator, regions, limit)]


def _rotor(
    simulator: Simulator, menus: Menus, layers: Sequence[int], limit: MemoryLimit
) -> Sequence[Region]:
    units = [(layer, None) for layer in layers]
    chain = segmentation_frontier(simulator, units, menus.whole)
    plans = map(regions_of, chain.cheapest_first(max(limit.bytes, chain.least_bytes)))
    return next(
        (p for p in plans if limit.allows(simulator.run(p))),
        regions_of(next(chain.cheapest_first(chain.least_bytes))),
    )


def _saving_products(graph: Graph, call: int, every: int) -> Region:
    """A program that keeps outputs of attention and of every n-th product."""
    found = graph.calls[call]
    save: set[tuple[int, int]] = set()
    products = 0
    for number in range(found.start, found.stop):
        name = graph.ops[number].name
        if name in _PRODUCTS or name in _CONVOLUTIONS:
            products += 1
            if products % every == 0:
                save.add((number, 0))
        elif name.lstrip("_").startswith(_ATTENTION):
            save.update((number, m) for m in range(len(graph.ops[number].outputs)))
    return Region(call, save=frozenset(save))


def _saving_articulations(graph: Graph, call: int) -> Region:
    """A program that keeps the outputs of about sqrt(n) articulation points."""
    import networkx

    found = graph.calls[call]
    dag = graph.to_networkx().subgraph(range(found.start, found.stop))
    points = sorted(networkx.articulation_points(dag.to_undirected()))
    points = [op for op in points if graph.ops[op].outputs]
    step = max(1, round(len(points) / math.isqrt(len(points) or 1)))
    return Region(call, save=frozenset((op, 0) for op in points[step - 1 :: step]))
