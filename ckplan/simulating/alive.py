"""What is alive at one moment of a step: storages, and what regions allocate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckplan.simulating.effect import NO_STORAGE
from ckplan.simulating.simulate import Timeline


class Held(NamedTuple):
    """Bytes that hold the content of a storage."""

    storage: int
    bytes: int
    form: str = ""  # REBUILT, ENCODED or COPIED; "" for the storage itself


def held_at(timeline: Timeline, moment: int) -> Iterator[Held]:
    """What is alive at a half moment; in a gap, when most bytes are alive there.

    Workspaces and random states are left out: they have no content of a storage.
    """
    storages, moved = timeline.graph.storages, timeline.changed_stops
    freed = {
        storage: storages[storage].bytes
        for storage in timeline.freed_ticks
        if moved[storage] == moment
    }
    gone: set[int] = set()
    for effect in timeline.effects:
        part = effect.gap_peak(moment, freed)[1]
        went = (storage for storage, _ in effect.freed_in_gap.get(moment, ())[:part])
        gone |= freed.keys() & went
        for one in effect.allocated_at(moment, part):
            if one.storage != NO_STORAGE and one.bytes:
                yield Held(one.storage, one.bytes, one.form)
    for storage in timeline.alive(moment):
        if storage not in gone:
            yield Held(storage, storages[storage].bytes)
