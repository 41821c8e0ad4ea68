"""Programs: what is rebuilt is what forward made, each step once, and all let go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckplan.simulating.program import (
    EXTERNAL,
    Flow,
    NestedRegion,
    Program,
    compile_program,
)
from ckplan.simulating.rebuild import Rebuild

X, A, B, C, D = range(5)


@dataclass(frozen=True)
class Step:
    reads: Sequence[int] = ()
    outputs: Sequence[int] = ()
    writes: Sequence[int] = ()


def flow_of(*steps: Step) -> Flow:
    flow = Flow()
    for step in steps:
        flow.add(step)
    return flow


# -- values ----------------------------------------------------------------------------


def test_a_storage_that_no_step_made_holds_an_external_value() -> None:
    flow = flow_of(Step([X], [A]))
    assert flow.maker_of[flow.value(X)] == EXTERNAL
    assert flow.maker_of[flow.value(A)] == 0
    assert flow.inputs == [(flow.value(X),)]
    assert flow.outputs == [(flow.value(A),)]


def test_every_write_in_place_makes_a_value() -> None:
    flow = Flow()
    flow.add(Step([X], [A]))
    made = flow.value(A)
    flow.add(Step([X], [A], writes=[A]))
    changed = flow.value(A)
    assert made != changed
    assert flow.storage_of[made] == flow.storage_of[changed] == A
    assert set(flow.inputs[1]) == {flow.value(X), made}  # what is written is read
    assert flow.overwrites == [{}, {made: changed}]
    assert flow.outputs[1] == flow.returned[1] == (changed,)
    assert flow.is_current(changed)
    assert not flow.is_current(made)


def test_an_output_that_is_an_input_makes_no_value() -> None:
    flow = flow_of(Step([X], [A]), Step([A, X], [A, B]))
    assert flow.outputs[1] == (flow.value(B),)
    assert flow.returned[1] == (flow.value(A), flow.value(B))


def test_outputs_on_one_storage_are_one_value() -> None:
    flow = flow_of(Step([X], [A, A]))
    assert flow.outputs == [(flow.value(A),)]
    assert flow.returned == [(flow.value(A),) * 2]


def test_a_write_that_is_not_returned_makes_a_value_too() -> None:
    flow = flow_of(Step([X], [A]), Step([X], [], writes=[A]))
    assert flow.outputs[1] == (flow.value(A),)
    assert flow.returned[1] == ()


# -- programs --------------------------------------------------------------------------


def values(flow: Flow, *storages: int) -> list[int]:
    return [flow.value(storage) for storage in storages]


def compiled(flow: Flow, dropped: Iterable[int], kept: Collection[int]) -> Program:
    return compile_program(flow, [(value, 0) for value in dropped], kept)


def test_program_has_the_steps_that_dropped_values_need_and_no_other() -> None:
    flow = flow_of(Step([X], [A]), Step([A], [B]), Step([A], [C]), Step([B, C], [D]))
    x, a, b = values(flow, X, A, B)
    program = compiled(flow, [b], kept=())
    assert program.steps == {0, 1}
    assert program.uses == {b: 1, a: 1, x: 1}
    assert program.retained == {x}
    assert program.overwritten_inputs == set()


def test_program_stops_at_what_is_kept() -> None:
    flow = flow_of(Step([X], [A]), Step([A], [B]), Step([B], [C]))
    a, c = values(flow, A, C)
    program = compiled(flow, [c], kept={a})
    assert program.steps == {1, 2}
    assert program.retained == {a}


def test_a_value_counts_once_for_every_reader_and_every_saved_tensor() -> None:
    flow = flow_of(Step([X], [A]), Step([A, A], [B]), Step([A, B], [C]))
    a, b, c = values(flow, A, B, C)
    program = compiled(flow, [a, a, c], kept=())
    assert program.uses[a] == 4
    assert program.uses[b] == program.uses[c] == 1


def test_kept_value_that_is_overwritten_is_not_there() -> None:
    flow = Flow()
    flow.add(Step([X], [A]))
    made = flow.value(A)
    flow.add(Step([], [A], writes=[A]))
    program = compiled(flow, [flow.value(A)], kept={made})
    assert program.steps == {0, 1}
    assert program.overwritten_inputs == set()


def test_external_value_that_is_overwritten_is_lost() -> None:
    flow = Flow()
    given_value = flow.value(X)
    flow.add(Step([X], [A]))
    flow.add(Step([], [X], writes=[X]))
    assert compiled(flow, [flow.value(A)], kept=()).overwritten_inputs == {given_value}
    kept = compiled(flow, [], kept={flow.value(A)})
    assert kept.overwritten_inputs == kept.steps == set()


def test_nothing_dropped_is_an_empty_program() -> None:
    program = compiled(flow_of(Step([X], [A])), [], kept=())
    assert (program.steps, program.retained, program.uses) == (set(), set(), {})


def test_an_inner_region_rebuilds_what_its_own_steps_make_and_reads_the_rest() -> None:
    """Steps of the inner region: the second and the third of four."""
    flow = flow_of(*(Step([n], [n + 1]) for n in range(4)))
    x, a, b, c, d = values(flow, *range(5))
    part = NestedRegion(1, 3, frozenset())
    dropped = [(a, 1), (b, 1), (c, 1), (d, 0)]
    program = compile_program(flow, dropped, (), parts=[part])
    (inner,) = program.inner
    assert (inner.steps, inner.needed, inner.retained) == ({1, 2}, {b, c}, {a})
    assert (program.needed, program.retained) == ({a, d}, {x})
    assert program.runs() == {0: 1, 1: 2, 2: 2, 3: 1}


# -- rebuilding ------------------------------------------------------------------------


@dataclass
class Log:
    """A machine that only writes down what it is told."""

    ran: list[tuple[int, list[int], list[int]]] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)

    def run(self, step: int, copies: Collection[int], keep: Collection[int]) -> None:
        self.ran.append((step, list(copies), list(keep)))

    def free(self, value: int) -> None:
        self.freed.append(value)

    def decode(self, value: int) -> None:
        raise AssertionError(value)

    def fetch(self, value: int) -> None:
        raise AssertionError(value)

    def nested(self) -> Log:
        raise AssertionError("there are no parts")


def test_what_is_wanted_runs_and_what_is_not_waits() -> None:
    flow = flow_of(Step([X], [A]), Step([A], [B]), Step([A], [C]))
    x, a, b, c = values(flow, X, A, B, C)
    log = Log()
    rebuild = Rebuild(compiled(flow, [b, c], kept=()), log)
    rebuild.materialize(c)
    assert log.ran == [(0, [], [a]), (2, [], [c])]
    assert log.freed == [x]
    rebuild.release(c)
    rebuild.materialize(b)
    assert log.ran[2:] == [(1, [], [b])]
    assert log.freed == [x, c, a]


def test_steps_run_in_the_order_of_forward() -> None:
    flow = flow_of(Step([X], [A]), Step([X], [B]), Step([A, B], [C]))
    log = Log()
    c = flow.value(C)
    Rebuild(compiled(flow, [c], kept=()), log).materialize(c)
    assert [step for step, _, _ in log.ran] == [0, 1, 2]


def test_a_value_wanted_twice_is_rebuilt_once() -> None:
    flow = flow_of(Step([X], [A]))
    a = flow.value(A)
    log = Log()
    rebuild = Rebuild(compiled(flow, [a, a], kept=()), log)
    for freed in ([], [a]):
        rebuild.materialize(a)
        rebuild.release(a)
        assert log.freed[1:] == freed
    assert len(log.ran) == 1


def test_second_output_that_nobody_wants_is_not_kept() -> None:
    flow = flow_of(Step([X], [A, B]))
    b = flow.value(B)
    log = Log()
    Rebuild(compiled(flow, [b], kept=()), log).materialize(b)
    assert log.ran == [(0, [], [b])]


def test_second_output_that_is_held_already_is_not_made_twice() -> None:
    flow = flow_of(Step([X], [A, B]), Step([A], [C]))
    a, b, c = values(flow, A, B, C)
    log = Log()
    rebuild = Rebuild(compiled(flow, [b, c], kept={a}), log)
    rebuild.materialize(b)
    assert log.ran == [(0, [], [b])]
    rebuild.materialize(c)
    assert log.ran[1:] == [(1, [], [c])]


def test_change_in_place_copies_what_is_still_needed_only() -> None:
    flow = Flow()
    flow.add(Step([X], [A]))
    made = flow.value(A)
    flow.add(Step([A], [B]))
    flow.add(Step([], [A], writes=[A]))
    changed, b = values(flow, A, B)
    for wanted, copies in (([changed], []), ([changed, b], [made])):
        log = Log()
        Rebuild(compiled(flow, wanted, kept=()), log).materialize(changed)
        assert log.ran == [(0, [], [made]), (2, copies, [changed])]


# -- against forward itself ------------------------------------------------------------

Term = tuple[object, ...]  # what a cell holds: how it was computed


@dataclass
class Cell:
    """Memory of one tensor, changed in place as kernels do."""

    term: Term


def run_step(number: int, args: Sequence[Term]) -> Term:
    return ("step", number, *args)


@dataclass
class Cells:
    """A machine that computes terms in cells."""

    flow: Flow
    steps: list[Step]
    cells: dict[int, Cell]
    ran: list[int] = field(default_factory=list)
    outer: Cells | None = None
    inner: list[Cells] = field(default_factory=list)

    def nested(self) -> Cells:
        self.inner.append(Cells(self.flow, self.steps, {}, self.ran, self))
        return self.inner[-1]

    def fetch(self, value: int) -> None:
        assert self.outer is not None
        self.cells[value] = self.outer.cells[value]

    def decode(self, value: int) -> None:
        raise AssertionError(value)

    def run(self, step: int, copies: Collection[int], keep: Collection[int]) -> None:
        flow = self.flow
        self.ran.append(step)
        present = {value: self.cells[value] for value in flow.inputs[step]}
        for value in copies:
            present[value] = Cell(present[value].term)
        by_storage = {flow.storage_of[v]: cell for v, cell in present.items()}
        result = run_step(step, arguments(self.steps[step], by_storage))
        changed = flow.overwrites[step]
        for old in changed:
            present[old].term = (flow.storage_of[old], result)
        made = {new: present[old] for old, new in changed.items()}
        for value in flow.outputs[step]:
            cell = made.get(value) or Cell((flow.storage_of[value], result))
            if value in keep:
                assert value not in self.cells, "it is there already"
                self.cells[value] = cell

    def free(self, value: int) -> None:
        del self.cells[value]


def arguments(step: Step, cells: dict[int, Cell]) -> list[Term]:
    return [cells[s].term for s in (*step.reads, *step.writes)]


def random_steps(rng: Random) -> list[Step]:
    """Steps over storages that begin with a few that are given."""
    known = list(range(rng.randint(1, 3)))
    steps = []
    for _ in range(rng.randint(1, 8)):
        reads = rng.sample(known, rng.randint(1, min(3, len(known))))
        writes = rng.sample(known, 1) if rng.random() < 0.3 else []
        made = range(len(known), len(known) + rng.randint(not writes, 2))
        known += made
        steps.append(Step(reads, [*writes, *made], writes))
    return steps


def random_parts(rng: Random, flow: Flow) -> list[NestedRegion]:
    """Parts of a flow, some inside others, each of which keeps some of its values."""
    parts: list[NestedRegion] = []

    def divide(start: int, stop: int, outer: int) -> None:
        while start < stop and len(parts) < 6:
            end = rng.randint(start + 1, stop)
            if rng.random() < 0.6 and (start, end) != (0, len(flow.inputs)):
                made = [v for v, m in enumerate(flow.maker_of) if start <= m < end]
                kept = frozenset(v for v in made if rng.random() < 0.2)
                parts.append(NestedRegion(start, end, kept, outer))
                if rng.random() < 0.5:
                    divide(start, end, len(parts))
            start = end

    divide(0, len(flow.inputs), 0)
    return parts


def innermost(parts: Sequence[NestedRegion], step: int) -> int:
    """The number of the part that runs a step; 0 if none does."""
    around = [n for n, p in enumerate(parts, start=1) if p.start <= step < p.stop]
    return max(around, default=0)


@given(rng=st.randoms(use_true_random=False))
def test_every_value_that_is_rebuilt_is_what_forward_made(rng: Random) -> None:
    check_rebuilding(rng)


@pytest.mark.slow
def test_many_values_that_are_rebuilt_are_what_forward_made() -> None:
    for seed in range(100_000):
        check_rebuilding(Random(seed))


def check_rebuilding(rng: Random) -> None:
    """Run forward in cells, drop some values, rebuild them in some order."""
    steps = random_steps(rng)
    flow, memory, terms, wanted = Flow(), dict[int, Cell](), dict[int, Term](), []
    for number, step in enumerate(steps):
        for storage in (*step.reads, *step.writes):
            cell = memory.setdefault(storage, Cell(("given", storage)))
            terms.setdefault(flow.value(storage), cell.term)
        result = run_step(number, arguments(step, memory))
        flow.add(step)
        for storage in step.outputs:
            memory[storage] = Cell((storage, result))
            terms[flow.value(storage)] = memory[storage].term
        saved = [flow.value(s) for s in step.outputs if rng.random() < 0.5]
        wanted += saved
    kept = {v for v in terms if rng.random() < 0.2}
    parts = random_parts(rng, flow) if rng.random() < 0.5 else []
    dropped = [
        (v, innermost(parts, rng.randrange(flow.maker_of[v], len(steps))))
        for v in wanted
        if flow.maker_of[v] != EXTERNAL and not (v in kept and flow.is_current(v))
    ]
    program = compile_program(flow, dropped, kept, parts=parts)
    if program.overwritten_inputs:
        assert all(not flow.is_current(value) for value in program.overwritten_inputs)
        return
    held = {value: memory[flow.storage_of[value]] for value in program.retained}
    machine = Cells(flow, steps, dict(held))
    rebuild = Rebuild(program, machine)
    rng.shuffle(dropped)
    for value, part in dropped:
        level = rebuild.owner(value, part)
        level.materialize(value)
        assert terms[value] == level.machine.cells[value].term
        level.release(value)
    assert machine.cells == {}
    assert not any(inner.cells for inner in machine.inner)
    assert Counter(machine.ran) == program.runs()
    if not parts:
        assert set(program.runs().values()) <= {1}
    assert all(terms[value] == cell.term for value, cell in held.items())
