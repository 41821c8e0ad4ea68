"""Regions that move what they can, at random."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from ckplan.graph.graph import Graph
from ckplan.plan.outputs import why_not_moved
from ckplan.plan.region import Region
from ckplan.simulating.simulate import Simulator


def movable(graph: Graph, region: Region) -> list[tuple[int, int]]:
    """(op, output) of those that a region may move, wanted or not."""
    last = region.call if region.last is None else region.last
    ops = range(graph.calls[region.call].start, graph.calls[last].stop)
    seen: dict[int, tuple[int, int]] = {}
    for op in ops:
        for output, storage in enumerate(graph.ops[op].outputs):
            if not why_not_moved(graph, op, output):
                seen[storage] = op, output
    return list(seen.values())


def moving(
    simulator: Simulator, region: Region, rng: Random, share: float = 0.5
) -> Region:
    """The region, moving some values that backward wants and keeping some others."""
    places = movable(simulator.graph, region)
    moved = {place for place in places if rng.random() < share}
    saved = {place for place in places if place not in moved and rng.random() < 0.3}
    found = replace(region, save=frozenset(saved), offload=frozenset(moved))
    return only_wanted(simulator, found)


def only_wanted(simulator: Simulator, region: Region) -> Region:
    """The region without moves of values that backward does not want."""
    view = simulator.view(region.call, region.last)
    wanted = view.program(region)[0].decodes
    values = view.flow.returned
    kept = (p for p in region.offload if values[p[0] - view.start][p[1]] in wanted)
    return replace(region, offload=frozenset(kept))


def mixes(
    simulator: Simulator, regions: list[Region], seed: int, count: int
) -> Iterator[list[Region]]:
    """Yield mixes at random, the first of which moves everything."""
    rng = Random(seed)
    for number in range(count):
        share = 1.0 if not number else 0.5
        yield [moving(simulator, region, rng, share) for region in regions]
