"""Replay a graph under a plan: live bytes at every moment, exact in bytes.

This module is the only definition of the peak. Time is counted in half moments. Half
moment ``2 t`` is the gap before op ``t``, where recomputation happens. Half moment
``2 t + 1`` is the run of op ``t``. A storage lives from the op that makes it to the
last moment that anything holds it: the model's own code, a saved tensor, or a region
that rebuilds from it.

A region changes three things. Its dropped saved tensors no longer hold their storages.
It retains the values that it rebuilds from. In backward, it reruns steps, which
allocate and free. ``Rebuild`` fixes their order for the simulator and the engine.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import TypeAlias

from ckplan.errors import PlanError
from ckplan.graph.graph import Graph
from ckplan.graph.records import GATHER
from ckplan.plan.hazards import refuse_hazards
from ckplan.plan.region import Region, check_apart
from ckplan.simulating.effect import Effect, Interval
from ckplan.simulating.moving import Link, Moves, find_moves
from ckplan.simulating.recomputing import find_effect
from ckplan.simulating.tiled_regions import refuse_regions_of_losses, tile_regions
from ckplan.simulating.timeline import Timeline
from ckplan.simulating.view import RegionView

__all__ = ["Simulator", "Timeline", "simulate"]

_Change: TypeAlias = tuple[int, int, int] | Interval
"""First and last half moment, and bytes: as an interval begins."""
_RECENT = 8  # timelines that are kept: a search asks for its best ones twice


def simulate(graph: Graph, regions: Iterable[Region] = ()) -> Timeline:
    """Replay one training step under a plan.

    Args:
        graph: The recorded step.
        regions: Regions that do not overlap.

    Returns:
        The timeline of live bytes and the extra seconds.

    Raises:
        PlanError: Two regions overlap, or one cannot be rebuilt.
    """
    return Simulator(graph).run(regions)


class Simulator:
    """Replays one graph under many plans; caches views and effects of regions."""

    def __init__(self, graph: Graph, link: Link | None = None) -> None:
        """Prepare the replays of a step.

        Args:
            graph: The step.
            link: The way of the copies of offloaded values, if known.
        """
        self.graph = graph
        self.link = link
        self._views: dict[tuple[int, int], RegionView] = {}
        self._effects: dict[Region, Effect] = {}
        self._tiled: dict[tuple[Region, ...], Simulator] = {}
        self._generated = {one.regions: one for one in graph.generated}
        self._recent: dict[tuple[Region, ...], Timeline] = {}
        self._end = 2 * len(graph.ops)
        self._saved_of = graph.lifetimes.held
        self._natural_stops, self._stops = (
            graph.lifetimes.natural_stops,
            graph.lifetimes.stops,
        )
        level = [0] * (self._end + 2)
        for found, start, stop in zip(
            graph.storages, graph.lifetimes.starts, self._stops, strict=True
        ):
            level[start] += found.bytes
            level[stop + 1] -= found.bytes
        self.unplanned_bytes = list(accumulate(level))[:-1]
        for moment, op in enumerate(graph.ops):
            self.unplanned_bytes[2 * moment + 1] += op.workspace.bytes

    def view(self, call: int, last: int | None = None) -> RegionView:
        """The values and saved tensors of a call, or of a run of sibling calls."""
        key = (call, call if last is None else last)
        if key not in self._views:
            self._views[key] = RegionView(self.graph, *key)
        return self._views[key]

    def effect(self, region: Region) -> Effect:
        """The effect of one region on the unplanned step, cached.

        Raises:
            PlanError: The region cannot be rebuilt.
        """
        if region not in self._effects:
            refuse_hazards(self.graph, region)
            view = self.view(region.call, region.last)
            self._check_parameters(view)
            self._effects[region] = find_effect(view, region)
        return self._effects[region]

    def run(self, regions: Iterable[Region] = ()) -> Timeline:
        """Replay the step under regions that do not overlap.

        Raises:
            PlanError: Two regions overlap, or one cannot be rebuilt.
        """
        regions = sorted(regions, key=lambda region: region.call)
        key = tuple(regions)
        if key not in self._recent:
            found = self._simulate(regions)
            if len(self._recent) >= _RECENT:
                del self._recent[next(iter(self._recent))]
            self._recent[key] = found
        return self._recent[key]

    def _simulate(self, regions: Sequence[Region]) -> Timeline:
        """Replay the step under regions in the order of their calls."""
        check_apart(self.graph, regions)
        tiled = tuple(one for one in regions if one.tiles is not None)
        if tiled:
            others = [one for one in regions if one.tiles is None]
            return self._run_tiled(tiled, others)
        effects = tuple(self.effect(region) for region in regions)
        moves = find_moves(self.graph, effects, self.link)
        moved = self._moved_stops(effects, moves)
        excess = Counter[int]()
        freed_ticks = self._freed_in_gap(effects, moved)
        sizes = self._freed_bytes(freed_ticks, moved)
        for effect in effects:
            excess.update(effect.excess(sizes))
        changes = self._changes(moved, effects, moves)
        live = self._replay(changes, excess, 0, len(self.unplanned_bytes) - 1)
        stops = self._stops, moved, freed_ticks
        found = Timeline(self.graph, live, effects, *stops, moves=moves)
        code = self._generated.get(tuple(region.saving for region in regions))
        if code and code.simulated_peak_bytes == found.simulated_peak_bytes:
            return replace(found, generated=code)
        return found

    def _run_tiled(
        self, tiled: tuple[Region, ...], others: Sequence[Region]
    ) -> Timeline:
        """Replay the step with calls in tiles, and other regions."""
        if tiled not in self._tiled:
            graph = tile_regions(self.graph, tiled)
            self._tiled[tiled] = Simulator(graph, self.link)
        refuse_regions_of_losses(self.graph, (*tiled, *others))
        found = self._tiled[tiled].run(others)
        more = found.graph.step_seconds - self.graph.step_seconds
        return replace(found, added_seconds=found.added_seconds + more)

    def live_within(
        self, region: Region, windows: Iterable[tuple[int, int]]
    ) -> list[list[int]]:
        """Live bytes under one region, over windows of half moments [first, last]."""
        effects = (self.effect(region),)
        moves = find_moves(self.graph, effects)
        moved = self._moved_stops(effects, moves)
        changes = list(self._changes(moved, effects, moves))
        freed_ticks = self._freed_in_gap(effects, moved)
        excess = effects[0].excess(self._freed_bytes(freed_ticks, moved))
        return [self._replay(changes, excess, *window) for window in windows]

    def _replay(
        self,
        changes: Iterable[_Change],
        excess: Mapping[int, int],
        start: int,
        stop: int,
    ) -> list[int]:
        """Live bytes over a window: the unplanned ones and the changes of regions."""
        delta = [0] * (stop - start + 2)
        for change in changes:
            first, last, num_bytes = change[:3]
            if first <= stop and last >= start and first <= last:
                delta[first - start if first > start else 0] += num_bytes
                delta[(last if last < stop else stop) - start + 1] -= num_bytes
        window = self.unplanned_bytes[start : stop + 1]
        live = list(map(add, window, accumulate(delta)))
        for moment, more_bytes in excess.items():
            if start <= moment <= stop:
                live[moment - start] += more_bytes
        return live

    def _moved_stops(self, effects: Sequence[Effect], moves: Moves) -> dict[int, int]:
        """Storage -> its last half moment, for storages that regions drop or hold."""
        dropped = set().union(*(effect.dropped for effect in effects))
        retained = dict(moves.holds)
        for effect in effects:
            for storage, until in effect.retained.items():
                retained[storage] = max(retained.get(storage, -1), until)
        stops: dict[int, int] = {}
        for storage in {*retained, *(self.graph.saved[i].storage for i in dropped)}:
            until = max(self._natural_stops[storage], retained.get(storage, -1))
            for index, last_held in self._saved_of.get(storage, ()):
                if last_held > until and index not in dropped:
                    until = last_held
            stops[storage] = min(until, self._end)
        return stops

    def _freed_in_gap(
        self, effects: Iterable[Effect], moved: Mapping[int, int]
    ) -> dict[int, int]:
        """Storage -> tick, of storages that a region is the last to free in a gap.

        If several regions free a storage in one gap, the last one is not known, and the
        storage is left out.
        """
        found: dict[int, int] = {}
        several: set[int] = set()
        for effect in effects:
            for gap, freed in effect.freed_in_gap.items():
                for storage, tick in freed:
                    if moved[storage] == gap:
                        several |= {storage} & found.keys()
                        found[storage] = tick
        return {storage: found[storage] for storage in found.keys() - several}

    def _freed_bytes(
        self, freed_ticks: Iterable[int], moved: Mapping[int, int]
    ) -> dict[int, dict[int, int]]:
        """Gap -> storage -> bytes, of the storages that are freed within that gap."""
        found: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for storage in freed_ticks:
            found[moved[storage]][storage] = self.graph.storages[storage].bytes
        return found

    def _changes(
        self, moved: Mapping[int, int], effects: Sequence[Effect], moves: Moves
    ) -> Iterator[_Change]:
        """Changes to the unplanned bytes, as intervals begin; negative if freed."""
        for storage, new in moved.items():
            old, size = self._stops[storage], self.graph.storages[storage].bytes
            if new < old:
                yield new + 1, old, -size
            elif new > old:
                yield old + 1, new, size
        yield from (*moves.leaving, *moves.early)
        for effect in effects:
            yield from effect.allocated

    def ends(self, storage: int) -> list[tuple[int, int]]:
        """(half moment, saved tensor) of every holder: how long it holds the storage.

        The model's own code comes first, with -1 in place of a saved tensor.
        """
        natural = self._natural_stops[storage]
        saved = [
            (last_held, index) for index, last_held in self._saved_of.get(storage, ())
        ]
        return [(natural, -1), *saved]

    @cached_property
    def _gathered(self) -> list[int]:
        """Calls whose parameters are gathered for that call alone."""
        found = (op.call for op in self.graph.ops if op.name == GATHER)
        return [call for call in dict.fromkeys(found) if call >= 0]

    def _check_parameters(self, view: RegionView) -> None:
        """Refuse a region with parameters that are gathered and freed inside it."""
        for number in self._gathered:
            call = self.graph.calls[number]
            inside = view.start <= call.start and call.stop <= view.stop
            if inside and view.unit != (number, None):
                raise PlanError(
                    f"cannot rebuild {view.name}: the parameters of {call} are "
                    "gathered for that call alone",
                    needed="regions inside one unit of parameters",
                    hint="one region for every unit, or larger units with --unit",
                )
