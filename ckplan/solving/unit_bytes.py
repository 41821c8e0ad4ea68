"""How regions on units change live bytes: equal units share one simulation.

Nothing here depends on seconds, so menus with different seconds share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import sub
from typing import TypeAlias

from ckplan.errors import PlanError
from ckplan.plan.region import Region
from ckplan.simulating.backwards import backwards_of
from ckplan.simulating.simulate import Simulator
from ckplan.simulating.view import RegionView
from ckplan.solving.unit_closure import alive_regardless

Unit: TypeAlias = tuple[int, int | None]
"""What can be a region: a call, and the last one if it is a run of siblings."""

Windows: TypeAlias = Sequence[tuple[int, int]]
"""First and last half moments of a unit's forward and of its backward."""


@dataclass(frozen=True, slots=True)
class RegionDelta:
    """How a region changes the live bytes of the step."""

    more_bytes: list[list[int]]  # by half moment of its forward and of its backward
    freed_bytes: int  # just before its backward
    simulated: Region  # the same region, maybe on an equal unit


class UnitBytes:
    """Live bytes of the units of one graph, with and without regions."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._graph = simulator.graph
        self._signatures: dict[Unit, str] = {}
        self._droppable: dict[int, int] = {}  # by call
        self._timing_keys: dict[Unit, int] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        self._changes: dict[tuple[int, Region], RegionDelta | None] = {}

    def windows(self, unit: Unit) -> Windows:
        """Half moments of a unit's forward and of its backward."""
        view = self._simulator.view(*unit)
        return [view.forward_window(), view.backward_window()]

    def live(self, windows: Windows) -> list[list[int]]:
        """Live bytes of the unplanned step over windows."""
        live = self._simulator.unplanned_bytes
        return [live[max(first, 0) : last + 1] for first, last in windows]

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

    def relative(self, region: Region) -> Region:
        """The region in relative numbers, which equal units share."""
        return region.moved(-region.call, -self._graph.calls[region.call].start)

    def signature(self, unit: Unit) -> str:
        """A key that is equal for units with the same ops."""
        if unit not in self._signatures:
            self._signatures[unit] = self._graph.signature(*unit)
        return self._signatures[unit]

    def change(self, unit: Unit, region: Region) -> RegionDelta | None:
        """How a region on a unit changes live bytes; None if it cannot be rebuilt."""
        key = self.timing_key(unit), self.relative(region)
        if key not in self._changes:
            self._changes[key] = None
            with suppress(PlanError):  # an equal call can lack an input
                self._changes[key] = self._find_change(region, self.windows(unit))
        return self._changes[key]

    def _find_change(self, region: Region, windows: Windows) -> RegionDelta:
        between = windows[1][0] - 1  # the last op before its backward begins
        live = self._simulator.live_within(region, [*windows, (between, between)])
        unplanned = self._simulator.unplanned_bytes
        return RegionDelta(
            [
                list(map(sub, found, unplanned[first : last + 1]))
                for (first, last), found in zip(windows, live, strict=False)
            ],
            unplanned[between] - live[-1][0],
            region,
        )

    def timing_key(self, unit: Unit) -> int:
        """A key equal for units whose equal regions change live bytes equally."""
        if unit not in self._timing_keys:
            view = self._simulator.view(*unit)
            key = self._timing(unit, view)
            self._timing_keys[unit] = self._numbers.setdefault(key, len(self._numbers))
        return self._timing_keys[unit]

    def _timing(self, unit: Unit, view: RegionView) -> tuple[object, ...]:
        windows = self.windows(unit)
        (start, stop), (begun, ended) = windows
        own = {*self._graph.saved_in(unit[0], unit[1])}

        def place(moment: int) -> tuple[int, int]:
            """Position in the windows; all moments between them have one position."""
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
            self._graph.is_changed(storage, view.stop, ended // 2 + 1)
            for storage in view.storages
        )
        return (
            self.signature(unit),
            unit if changed else None,  # overwritten values may be needed until then
            tuple(last - first for first, last in windows),
            tuple(
                (
                    place(2 * s.unpacked_at),
                    place(2 * s.last_held),
                    place(2 * s.last_used),
                    *((place(2 * a), place(2 * b)) for a, b in s.uses),
                )
                for _, s in view.made
            ),
            tuple(map(ends, dict.fromkeys(view.flow.storage_of))),
            tuple(
                (one.keeps_graph, len(one.uses))
                for one in backwards_of(self._graph, view.made)
            ),
        )
