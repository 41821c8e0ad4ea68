"""Options with regions inside: for long chains and large calls, where bursts are big.

A region that keeps nothing holds, while it is rebuilt, all that its backward will want.
With regions inside, it holds only what these need, and they rebuild the rest in their
turn: every level costs one more run of the forward, and turns a sum of bytes into about
a root of it. A. Griewank, A. Walther, "Revolve", 2000, is the uniform case; with a menu
for every part it is the recurrence of Beaumont et al. ("Optimal checkpointing for
heterogeneous chains", 2019), its splits taken from a few even ones.

Inside one region the parts make a chain just as the units of a step do, so the same
recurrence chooses among them (``chain.py``): live bytes are those of the step under the
region alone, in place of the unplanned step.

What an outermost region keeps in a smaller form, masks as bits, stays for all runs of
it: then they need not draw random numbers again, which takes longer than most ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from ckplan.errors import PlanError
from ckplan.records import OUTSIDE_CALLS
from ckplan.region import Region
from ckplan.simulate import Simulator
from ckplan.solving.chain import ChainFrontier, Link, regions_of
from ckplan.solving.covers import NEARLY_ALL
from ckplan.solving.menu import Menus, Option, Unit

_MOST_PARTS = 12  # of a run, each call by itself; longer ones are cut into runs
_MOST_LEVELS = 4
_MOST_FLAT = 3  # options without regions inside, of one part
_MOST_PLANS = 6  # of the inside of one unit
_MANY_PLANS = 24  # of the inside of a large unit that keeps encoded values
_LARGE = 0.1  # of what could be dropped


class Nesting:
    """Options with regions inside, for the units of one graph."""

    def __init__(
        self, simulator: Simulator, menus: Menus, *, small: bool = False
    ) -> None:
        """Options that are found as they are asked for.

        Args:
            simulator: Of the graph.
            menus: Of the same.
            small: Whether the step is: all runs of parts are parts then, and every
                plan of the inside counts. Of a uniform chain this is Revolve's optimum.
        """
        self._simulator = simulator
        self._graph = simulator.graph
        self._menus = menus
        self._small = small
        self._found: dict[str, tuple[Unit, list[Region]]] = {}  # by signature

    def options(self, unit: Unit) -> list[Option]:
        """The menu of a unit, options with regions inside among them."""
        flat = [o.region for o in self._menus.options(unit) if o.region is not None]
        return self._menus.useful(unit, [*flat, *self.regions(unit)])

    def encoding(self, unit: Unit) -> list[Option]:
        """The menu of a unit, and regions that keep what is small when encoded.

        Large units get those only, with regions inside that do not divide further.
        """
        options = self._menus.options(unit)
        flat = [o.region for o in options if o.region is not None]
        encoding = [region.encode for region in flat if region.encode]
        if not encoding or not self._is_large(unit):
            return options
        whole = Region(unit[0], last=unit[1], encode=encoding[-1])
        found = self._inside(whole, self._parts(unit), _MOST_LEVELS, _MANY_PLANS)
        return self._menus.useful(unit, [*flat, *found])

    def _is_large(self, unit: Unit) -> bool:
        outermost = self._graph.children[OUTSIDE_CALLS]
        total = sum(map(self._menus.droppable_bytes, outermost))
        return self._menus.droppable_bytes(unit[0]) >= _LARGE * total

    def simplest(self, unit: Unit) -> Region:
        """Keep nothing, and the same for every part of it."""
        inner = tuple(Region(call, last=last) for call, last in self._parts(unit))
        own = inner and (inner[0].call, inner[0].last) == unit
        return Region(unit[0], last=unit[1], inner=() if own else inner)

    def regions(self, unit: Unit, level: int = 1) -> list[Region]:
        """Regions on a unit with regions inside, those that hold least first."""
        level = 1 if self._small else level  # their parts are fewer every time
        signature = f"{self._menus.signature(unit)} {level}"
        if signature not in self._found:
            self._found[signature] = unit, self._regions(unit, level)
        like, regions = self._found[signature]
        return [self._moved(region, like, unit) for region in regions]

    def _regions(self, unit: Unit, level: int) -> list[Region]:
        parts = self._parts(unit) if level <= _MOST_LEVELS else []
        whole = Region(unit[0], last=unit[1])
        return self._inside(whole, parts, level, _MOST_PLANS)

    def _inside(
        self, whole: Region, parts: Sequence[Unit], level: int, most_plans: int
    ) -> list[Region]:
        """A region with others inside of it, those that hold least first."""
        try:
            inside = _Inside(self._simulator, whole, parts)
        except PlanError:  # it cannot be rebuilt at all
            return []
        if len(inside.parts) < 2:
            return []
        found = inside.frontier(lambda p: self._choices(p, level), runs=self._small)
        plans = found.smallest_first() if self._small else found.spread(most_plans)
        insides = filter(None, map(regions_of, plans))
        return [replace(whole, inner=inner) for inner in insides]

    def _choices(self, part: Unit, level: int) -> Iterator[Region]:
        """What can be done with a part while what is around it is rebuilt."""
        flat = [option.region for option in self._menus.options(part)]
        plain = [region for region in flat if region and not region.encode]
        step = 1 if self._small else max(1, len(plain) // _MOST_FLAT)
        yield from plain[::step]
        yield Region(part[0], last=part[1])
        yield from self.regions(part, level + 1)

    def _parts(self, unit: Unit) -> list[Unit]:
        """The calls of a run, or those that a call makes; many of them in runs."""
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
        runs = (calls[at : at + length] for at in range(0, len(calls), length))
        return [(run[0], run[-1] if len(run) > 1 else None) for run in runs]

    def _made_by(self, call: int) -> list[int]:
        """The calls that a call makes, one that is nearly all of it divided itself."""
        calls: list[int] = []
        most = NEARLY_ALL * self._menus.droppable_bytes(call)
        for child in self._graph.children[call]:
            is_most = self._menus.droppable_bytes(child) >= most
            calls += (is_most and self._made_by(child)) or [child]
        return calls

    def _moved(self, region: Region, like: Unit, unit: Unit) -> Region:
        """The same region on another unit that does the same."""
        starts = [self._graph.calls[call].start for call, _ in (like, unit)]
        return region.moved(unit[0] - like[0], starts[1] - starts[0])


class _Inside:
    """The backward of one region, as a chain of its parts."""

    def __init__(
        self, simulator: Simulator, whole: Region, parts: Sequence[Unit]
    ) -> None:
        self._simulator = simulator
        self._whole = whole
        first, last = simulator.view(whole.call, whole.last).backward_window()
        (self.live,) = simulator.live_within(whole, [(first, last)])
        self._start = max(first, 0)
        windows = [(part, self._window(part)) for part in parts]
        self._windows = [window for _, window in windows if window[0] <= window[1]]
        self.parts = [part for part, window in windows if window[0] <= window[1]]

    def frontier(
        self, choices: Callable[[Unit], Iterable[Region]], *, runs: bool
    ) -> ChainFrontier:
        """The frontier over what can be done with the parts.

        Args:
            choices: Regions on a part.
            runs: Whether every run of parts may be a part, too.
        """
        gaps = self._gaps()
        after = [ChainFrontier.end(gaps[-1])]
        for place in range(len(self.parts) - 1, -1, -1):
            ways: list[ChainFrontier] = []
            for last in range(place, len(self.parts) if runs else place + 1):
                unit = self._run(place, last)
                if unit != (self._whole.call, self._whole.last):
                    options = self._options(unit, choices(unit))
                    link = Link(unit, options, gaps[place])
                    ways.append(after[last - place].before(link))
            after.insert(0, ChainFrontier.either(ways))
        return after[0]

    def _window(self, unit: Unit) -> tuple[int, int]:
        """Half moments of a unit's backward that are of the region's, too."""
        first, last = self._simulator.view(*unit).backward_window()
        return max(first, self._start), min(last, self._start + len(self.live) - 1)

    def _run(self, place: int, last: int) -> Unit:
        if last == place:
            return self.parts[place]
        call, end = self.parts[last]
        return self.parts[place][0], call if end is None else end

    def _options(self, unit: Unit, regions: Iterable[Region]) -> list[Option]:
        """Everything kept, and what each of the regions on a unit does instead."""
        first, last = self._window(unit)
        between = max(first - 1, self._start)
        kept = self.live[first - self._start : last - self._start + 1]
        options = [Option(None, max(kept, default=0), 0, 0.0)]
        base_seconds = self._simulator.effect(self._whole).seconds
        for region in dict.fromkeys(regions):
            nested = replace(self._whole, inner=(region,))
            with suppress(PlanError):
                during, before = self._simulator.live_within(
                    nested, [(first, last), (between, between)]
                )
                freed = self.live[between - self._start] - before[0]
                seconds = self._simulator.effect(nested).seconds - base_seconds
                options.append(Option(region, max(during), freed, seconds))
        useful = [o for o in options[1:] if o.freed_bytes > 0]
        return [options[0], *sorted(useful, key=lambda option: option.seconds)]

    def _gaps(self) -> list[int]:
        """Most live bytes outside of all parts, by how many parts have dropped."""
        gaps = [0] * (len(self._windows) + 1)
        for at, live in enumerate(self.live, start=self._start):
            if not any(first <= at <= last for first, last in self._windows):
                dropped = 0
                for first, _ in self._windows:
                    if first <= at:
                        break
                    dropped += 1
                gaps[dropped] = max(gaps[dropped], live)
        return gaps
