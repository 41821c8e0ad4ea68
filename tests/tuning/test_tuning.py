"""Settings above a plan: the search against every setting, one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import graphs
import pytest

from ckplan.errors import CkplanError, GraphError, InfeasibleError, WorkloadError
from ckplan.graph.extrapolate import extrapolate
from ckplan.graph.graph import Graph
from ckplan.report.tuning import save_tuned_plot, tuned_json
from ckplan.simulating.extra_work import extra_work
from ckplan.simulating.simulate import Simulator
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.solving.replays import ReplayedPlan
from ckplan.tuning import plan_levers
from ckplan.tuning import search as tuning_search
from ckplan.tuning.answer import plan_of
from ckplan.tuning.known_batches import STEPS
from ckplan.tuning.largest import largest_batch, largest_number, largest_under
from ckplan.tuning.lever_rows import EXPANDABLE
from ckplan.tuning.recorded import tune_traces
from ckplan.tuning.search import WaySearch
from ckplan.tuning.searches import Searches
from ckplan.tuning.settings import ALLOWED, Setting, Way, conflict, levers_of
from ckplan.tuning.tune import Tuning
from ckplan.tuning.tuned import Tuned, nothing_fits

CONSTANT = 3.0  # seconds of every op that no row adds to


def step_at(rows: int, *, constant: float = CONSTANT, blocks: int = 1) -> Graph:
    """A chain whose activations and seconds grow with the rows."""
    graph = graphs.chain(
        blocks,
        width_bytes=10 * rows,
        hidden_bytes=40 * rows,
        stats_bytes=rows,
        weight_bytes=50,
        seconds=constant + rows,
    )
    stop = graph.backward_stop
    ops = tuple(
        replace(op, seconds=constant if number >= stop else op.seconds)
        for number, op in enumerate(graph.ops)
    )
    return replace(graph, ops=ops)


def record(way: Way, rows: int, accumulate: int) -> Graph:
    """A fused optimizer is twice as fast; autocast halves all bytes but a fifth."""
    graph = step_at(rows)
    stop, factor = graph.backward_stop, 0.5 if way.optimizer == "adamw:fused" else 1.0
    part = 0.8 if way.amp == "bf16" else 1.0
    ops = tuple(
        replace(op, seconds=op.seconds * (factor if number >= stop else part))
        for number, op in enumerate(graph.ops)
    )
    options: dict[str, Any] = {"accumulate": accumulate} if accumulate > 1 else {}
    return replace(graph, ops=ops, options=options)


def tuned(limit_bytes: int, **how: Any) -> Tuned:
    limit = MemoryLimit(limit_bytes)
    return Tuning(record, limit, way=Way(), rows=4, **how).run()


@cache
def plan_at(rows: int, amp: str | None, limit_bytes: int) -> ReplayedPlan | None:
    return Planner(record(Way(amp=amp), rows, 1)).within(limit_bytes)


def every_setting(limit_bytes: int, ways: list[Way], total: int | None) -> float:
    """Most samples per second of all settings, each computed alone."""
    best = 0.0
    for way in ways:
        for rows in range(1, 1000):
            many = 1 if total is None else total // rows
            if total is not None and total % rows:
                continue
            graph = record(way, rows, 1)
            found = plan_at(rows, way.amp, limit_bytes)
            if found is None:
                break
            stop = graph.backward_stop
            micro = sum(op.seconds for op in graph.ops[:stop])
            micro += sum(effect.seconds for effect in found[0].effects)
            update = sum(op.seconds for op in graph.ops[stop:])
            best = max(best, rows * many / (many * micro + update))
    return best


FOREACH = Way(optimizer="adamw:foreach")
KERNELS = [Way(), *(Way(optimizer=f"adamw:{k}") for k in ("fused", "foreach"))]


@pytest.mark.parametrize(("limit_bytes", "total"), [(500, None), (900, 12)])
def test_no_setting_is_faster_than_the_tuned_one(
    limit_bytes: int, total: int | None
) -> None:
    best = tuned(limit_bytes, total=total).best
    expected = every_setting(limit_bytes, KERNELS, total)
    assert best.samples_per_second == pytest.approx(expected, rel=1e-3)
    assert best.profiled
    assert best.peak_bytes <= limit_bytes
    assert best.way == Way(optimizer="adamw:fused")  # bf16 was not allowed
    if total is not None:
        assert best.batch * best.accumulate == total


def test_a_lever_that_another_one_makes_needless_is_left_out() -> None:
    tuning = Tuning(record, MemoryLimit(500), way=Way(), rows=4, allow=["bf16"])
    one, two = tuning.levers[0], next(x for x in tuning.levers if x.name == "bf16")
    both = two.pulled(one.pulled(Way()))
    alone = two.pulled(Way())
    base = tuning.best_of(Way())
    assert base is not None
    seconds = {both: 1.0, alone: 1.0, one.pulled(Way()): 2.0, Way(): 3.0}

    def of(way: Way) -> Setting:
        return replace(base, way=way, step_seconds=seconds.get(way, 9.0), profiled=True)

    tuning.best_of = of
    best, _ = tuning._or_with_fewer(of(both), {})
    assert best.way == alone
    seconds[alone] = 1.1
    best, _ = tuning._or_with_fewer(of(both), {})
    assert best.way == both


def test_no_plan_is_taken_from_a_step_that_runs_other_ops() -> None:
    def longer_when_large(way: Way, rows: int, accumulate: int) -> Graph:
        return step_at(rows, blocks=2 if rows < 40 else 3)

    searches = Searches(longer_when_large, MemoryLimit(8000), Way(), 4)
    known, drawn = searches.of(Way()), searches.of(KERNELS[1])
    known.check(40)  # only there the step is recorded, and longer than the drawn one
    taken, found = known.setting(40), drawn.setting(40)
    assert drawn.like is known
    assert taken is not None and taken.regions[-1].call >= len(drawn.graph_at(40).calls)
    assert found is not None and found.peak_bytes <= 8000


def test_for_a_card_an_update_is_recorded_where_its_step_is() -> None:
    asked: list[tuple[Way, int]] = []

    def roofline(way: Way, rows: int, accumulate: int) -> Graph:
        asked.append((way, rows))
        return replace(record(way, rows, accumulate), costs="roofline of a card")

    searches = Searches(roofline, MemoryLimit(900), Way(), 4)
    searches.of(Way()).graph_at(4)
    searches.of(KERNELS[1]).check(50)
    assert asked[-2:] == [(Way(), 50), (KERNELS[1], 50)]


def test_what_was_drawn_is_not_said_to_be_faster_than_what_was_recorded() -> None:
    def slower_when_large(way: Way, rows: int, accumulate: int) -> Graph:
        graph = step_at(rows, constant=1e-6)
        factor = 1.02 if rows > 8 else 1.0  # measured in a busier moment
        ops = (replace(op, seconds=factor * op.seconds) for op in graph.ops)
        return replace(graph, ops=tuple(ops))

    limit = MemoryLimit(5000)
    found = Tuning(slower_when_large, limit, way=Way(), rows=4).run()
    assert found.best.profiled
    rates = [one.setting.samples_per_second for one in found.next]
    assert all(rate <= found.best.samples_per_second for rate in rates)


def test_a_lever_whose_step_is_slower_than_drawn_is_left_out_again() -> None:
    def measured(way: Way, rows: int, accumulate: int) -> Graph:
        graph, factor = step_at(rows, constant=CONSTANT), 1.0
        if way.optimizer == "adamw:fused":
            factor = 1.03 if rows > 8 else 0.99
        ops = (replace(op, seconds=factor * op.seconds) for op in graph.ops)
        return replace(graph, ops=tuple(ops))

    found = Tuning(measured, MemoryLimit(5000), way=Way(), rows=4).run()
    assert found.best.profiled
    assert found.best.way == Way()
    rows = [row.on_best_seconds_per_sample for row in found.levers if not row.in_best]
    assert all(one is None or one >= found.best.seconds_per_sample for one in rows)


def test_a_lever_that_changes_results_is_pulled_only_if_allowed() -> None:
    allowed = tuned(500, allow=["bf16"])
    assert allowed.best.way == Way(amp="bf16", optimizer="adamw:fused")
    expected = every_setting(500, [allowed.best.way], None)
    assert allowed.best.samples_per_second == pytest.approx(expected, rel=1e-3)
    rows = {row.name: row for row in allowed.levers}
    assert rows["bf16"].pays
    assert rows["bf16"].bits == "changes"
    assert not rows["adamw:foreach"].pays
    assert rows["adamw:fused"].crossover == 1


def test_what_is_only_predicted_is_said_where_it_is_chosen() -> None:
    def without_states(way: Way, rows: int, accumulate: int) -> Graph:
        factor = 0.1 if way.optimizer == "adamw8bit" else 1.0
        return step_at(rows, constant=factor * CONSTANT)

    def notes(*allow: str) -> str:
        limit = MemoryLimit(500)
        tuning = Tuning(without_states, limit, way=Way(), rows=4, allow=allow)
        return " ".join(tuning.run().notes)

    assert "`ckplan verify` refuses it" in notes("adamw8bit")
    assert "refuses" not in notes("adafactor")


def test_the_plans_of_a_way_serve_another_optimizer_before_a_search_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def larger(way: Way, rows: int, accumulate: int) -> Graph:
        """Another optimizer needs some bytes more, which the same plan has not."""
        graph = step_at(rows, blocks=6)
        more = 0 if way.optimizer is None else 60
        kept = graph.storages[0]
        grown = replace(kept, bytes=kept.bytes + more)
        return replace(graph, storages=(grown, *graph.storages[1:]))

    def searches(limit_bytes: int) -> tuple[WaySearch, WaySearch]:
        tuning = Tuning(larger, MemoryLimit(limit_bytes), way=Way(), rows=4)
        return tuning.search(Way()), tuning.search(Way(optimizer="adafactor"))

    base, _ = searches(4000)
    rows = base.largest_unplanned + 2
    cheap = base.setting(rows)
    assert cheap is not None
    limit_bytes = cheap.peak_bytes + 30
    base, other = searches(limit_bytes)
    assert base.setting(rows) == cheap
    for name in ("plans_at", "planner_at"):
        monkeypatch.setattr(other, name, lambda rows: pytest.fail("searched"))
    found = other.setting(rows)
    assert found is not None and found.regions != cheap.regions
    assert found.regions and found.peak_bytes <= limit_bytes


def test_a_lever_that_fits_at_no_batch_pays_from_no_batch_on() -> None:
    def heavy(way: Way, rows: int, accumulate: int) -> Graph:
        graph = record(way, rows, accumulate)
        if way.optimizer != "adamw:foreach":
            return graph
        larger = (
            replace(one, bytes=one.bytes + 10_000 * (one.kind == "parameter"))
            for one in graph.storages
        )
        return replace(graph, storages=tuple(larger))

    found = Tuning(heavy, MemoryLimit(900), way=Way(), rows=4).run()
    row = next(row for row in found.levers if row.name == "adamw:foreach")
    assert row.seconds_per_sample is None
    assert row.crossover is None
    assert not row.pays


def test_a_batch_that_fits_unplanned_is_one_point_of_the_curve() -> None:
    def uneven(way: Way, rows: int, accumulate: int) -> Graph:
        graph = record(way, rows, accumulate)
        factor = 1.0 if rows in (2, 4) else 1.0005
        ops = (replace(op, seconds=op.seconds * factor) for op in graph.ops)
        return replace(graph, ops=tuple(ops))

    search = Tuning(uneven, MemoryLimit(5_000), way=Way(), rows=4).search(Way())
    bare = search.setting(5, planned=False)
    assert search.largest_unplanned > 8
    assert search.check(8)  # recorded: what is drawn at 5 is now a little slower
    assert search.setting(5) == bare


def test_a_lever_that_pays_only_at_small_batches_pays_from_none_on() -> None:
    def slower(way: Way, rows: int, accumulate: int) -> Graph:
        graph = record(Way(), rows, accumulate)
        first = graph.ops[0].seconds + (rows - 2.5) * (way == FOREACH)
        ops = (replace(graph.ops[0], seconds=first), *graph.ops[1:])
        return replace(graph, ops=ops)

    found = Tuning(slower, MemoryLimit(900), way=Way(), rows=4).run()
    row = next(row for row in found.levers if row.name == "adamw:foreach")
    assert not row.pays
    assert row.crossover is None


def test_the_plan_of_the_best_setting_replays_at_its_batch() -> None:
    found = tuned(500)
    plan = plan_of(found)
    assert plan.workload["micro_batch"] == found.best.batch
    assert plan.bound.keys() == {"any_schedule"}
    moving = replace(found.best, way=replace(found.best.way, tiles="same"))
    assert not plan_of(replace(found, best=moving)).bound  # it knows no tiles
    again = Simulator(step_at(found.best.batch)).run(found.best.regions)
    assert again.peak_bytes == found.best.peak_bytes
    assert plan.predicted is not None
    assert plan.predicted.peak_bytes == found.best.peak_bytes
    assert found.best.extra == extra_work(again, found.best.batch)
    best = tuned_json(found)["best"]
    assert best["extra_device_bytes_per_sample"] == found.best.extra.device_bytes


@pytest.mark.parametrize("planned", [False, True])
def test_the_largest_batch_is_the_last_that_fits(planned: bool) -> None:
    limit = MemoryLimit(1_200)
    planner_at = (lambda rows: Planner(step_at(rows))) if planned else None
    found, regions = largest_batch(step_at, limit, planner_at, start=3)
    assert Simulator(step_at(found)).run(regions).peak_bytes <= limit.bytes

    def fits(rows: int) -> bool:
        planner = Planner(step_at(rows))
        least = planner.floor if planned else planner.unplanned
        return least.peak_bytes <= limit.bytes

    assert [fits(found), fits(found + 1)] == [True, False]


def test_the_largest_planned_batch_has_a_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = Searches(record, MemoryLimit(1_200), Way(), 4).of(Way())
    most = search.largest_planned
    monkeypatch.setattr(tuning_search, "plan_within", lambda plans, limit: None)
    found = search.setting(most)
    assert found is not None and found.regions
    assert found.peak_bytes <= 1_200
    assert search.setting(most + 1) is None


def test_plans_are_first_searched_where_the_largest_batch_is_likely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    plans_at = WaySearch.plans_at

    def noted(search: WaySearch, rows: int) -> Any:
        asked.append(rows)
        return plans_at(search, rows)

    monkeypatch.setattr(WaySearch, "plans_at", noted)
    searches = Searches(record, MemoryLimit(1_200), Way(), 4)
    one = searches.of(Way())
    most = one.largest_planned
    assert asked[0] == one.largest_unplanned + 1  # not one of many rows, or of few
    other = searches.of(Way(optimizer="adamw:fused"))
    asked.clear()
    assert other.largest_planned == most
    assert asked[0] == most


@pytest.mark.parametrize("start", [1, 5, 100, 4000])
@pytest.mark.parametrize("largest", [0, 1, 2, 63, 100])
@pytest.mark.parametrize("gap", [0, 1, 7])
def test_the_largest_number_is_found_from_anywhere(
    start: int, largest: int, gap: int
) -> None:
    def bent(rows: int) -> int:
        return 100 + 3 * rows + max(rows - 50, 0) ** 2

    limit = bent(largest + gap)
    for numbers in (range(1, 101), STEPS):
        expected = max((n for n in numbers if n <= largest), default=0)
        how = (bent, lambda n: n <= largest, limit, numbers, start)
        assert largest_number(*how) == expected
        assert largest_number(*how, least=expected) == expected
        for guess in (1, largest, 50, 4000):
            for least in (0, expected // 2):
                found = largest_number(*how, least=least, likely=lambda n, g=guess: g)
                assert found == expected


def test_a_batch_of_one_row_that_needs_more_than_two_hides_no_larger_one() -> None:
    # Of one row, other ops run: copies, which larger batches do without.
    def fits(rows: int) -> bool:
        return rows == 2

    numbers = range(1, 100)
    for guess in (1, 2):
        found = largest_number(
            lambda n: 10 * n, fits, 35, numbers, near=4, likely=lambda n, g=guess: g
        )
        assert found == 2


def test_a_plan_is_not_replayed_on_a_batch_with_other_ops() -> None:
    def at(rows: int) -> Graph:
        return step_at(rows, blocks=2 if rows == 1 else 3)

    regions = Planner(at(1)).smallest[1]
    assert regions
    assert largest_under(at, MemoryLimit(10_000), regions, 1) == 1
    assert largest_under(step_at, MemoryLimit(10_000), (), 1) > 1


def test_a_drawn_step_is_the_recorded_one() -> None:
    drawn = extrapolate(step_at(4), step_at(8), (4, 8, 37))
    real = step_at(37)
    assert [one.bytes for one in drawn.storages] == [one.bytes for one in real.storages]
    assert drawn.step_seconds == pytest.approx(real.step_seconds)
    checked = replace(drawn)  # made anew, so it is checked and derives all it needs
    assert checked == drawn and "saved_of" not in vars(checked)
    for name in ("children", "creates", "saved_of", "unused_workspaces", "lifetimes"):
        assert name in vars(drawn)
        assert getattr(checked, name) == getattr(drawn, name)
    assert Simulator(checked).run().live_bytes == Simulator(drawn).run().live_bytes


@pytest.mark.parametrize("rows", [10**17, 10**40])
def test_a_drawn_step_is_refused_where_its_sizes_are_out_of_range(rows: int) -> None:
    with pytest.raises(GraphError, match="the trace is inconsistent"):
        extrapolate(step_at(4), step_at(8), (4, 8, rows))


def traced(rows: int, **options: Any) -> Graph:
    batch = {"batch": {"x": f"float32[{rows},10]"}}
    return replace(step_at(rows), fingerprint=batch, options=options)


def test_two_traces_are_tuned_as_they_train(tmp_path: Path) -> None:
    found = tune_traces([traced(4), traced(8)], budget=500)
    expected = every_setting(500, [Way()], None)
    assert found.best.samples_per_second == pytest.approx(expected, rel=1e-3)
    assert not found.best.profiled
    assert any("drawn through the two traces" in note for note in found.notes)
    assert [row.name for row in found.levers] == ["recompute"]
    path = tmp_path / "curve.svg"
    save_tuned_plot(path, found, force=False)
    assert "samples per second" in path.read_text()


@pytest.mark.parametrize(
    ("traces", "how", "message"),
    [
        ([traced(4)], {"budget": 500}, "cannot search batches in 1 trace"),
        ([traced(4), traced(4)], {"budget": 500}, "do not differ in the rows"),
        ([traced(4), traced(8)], {"gpu": "RTX 4090"}, "cannot plan for RTX 4090"),
        ([traced(4), traced(8)], {"budget": 500, "total_batch": 8}, "not in the trace"),
    ],
)
def test_traces_that_cannot_be_tuned_are_named(
    traces: list[Graph], how: dict[str, Any], message: str
) -> None:
    with pytest.raises(CkplanError, match=message):
        tune_traces(traces, **how)


def test_where_only_a_lever_fits_the_row_of_plans_is_that_of_the_best_setting() -> None:
    def large(way: Way, rows: int, accumulate: int) -> Graph:
        graph = record(way, rows, accumulate)
        if way.amp:
            return graph
        wider = (replace(one, bytes=20 * one.bytes) for one in graph.storages)
        return replace(graph, storages=tuple(wider))

    limit = MemoryLimit(500)
    found = Tuning(large, limit, way=Way(), rows=4, allow=["bf16"]).run()
    assert found.best.way.amp == "bf16"
    row = next(row for row in found.levers if row.name == "recompute")
    assert row.seconds_per_sample is not None
    assert row.pays == row.in_best == bool(found.best.regions)


def test_fewer_gaps_are_a_row_of_a_card() -> None:
    def wide(way: Way, rows: int, accumulate: int) -> Graph:
        graph = record(way, rows, accumulate)
        sizes = (replace(one, bytes=one.bytes << 14) for one in graph.storages)
        return replace(graph, storages=tuple(sizes))

    limit = MemoryLimit(40 << 20, of_reserved=True)
    found = Tuning(wide, limit, way=Way(), rows=4).run()
    row = next(row for row in found.levers if row.name == EXPANDABLE)
    wider = replace(limit, expandable=True)
    alone = Tuning(wide, wider, way=Way(), rows=4)
    best = alone.search(Way()).best()
    assert best is not None and row.seconds_per_sample == best.seconds_per_sample
    assert found.base is not None
    assert row.pays == (best.samples_per_second > found.base.samples_per_second)
    assert row.saved_bytes == 2 << 20  # reserved of a batch of 4, in whole segments
    assert EXPANDABLE not in {one.name for one in alone.run().levers}


def quadratic(rows: int) -> Graph:
    graph = step_at(rows)
    grown = (replace(one, bytes=one.bytes * one.bytes) for one in graph.storages)
    return replace(graph, storages=tuple(grown))


def test_bytes_that_are_not_linear_are_an_error_and_every_batch_is_recorded() -> None:
    with pytest.raises(GraphError, match="not linear in the rows"):
        extrapolate(quadratic(4), quadratic(8), (4, 8, 37))
    asked: list[int] = []

    def recorded(way: Way, rows: int, accumulate: int) -> Graph:
        asked.append(rows)
        return quadratic(rows)

    limit = MemoryLimit(40_000)
    found = Tuning(recorded, limit, way=Way(optimizer="none"), rows=4).run()
    peak = Planner(quadratic(found.best.batch)).unplanned.peak_bytes
    assert found.best.peak_bytes <= min(peak, limit.bytes)
    assert found.best.batch in asked
    assert any("not linear" in note for note in found.notes)


def test_a_batch_that_the_model_refuses_is_left_out() -> None:
    def recorded(way: Way, rows: int, accumulate: int) -> Graph:
        if rows == 1:
            raise WorkloadError("batch norm of one row", needed="more", hint="more")
        return quadratic(rows)

    limit = MemoryLimit(40_000)
    found = Tuning(recorded, limit, way=Way(optimizer="none"), rows=4).run()
    assert found.best.batch > 1
    assert 1 not in {rows for rows, _, _ in found.curve}


def test_where_nothing_is_linear_no_batch_of_the_curve_is_faster_than_the_best() -> (
    None
):
    asked: list[int] = []

    def recorded(way: Way, rows: int, accumulate: int) -> Graph:
        asked.append(rows)
        graph = quadratic(rows)
        ops = tuple(replace(op, seconds=50.0 + rows * rows / 20) for op in graph.ops)
        return replace(graph, ops=ops)

    limit = MemoryLimit(60_000_000)
    found = Tuning(recorded, limit, way=Way(optimizer="none"), rows=4).run()
    fastest = max(one.samples_per_second for _, one, _ in found.curve if one)
    assert found.best.samples_per_second >= fastest
    per_sample = [(50.0 + n * n / 20) / n for n in range(1, found.largest_unplanned)]
    best = found.best.batch
    assert (50.0 + best * best / 20) / best <= 1.05 * min(per_sample)
    assert sum(rows > 2 * found.largest_planned for rows in asked) <= 2


def test_a_batch_that_was_recorded_for_the_curve_alone_can_be_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    curve = WaySearch.curve

    def with_one_more(search: WaySearch) -> list[Any]:
        one = search.setting(2)
        assert one is not None
        faster = replace(one, step_seconds=0.1, profiled=True)
        unknown = replace(one, step_seconds=0.01, profiled=False)
        return [*curve(search), (2, None, faster), (2, None, unknown)]

    monkeypatch.setattr(WaySearch, "curve", with_one_more)
    found = tuned(1000)
    assert (found.best.batch, found.best.step_seconds) == (2, 0.1)
    assert found.graph.fingerprint == record(Way(), 2, 1).fingerprint


def test_sizes_on_no_line_are_searched_in_few_steps() -> None:
    asked: list[int] = []

    def size_of(rows: int) -> int:
        asked.append(rows)
        return 4 * rows * rows + (16 << 20)

    limit_bytes, numbers = 25_000_000_000, range(1, 1 << 24)
    found = largest_number(size_of, lambda n: True, limit_bytes, numbers, near=64)
    assert size_of(found) <= limit_bytes < size_of(found + 1)
    assert len(asked) < 20  # steps along a line alone, then halves: 34


def test_a_limit_below_one_sample_names_the_floor_its_owner_and_what_helps() -> None:
    with pytest.raises(InfeasibleError, match="at one sample is 340 B") as raised:
        tuned(100)
    error = raised.value
    assert error.exit_code == 3
    assert error.needed.startswith("at least 340 B (340 B); in ")
    assert "of kind" in error.needed
    assert error.hint.endswith("; or a larger card")


@pytest.mark.parametrize("expandable", [False, True])
def test_where_only_gaps_do_not_fit_the_error_says_what_is_reserved(
    expandable: bool,
) -> None:
    graph = step_at(1)
    floor = Planner(graph).floor.peak_bytes
    limit = MemoryLimit(floor, of_reserved=True, expandable=expandable)
    error = nothing_fits(graph, limit)
    assert "gaps of the allocator come on top" in error.what
    assert "B) reserved" in error.needed
    assert ("--expandable-segments" in error.hint) != expandable


@pytest.mark.parametrize(
    ("total", "message"),
    [
        (None, r"it refuses every batch that fits: 1 \(no odd ones\)"),
        (15, r"the total batch 15: the model refuses 1 \(no odd ones\); 3 "),
    ],
)
def test_a_model_that_refuses_every_batch_is_not_said_to_be_too_large(
    total: int | None, message: str
) -> None:
    def recorded(way: Way, rows: int, accumulate: int) -> Graph:
        if rows not in (2, 4, 8):
            raise WorkloadError("no odd ones", needed="even rows", hint="even rows")
        return record(way, rows, accumulate)

    one = Simulator(step_at(1)).run().peak_bytes
    limit = MemoryLimit(one if total is None else 9000)
    search = Tuning(recorded, limit, way=Way(optimizer="none"), rows=4, total=total)
    with pytest.raises(CkplanError, match=message) as raised:
        search.run()
    assert raised.value.exit_code == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: levers_of(Way(), ["bf61"]), "cannot allow 'bf61'"),
        (lambda: tuned(900, total=0), "a total batch of 0"),
    ],
)
def test_bad_input_is_named(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(CkplanError, match=message):
        wrong()


def test_levers_that_set_the_same_exclude_each_other() -> None:
    bf16, pure = ALLOWED["bf16"], ALLOWED["pure-bf16"]
    assert conflict([bf16], ALLOWED["fp16"]) is not None
    assert "16 bits already" in str(conflict([bf16], pure))
    assert conflict([bf16], ALLOWED["adafactor"]) is None
    assert levers_of(Way(optimizer="adamw:fused"), []) == ()


class Slowed:
    """Records steps; the first times at some batch, another program takes half."""

    def __init__(self, rows: int, times: int, constant: float = CONSTANT) -> None:
        self._rows, self._slow, self._constant = rows, times, constant
        self.asked: list[int] = []

    def __call__(self, way: Way, rows: int, accumulate: int) -> Graph:
        del way, accumulate
        self.asked.append(rows)
        graph = step_at(rows, constant=self._constant)
        if rows != self._rows or self.asked.count(rows) > self._slow:
            return graph
        ops = (replace(op, seconds=2 * op.seconds) for op in graph.ops)
        return replace(graph, ops=tuple(ops))


OWN = Way(optimizer="adafactor")  # it has no other kernels


@pytest.mark.parametrize("slow", [4, 8])
def test_one_slow_recording_does_not_decide_the_batch(slow: int) -> None:
    record, limit = Slowed(slow, times=1), MemoryLimit(2_000)
    found = Tuning(record, limit, way=OWN, rows=8).run()
    honest = Tuning(Slowed(slow, times=0), limit, way=OWN, rows=8).run()
    assert found.largest_unplanned == honest.largest_unplanned
    assert found.best.batch > 8
    if slow == 8:  # the larger one: a row cannot take longer there, so both are again
        assert found.best == honest.best
        assert record.asked[:4] == [8, 4, 8, 4]


def test_a_batch_whose_rows_do_take_longer_is_measured_twice_and_believed() -> None:
    record = Slowed(8, times=9, constant=0.0)
    found = Tuning(record, MemoryLimit(2_000), way=OWN, rows=8).run()
    assert found.best.batch <= 4
    assert record.asked[:4] == [8, 4, 8, 4]


def test_where_copies_need_bytes_the_smallest_plan_is_the_next_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = Planner(step_at(4))
    whole, smaller = planner.unplanned, Simulator(step_at(1)).run()

    class NeedsMore:
        """Its plans need a tenth more bytes than its floor."""

        floor_bytes = whole.peak_bytes // 2
        least = floor_bytes * 11 // 10

        def within(self, budget_bytes: int) -> ReplayedPlan | None:
            return (smaller, ()) if budget_bytes >= self.least else None

    monkeypatch.setattr(plan_levers, "search_with", lambda *_, **__: NeedsMore())
    found = plan_levers.LeverPlans(planner, Way(tiles="same"))
    assert found.smallest == (smaller, ())
    NeedsMore.least = 2 * whole.peak_bytes
    assert plan_levers.LeverPlans(planner, Way(tiles="same")).smallest == (whole, ())


def test_a_lever_that_is_left_out_leaves_others_in() -> None:
    given = Way(options=(("rows", "3"),))
    lora, pure = ALLOWED["lora"], ALLOWED["pure-bf16"]
    both = lora.pulled(pure.pulled(given))
    assert lora.left_out(both, given) == pure.pulled(given)
    assert pure.left_out(both, given) == lora.pulled(given)
    assert pure.left_out(pure.pulled(given), given) == given
    mixed = ALLOWED["bf16"].pulled(both)
    assert ALLOWED["bf16"].left_out(mixed, given) == both
