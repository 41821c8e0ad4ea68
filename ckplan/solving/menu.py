"""Menus: the options of one unit, which is a call or a run of sibling calls.

Options are the vertices of the lower convex hull of (bytes kept, recompute seconds)
over all sets of saved values (``closure_problem.py``), from the fastest to the one that
keeps nothing. In small steps, options are all sets. Equal units share one search. If
the peak is inside a unit's backward, the vertices for that moment are added; for them,
only values needed after that moment count as kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import TypeAlias

from ckplan.graph.records import OUTSIDE_CALLS
from ckplan.plan.region import PROGRAM, RERUN, Region
from ckplan.simulating.simulate import Simulator
from ckplan.simulating.view import RegionView
from ckplan.solving.closure_problem import SavedSet
from ckplan.solving.unit_bytes import Unit, UnitBytes
from ckplan.solving.unit_closure import (
    alive_regardless,
    keepable_outputs,
    unit_closure_problem,
)

_FEWEST_CUTS, MOST_CUTS, _CUTS_TIMES_STEPS = 1, 40, 2500
_LEAST_EARLY = 1 / 32  # least share of droppable bytes used before a peak
_FEW_STEPS, _FEW_SETS = 24, 256  # of a unit whose sets local search tries all
_TRIED_TIMES_STEPS = 2500  # most sets times steps, if all sets are tried

_Outputs: TypeAlias = frozenset[tuple[int, int]]
"""(op counted from the unit's first, output)"""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a unit: a region, or none, and its cost."""

    region: Region | None  # None: keep everything
    need_bytes: int  # budget of its own moments if no earlier unit drops any
    freed_bytes: int  # between its forward and its backward
    seconds: float


class Menus:
    """Menus for the units of one graph."""

    def __init__(
        self,
        simulator: Simulator,
        *,
        small: bool = False,
        most_cuts: int = MOST_CUTS,
        unit_bytes: UnitBytes | None = None,
    ) -> None:
        """Compute no menu yet: each is computed at its first use.

        Args:
            simulator: The simulator of the graph.
            small: Whether the step is small enough to try every set.
            most_cuts: Most vertices of a hull.
            unit_bytes: Bytes of the same units, to share with other menus.
        """
        self.bytes = unit_bytes or UnitBytes(simulator)
        self._simulator = simulator
        self._small = small
        self._most_cuts = most_cuts
        self._graph = simulator.graph
        self._hulls: dict[str, list[Region]] = {}  # by signature
        self._options: dict[Unit, list[Option]] = {}
        self._choices: dict[Unit, list[Region]] = {}

    def options(self, unit: Unit) -> list[Option]:
        """Every way to run a unit, cheapest first; the first keeps everything."""
        if unit not in self._options:
            self._options[unit] = self.as_options(unit, self._regions(unit))
        return self._options[unit]

    def _regions(self, unit: Unit) -> list[Region]:
        regions = [self._moved_to_unit(kept, unit) for kept in self._kept(unit)]
        if unit[1] is None and self._may_rerun(unit[0]):
            regions.append(Region(unit[0], RERUN))
        return regions

    def _may_rerun(self, call: int) -> bool:
        """Whether running a call again, with its buffers restored, may be better.

        A program recomputes no op whose inputs have been overwritten. If its ops vary,
        each step records them, which a rerun does not need; but it refuses a generator
        that the forward makes, if that begins in another state.
        """
        hazards = self._graph.hazards_in(call)
        if any(one.kind == "buffer" for one in hazards):
            return True
        view = self._simulator.view(call)
        return view.varies and not view.draws[1]

    def choices(self, unit: Unit) -> list[Region]:
        """Regions on a unit for local search: every set if there are few."""
        if unit not in self._choices:
            steps = len(self._simulator.view(*unit).flow.inputs)
            found = self.enumerate_all(unit, _FEW_SETS) if steps <= _FEW_STEPS else []
            self._choices[unit] = list(dict.fromkeys([*found, *self._regions(unit)]))
        return self._choices[unit]

    def nearby(self, region: Region) -> Iterator[Region]:
        """Regions on the same unit that keep, encode or drop one value more."""
        if region.by != PROGRAM:
            return
        save, encode = region.save, region.encode
        for place in keepable_outputs(self._simulator.view(region.call, region.last)):
            one = frozenset([place])
            if place in save or place in encode:
                yield replace(region, save=save - one, encode=encode - one)
            if place not in save:
                yield replace(region, save=save | one, encode=encode - one)
            if place not in encode and place in self._graph.encoding_of:
                yield replace(region, save=save - one, encode=encode | one)

    def enumerate_all(self, unit: Unit, most: int) -> list[Region]:
        """A region for every set of saved values; empty if there are too many."""
        view = self._simulator.view(*unit)
        if not view.made:
            return []
        choices = unit_closure_problem(self._graph, view).enumerate_all(most)
        found = dict.fromkeys(_kept(view, choice) for choice in choices)
        return [self._moved_to_unit(kept, unit) for kept in found]

    def backward_peak_regions(self, unit: Unit, moment: int) -> list[Region]:
        """Regions on a unit that drop tensors needed after a half moment.

        Tensors that backward needs by that moment are alive at it anyway, so the
        regions keep them.

        The result is empty if the moment is outside the unit's backward, or if so few
        bytes are needed by then that the menu has nearly the same regions.
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
            if 0 <= saved.unpacked_at <= moment // 2 and saved.storage in made
        }
        most, known = (sum(size[one].bytes for one in found) for found in (made, early))
        if known == most or known < _LEAST_EARLY * most:
            return []
        choices = unit_closure_problem(graph, view, early).hull(self._num_cuts(view))
        found = dict.fromkeys(_kept(view, choice) for choice in choices)
        return [self._moved_to_unit(kept, unit) for kept in found]

    def whole(self, unit: Unit) -> list[Option]:
        """The two common options: keep everything, or rerun the whole unit."""
        return self.as_options(unit, [Region(unit[0], RERUN, last=unit[1])])

    def as_options(self, unit: Unit, regions: Iterable[Region]) -> list[Option]:
        """Options of those regions on a unit that free bytes, cheapest first."""
        view, found = self._simulator.view(*unit), self.bytes
        windows = found.windows(unit)
        live = found.live(windows)
        keep = Option(None, max(max(own, default=0) for own in live), 0, 0.0)
        if not view.made or windows[1][0] <= windows[0][1]:
            return [keep]  # backward begins at once: nothing can be dropped
        options: list[Option] = []
        for region in regions:
            change = found.change(unit, region)
            if change is not None and change.freed_bytes > 0:
                need = max(
                    max(map(add, own, more), default=0)
                    for own, more in zip(live, change.more_bytes, strict=True)
                )
                seconds = self._simulator.effect(change.simulated).seconds
                options.append(Option(region, need, change.freed_bytes, seconds))
        return [keep, *_non_dominated(options)]

    def droppable_bytes(self, call: int) -> int:
        """Bytes that a region on the call could drop at most."""
        return self.bytes.droppable_bytes(call)

    def signature(self, unit: Unit) -> str:
        """A key that is equal for units with the same ops."""
        return self.bytes.signature(unit)

    @property
    def all_droppable_bytes(self) -> int:
        """Droppable bytes of all outermost calls together."""
        return sum(map(self.droppable_bytes, self._graph.children[OUTSIDE_CALLS]))

    def canonicalize(
        self, regions: Sequence[Region], segmentation: Sequence[Unit]
    ) -> list[Region]:
        """Reorder choices among equal units so that the first ones keep the least.

        Early freeing helps every later moment. An ordered plan has a short plan file.
        """
        chosen = {(region.call, region.last): region for region in regions}
        equal_units: dict[str, list[Unit]] = defaultdict(list)
        for unit in segmentation:
            equal_units[self.signature(unit)].append(unit)
        tidied: list[Region] = []
        for units in equal_units.values():
            saves = [self.bytes.relative(chosen[u]) for u in units if u in chosen]
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

    def _moved_to_unit(self, region: Region, unit: Unit) -> Region:
        """A relative region in the numbers of one unit."""
        return region.moved(unit[0], self._graph.calls[unit[0]].start)

    def _kept_bytes(self, region: Region) -> int:
        graph = self._graph
        storages = {graph.ops[op].outputs[output] for op, output in region.save}
        saved = sum(graph.storages[storage].bytes for storage in storages)
        return saved + sum(graph.encoding_of[place].bytes for place in region.encode)

    def _num_cuts(self, view: RegionView) -> int:
        """Most hull vertices of a unit; fewer for large units, to limit search time."""
        affordable = _CUTS_TIMES_STEPS // len(view.flow.inputs)
        return max(_FEWEST_CUTS, min(self._most_cuts, affordable))

    def _kept(self, unit: Unit) -> list[Region]:
        """The hull of a unit as relative regions."""
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
            choices = choices or closure.hull(self._num_cuts(view))
            found = (_kept(view, choice) for choice in choices)
            self._hulls[signature] = list(dict.fromkeys(found))
        return self._hulls[signature]


def _non_dominated(options: Sequence[Option]) -> list[Option]:
    """The options that no other dominates, cheapest first."""
    kept: list[Option] = []
    for one in sorted(options, key=lambda o: (o.seconds, o.need_bytes, -o.freed_bytes)):
        if not any(
            other.need_bytes <= one.need_bytes and other.freed_bytes >= one.freed_bytes
            for other in kept
        ):
            kept.append(one)
    return kept


def _kept(view: RegionView, choice: SavedSet) -> Region:
    """A region that keeps some values, relative to its unit's first call and op."""
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
