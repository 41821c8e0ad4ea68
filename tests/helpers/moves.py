"""Regions that move what they can, at random."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from ckplan.graph.graph import Graph
from ckplan.plan.region import Region
from ckplan.simulating.simulate import Simulator
from ckplan.solving.offloading import movable, only_wanted


def ops_of(graph: Graph, region: Region) -> range:
    last = region.call if region.last is None else region.last
    return range(graph.calls[region.call].start, graph.calls[last].stop)


def moving(
    simulator: Simulator, region: Region, rng: Random, share: float = 0.5
) -> Region:
    """The region, moving some values that backward wants and keeping some others."""
    places = movable(simulator.graph, ops_of(simulator.graph, region))
    moved = {place for place in places if rng.random() < share}
    saved = {place for place in places if place not in moved and rng.random() < 0.3}
    found = replace(region, save=frozenset(saved), offload=frozenset(moved))
    return only_wanted(simulator, found)


def mixes(
    simulator: Simulator, regions: list[Region], seed: int, count: int
) -> Iterator[list[Region]]:
    """Yield mixes at random, the first of which moves everything."""
    rng = Random(seed)
    for number in range(count):
        share = 1.0 if not number else 0.5
        yield [moving(simulator, region, rng, share) for region in regions]
