"""When the storages of an unplanned step are made and freed, in half moments."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ckplan.graph.records import BEFORE_STEP, RecordedStep


class Lifetimes(NamedTuple):
    """First and last half moments of all storages; no size is part of them."""

    starts: list[int]
    natural_stops: list[int]  # without saved tensors
    stops: list[int]
    held: dict[int, list[tuple[int, int]]]
    """Storage -> (saved tensor, last half moment that it is held) of all its holders"""


def lifetimes_of(
    graph: RecordedStep,
    saved_of: Mapping[int, Sequence[int]],
    unused_workspaces: Collection[int],
) -> Lifetimes:
    """The lifetimes, given the saved tensors of storages and workspaces without use."""
    end = 2 * len(graph.ops)
    held = {
        storage: [(index, 2 * graph.saved[index].last_held + 1) for index in saved]
        for storage, saved in saved_of.items()
    }
    found = Lifetimes([], [], [], held)
    for storage, one in enumerate(graph.storages):
        start = 0 if one.maker == BEFORE_STEP else 2 * one.maker + 1
        natural = max(start, min(2 * one.last + 1, end))
        if storage in unused_workspaces:
            natural = start - 1
        until = (last_held for _, last_held in held.get(storage, ()))
        found.starts.append(start)
        found.natural_stops.append(natural)
        found.stops.append(min(max((natural, *until)), end))
    return found
