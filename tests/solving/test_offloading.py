"""Plans that may offload: never dearer than recomputation, and as predicted."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path

import pytest
import torch
from commands import Run
from graphs import with_even_seconds
from measured import peak_bytes_of
from moves import mixes
from small_models import build

import ckplan
from ckplan.errors import CkplanError
from ckplan.gpus import find
from ckplan.graph import file as trace_file
from ckplan.graph.graph import Graph
from ckplan.plan import file as plan_file
from ckplan.plan.plan import Plan, PlannedRegion
from ckplan.plan.resolve import resolve
from ckplan.simulating.effect import RETURNED
from ckplan.simulating.moving import STAGING_BYTES, Link
from ckplan.simulating.queues import CopyEvent, _with_copies
from ckplan.simulating.simulate import Simulator, Timeline
from ckplan.solving.memory_limit import MemoryLimit
from ckplan.solving.offloading import (
    MovingPlanner,
    behind_host,
    host_rate,
    movable,
    with_moves,
)
from ckplan.solving.planner import Planner
from ckplan.solving.reserved_limit import _largest_fitting
from ckplan.units import parse_budget

FAST, SLOW = "1000GB", "1KB"  # disks


@cache
def graph() -> Graph:
    workload = build("residual")
    given = workload.model, workload.batch
    return with_even_seconds(
        ckplan.profile(*given, loss=workload.loss, optimizer="none", replay=False)
    )


def check_nothing_moves(found: Plan, plain: Plan) -> None:
    """Recomputation alone: the same plan, or one of the other searches, if cheaper."""
    assert found.predicted and plain.predicted
    assert not any(region.offload for region in found.regions)
    assert not found.predicted.moved_bytes
    if found.regions != plain.regions:
        assert found.predicted.overhead <= plain.predicted.overhead
    else:
        assert found.predicted == plain.predicted


@pytest.mark.parametrize("budget", ["90%", "75%"])
def test_a_fast_disk_makes_plans_cheaper_and_a_slow_one_is_left_alone(
    budget: str, tmp_path: Path
) -> None:
    plain, fast, slow = (
        ckplan.solve(graph(), budget, spill_rate=rate) for rate in (None, FAST, SLOW)
    )
    assert plain.predicted and fast.predicted and slow.predicted
    check_nothing_moves(slow, plain)
    assert fast.predicted.overhead < plain.predicted.overhead
    assert fast.predicted.moved_bytes
    assert fast.bound["any_schedule"] <= fast.predicted.overhead
    assert fast.bound["any_schedule"] <= plain.bound["any_schedule"]
    workload, planned = build("residual"), build("residual")
    ckplan.apply(planned.model, fast, spill=tmp_path)

    def step(one: object = planned) -> list[torch.Tensor]:
        torch.manual_seed(1)
        out = one.model(one.batch)  # type: ignore[attr-defined]
        loss = one.loss(out, one.batch)  # type: ignore[attr-defined]
        loss.backward()
        return [loss, *(p.grad for p in one.model.parameters())]  # type: ignore[attr-defined]

    assert all(map(torch.equal, step(workload), step()))
    planned.model.zero_grad()
    held = [*planned.model.parameters(), planned.batch]
    peak_bytes = peak_bytes_of(lambda: step() and None, held)
    assert peak_bytes == pytest.approx(fast.predicted.peak_bytes, rel=1e-3)
    assert fast.predicted.peak_bytes <= parse_budget(
        budget, fast.predicted.unplanned_peak_bytes
    )
    assert ckplan.status(planned.model).spilled_bytes >= fast.predicted.moved_bytes


def test_moves_cost_what_they_take_from_the_processor() -> None:
    regions = list(resolve(Plan(regions=(PlannedRegion("[0..2]"),)), graph()))
    (mix,) = mixes(Simulator(graph()), regions, seed=0, count=1)
    idle, busy = Link(1e18), Link(1e18, False, 1e-9, 1e-3)
    free, taken = (Simulator(graph(), link).run(mix) for link in (idle, busy))
    num_moves = sum(len(one.moved) for one in taken.effects)
    assert num_moves > 1
    seconds = 2 * 1e-9 * taken.moves.moved_bytes + 1e-3 * num_moves
    assert taken.recompute_seconds - free.recompute_seconds == pytest.approx(seconds)
    assert taken.moving_seconds - taken.stall_seconds == pytest.approx(seconds)
    assert taken.stall_seconds == pytest.approx(0, abs=1e-9)
    assert taken.live_bytes == free.live_bytes


@pytest.mark.parametrize(
    "link",
    [
        Link(1e18, busy_seconds_per_byte=1.0),
        Link(1e18, seconds_per_move=1.0),
        Link(1e18, slowest=Link(1e3)),
        Link(1e18, slowest=Link(1e18, busy_seconds_per_byte=1.0)),
    ],
)
def test_a_disk_that_never_waits_is_left_alone_where_moves_take_too_much(
    link: Link,
) -> None:
    plain = ckplan.solve(graph(), "75%")
    planner = MovingPlanner(Planner(graph()), link)
    found = ckplan.solve(graph(), "75%", spill_rate=link)
    check_nothing_moves(found, plain)
    assert plain.budget_bytes is not None
    cheapest = planner.within(plain.budget_bytes)
    assert cheapest and not cheapest[0].moves.moved_bytes
    freely = ckplan.solve(graph(), "75%", spill_rate=replace(link, slowest=None))
    assert freely.predicted
    assert bool(freely.predicted.moved_bytes) == (link.slowest is not None)


def test_moves_reach_below_the_floor_of_recomputation() -> None:
    plain = ckplan.solve(graph(), goal="min-memory").predicted
    moved = ckplan.solve(graph(), goal="min-memory", spill_rate=FAST).predicted
    assert plain and moved
    assert moved.peak_bytes <= plain.peak_bytes


def test_waits_shrink_with_the_rate_to_nothing() -> None:
    regions = list(resolve(Plan(regions=(PlannedRegion("[0..2]"),)), graph()))
    plain = Simulator(graph())
    for mix in mixes(plain, regions, seed=0, count=3):
        links = map(Link, (1e3, 1e6, 1e9, 1e18))
        found = [Simulator(graph(), link).run(mix) for link in links]
        waits = [one.stall_seconds for one in found]
        assert waits == sorted(waits, reverse=True)
        assert waits[-1] < 1e-9
        copies = 2 * found[0].moves.moved_bytes / 1e3
        assert copies * 0.9 < waits[0] <= copies  # next to nothing hides them
        assert {one.peak_bytes for one in found} == {plain.run(mix).peak_bytes}
        extra = found[0].recompute_seconds - found[-1].recompute_seconds
        assert extra == pytest.approx(waits[0] - waits[-1])


def test_the_bound_counts_moves_as_free() -> None:
    whole, free = Planner(graph()), Planner(with_moves(graph(), Link(inf)))
    for share in (95, 85, 75):
        budget_bytes = whole.unplanned.peak_bytes * share // 100
        assert free.bound(budget_bytes) <= whole.bound(budget_bytes)
        assert free.bound(budget_bytes) <= free.solve(budget_bytes).timeline.overhead


@pytest.mark.parametrize(
    ("wish", "found"),
    [
        ({"goal": "knee"}, "for this objective"),
        ({"max_overhead": 0.1}, "for this objective"),
        ({"budget": "80%", "allow": ["moves"]}, "cannot allow 'moves'"),
    ],
)
def test_wishes_that_moves_cannot_meet_are_refused(
    wish: dict[str, object], found: str
) -> None:
    with pytest.raises(CkplanError, match=found):
        ckplan.solve(graph(), **wish, spill_rate=FAST)  # type: ignore[arg-type]


def test_rates_and_devices_are_checked() -> None:
    for rate in (0, -1.0, float("inf"), "0GB", "fast"):
        with pytest.raises(CkplanError):
            ckplan.solve(graph(), "80%", spill_rate=rate)
    with pytest.raises(CkplanError, match="to host memory: the step runs there"):
        ckplan.solve(graph(), "80%", offload="host")
    with pytest.raises(CkplanError, match="to '/tmp' without the rate of its disk"):
        ckplan.solve(graph(), "80%", offload="/tmp")
    with pytest.raises(CkplanError, match="no card is named"):
        ckplan.solve(on_card(), "80%", offload="host")


@cache
def on_card(microseconds: float = 0.0) -> Graph:
    """The step on a card, whose ops take some time to launch."""
    ops = [replace(op, launch_seconds=microseconds * 1e-6) for op in graph().ops]
    known = {**graph().fingerprint, "device": "cuda"}
    return replace(graph(), fingerprint=known, ops=tuple(ops))


def test_a_card_moves_to_the_host_at_the_rate_of_its_link() -> None:
    plan = ckplan.solve(on_card(5.0), "75%", gpu=None, offload="host", spill_rate=FAST)
    assert plan.predicted
    assert 0 < plan.predicted.moved_bytes <= plan.predicted.host_bytes
    assert plan.predicted.host_bytes <= 1.05 * plan.predicted.moved_bytes
    assert host_rate(on_card(), "host", "H100") == find("H100").link
    assert "host_bytes" in plan_file.dumps(plan)
    assert plan_file.loads(plan_file.dumps(plan), "plan").predicted == plan.predicted


def test_the_cpu_moves_to_a_file_with_its_folder_named_or_not() -> None:
    disk = Link(1e12, busy_seconds_per_byte=1e-13)
    named = ckplan.solve(graph(), "75%", offload="/tmp", spill_rate=disk)
    assert named.predicted and named.predicted.moved_bytes
    assert named == ckplan.solve(graph(), "75%", spill_rate=disk)


def test_a_card_moves_to_a_file_at_the_slower_of_disk_and_bus() -> None:
    plan = ckplan.solve(on_card(5.0), "75%", offload="/tmp", spill_rate=FAST)
    assert plan.predicted
    assert plan.predicted.moved_bytes
    assert plan.predicted.host_bytes == STAGING_BYTES
    bus = find("H100").link
    disk = Link(1e9, busy_seconds_per_byte=1.0, slowest=Link(1e8))
    slow = behind_host(on_card(), disk, "H100")
    assert slow.bytes_per_second == 1e9
    assert slow.slowest and slow.slowest.bytes_per_second == 1e8
    assert not slow.busy_seconds(2**30)
    assert not slow.both_ways
    assert behind_host(on_card(), Link(1e15), "H100").bytes_per_second == bus
    assert behind_host(on_card(), Link(1e15)).bytes_per_second == 1e15
    slower, faster = (
        Simulator(on_card(5.0), behind_host(on_card(), Link(rate)))
        for rate in (1e6, 1e12)
    )
    regions = resolve(plan, slower.graph)
    assert slower.run(regions).stall_seconds > faster.run(regions).stall_seconds
    assert slower.run(regions).peak_bytes == faster.run(regions).peak_bytes


def test_what_returns_early_is_allocated_after_what_was_asked_for() -> None:
    """Both begin in one gap, in the order in which the engine begins them."""
    step = on_card(5.0)
    regions = [{"calls": f"{n}", "offload": ["drop/div_#1"]} for n in range(3)]
    text = json.dumps({"ckplan": 1, "regions": regions})
    timeline = Simulator(step).run(resolve(plan_file.loads(text, "x"), step))
    assert len(timeline.moves.early) == 2
    for early in timeline.moves.early:
        asked = next(one for one in timeline.effects if one.asked == early.start)
        own = [one.start_tick for one in asked.allocated if one.form == RETURNED]
        assert early.start_tick > max(own)


def test_an_op_that_hands_a_tensor_on_is_not_what_moves_it() -> None:
    """As cuDNN's recurrent op does with its weights."""
    step = on_card(5.0)
    maker, output = movable(step, range(step.num_forward))[0]
    ops = list(step.ops)
    storage = ops[maker].outputs[output]
    later = next(
        number
        for number, op in enumerate(ops)
        if number > maker and storage in op.reads and op.outputs
    )
    found = replace(ops[later], outputs=(*ops[later].outputs, storage))
    ops[later] = found
    handed = replace(step, ops=tuple(ops))
    places = movable(handed, range(handed.num_forward))
    assert (maker, output) in places
    assert (later, len(found.outputs) - 1) not in places
    assert ckplan.solve(handed, "75%", offload="host", spill_rate=FAST).predicted


class Card(MemoryLimit):
    """A card that has no room for plans that move."""

    def allows(self, timeline: Timeline) -> bool:
        return timeline.peak_bytes <= self.bytes and not timeline.moves.moved_bytes


def test_a_plan_that_fits_a_card_goes_before_a_cheaper_one_that_does_not() -> None:
    planner = Planner(on_card(5.0))
    moving = MovingPlanner(planner, Link(1e12, both_ways=True))
    limit = MemoryLimit(planner.unplanned.peak_bytes * 3 // 4)
    assert moving.solve(limit).timeline.moves.moved_bytes
    found = moving.solve(Card(limit.bytes, of_reserved=True)).timeline
    assert not found.moves.moved_bytes
    assert found.peak_bytes <= limit.bytes


class GappyCard(MemoryLimit):
    """A card with room for moves of some sizes alone, none of which is tried first."""

    def allows(self, timeline: Timeline) -> bool:
        share = timeline.peak_bytes / self.bytes
        return timeline.moves.moved_bytes > 0 and 0.55 < share < 0.7


def test_a_card_is_asked_of_steps_with_moves_and_between_the_sizes_tried() -> None:
    planner = Planner(on_card(5.0))
    moving = MovingPlanner(planner, Link(1e12, both_ways=True))
    limit = GappyCard(planner.unplanned.peak_bytes - 1, of_reserved=True)
    found = moving.solve(limit)
    assert limit.allows(found.timeline)
    assert found.timeline.peak_bytes <= found.budget_bytes


@pytest.mark.parametrize("room", [range(50_000, 53_000), range(63_500, 63_600)])
def test_a_size_that_fits_is_found_between_those_that_do_not(room: range) -> None:
    found = _largest_fitting(room.__contains__, 1000, 64_000)
    assert found in room
    assert _largest_fitting(range(0).__contains__, 1000, 64_000) is None
    assert _largest_fitting(range(1000, 1001).__contains__, 1000, 64_000) == 1000


@pytest.mark.parametrize("microseconds", [0.001, 300.0])
def test_copies_each_way_stall_the_device_where_they_are_late(
    microseconds: float,
) -> None:
    step = on_card(microseconds)
    regions = list(resolve(Plan(regions=(PlannedRegion("[0..2]"),)), step))
    (mix,) = mixes(Simulator(step), regions, seed=0, count=1)
    rates = (1e6, 1e8, 1e9, 1e18)
    found = [Simulator(step, Link(rate, both_ways=True)).run(mix) for rate in rates]
    waits = [one.stall_seconds for one in found]
    assert waits == sorted(waits, reverse=True)
    assert waits[-1] == pytest.approx(0, abs=1e-9)
    assert waits[0] <= 2 * found[0].moves.moved_bytes / rates[0]
    assert waits[0] > found[0].moves.moved_bytes / rates[0]
    plain = Simulator(step).run(mix)
    for one, wait in zip(found, waits, strict=True):
        more = one.recompute_seconds - plain.recompute_seconds
        assert more == pytest.approx(wait)
        assert one.peak_bytes == plain.peak_bytes
    shared = Simulator(step, Link(1e6)).run(mix)
    assert shared.stall_seconds >= waits[0]


def test_three_queues_by_hand() -> None:
    copies = [
        CopyEvent(1, 0, "out", ("out", 7), 5.0),  # after op 0
        CopyEvent(3, 1, "out", ("out", 7), None),  # its value is freed after op 1
        CopyEvent(4, 0, "in", ("in", 7), 4.0),  # begins before op 2
        CopyEvent(6, 1, "in", ("in", 7), None),  # is wanted before op 3
    ]
    met = {1: copies[:1], 2: copies[1:3], 3: copies[3:]}
    found = _with_copies([0.1] * 4, [2.0, 3.0, 1.0, 1.0], met)
    # op 0 ends at 2.1, the copy out at 7.1; op 1 at 5.1, waits until 7.1; op 2 ends at
    # 8.1, the copy back at 11.1; op 3 ends at 12.1.
    assert found.seconds == pytest.approx(12.1)
    assert found.device_seconds == pytest.approx(7.0 + 2.0 + 3.0)


def test_a_disk_is_measured_once(tmp_path: Path) -> None:
    first = ckplan.spill_rate(tmp_path)
    assert first > 0
    assert ckplan.spill_rate(tmp_path) == first
    assert not list(tmp_path.iterdir())
    with pytest.raises(CkplanError, match="cannot spill to"):
        ckplan.spill_rate(tmp_path / "none")


def test_the_command_offloads_to_a_folder(run: Run, folder: Path) -> None:
    trace, plan = folder / "step.json.gz", folder / "moving.yaml"
    trace_file.save(graph(), trace, force=False)
    wish = ("solve", str(trace), "--budget", "75%", "-o", str(plan), "--json")
    refused = run(*wish, "--offload", "host")
    assert refused.code == 1
    assert "to host memory: the step runs there" in refused.err
    assert run(*wish, "--spill-rate", "1GB").code == 2
    assert run(*wish, "--offload", str(folder / "none")).code == 1
    for disk in ("none", str(folder)):
        rate = () if disk == "none" else ("--spill-rate", FAST)
        ended = run(*wish, "--offload", disk, *rate, "--force")
        assert ended.code == 0, ended.err
        found = json.loads(ended.out)
        assert found["stall_seconds"] >= 0
        assert "nothing moves" not in ended.err
        moves = any(region.get("offload") for region in found["regions"])
        assert moves == (found["moved_bytes"] > 0) == (disk != "none")
        loaded = plan_file.load(plan)
        assert loaded.predicted
        assert loaded.predicted.moved_bytes == found["moved_bytes"]
    on_gpu = folder / "card.json.gz"
    trace_file.save(on_card(5.0), on_gpu, force=False)
    where = ("--offload", str(folder), "--spill-rate", FAST, "--force")
    ended = run("solve", str(on_gpu), *wish[2:], *where)
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["moved_bytes"] > 0
    assert found["host_bytes"] == STAGING_BYTES
    ended = run(*wish, "--offload", str(folder), "--spill-rate", SLOW, "--force")
    assert ended.code == 0, ended.err
    assert "nothing moves: recomputation alone is no slower" in ended.err
    assert not json.loads(ended.out)["moved_bytes"]
    ended = run(*wish, "--offload", str(folder), "--force")
    assert ended.code == 0, ended.err
    assert f"the disk of {folder} moves " in ended.err
    assert "beside kernels" in ended.err
