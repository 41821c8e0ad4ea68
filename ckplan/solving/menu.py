"""What can be done with one call, or one run of calls: a menu of regions.

Options are the vertices of the lower convex hull of (bytes kept, seconds run again)
over all sets of values to keep (``closure.py``), from keeping all that is cheap to
rebuild nothing, to keeping nothing; in small steps, all sets. Units that do the same
share one search. Where the peak is inside of a unit's backward, there are the vertices
for that moment, too: of them only what is wanted later counts as kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import add, sub
from typing import TypeAlias

from ckplan.errors import PlanError
from ckplan.graph.records import OUTSIDE_CALLS
from ckplan.plan.region import RERUN, Region
from ckplan.simulating.simulate import Simulator
from ckplan.simulating.view import RegionView
from ckplan.solving.closure_problem import SavedSet
from ckplan.solving.unit_closure import alive_regardless, unit_closure_problem

_FEWEST_CUTS, _MOST_CUTS, _CUTS_TIMES_STEPS = 1, 40, 2500
_LEAST_EARLY = 1 / 32  # of what a unit could drop, wanted by some moment
_TRIED_TIMES_STEPS = 2500  # sets of values to keep, where they are all tried

Unit: TypeAlias = tuple[int, int | None]
"""What can be a region: a call, and the last one if it is a run of siblings."""

_Outputs: TypeAlias = frozenset[tuple[int, int]]
"""(op counted from the unit's first, output)"""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a unit."""

    region: Region | None  # None: keep everything
    need_bytes: int  # budget its own moments need if no earlier unit drops any
    freed_bytes: int  # what it frees between its forward and its backward
    seconds: float


@dataclass(frozen=True, slots=True)
class RegionDelta:
    """What a region does to the step around it."""

    more_bytes: list[list[int]]  # by half moment of its forward and of its backward
    freed_bytes: int  # just before its backward
    seconds: float


class Menus:
    """Menus for the units of one graph."""

    def __init__(self, simulator: Simulator, *, small: bool = False) -> None:
        """Menus that are found as they are asked for.

        Args:
            simulator: Of the graph.
            small: Whether few units are there, so that every set can be tried.
        """
        self._simulator = simulator
        self._small = small
        self._graph = simulator.graph
        self._hulls: dict[str, list[Region]] = {}  # by signature
        self._signatures: dict[Unit, str] = {}
        self._droppable: dict[int, int] = {}  # by call
        self._timing_keys: dict[tuple[object, ...], int] = {}
        self._changes: dict[tuple[int, Region], RegionDelta | None] = {}

    def options(self, unit: Unit) -> list[Option]:
        """Every way to run a unit, cheapest first; keeping everything is the first."""
        regions = [self._moved_to_unit(kept, unit) for kept in self._kept(unit)]
        if unit[1] is None and self._overwrites_buffers(unit[0]):
            regions.append(Region(unit[0], RERUN))
        return self.as_options(unit, regions)

    def _overwrites_buffers(self, call: int) -> bool:
        """Whether to run it again, with its buffers put back, saves what programs keep.

        They run no op again that read what is overwritten by then.
        """
        return any(one.kind == "buffer" for one in self._graph.hazards_in(call))

    def enumerate_all(self, unit: Unit, most: int) -> list[Region]:
        """A region for every set of values to keep; none if there are too many."""
        view = self._simulator.view(*unit)
        if not view.made:
            return []
        choices = unit_closure_problem(self._graph, view).enumerate_all(most)
        found = dict.fromkeys(_kept(view, choice) for choice in choices)
        return [self._moved_to_unit(kept, unit) for kept in found]

    def backward_peak_regions(self, unit: Unit, moment: int) -> list[Region]:
        """Regions on a unit that drop what its backward wants after a half moment.

        What it wants by then is there at that moment anyway, so they keep it.

        None where that moment is not in its backward, nor where it wants so little by
        then that the menu has hardly others.
        """
        graph, view = self._graph, self._simulator.view(*unit)
        first, last = view.backward_window()
        if not first <= moment <= last:
            return []
        alive, size = alive_regardless(graph, view), graph.storages
        made = {saved.storage for _, saved in view.made} - alive
        early = {
            saved.storage
            for _, saved in view.made
            if 0 <= saved.wanted <= moment // 2 and saved.storage in made
        }
        most, known = (sum(size[one].bytes for one in found) for found in (made, early))
        if known == most or known < _LEAST_EARLY * most:
            return []
        choices = unit_closure_problem(graph, view, early).hull(_most_cuts(view))
        found = dict.fromkeys(_kept(view, choice) for choice in choices)
        return [self._moved_to_unit(kept, unit) for kept in found]

    def whole(self, unit: Unit) -> list[Option]:
        """The two ways of everyday practice: keep everything, or run it all again."""
        return self.as_options(unit, [Region(unit[0], RERUN, last=unit[1])])

    def as_options(self, unit: Unit, regions: Iterable[Region]) -> list[Option]:
        """Regions on a unit as options, those that free something, cheapest first."""
        view = self._simulator.view(*unit)
        windows = _windows(view)
        keep = Option(None, self._need(windows), 0, 0.0)
        if not view.made or windows[1][0] <= windows[0][1]:
            return [keep]  # nothing is dropped before backward wants it
        timing_key = self.timing_key(unit)
        options: list[Option] = []
        for region in regions:
            change = self._change(timing_key, region, windows)
            if change is not None and change.freed_bytes > 0:
                need = self._need(windows, change.more_bytes)
                options.append(Option(region, need, change.freed_bytes, change.seconds))
        return [keep, *_non_dominated(options)]

    def droppable_bytes(self, call: int) -> int:
        """Bytes that a region on the call could drop at most."""
        if call not in self._droppable:
            view = self._simulator.view(call)
            alive = alive_regardless(self._graph, view)
            self._droppable[call] = sum(
                self._graph.storages[storage].bytes
                for storage in {saved.storage for _, saved in view.made} - alive
            )
        return self._droppable[call]

    @property
    def all_droppable_bytes(self) -> int:
        """Those of the outermost calls."""
        return sum(map(self.droppable_bytes, self._graph.children[OUTSIDE_CALLS]))

    def canonicalize(
        self, regions: Sequence[Region], segmentation: Sequence[Unit]
    ) -> list[Region]:
        """The same choices, those that keep least given to the first of like units.

        Freeing early helps every later moment, and a plan in order is short to write.
        """
        chosen = {(region.call, region.last): region for region in regions}
        alike: dict[str, list[Unit]] = defaultdict(list)
        for unit in segmentation:
            alike[self.signature(unit)].append(unit)
        tidied: list[Region] = []
        for units in alike.values():
            saves = [self.relative(chosen[u]) for u in units if u in chosen]
            saves.sort(
                key=lambda kept: (
                    self._kept_bytes(self._moved_to_unit(kept, units[0])),
                    kept.by,
                    sorted(kept.save),
                    sorted(kept.encode),
                )
            )
            tidied += map(self._moved_to_unit, saves, units)
        return sorted(tidied, key=lambda region: region.call)

    def relative(self, region: Region) -> Region:
        """The region as units that do the same can share it."""
        return region.moved(-region.call, -self._graph.calls[region.call].start)

    def _moved_to_unit(self, region: Region, unit: Unit) -> Region:
        """A region that units which do the same share, on one of them."""
        return region.moved(unit[0], self._graph.calls[unit[0]].start)

    def _kept_bytes(self, region: Region) -> int:
        graph = self._graph
        storages = {graph.ops[op].outputs[output] for op, output in region.save}
        saved = sum(graph.storages[storage].bytes for storage in storages)
        return saved + sum(graph.encoding_of[place].bytes for place in region.encode)

    def signature(self, unit: Unit) -> str:
        """Equal for units that do the same."""
        if unit not in self._signatures:
            self._signatures[unit] = self._graph.signature(*unit)
        return self._signatures[unit]

    def _kept(self, unit: Unit) -> list[Region]:
        """The hull of a unit, as units that do the same can share it."""
        signature = self.signature(unit)
        if signature not in self._hulls:
            view = self._simulator.view(*unit)
            if not view.made:
                return []
            closure, steps = (
                unit_closure_problem(self._graph, view),
                len(view.flow.inputs),
            )
            choices = (
                closure.enumerate_all(_TRIED_TIMES_STEPS // steps)
                if self._small
                else []
            )
            choices = choices or closure.hull(_most_cuts(view))
            found = (_kept(view, choice) for choice in choices)
            self._hulls[signature] = list(dict.fromkeys(found))
        return self._hulls[signature]

    def _change(
        self, timing_key: int, region: Region, windows: Sequence[tuple[int, int]]
    ) -> RegionDelta | None:
        """What a region changes; None if it cannot be rebuilt."""
        key = timing_key, self.relative(region)
        if key not in self._changes:
            self._changes[key] = None
            with suppress(PlanError):  # a call like this one may have lost an input
                self._changes[key] = self._find_change(region, windows)
        return self._changes[key]

    def _find_change(
        self, region: Region, windows: Sequence[tuple[int, int]]
    ) -> RegionDelta:
        between = windows[1][0] - 1  # the last op before its backward begins
        live = self._simulator.live_within(region, [*windows, (between, between)])
        unplanned = self._simulator.unplanned_bytes
        return RegionDelta(
            [
                list(map(sub, found, unplanned[first : last + 1]))
                for (first, last), found in zip(windows, live, strict=False)
            ],
            unplanned[between] - live[-1][0],
            self._simulator.effect(region).seconds,
        )

    def _need(
        self,
        windows: Sequence[tuple[int, int]],
        more_bytes: Sequence[Sequence[int]] = (),
    ) -> int:
        """Most live bytes over windows, with what a region adds to them."""
        live = self._simulator.unplanned_bytes
        own = [live[max(first, 0) : last + 1] for first, last in windows]
        if more_bytes:
            own = [list(map(add, *pair)) for pair in zip(own, more_bytes, strict=True)]
        return max(max(window, default=0) for window in own)

    def timing_key(self, unit: Unit) -> int:
        """Equal for units of which like regions change the step in the same way."""
        graph, view = self._graph, self._simulator.view(*unit)
        windows = _windows(view)
        (start, stop), (begun, ended) = windows
        own = {*graph.saved_in(unit[0], unit[1])}

        def place(moment: int) -> tuple[int, int]:
            """Where it is in the windows; all between them is one."""
            if moment <= stop:
                return 0, moment - start
            if moment < begun - 1:
                return 1, 0
            return 2, min(moment, ended + 1) - begun

        def ends(storage: int) -> tuple[tuple[int, int], ...]:
            found = self._simulator.ends(storage)
            last = max(moment for moment, saved in found if saved not in own)
            return place(last), *(place(at) for at, saved in found if saved in own)

        changed = any(
            graph.is_changed(storage, view.stop, ended // 2 + 1)
            for storage in view.storages
        )
        found = (
            self.signature(unit),
            unit if changed else None,  # what is overwritten may be needed until then
            tuple(last - first for first, last in windows),
            tuple(
                (place(2 * s.wanted), place(2 * s.done), place(2 * s.used))
                for _, s in view.made
            ),
            tuple(map(ends, dict.fromkeys(view.flow.storage_of))),
        )
        return self._timing_keys.setdefault(found, len(self._timing_keys))


def _non_dominated(options: Sequence[Option]) -> list[Option]:
    """Those than which none is better in everything, the cheapest first."""
    kept: list[Option] = []
    for one in sorted(options, key=lambda o: (o.seconds, o.need_bytes, -o.freed_bytes)):
        if not any(
            other.need_bytes <= one.need_bytes and other.freed_bytes >= one.freed_bytes
            for other in kept
        ):
            kept.append(one)
    return kept


def _most_cuts(view: RegionView) -> int:
    """Large units get fewer options, so that the search stays short."""
    return max(
        _FEWEST_CUTS, min(_MOST_CUTS, _CUTS_TIMES_STEPS // len(view.flow.inputs))
    )


def _windows(view: RegionView) -> list[tuple[int, int]]:
    """Half moments of a unit's forward and of its backward."""
    return [view.forward_window(), view.backward_window()]


def _kept(view: RegionView, choice: SavedSet) -> Region:
    """A region that keeps some values, counted from its unit's first call and op."""
    flow, (first, last) = view.flow, view.unit

    def outputs(values: Iterable[int]) -> _Outputs:
        makers = ((flow.maker_of[value], value) for value in values)
        return frozenset((op, flow.returned[op].index(value)) for op, value in makers)

    return Region(
        0,
        save=outputs(choice.kept),
        last=None if last is None else last - first,
        encode=outputs(choice.encoded),
    )
