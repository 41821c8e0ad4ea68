"""Which calls make a chain: sets of calls of which none lies inside another.

A cover comes from cutting the call tree: a call that holds more than a given share of
what could be dropped is replaced by its children, as long as they hold most of it.
Large shares give few regions with cheap insides, small shares many regions with small
bursts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckplan.graph import OUTSIDE_CALLS, Graph
from ckplan.simulate import Simulator
from ckplan.solving.chain import ChainFrontier, Link
from ckplan.solving.menu import Menus, Option

SHARES = (1.0, 1 / 8, 1 / 32)
_CHILDREN_MUST_HOLD = 0.5  # of their parent's droppable bytes


def find_covers(graph: Graph, menus: Menus) -> list[tuple[int, ...]]:
    """Distinct covers, from the coarsest to the finest; calls in forward order."""
    roots = graph.children[OUTSIDE_CALLS]
    sizes: dict[int, int] = {}

    def size(call: int) -> int:
        if call not in sizes:
            sizes[call] = menus.droppable_bytes(call)
        return sizes[call]

    total = sum(size(call) for call in roots)
    found: dict[tuple[int, ...], None] = {}
    for share in SHARES:
        cover: list[int] = []
        stack = list(reversed(roots))
        while stack:
            call = stack.pop()
            children = graph.children[call]
            inside = sum(size(child) for child in children)
            worth = inside >= _CHILDREN_MUST_HOLD * size(call)
            if size(call) > share * total and children and worth:
                stack += reversed(children)
            elif size(call):
                cover.append(call)
        if cover:
            found[tuple(cover)] = None
    return list(found)


def chain_of(
    simulator: Simulator,
    menus: Menus,
    cover: Sequence[int],
    options: Callable[[int], Sequence[Option]] | None = None,
) -> ChainFrontier:
    """The frontier over the calls of a cover; by default with their whole menus."""
    gaps = _gaps(simulator, cover)
    options = options or menus.options
    links = [
        Link(options(call), gap) for call, gap in zip(cover, gaps[:-1], strict=True)
    ]
    return ChainFrontier(links, gaps[-1])


def _gaps(simulator: Simulator, cover: Sequence[int]) -> list[int]:
    """Most live bytes where exactly the first ``i`` calls have dropped, for every i."""
    gaps = [0] * (len(cover) + 1)
    owner = _calls_dropped(simulator, cover)
    inside = _own_moments(simulator, cover)
    for moment, live in enumerate(simulator.unplanned_bytes):
        if not inside[moment]:
            gaps[owner[moment]] = max(gaps[owner[moment]], live)
    return gaps


def _calls_dropped(simulator: Simulator, cover: Sequence[int]) -> list[int]:
    """For every half moment, how many calls from the first on have dropped."""
    end = len(simulator.unplanned_bytes)
    dropped = [0] * end
    for position, call in enumerate(cover):
        stop = 2 * simulator.graph.calls[call].stop
        first, _ = simulator.view(call).backward_window()
        for moment in range(stop, first if first >= 0 else stop):
            if dropped[moment] == position:
                dropped[moment] = position + 1
    return dropped


def _own_moments(simulator: Simulator, cover: Sequence[int]) -> list[bool]:
    inside = [False] * len(simulator.unplanned_bytes)
    for call in cover:
        view = simulator.view(call)
        first, last = view.backward_window()
        for start, stop in ((2 * view.start, 2 * view.stop - 1), (first, last)):
            for moment in range(max(start, 0), stop + 1):
                inside[moment] = True
    return inside
