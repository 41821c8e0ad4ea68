"""What is alive at a moment: all of it, in its form, and never more than live bytes."""

from __future__ import annotations

from random import Random

import graphs
import pytest

from ckplan.errors import PlanError
from ckplan.plan.region import RERUN, Region
from ckplan.simulating.alive import held_at
from ckplan.simulating.effect import NO_STORAGE, REBUILT
from ckplan.simulating.simulate import Timeline, simulate


def planned(seed: int) -> Timeline | None:
    rng = Random(seed)
    graph = graphs.random_step(rng)
    regions = graphs.nested(graph, graphs.random_regions(graph, rng), rng)
    try:
        return simulate(graph, regions)
    except PlanError:
        return None


@pytest.mark.parametrize("seed", range(150))
def test_what_regions_hold_in_a_gap_adds_up_to_its_peak(seed: int) -> None:
    timeline = planned(seed)
    if timeline is None:
        return
    storages, moved = timeline.graph.storages, timeline.changed_stops
    for effect in timeline.effects:
        for gap, peaks in effect.gap_peaks.items():
            freed = [s for s in timeline.freed_ticks if moved[s] == gap]
            sizes = {storage: storages[storage].bytes for storage in freed}
            _, part = effect.gap_peak(gap, sizes)
            found = effect.allocated_at(gap, part)
            assert sum(one.bytes for one in found) == peaks[part]
    for moment, live in enumerate(timeline.live_bytes):
        assert sum(held.bytes for held in held_at(timeline, moment)) <= live


def test_a_rebuilt_tensor_is_named_while_backward_reads_it() -> None:
    graph = graphs.chain(3)
    for region in (Region(1), Region(1, by=RERUN)):
        timeline = simulate(graph, [region])
        dropped = {graph.saved[i].storage for i in timeline.effects[0].dropped}
        again = {
            held.storage
            for moment in range(len(timeline.live_bytes))
            for held in held_at(timeline, moment)
            if held.form == REBUILT
        }
        assert dropped and dropped <= again
        assert NO_STORAGE not in again
        for moment in range(len(timeline.live_bytes)):
            alive = [held for held in held_at(timeline, moment) if not held.form]
            assert {held.storage for held in alive} <= {*timeline.alive(moment)}
