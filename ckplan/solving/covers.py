"""Which units make a chain: sets of calls of which none lies inside another.

A cover comes from cutting the call tree: a call that holds more than a given share of
what could be dropped is replaced by its children, as long as they hold most of it.
Large shares give few regions with cheap insides, small shares many regions with small
bursts. Where what lies between calls is most of the memory, neighbours among a cover's
calls are put together to runs, which keep only what enters them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ckplan.graph import OUTSIDE_CALLS, Graph
from ckplan.simulate import Simulator
from ckplan.solving.chain import ChainFrontier, Link
from ckplan.solving.menu import Menus, Option, Unit

SHARES = (1.0, 1 / 8, 1 / 32)
LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Of runs, in calls."""

_CHILDREN_MUST_HOLD = 0.5  # of their parent's droppable bytes


def find_covers(graph: Graph, menus: Menus) -> list[tuple[Unit, ...]]:
    """Distinct covers, from the coarsest to the finest; calls in forward order."""
    roots = graph.children[OUTSIDE_CALLS]
    sizes: dict[int, int] = {}

    def size(call: int) -> int:
        if call not in sizes:
            sizes[call] = menus.droppable_bytes(call)
        return sizes[call]

    total = sum(size(call) for call in roots)
    found: dict[tuple[Unit, ...], None] = {}
    for share in SHARES:
        cover: list[Unit] = []
        stack = list(reversed(roots))
        while stack:
            call = stack.pop()
            children = graph.children[call]
            inside = sum(size(child) for child in children)
            worth = inside >= _CHILDREN_MUST_HOLD * size(call)
            if size(call) > share * total and children and worth:
                stack += reversed(children)
            elif size(call):
                cover.append((call, None))
        if cover:
            found[tuple(cover)] = None
    return list(found)


def run_covers(graph: Graph, menus: Menus) -> dict[int, list[tuple[Unit, ...]]]:
    """Covers of runs by the length of their runs, in calls.

    Here a call is replaced by its children also where these hold nothing of their own:
    what one hands to the next may be all there is.
    """
    roots = graph.children[OUTSIDE_CALLS]
    total = sum(menus.droppable_bytes(call) for call in roots)
    found: dict[int, dict[tuple[Unit, ...], None]] = {}
    for share in SHARES[1:]:
        groups: list[list[int]] = [[]]
        stack = list(reversed(roots))
        while stack:
            call = stack.pop()
            children = graph.children[call]
            if menus.droppable_bytes(call) > share * total and len(children) > 1:
                stack += reversed(children)
            elif graph.saved_in(call):
                if groups[-1] and not _siblings(graph, groups[-1][-1], call):
                    groups.append([])
                groups[-1].append(call)
        longest = max(map(len, groups))
        for length in (n for n in LENGTHS if n < longest):
            cover = tuple(unit for group in groups for unit in _runs(group, length))
            found.setdefault(length, {})[cover] = None
    return {length: list(covers) for length, covers in sorted(found.items())}


def _siblings(graph: Graph, one: int, other: int) -> bool:
    parent = graph.calls[one].parent
    return parent == graph.calls[other].parent != OUTSIDE_CALLS


def _runs(calls: Sequence[int], length: int) -> Iterator[Unit]:
    for start in range(0, len(calls), length):
        run = calls[start : start + length]
        yield run[0], run[-1] if len(run) > 1 else None


def chain_of(
    simulator: Simulator,
    menus: Menus,
    cover: Sequence[Unit],
    options: Callable[[Unit], Sequence[Option]] | None = None,
) -> ChainFrontier:
    """The frontier over the units of a cover; by default with their whole menus."""
    gaps = _gaps(simulator, cover)
    options = options or menus.options
    links = [
        Link(options(unit), gap) for unit, gap in zip(cover, gaps[:-1], strict=True)
    ]
    return ChainFrontier(links, gaps[-1])


def _gaps(simulator: Simulator, cover: Sequence[Unit]) -> list[int]:
    """Most live bytes where exactly the first ``i`` units have dropped, for every i."""
    gaps = [0] * (len(cover) + 1)
    owner = _units_dropped(simulator, cover)
    inside = _own_moments(simulator, cover)
    for moment, live in enumerate(simulator.unplanned_bytes):
        if not inside[moment]:
            gaps[owner[moment]] = max(gaps[owner[moment]], live)
    return gaps


def _units_dropped(simulator: Simulator, cover: Sequence[Unit]) -> list[int]:
    """For every half moment, how many units from the first on have dropped."""
    end = len(simulator.unplanned_bytes)
    dropped = [0] * end
    for position, unit in enumerate(cover):
        stop = 2 * simulator.view(*unit).stop
        first, _ = simulator.view(*unit).backward_window()
        for moment in range(stop, first if first >= 0 else stop):
            if dropped[moment] == position:
                dropped[moment] = position + 1
    return dropped


def _own_moments(simulator: Simulator, cover: Sequence[Unit]) -> list[bool]:
    inside = [False] * len(simulator.unplanned_bytes)
    for unit in cover:
        view = simulator.view(*unit)
        first, last = view.backward_window()
        for start, stop in ((2 * view.start, 2 * view.stop - 1), (first, last)):
            for moment in range(max(start, 0), stop + 1):
                inside[moment] = True
    return inside
