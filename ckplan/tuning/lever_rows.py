"""The table of levers: what each does alone, and with the best setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckplan.simulating.allocations import reserved_bytes
from ckplan.simulating.simulate import Simulator
from ckplan.solving.remedies import bits_of_parts
from ckplan.tuning.plan_levers import has_plan_levers
from ckplan.tuning.search import WaySearch
from ckplan.tuning.searches import Searches
from ckplan.tuning.settings import SAME, Lever, Setting
from ckplan.tuning.tuned import LeverRow, pays_over

RECOMPUTE = "recompute"
ACCUMULATE = "accumulate"
EXPANDABLE = "expandable segments"
_MANY = 4  # micro-batches of the row 'accumulate'


def row_of(
    searches: Searches,
    lever: Lever,
    alone: Setting | None,
    best: Setting,
    on_top: Mapping[Lever, Setting | None],
) -> LeverRow:
    """What a lever does alone, and with the best setting."""
    way = lever.pulled(searches.way)
    base = searches.of(searches.way)
    refused = searches.refused.get(way)
    without = base.best()
    in_best = lever.is_in(best.way) and not lever.is_in(searches.way)
    other = on_top.get(lever)
    if in_best:
        other = searches.best_of(lever.left_out(best.way, searches.way))
    saved = first = None
    pays = pays_over(alone, without)
    if refused is None:
        both, rows = (base, searches.of(way)), searches.rows
        if has_plan_levers(way):
            peaks = [one.plans_at(rows).floor.peak_bytes for one in both]
            first = base.largest_unplanned + 1 if pays else None
        else:
            peaks = [Simulator(s.graph_at(rows)).run().peak_bytes for s in both]
            first = _crossover(*both)
        saved = peaks[0] - peaks[1]
    return LeverRow(
        name=lever.name,
        bits=lever.bits,
        saved_bytes=saved,
        seconds_per_sample=alone.seconds_per_sample if alone else None,
        pays=pays,
        crossover=first,
        on_best_seconds_per_sample=other.seconds_per_sample if other else None,
        in_best=in_best,
        refused=refused,
    )


def row_of_plan(searches: Searches, best: Setting) -> LeverRow:
    """What plans do: the best setting that has one, and the best without any.

    If no batch of the way as given fits, they are those of the best setting's way.
    """
    search = searches.of(searches.way)
    if search.best() is None:
        search = searches.of(best.way)
    without, planned = search.best(planned=False), search.best()
    forced = search.planned_settings()
    best_planned = min(forced, key=lambda s: s.seconds_per_sample, default=None)
    plans = search.plans_at(searches.rows)
    saved = plans.unplanned.peak_bytes - plans.floor.peak_bytes
    pays = planned is not None and bool(planned.regions)
    bare = searches.of(best.way).best(planned=False)
    least = None if without is None else without.seconds_per_sample
    first = min(
        (s.batch for s in forced if least is None or s.seconds_per_sample < least),
        default=None,
    )
    return LeverRow(
        name=RECOMPUTE,
        bits=SAME,
        saved_bytes=saved,
        seconds_per_sample=best_planned.seconds_per_sample if best_planned else None,
        pays=pays,
        crossover=first,
        on_best_seconds_per_sample=(
            (bare.seconds_per_sample if bare else None)
            if best.regions
            else best.seconds_per_sample
        ),
        in_best=bool(best.regions),
    )


def row_of_accumulation(searches: Searches) -> LeverRow:
    """``_MANY`` micro-batches without a plan: they share one optimizer step."""
    base = searches.of(searches.way)
    way_search = replace(base, accumulate=_MANY, _settings={}, _lever_plans={})
    way_search.start = max(base.largest_unplanned, 1)
    alone, without = way_search.best(planned=False), base.best(planned=False)
    peaks = [
        Simulator(one.graph_at(searches.rows)).run().peak_bytes
        for one in (base, way_search)
    ]
    pays = pays_over(alone, without)
    return LeverRow(
        name=f"{ACCUMULATE} {_MANY}",
        bits=bits_of_parts(base.graph_at(searches.rows)),
        saved_bytes=peaks[0] - peaks[1],
        seconds_per_sample=alone.seconds_per_sample if alone else None,
        pays=pays,
        crossover=alone.batch * _MANY if pays and alone else None,
        on_best_seconds_per_sample=None,
        in_best=False,
    )


def row_of_expandable_segments(searches: Searches, best: Setting) -> LeverRow:
    """What ``PYTORCH_ALLOC_CONF=expandable_segments:True`` does: fewer gaps."""
    wider = replace(searches.limit, expandable=True)
    base = searches.of(searches.way)
    other = base.with_limit(wider)
    other.start = max(base.largest_unplanned, 1)
    alone, without = other.best(), base.best()
    on_best = alone
    if best.way != searches.way:
        there = searches.of(best.way).with_limit(wider)
        there.start = other.start
        on_best = there.best()
    timeline = Simulator(base.graph_at(searches.rows)).run()
    sizes = [reserved_bytes(timeline, expandable=one) for one in (False, True)]
    pays = pays_over(alone, without)
    return LeverRow(
        name=EXPANDABLE,
        bits=SAME,
        saved_bytes=sizes[0] - sizes[1],
        seconds_per_sample=alone.seconds_per_sample if alone else None,
        pays=pays,
        crossover=base.largest_unplanned + 1 if pays else None,
        on_best_seconds_per_sample=on_best.seconds_per_sample if on_best else None,
        in_best=False,
    )


def _crossover(base: WaySearch, other: WaySearch) -> int | None:
    """Smallest batch from which on a way beats the base unplanned; None if at none."""
    best, found = base.best(), None
    for rows in reversed(other.first_batches(other.largest_unplanned)):
        one = other.setting(rows, planned=False)
        least = base.setting(rows, planned=False) or best
        if one is None or (
            least is not None and one.seconds_per_sample >= least.seconds_per_sample
        ):
            break
        found = rows
    return found
