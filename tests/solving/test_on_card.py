"""Plans for cards: PyTorch's allocator has room there, which tensors alone do not say.

``scripts/room.py`` runs such plans with torch's own allocator.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import graphs
import pytest
from typer.testing import CliRunner, Result

import ckplan
from ckplan import gpus
from ckplan.cli import app
from ckplan.errors import CkplanError, InfeasibleError
from ckplan.graph.file import save
from ckplan.graph.graph import Graph
from ckplan.report.comparison import comparison_report
from ckplan.report.reserved import reserved_facts
from ckplan.report.tables import render
from ckplan.simulating import allocations
from ckplan.simulating.allocations import (
    has_room,
    replayed,
    reserved_bytes,
    reserved_on_card,
)
from ckplan.simulating.caching_allocator import NoRoomError
from ckplan.simulating.simulate import Timeline, simulate
from ckplan.solving.common_strategies import all_baselines
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.planner import Planner
from ckplan.solving.reserved_limit import (
    plan_within,
    solve_within_limit,
    with_spare_segment,
)
from ckplan.solving.solve import Objective, find
from ckplan.units import format_bytes

MIB = 2**20
T4 = gpus.find("T4").usable_bytes


def of_card(num_blocks: int = 8) -> Graph:
    """Sizes that leave gaps."""
    graph = graphs.chain(
        num_blocks,
        width_bytes=21 * MIB,
        hidden_bytes=147 * MIB,
        weight_bytes=9 * MIB,
    )
    fingerprint = {**graph.fingerprint, "device": "cuda"}
    return replace(graph, options={"gpu": "T4"}, fingerprint=fingerprint)


@pytest.mark.parametrize("falling", [False, True])
@pytest.mark.parametrize("expandable", [False, True])
def test_room_on_a_card_does_not_depend_on_the_cards_asked_before(
    falling: bool, expandable: bool
) -> None:
    asked = simulate(of_card())
    least, most = asked.peak_bytes, reserved_bytes(asked, expandable=expandable)
    sizes = [least + (most - least) * place // 6 for place in range(-1, 9)]
    answers = {
        size: has_room(asked, size, expandable=expandable)
        for size in sorted(sizes, reverse=falling)
    }
    for size, answer in answers.items():
        fresh = simulate(of_card())
        assert answer == has_room(fresh, size, expandable=expandable)
        assert answer == (_replays_within(fresh, size, expandable=expandable))
    assert {*answers.values()} == {False, True}


def _replays_within(timeline: Timeline, size: int, *, expandable: bool) -> bool:
    try:
        return bool(replayed(timeline, expandable=expandable, capacity_bytes=size))
    except NoRoomError:
        return False


def test_a_card_larger_than_one_that_was_never_full_is_not_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeline = simulate(of_card())
    enough_bytes = 2 * reserved_bytes(timeline)
    assert has_room(timeline, enough_bytes, expandable=False)
    monkeypatch.setattr(allocations, "events", None)
    assert has_room(timeline, enough_bytes, expandable=False)
    assert has_room(timeline, enough_bytes + MIB, expandable=False)
    with pytest.raises(TypeError):
        has_room(timeline, enough_bytes - 1, expandable=False)


def test_memory_that_is_just_enough_is_enough() -> None:
    timeline = simulate(of_card())
    needed_bytes = reserved_bytes(timeline)
    assert has_room(timeline, needed_bytes, expandable=False)
    assert replayed(timeline, capacity_bytes=needed_bytes) == replayed(timeline)
    with pytest.raises(NoRoomError):
        replayed(timeline, capacity_bytes=timeline.peak_bytes - 1)
    assert not has_room(timeline, timeline.peak_bytes - 1, expandable=True)
    for limit_bytes, of_reserved in (
        (timeline.peak_bytes, False),
        (needed_bytes, True),
    ):
        assert MemoryLimit(limit_bytes, of_reserved).allows(timeline)
        assert not MemoryLimit(timeline.peak_bytes - 1, of_reserved).allows(timeline)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("share", [0.5, 0.6, 0.7, 0.8, 0.9])
def test_a_plan_for_a_card_has_room_where_one_for_its_tensors_may_not(
    share: float, expandable: bool
) -> None:
    planner = Planner(of_card())
    limit = MemoryLimit(round(share * planner.unplanned.peak_bytes), True, expandable)
    by_tensors = planner.solve(limit.bytes)
    found = solve_within_limit(planner, limit)
    room = with_spare_segment(limit)
    assert 0.99 * limit.bytes <= room.bytes <= limit.bytes - 2 * MIB
    assert room.allows(found.timeline)
    assert found.budget_bytes + found.fragmentation_bytes == limit.bytes
    assert found.timeline.peak_bytes <= found.budget_bytes
    if room.allows(by_tensors.timeline):
        assert found == planner.solve(limit.bytes, limit)
        assert (found.regions, found.fragmentation_bytes) == (by_tensors.regions, 0)
    else:
        assert 0 < found.fragmentation_bytes < limit.bytes / 4
        assert found.timeline.overhead >= by_tensors.timeline.overhead


def test_a_step_that_fits_without_a_spare_segment_gets_no_plan() -> None:
    planner = Planner(of_card())
    peak = planner.unplanned.peak_bytes
    sizes = range(peak, peak + 200 * MIB, 2 * MIB)
    limits = (MemoryLimit(one, of_reserved=True) for one in sizes)
    limit = next(one for one in limits if one.allows(planner.unplanned))
    assert not with_spare_segment(limit).allows(planner.unplanned)
    found = solve_within_limit(planner, limit)
    assert (found.regions, found.timeline.overhead) == ((), 0.0)


def test_without_a_card_tensors_are_all_there_is() -> None:
    graph = of_card(40)
    on_cpu = {**graph.fingerprint, "device": "cpu"}
    graph = replace(graph, options={}, fingerprint=on_cpu)
    planner = Planner(graph)
    budget_bytes = round(0.7 * planner.unplanned.peak_bytes)
    found = solve_within_limit(planner, MemoryLimit(budget_bytes))
    assert (found.budget_bytes, found.fragmentation_bytes) == (budget_bytes, 0)
    assert found == planner.solve(budget_bytes)
    for card in (Objective(gpu="T4"), Objective(gpu_memory="16GB")):
        with pytest.raises(CkplanError, match="bytes and seconds of the CPU"):
            find(planner, card)


@pytest.mark.parametrize("share", [0.6, 0.8, 1.0])
def test_what_fits_agrees_with_the_bytes_that_are_shown(share: float) -> None:
    planner = Planner(of_card())
    limit = MemoryLimit(round(share * planner.unplanned.peak_bytes), of_reserved=True)
    rows = all_baselines(planner, limit)
    assert {row.fits for row in rows} == {True, False}
    for row in rows:
        assert row.reserved_bytes is not None
        assert row.fits == (row.reserved_bytes <= limit.bytes), row
        assert row.reserved_bytes >= row.peak_bytes
    text = render(comparison_report("m", limit, 0, rows))
    assert " reserved " in text.splitlines()[1]
    for name in ("chen", "rotor", "tf speed", "tf memory"):
        assert sum(line.startswith(name) for line in text.splitlines()) == 1


def test_where_no_plan_leaves_room_tensors_decide() -> None:
    planner = Planner(of_card())
    floor = MemoryLimit(planner.floor.peak_bytes, of_reserved=True)
    found = solve_within_limit(planner, floor)
    assert (found.budget_bytes, found.fragmentation_bytes) == (floor.bytes, 0)
    assert not found.as_baseline.fits
    with pytest.raises(InfeasibleError):
        solve_within_limit(planner, MemoryLimit(floor.bytes - 1, of_reserved=True))


def test_where_nothing_can_be_spared_a_plan_may_still_have_room() -> None:
    planner = Planner(of_card())
    least_bytes = planner.floor.peak_bytes
    unspared = 0
    for budget_bytes in range(least_bytes, least_bytes + 240 * MIB, 4 * MIB):
        limit = MemoryLimit(budget_bytes, of_reserved=True)
        found = solve_within_limit(planner, limit)
        keeps, spares = (
            one.allows(found.timeline) for one in (limit, with_spare_segment(limit))
        )
        assert found.fragmentation_bytes or spares or not keeps
        unspared += bool(found.fragmentation_bytes) and not spares
    assert unspared


class OddLimit(MemoryLimit):
    """Has no room for a plan that it has room for with a spare segment taken away.

    PyTorch's allocator frees cached segments where it is full, which may leave more.
    """

    def allows(self, timeline: Any) -> bool:
        whole = self.bytes == 1000 * MIB
        return timeline.peak_bytes <= (700 if whole else 800) * MIB


def test_a_plan_that_fits_with_a_spare_segment_fits_without_one_too() -> None:
    def within(budget_bytes: int) -> tuple[SimpleNamespace, tuple[()]]:
        return SimpleNamespace(peak_bytes=budget_bytes), ()

    unplanned, floor = SimpleNamespace(peak_bytes=2000 * MIB), within(100 * MIB)[0]
    plans: Any = SimpleNamespace(unplanned=unplanned, floor=floor, within=within)
    found = plan_within(plans, OddLimit(1000 * MIB, of_reserved=True))
    assert found is not None
    assert 690 * MIB < found[0].peak_bytes <= 700 * MIB


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Graph:
    """A step too large for a T4, in the folder of the test."""
    monkeypatch.chdir(tmp_path)
    graph = of_card(40)
    assert simulate(graph).peak_bytes > T4
    save(graph, tmp_path / "step.json")
    return graph


def run(*argv: str) -> Result:
    return CliRunner().invoke(app, ["solve", "step.json", "--force", *argv])


def test_solve_leaves_room_for_gaps_and_says_how_much(trace: Graph) -> None:
    found = json.loads(run("--gpu", "T4", "--json").stdout)
    gap_bytes = found["gap_bytes"]
    assert gap_bytes > 0
    assert found["budget_bytes"] == T4
    plan = ckplan.load_plan("plan.yaml")
    assert plan.budget_bytes == T4 - gap_bytes
    assert ckplan.solve(trace, gpu="T4") == plan
    assert ckplan.solve(trace).regions == plan.regions  # the card of the trace
    ended = run("--gpu", "T4")
    said = " ".join(ended.stdout.split())
    assert f"which is {format_bytes(T4)} less {format_bytes(gap_bytes)} for" in said
    assert "--expandable-segments lowers fragmentation" in ended.stderr
    assert "warning" not in ended.stderr


def test_what_a_full_card_reserves_is_said() -> None:
    step = simulate(of_card())
    whole = reserved_on_card(step)
    for room, full in ((whole.bytes - 8 * MIB, True), (whole.bytes, False)):
        limit = MemoryLimit(room, of_reserved=True)
        assert limit.allows(step)
        said = dict(reserved_facts(whole, limit, step))["reserved"]
        within = limit.reserved_bytes(step)
        assert (f"on the card {format_bytes(within)}" in said) == full


def test_a_reserve_is_apart_from_gaps(trace: Graph) -> None:
    found = json.loads(run("--gpu", "T4", "--reserve", "1GiB", "--json").stdout)
    assert (found["budget_bytes"], found["reserve_bytes"]) == (T4, 2**30)
    plan = ckplan.load_plan("plan.yaml")
    assert plan.budget_bytes == T4 - 2**30 - found["gap_bytes"]
    assert ckplan.solve(trace, gpu="T4", reserve="1GiB") == plan


def test_expandable_segments_leave_fewer_gaps_and_must_be_set(trace: Graph) -> None:
    fixed = json.loads(run("--gpu", "T4", "--json").stdout)
    ended = run("--gpu", "T4", "--expandable-segments", "--json")
    found = json.loads(ended.stdout)
    assert found["gap_bytes"] < fixed["gap_bytes"]
    assert found["overhead"] <= fixed["overhead"]
    assert "needs PYTORCH_ALLOC_CONF=expandable_segments:True" in ended.stderr
    plan = ckplan.solve(trace, gpu="T4", expandable_segments=True)
    assert plan == ckplan.load_plan("plan.yaml")
    alone = run("--budget", "14GiB", "--expandable-segments")
    assert alone.exit_code == 1
    assert "cannot use expandable segments: no card is named" in alone.stderr
    with pytest.raises(CkplanError, match="expandable segments: no card is named"):
        ckplan.solve(trace, "14GiB", expandable_segments=True)


def test_a_plan_that_fits_with_expandable_segments_alone_says_so(trace: Graph) -> None:
    floor = Planner(trace).floor.peak_bytes
    for gap_bytes, expandable in ((300 * MIB, True), (20 * MIB, False)):
        objective = Objective(gpu="T4", reserve_bytes=T4 - floor - gap_bytes)
        found = find(Planner(trace), objective)
        assert found.limit.expandable == expandable
        assert found.limit.allows(found.timeline) == expandable
        argv = ("--gpu", "T4", "--reserve", str(objective.reserve_bytes))
        ended = run(*argv)
        assert ended.exit_code == 0
        needs = "gaps: this one needs PYTORCH_ALLOC_CONF="
        wish = f"no plan leaves room for {needs if expandable else 'its gaps'}"
        assert wish in ended.stderr
        with pytest.warns(UserWarning, match=wish):
            plan = ckplan.solve(trace, gpu="T4", reserve=objective.reserve_bytes)
        assert plan == ckplan.load_plan("plan.yaml")


def test_what_would_do_in_place_of_a_plan_is_said_with_its_price(trace: Graph) -> None:
    del trace
    fixed = json.loads(run("--gpu", "T4", "--json").stdout)
    (row,) = (one for one in fixed["instead"] if "expandable" in one["how"])
    found = json.loads(run("--gpu", "T4", "--expandable-segments", "--json").stdout)
    assert row["overhead"] == pytest.approx(found["overhead"])
    assert row["overhead"] < fixed["overhead"]
    assert not any("expandable" in one["how"] for one in found["instead"])
    said = run("--gpu", "T4").stdout
    assert said.index("In place of this plan") < said.index("Budget, bound and floor")
    unplanned = json.loads(run("--budget", "100%", "--json").stdout)
    assert unplanned["instead"] == []


def test_a_budget_is_of_tensors_and_warns_where_the_allocator_fails(
    trace: Graph,
) -> None:
    del trace
    ended = run("--budget", str(T4), "--json")
    assert json.loads(ended.stdout)["gap_bytes"] == 0
    assert ckplan.load_plan("plan.yaml").budget_bytes == T4
    assert "warning: PyTorch's allocator runs out of memory" in ended.stderr
    assert "warning" not in run("--budget", "300%").stderr


def test_common_practice_is_asked_for_the_same_room(trace: Graph) -> None:
    by_tensors, of_reserved, expandable = (
        {
            row["name"]: row
            for row in json.loads(run_compare("--json", *argv).stdout)["baselines"]
        }
        for argv in (
            ("--budget", str(T4)),
            ("--gpu", "T4"),
            ("--gpu", "T4", "--expandable-segments"),
        )
    )
    solved = json.loads(run("--gpu", "T4", "--json").stdout)
    assert of_reserved["this plan"]["peak_bytes"] == solved["peak_bytes"]
    assert of_reserved["this plan"]["fits"]
    in_solve = {row["name"]: row for row in solved["baselines"]}
    assert in_solve == {name: of_reserved[name] for name in in_solve}
    plans = Planner(trace).standard_baselines.every_call
    for timeline, _ in plans:
        room = has_room(timeline, T4, expandable=False)
        assert of_reserved["every call"]["fits"] == room
    differ = [
        n for n, row in by_tensors.items() if of_reserved[n]["fits"] < row["fits"]
    ]
    assert differ, "no practice fits by its tensors alone"
    assert all(of_reserved[n]["fits"] <= row["fits"] for n, row in expandable.items())
    for name in ("chen", "first k calls"):
        assert of_reserved[name]["fits"], name
        assert of_reserved[name]["overhead"] >= by_tensors[name]["overhead"]
    ended = run_compare("--expandable-segments")
    assert ended.exit_code == 2


def run_compare(*argv: str) -> Result:
    return CliRunner().invoke(app, ["compare", "step.json", *argv])
