"""Exhaustive search: simulate every plan of a very small step.

The recurrence of ``chain.py`` adds up the bytes that units free, as if each unit were
alone. That is too coarse for a step of a few ops whose units share most tensors. Trying
all plans is quick there: every set of saved values on every call and every run of
siblings, and nested regions if there are few enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import TypeAlias

from ckplan.errors import PlanError
from ckplan.plan.region import Region
from ckplan.simulating.simulate import Simulator, Timeline
from ckplan.solving.menu import Menus
from ckplan.solving.segmentation import CallNode, are_siblings
from ckplan.solving.unit_bytes import Unit

_MOST_PLANS, _MOST_NESTED_PLANS = 6000, 3000  # the latter share no simulations

_Plan: TypeAlias = tuple[Region, ...]


class _TooManyError(Exception):
    """There are too many plans to try."""


def try_all(
    simulator: Simulator, menus: Menus, nodes: Sequence[CallNode], *, nested: bool
) -> list[tuple[Timeline, _Plan]]:
    """The non-dominated plans with their timelines, smallest peak first.

    Args:
        simulator: The simulator of the graph.
        menus: The menus of the graph.
        nodes: The outermost calls, all divided.
        nested: Whether regions can contain regions.

    Returns:
        The plans; empty if there are too many to try.
    """
    with suppress(_TooManyError):
        plans = _PlanEnumerator(simulator, menus, nested=nested).of_siblings(nodes)
        return _non_dominated(simulator, plans)
    return []


def _non_dominated(
    simulator: Simulator, plans: Sequence[_Plan]
) -> list[tuple[Timeline, _Plan]]:
    found: list[tuple[Timeline, _Plan]] = []
    for plan in plans:
        with suppress(PlanError):
            found.append((simulator.run(plan), plan))
    found.sort(key=lambda one: (one[0].peak_bytes, one[0].recompute_seconds))
    kept: list[tuple[Timeline, _Plan]] = []
    for timeline, plan in found:
        if not kept or timeline.recompute_seconds < kept[-1][0].recompute_seconds:
            kept.append((timeline, plan))
    return kept


class _PlanEnumerator:
    """Enumerates all plans for parts of a step."""

    def __init__(self, simulator: Simulator, menus: Menus, *, nested: bool) -> None:
        self._simulator = simulator
        self._menus = menus
        self._nested = nested
        self._most = _MOST_NESTED_PLANS if nested else _MOST_PLANS

    def of_siblings(
        self, nodes: Sequence[CallNode], around: Unit | None = None
    ) -> list[_Plan]:
        """All plans for siblings, including the empty plan.

        Args:
            nodes: The siblings, in forward order.
            around: The unit of all these siblings; it gets no region here.
        """
        after: list[list[_Plan]] = [[()]]
        for place in range(len(nodes) - 1, -1, -1):
            node = nodes[place]
            plans = self._combine(self.of_siblings(node.parts), after[0])
            for last in range(place, len(nodes)):
                together = nodes[place : last + 1]
                unit = (node.call, None if last == place else nodes[last].call)
                if unit != around and (
                    last == place
                    or are_siblings(self._simulator.graph, node.call, nodes[last].call)
                ):
                    regions = [(region,) for region in self._of_unit(unit, together)]
                    plans += self._combine(regions, after[last - place])
            after.insert(0, plans)
        return after[0]

    def _of_unit(self, unit: Unit, nodes: Sequence[CallNode]) -> Iterator[Region]:
        flat = self._menus.enumerate_all(unit, self._most)
        if not flat and self._simulator.view(*unit).made:
            raise _TooManyError
        inside: list[_Plan] = [()]
        if self._nested:
            parts = nodes[0].parts if unit[1] is None else nodes
            plans = self.of_siblings(parts, around=unit)
            inside = [plan for plan in plans if not any(one.encode for one in plan)]
        if len(flat) * len(inside) > self._most:
            raise _TooManyError
        for region, plan in product(flat, inside):
            yield replace(region, inner=plan)

    def _combine(self, some: Sequence[_Plan], others: Sequence[_Plan]) -> list[_Plan]:
        if len(some) * len(others) > self._most:
            raise _TooManyError
        return [one + other for one, other in product(some, others)]
