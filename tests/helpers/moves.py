"""Regions that move what they can, at random."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from ckplan.graph.graph import Graph
from ckplan.plan.outputs import storage_of, why_not_moved
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
    graph = simulator.graph
    places = movable(graph, ops_of(graph, region))
    moved = {place for place in places if rng.random() < share}
    saved = {place for place in places if place not in moved and rng.random() < 0.3}
    encoded = {
        place
        for place in graph.encoding_of
        if place[0] in ops_of(graph, region) and place not in moved | saved
    }
    taken = {storage_of(graph, place) for place in moved}
    small = {
        place
        for place in encoded
        if not why_not_moved(graph, *place, graph.encoding_of[place])
        and storage_of(graph, place) not in taken
        and rng.random() < share
    }
    found = replace(
        region,
        save=frozenset(saved),
        encode=frozenset(encoded),
        offload=frozenset(moved | small),
    )
    return only_wanted(simulator, found)


def mixes(
    simulator: Simulator, regions: list[Region], seed: int, count: int
) -> Iterator[list[Region]]:
    """Yield mixes at random, the first of which moves everything."""
    rng = Random(seed)
    for number in range(count):
        share = 1.0 if not number else 0.5
        yield [moving(simulator, region, rng, share) for region in regions]
