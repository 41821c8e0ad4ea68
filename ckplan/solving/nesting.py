"""Options with nested regions, for long chains and large calls with large bursts.

While a region that keeps nothing is rebuilt, it retains all tensors that its backward
needs. With nested regions, it retains only their inputs, and they rebuild the rest
later. Every level costs one more run of the forward and reduces a sum of bytes to about
its square root. A. Griewank, A. Walther, "Revolve", 2000, is the uniform case. With a
menu for every part it is the recurrence of Beaumont et al. ("Optimal checkpointing for
heterogeneous chains", 2019), restricted to a few even splits.

The parts of one region form a chain, as the units of a step do, so the recurrence of
``chain.py`` chooses among them. Live bytes are those of the step under the region alone
instead of those of the unplanned step.

A region that keeps its expensive values can still drop cheap parts again, such as the
norm before a convolution. Otherwise they are retained while the convolution runs
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from operator import add, sub
from typing import TypeAlias

from ckplan.errors import PlanError
from ckplan.plan.region import PROGRAM, Region
from ckplan.simulating.simulate import Simulator
from ckplan.solving.chain import ChainFrontier, Link, regions_of
from ckplan.solving.interpolated_options import around_middle, between
from ckplan.solving.menu import Menus, Option
from ckplan.solving.segmentation import DOMINANT_PART_SHARE, are_siblings
from ckplan.solving.unit_bytes import RegionDelta, Unit

_MOST_PARTS = 12  # calls of a run as single parts; longer runs are cut into runs
_MOST_LEVELS = 4
_MOST_FLAT = 3  # options of one part without nested regions
_MOST_PLANS = 6  # nested plans of one unit
_FEW_STEPS, _PLANS_OF_SMALL = 16, 8  # most ops of a small unit; its nested plans
_KEPT_BY_SMALL = 6  # sets of saved values of a small unit, besides the empty one
_PAIR = 2

_Choices: TypeAlias = Callable[[Unit], Iterable[Region]]
"""Part of a region -> regions that may be nested on it."""


class Nesting:
    """Options with nested regions, for the units of one graph."""

    def __init__(
        self, simulator: Simulator, menus: Menus, *, small: bool = False
    ) -> None:
        """Compute no option yet: each is computed at its first use.

        Args:
            simulator: The simulator of the graph.
            menus: The menus of the graph.
            small: Whether the step is small. If so, all runs of parts are parts and
                all nested plans are tried, which is Revolve's optimum for a uniform
                chain.
        """
        self._simulator = simulator
        self._graph = simulator.graph
        self._menus = menus
        self._small = small
        self._found: dict[tuple[str, int], tuple[Unit, list[Region]]] = {}

    def options(self, unit: Unit) -> list[Option]:
        """The menu of a unit, with options that have nested regions."""
        return self._menus.as_options(unit, [*self._menu(unit), *self.regions(unit)])

    def near_floor_options(self, unit: Unit, *, few: bool = False) -> list[Option]:
        """The menu of a unit, with options that pay only just above the floor.

        These are regions between those of the menu, and regions around others.

        Args:
            unit: The unit.
            few: Whether to vary which value is kept instead of the encodings.
        """
        menu = self._menu(unit)
        flat = _programs(menu)
        pairs = self._cached_by_signature(
            unit, 0, lambda: self._around_pairs(unit, flat[-2:] if few else flat)
        )
        more = around_middle(flat) if few else between(flat)
        regions = [*menu, *more, *pairs]
        return self._menus.as_options(unit, regions)

    def _around_pairs(self, unit: Unit, flat: Sequence[Region]) -> list[Region]:
        """Regions on a small unit that drop parts, or pairs of neighbours, again."""
        if len(self._simulator.view(*unit).flow.inputs) > _FEW_STEPS:
            return []
        outermost = [Region(unit[0], last=unit[1]), *flat[-_KEPT_BY_SMALL:]]
        return [
            one
            for whole in outermost
            for one in self._inside(whole, self._keep_nothing, _PAIR, _PLANS_OF_SMALL)
        ]

    def _menu(self, unit: Unit) -> list[Region]:
        """The regions of a unit's menu, without the option that keeps everything."""
        return [one.region for one in self._menus.options(unit) if one.region]

    def drop_all_nested(self, unit: Unit) -> Region:
        """A region that keeps nothing, with such a region on every part."""
        inner = tuple(Region(call, last=last) for call, last in self._parts(unit))
        own = inner and (inner[0].call, inner[0].last) == unit
        return Region(unit[0], last=unit[1], inner=() if own else inner)

    def regions(self, unit: Unit, level: int = 1) -> list[Region]:
        """Regions on a unit with nested regions, smallest peak first."""
        level = 1 if self._small else level  # every level has fewer parts
        if level > _MOST_LEVELS:
            return []
        return self._cached_by_signature(unit, level, lambda: self._nested(unit, level))

    def _nested(self, unit: Unit, level: int) -> list[Region]:
        def choices(part: Unit) -> Iterator[Region]:
            yield from self._plain(part)
            yield from self.regions(part, level + 1)

        whole = Region(unit[0], last=unit[1])
        return self._inside(whole, choices, 1, _MOST_PLANS)

    def _cached_by_signature(
        self, unit: Unit, level: int, find: Callable[[], list[Region]]
    ) -> list[Region]:
        """Regions on a unit, computed once for all equal units."""
        key = self._menus.signature(unit), level
        if key not in self._found:
            self._found[key] = unit, find()
        like, regions = self._found[key]
        return [self._moved(region, like, unit) for region in regions]

    def _inside(
        self, whole: Region, choices: _Choices, longest: int, most_plans: int
    ) -> list[Region]:
        """A region with different nested regions, smallest peak first.

        Args:
            whole: The region without nested regions.
            choices: Regions on a part while the whole is rebuilt.
            longest: Most neighbouring parts that can form one part.
            most_plans: Most regions to return, unless the step is small.
        """
        try:
            parts = self._parts((whole.call, whole.last))
            inside = _RegionChain(self._simulator, self._menus, whole, parts)
        except PlanError:  # it cannot be rebuilt
            return []
        if len(inside.parts) < 2:
            return []
        found = inside.frontier(choices, len(inside.parts) if self._small else longest)
        plans = (
            found.smallest_first() if self._small else found.evenly_spaced(most_plans)
        )
        insides = filter(None, map(regions_of, plans))
        return [replace(whole, inner=inner) for inner in insides]

    def _plain(self, part: Unit) -> Iterator[Region]:
        """Regions on a part without nested regions and without encodings."""
        flat = _programs(self._menu(part))
        flat = [replace(one, encode=frozenset()) for one in flat]
        plain = list(dict.fromkeys(flat))
        step = 1 if self._small else max(1, len(plain) // _MOST_FLAT)
        yield from plain[::step]
        yield from self._keep_nothing(part)

    def _keep_nothing(self, part: Unit) -> Iterator[Region]:
        """The region on a part that keeps nothing."""
        yield Region(part[0], last=part[1])

    def _parts(self, unit: Unit) -> list[Unit]:
        """The calls of a run, or the children of a call; many are put into runs."""
        call, last = unit
        if last is None:
            calls = self._made_by(call)
        else:
            siblings = self._graph.children[self._graph.calls[call].parent]
            calls = [one for one in siblings if call <= one <= last]
        calls = [one for one in calls if self._graph.saved_in(one)]
        length = 1
        while len(calls) > _MOST_PARTS * length and not self._small:
            length = -(-len(calls) // _MOST_PARTS) if length == 1 else length + 1
        families = groupby(calls, lambda one: self._graph.calls[one].parent)
        runs = (
            family[first : first + length]
            for family in (list(own) for _, own in families)
            for first in range(0, len(family), length)
        )
        return [(run[0], run[-1] if len(run) > 1 else None) for run in runs]

    def _made_by(self, call: int) -> list[int]:
        """The children of a call; a child that is nearly all of it is divided too."""
        calls: list[int] = []
        most = DOMINANT_PART_SHARE * self._menus.droppable_bytes(call)
        for child in self._graph.children[call]:
            is_most = self._menus.droppable_bytes(child) >= most
            calls += (is_most and self._made_by(child)) or [child]
        return calls

    def _moved(self, region: Region, like: Unit, unit: Unit) -> Region:
        """The same region on another, equal unit."""
        starts = [self._graph.calls[call].start for call, _ in (like, unit)]
        return region.moved(unit[0] - like[0], starts[1] - starts[0])


def _programs(menu: Iterable[Region]) -> list[Region]:
    """The regions of a menu that can be nested or contain others."""
    return [region for region in menu if region.by == PROGRAM]


def _end(unit: Unit) -> int:
    """The last call of a unit."""
    call, last = unit
    return call if last is None else last


class _RegionChain:
    """The backward of one region, as a chain of its parts."""

    def __init__(
        self,
        simulator: Simulator,
        menus: Menus,
        whole: Region,
        parts: Sequence[Unit],
    ) -> None:
        self._simulator = simulator
        self._menus = menus
        self._whole = whole
        self._changes: dict[object, RegionDelta | None] = {}
        first, last = simulator.view(whole.call, whole.last).backward_window()
        (self.live,) = simulator.live_within(whole, [(first, last)])
        self._start = max(first, 0)
        windows = [(part, self._window(part)) for part in parts]
        self._windows = [window for _, window in windows if window[0] <= window[1]]
        self.parts = [part for part, window in windows if window[0] <= window[1]]

    def frontier(self, choices: _Choices, longest: int) -> ChainFrontier:
        """The frontier over the options of the parts.

        Args:
            choices: Regions on a part.
            longest: Most neighbouring parts that can form one part.
        """
        gaps = self._live_between_units()
        after = [ChainFrontier.end(gaps[-1])]
        for place in range(len(self.parts) - 1, -1, -1):
            ways: list[ChainFrontier] = []
            for last in range(place, min(place + longest, len(self.parts))):
                unit = self._run(place, last)
                if unit is not None and unit != (self._whole.call, self._whole.last):
                    options = self._options(unit, choices(unit))
                    link = Link(unit, options, gaps[place])
                    ways.append(after[last - place].before(link))
            after.insert(0, ChainFrontier.either(ways))
        return after[0]

    def _window(self, unit: Unit) -> tuple[int, int]:
        """Half moments that the backward of a unit and of the region share."""
        first, last = self._simulator.view(*unit).backward_window()
        return max(first, self._start), min(last, self._start + len(self.live) - 1)

    def _run(self, place: int, last: int) -> Unit | None:
        """A range of parts as one unit, if they are siblings; else None."""
        if last == place:
            return self.parts[place]
        first = self.parts[place][0]
        call, end = self.parts[last]
        if not are_siblings(self._simulator.graph, first, call):
            return None
        return first, call if end is None else end

    def _options(self, unit: Unit, regions: Iterable[Region]) -> list[Option]:
        """The option that keeps everything, and one for each region on a unit."""
        kept = self._live(self._window(unit))
        like = self._part_key(unit)
        options: list[Option] = []
        for region in dict.fromkeys(regions):
            change = self._change(like, unit, region)
            if change is not None and change.freed_bytes > 0:
                need = max(map(add, kept, change.more_bytes[0]))
                seconds = self._more_seconds(change.simulated)
                options.append(Option(region, need, change.freed_bytes, seconds))
        options.sort(key=lambda option: option.seconds)
        return [Option(None, max(kept, default=0), 0, 0.0), *options]

    def _part_key(self, unit: Unit) -> tuple[int, bool, bool]:
        """A key that is equal for equal parts; parts at the ends have their own."""
        is_first = unit[0] == self.parts[0][0]
        is_last = _end(unit) == _end(self.parts[-1])
        return self._menus.bytes.timing_key(unit), is_first, is_last

    def _change(
        self, like: tuple[int, bool, bool], unit: Unit, region: Region
    ) -> RegionDelta | None:
        """How a region on a part changes live bytes; None if it cannot be rebuilt."""
        key = like, self._menus.bytes.relative(region)
        if key not in self._changes:
            self._changes[key] = None
            with suppress(PlanError):
                self._changes[key] = self._find_change(unit, region)
        return self._changes[key]

    def _find_change(self, unit: Unit, region: Region) -> RegionDelta:
        first, last = self._window(unit)
        between = max(first - 1, self._start)
        windows = [(first, last), (between, between)]
        nested = replace(self._whole, inner=(region,))
        now = self._simulator.live_within(nested, windows)
        during, before = (
            list(map(sub, found, self._live(window)))
            for found, window in zip(now, windows, strict=True)
        )
        return RegionDelta([during], -before[0], nested)

    def _more_seconds(self, nested: Region) -> float:
        """Seconds that a nested region adds."""
        whole, found = map(self._simulator.effect, (self._whole, nested))
        return found.seconds - whole.seconds

    def _live(self, window: tuple[int, int]) -> list[int]:
        """Live bytes over half moments without nested regions."""
        first, last = window
        return self.live[first - self._start : last - self._start + 1]

    def _live_between_units(self) -> list[int]:
        """Most live bytes outside all parts, by the number of dropped parts."""
        gaps = [0] * (len(self._windows) + 1)
        for moment, live in enumerate(self.live, start=self._start):
            if not any(first <= moment <= last for first, last in self._windows):
                dropped = 0
                for first, _ in self._windows:
                    if first <= moment:
                        break
                    dropped += 1
                gaps[dropped] = max(gaps[dropped], live)
        return gaps
