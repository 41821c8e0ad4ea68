"""When the backwards of a step use saved tensors, one backward after the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import groupby, zip_longest
from typing import NamedTuple

from ckplan.graph.graph import Graph
from ckplan.graph.records import Saved


class Use(NamedTuple):
    """A backward takes a saved tensor, and lets it go."""

    begin: int  # op before which it is unpacked
    end: int  # last op that it is held for
    saved: int  # index of the saved tensor


class Backward(NamedTuple):
    """The uses of some saved tensors in one backward, in order."""

    keeps_graph: bool  # all that is there when it begins is there for the next one
    uses: list[Use]


def backwards_of(
    graph: Graph, saves: Iterable[tuple[int, Saved]], *, anew: bool = True
) -> list[Backward]:
    """The uses of some saved tensors, of each backward that keeps the graph alone.

    Args:
        graph: The step.
        saves: (index, saved tensor) of those to follow.
        anew: Whether each takes what it uses anew; else, what the first one took stays.

    Returns:
        In order. Backwards that do not keep the graph count as one where no other is
        between: each lets go of what it used, when autograd does.
    """
    kept = [start for start, _ in graph.kept_backwards]

    def number(begin: int) -> int:
        found = bisect_right(kept, begin) - 1
        return found if found >= 0 and begin < graph.kept_backwards[found][1] else -1

    found: list[tuple[int, Use]] = []
    for index, saved in saves:
        for begin, end in saved.every_use[: None if anew else 1]:
            of = number(begin) if anew else -1
            found.append((of, Use(begin, end if of >= 0 else saved.last_held, index)))
    found.sort(key=lambda one: one[1].begin)
    return [
        Backward(of >= 0, [use for _, use in uses])
        for of, uses in groupby(found, key=lambda one: one[0])
    ]


def reruns_of(
    saves: Iterable[tuple[int, Saved]],
) -> Iterator[tuple[int, dict[int, int]]]:
    """When a call runs again, and how long it then holds what: it fills all at once.

    Args:
        saves: (index, saved tensor) of all that a second run fills.

    Yields:
        The op before which the call runs again, and by saved tensor the last op that
        what it filled is held for.
    """
    known = dict(saves)
    uses = sorted(
        (begin, index) for index, saved in known.items() for begin, _ in saved.every_use
    )
    fills: list[int] = []
    filled: set[int] = set()
    for begin, index in uses:
        if index not in filled:
            fills.append(begin)
            filled = {i for i, saved in known.items() if saved.last_held >= begin}
        filled.discard(index)
    for fill, following in zip_longest(fills, fills[1:]):
        until: dict[int, int] = {}
        for index, saved in known.items():
            end, stop = saved.last_held, following
            for begin, used in saved.every_use:
                if begin >= fill and (following is None or begin < following):
                    end, stop = used, None
                    break
            until[index] = end if stop is None else min(end, stop)
        yield fill, {index: end for index, end in until.items() if end >= fill}
