"""Whatever is asked of whatever graph: a right answer, or an error of three lines.

Right is what the walk of ``oracles.py`` sees: the plan read back from its text fits,
has the peak and the seconds it says, and is empty where the unplanned step fits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from commands import Run
from every_plan import scale, without_states
from graphs import Forward, chain
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracles import walk_plan
from small_steps import KINDS, small_step

from ckplan.errors import CkplanError, GraphError, InfeasibleError, UnitError
from ckplan.graph.file import dumps, loads
from ckplan.graph.graph import Graph
from ckplan.plan.file import dumps as plan_text
from ckplan.plan.file import loads as read_plan
from ckplan.plan.region import RERUN
from ckplan.plan.resolve import resolve
from ckplan.simulating.simulate import simulate
from ckplan.solving.milp import solve_exactly
from ckplan.solving.planner import Planner
from ckplan.solving.solve import Objective, find, solve_plan, to_plan

EXAMPLES = 10
MANY = 200  # in tests marked slow
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # of what a seed is
ROUNDED = 1e-4  # of the overhead in a plan file
HUGE = 2**54  # of one tensor
RANDOM = st.integers(0, 2**32).map(Random)
ODD = (-2, -1, 0, 1, 3, 12, 2**53 + 1, 2**62, 2**63, 1.5, -0.5, 1e300)
STRANGE = (*ODD, float("nan"), float("inf"), None, True, "", "x", [], {})


def check(graph: Graph) -> None:
    """Ask for a plan at every budget at which something may go wrong."""
    planner = Planner(graph)
    floor, unplanned = planner.floor.peak_bytes, planner.unplanned.peak_bytes
    assert floor <= unplanned == walk_plan(graph, ()).peak_bytes
    for budget in edges(graph, floor, unplanned):
        try:
            plan = to_plan(graph, find(planner, Objective(budget)))
        except (InfeasibleError, UnitError) as error:
            assert len(str(error).splitlines()) == 3
            assert budget < floor or budget == 0
            continue
        regions = resolve(read_plan(plan_text(plan), "plan"), graph)
        assert bool(regions) <= (budget < unplanned)
        seen = walk_plan(graph, regions)
        assert plan.predicted is not None
        assert seen.peak_bytes == plan.predicted.peak_bytes <= budget
        overhead = seen.seconds / (graph.step_seconds or 1)
        if not any(op.launch_seconds for op in graph.ops):  # which nobody walks
            assert plan.predicted.overhead == pytest.approx(overhead, abs=ROUNDED)


def edges(graph: Graph, floor: int, unplanned: int) -> Iterator[int]:
    """Budgets around everything that matters."""
    sizes = graph.bytes_by_kind
    state = sizes["parameter"] + sizes["buffer"] + sizes["optimizer"]
    found = {0, 1, state - 1, state, floor - 1, floor, (floor + unplanned) // 2}
    found |= {unplanned - 1, unplanned, unplanned + 1, 2 * unplanned + 1}
    return (budget for budget in sorted(found) if budget >= 0)


# -- odd graphs ------------------------------------------------------------------------


@given(rng=RANDOM)
@settings(max_examples=EXAMPLES, phases=NO_SHRINKING)
def test_steps_of_every_kind_are_planned_at_every_edge(rng: Random) -> None:
    check(small_step(rng, rng.choice(KINDS)))


@given(rng=RANDOM)
@settings(max_examples=EXAMPLES, phases=NO_SHRINKING)
def test_odd_steps_are_planned_at_every_edge(rng: Random) -> None:
    check(odd_step(rng))


def odd_step(rng: Random) -> Graph:
    """Make up a step with next to nothing in it.

    Tensors of no bytes, parts that do not meet, calls that do nothing or save nothing,
    ops without inputs, without outputs and outside of all calls.
    """
    forward = Forward(seconds=rng.choice((0, 1)))
    parts = [[forward.given(rng.choice((0, 7)))] for _ in range(rng.randint(1, 2))]
    for number in range(rng.randint(0, 4)):
        with forward.call(f"{number}"):
            for _ in range(rng.randint(0, 2)):
                odd_op(forward, rng, rng.choice(parts))
        if rng.random() < 0.3:
            odd_op(forward, rng, rng.choice(parts))
    if rng.random() < 0.9:
        forward.op("mean", [part[-1] for part in parts], makes=[rng.choice((0, 4))])
    return forward.graph()


def odd_op(forward: Forward, rng: Random, part: list[int]) -> None:
    reads = [part[-1]] if rng.random() < 0.9 else []
    if rng.random() < 0.4:
        reads.append(forward.given(rng.choice((0, 3)), "parameter"))
    makes = [rng.choice((0, 0, 1, 9)) for _ in range(rng.choice((0, 1, 1, 2)))]
    saves = [s for s in reads if rng.random() < 0.6]
    part += forward.op("odd", reads, makes=makes, saves=saves)


@pytest.mark.parametrize("num_ops", [0, 1])
def test_a_step_of_next_to_nothing_is_planned(num_ops: int) -> None:
    forward = Forward()
    for _ in range(num_ops):
        forward.op("mean", [forward.given(8)], makes=[4])
    check(forward.graph())


@given(rng=RANDOM)
@settings(max_examples=EXAMPLES // 2, phases=NO_SHRINKING)
def test_bytes_beyond_all_floats_are_planned_to_the_byte(rng: Random) -> None:
    check_scaled(rng)


def check_scaled(rng: Random) -> None:
    graph = without_states(small_step(rng, rng.choice(KINDS)))
    most = max((s.bytes for s in graph.storages), default=0)
    by = HUGE // max(most, 1)
    huge = scale(graph, by)
    check(huge)
    planner, larger = Planner(graph), Planner(huge)
    assert larger.floor.peak_bytes == by * planner.floor.peak_bytes
    found, other = (
        planner.within(planner.floor.peak_bytes),
        larger.within(larger.floor.peak_bytes),
    )
    assert found is not None and other is not None
    assert found[1] == other[1]


def test_reruns_that_are_planned_are_what_the_walk_sees() -> None:
    rng = Random(841)
    graph = scale(small_step(rng, rng.choice(KINDS)), 10**6)
    check(graph)
    planner = Planner(graph)
    found = planner.within(planner.floor.peak_bytes)
    assert found is not None
    assert {region.by for region in found[1]} == {RERUN}


# -- graph files that somebody changed -------------------------------------------------


@given(rng=RANDOM)
@settings(max_examples=4 * EXAMPLES, phases=NO_SHRINKING)
def test_a_changed_file_is_refused_or_planned_right(rng: Random) -> None:
    check_changed_file(rng)


def check_changed_file(rng: Random) -> None:
    content = json.loads(dumps(small_step(rng, rng.choice(KINDS))))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        change(content, rng)
    try:
        graph = loads(json.dumps(content), "changed")
    except GraphError as error:
        assert len(str(error).splitlines()) == 3
        return
    check(graph)


@pytest.mark.slow
@given(rng=RANDOM)
@settings(max_examples=MANY, phases=NO_SHRINKING)
def test_many_steps_and_changed_files_are_planned_right(rng: Random) -> None:
    check(small_step(rng, rng.choice(KINDS)))
    check(odd_step(rng))
    check_scaled(rng)
    check_changed_file(rng)


def test_what_is_wanted_while_forward_runs_is_not_dropped() -> None:
    rng = Random(5017)
    content = json.loads(dumps(small_step(rng, rng.choice(KINDS))))
    content["saved"][1][3] = 0  # as a gradient penalty does
    check(loads(json.dumps(content), "changed"))


def change(content: dict[str, Any], rng: Random) -> None:
    """Change one thing in a graph file: a row, a number in it, or what is no row."""
    key = rng.choice([key for key in content if key != "ckplan_graph"])
    rows = content[key]
    if not isinstance(rows, list) or not rows or rng.random() < 0.05:
        content[key] = rng.choice(STRANGE)
        return
    place = rng.randrange(len(rows))
    how = rng.random()
    if how < 0.1:
        rows.pop(place)
    elif how < 0.2:
        rows.insert(place, json.loads(json.dumps(rng.choice(rows))))
    elif how < 0.3:
        other = rng.randrange(len(rows))
        rows[place], rows[other] = rows[other], rows[place]
    elif isinstance(rows[place], list) and rows[place]:
        change_row(rows[place], rng)
    else:
        rows[place] = rng.choice(STRANGE)


def change_row(row: list[Any], rng: Random) -> None:
    place = rng.randrange(len(row))
    if isinstance(row[place], list) and rng.random() < 0.8:
        row[place].append(rng.choice((rng.randint(0, 20), *ODD)))
    elif rng.random() < 0.6:
        row[place] = rng.randint(-1, 20)
    else:
        row[place] = rng.choice(STRANGE)


@pytest.mark.parametrize(
    ("key", "row", "place", "value", "found"),
    [
        ("ops", 2, 2, [20], "op 2 (gelu) reads what op "),  # a cycle
        ("ops", 2, 2, [7], "op 2 (gelu) reads what op 2 makes"),  # its own output
        ("ops", 2, 4, [20], "op 2 (gelu) returns what op "),
        ("ops", 2, 4, [0], "op 2 (gelu) returns what it neither reads nor makes"),
        ("storages", 3, 3, -1, "storage 3 is freed before it is made"),
        ("storages", 3, 2, 99, "storage 3 has "),
        ("calls", 2, 4, 99, "call 2 covers ops"),
        ("calls", 3, 4, 7, "is not inside"),
        ("calls", 0, 4, 8, "ends after forward"),  # which has 7 ops
        ("calls", 3, 3, 0, "begins before the one before it ends"),
        ("calls", 2, 0, "h.0", "two calls have the name h.0#0"),
        ("calls", 2, 0, 7, "7 is not a name"),
        ("names", 0, None, 7, "7 is not a name"),
        ("names", 0, None, "", "'' is not the name of an op"),
        ("names", 0, None, "a/b", "'a/b' is not the name of an op"),
        ("calls", 2, 6, [99], "call 2 is given a storage that is not there"),
        ("calls", 1, 6, [6], "receives a storage that is made later"),
        ("calls", 2, 7, [99], "call 2 has state in a storage that is not there"),
        ("calls", 1, 7, [6], "has state in a storage that is made later"),
        ("saved", 4, 2, 0, "out of forward order"),
        ("saved", 4, 0, 20, "which is not alive"),
        ("saved", 4, 3, 0, "too early or too late"),
        ("saved", 4, 4, 0, "is freed at op 0, too early"),
        ("saved", 4, 5, 0, "is last used at op 0, too early or too late"),
        ("storages", 3, 0, 10**18, "B in total are too many"),
        ("ops", 2, 8, float("nan"), "a cost that is not a number"),
        ("ops", 2, 8, -1.0, "a cost that is not a number"),
    ],
)
def test_an_inconsistent_trace_is_refused(
    key: str, row: int, place: int | None, value: object, found: str
) -> None:
    content = json.loads(dumps(chain(1)))
    if place is None:
        content[key][row] = value
    else:
        content[key][row][place] = value
    with pytest.raises(GraphError) as caught:
        loads(json.dumps(content), "changed")
    assert found in caught.value.what
    assert caught.value.what.startswith("the trace is inconsistent: ")


# -- budgets ---------------------------------------------------------------------------

BUDGETS = (
    0,
    -1,
    "",
    "0",
    "-1GiB",
    "nan",
    "inf",
    "1e3",
    "12",
    "12GB",
    "200%",
    "0%",
    "%",
)


@pytest.mark.parametrize("budget", [*BUDGETS, 1.5, True, [], 10**30, "9" * 400])
def test_any_budget_is_answered(budget: Any) -> None:
    graph = chain(2)
    try:
        plan = solve_plan(graph, budget)
    except CkplanError as error:
        assert len(str(error).splitlines()) == 3
        return
    peak = simulate(graph, resolve(plan, graph)).peak_bytes
    assert plan.budget_bytes is not None
    assert peak <= plan.budget_bytes


def test_the_integer_program_of_an_odd_step_is_no_traceback() -> None:
    for seed in range(20):
        planner = Planner(odd_step(Random(seed)))
        exact = solve_exactly(planner.simulator, planner.floor.peak_bytes, 10.0)
        least = planner.within(planner.floor.peak_bytes)
        assert least is not None
        assert exact.overhead is not None
        assert exact.overhead <= least[0].overhead + 1e-6


@pytest.mark.parametrize(
    ("budget", "code", "said"),
    [
        ("0", 1, "it is 0 bytes"),
        ("1", 1, "1 of what?"),
        ("1B", 3, "no plan fits"),
        ("FLOOR-1", 3, "no plan fits"),
        ("FLOOR", 0, "wrote plan.yaml"),
        ("PEAK", 0, "no plan is needed"),
        ("1000TB", 0, "no plan is needed"),
    ],
)
def test_solve_answers_at_every_edge(
    run: Run,
    folder: Path,
    budget: str,
    code: int,
    said: str,
) -> None:
    graph = chain(3)
    planner = Planner(graph)
    numbers = {
        "FLOOR-1": planner.floor.peak_bytes - 1,
        "FLOOR": planner.floor.peak_bytes,
        "PEAK": planner.unplanned.peak_bytes,
    }
    (folder / "step.json").write_text(dumps(graph))
    size = f"{numbers[budget]}B" if budget in numbers else budget
    ended = run("solve", "step.json", "--budget", size)
    assert (ended.code, said in ended.err) == (code, True), ended.err
    assert (folder / "plan.yaml").exists() == (code == 0)
    if said == "no plan is needed":
        text = (folder / "plan.yaml").read_text()
        assert read_plan(text, "plan").regions == ()


@pytest.mark.parametrize("seed", range(12))
def test_solve_of_a_changed_file_is_no_traceback(
    run: Run,
    folder: Path,
    seed: int,
) -> None:
    rng = Random(seed)
    content = json.loads(dumps(chain(2)))
    change(content, rng)
    (folder / "step.json").write_text(json.dumps(content))
    ended = run("solve", "step.json", "--budget", "70%")
    assert ended.code in (0, 1, 3)
    assert ended.code == 0 or ended.err.splitlines()[-3].startswith("error: ")
