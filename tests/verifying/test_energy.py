"""Joules are read from counters in long windows, both sides in turns, or refused."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from commands import Run
from verifications import verification

import ckplan.verifying.verify as verifying
from ckplan.errors import CkplanError
from ckplan.plan.plan import Plan
from ckplan.report.tables import render
from ckplan.report.verification import verification_report
from ckplan.tracing.costs.spread import Quartiles
from ckplan.training.loading import WorkloadSpec
from ckplan.verifying import energy
from ckplan.verifying.compare_steps import NOTE_NOT_TOGETHER, StepPair
from ckplan.verifying.energy import (
    WINDOW_SECONDS,
    WINDOWS,
    Energy,
    energy_counters,
    measure_energy,
)
from ckplan.verifying.worker import FirstSteps, OutOfMemoryError, Result

MIB = 2**20


@dataclass
class Machine:
    """A clock, and what was used until now."""

    seconds: float = 0.0
    joules: float = 0.0
    log: list[str] = field(default_factory=list)

    def clock(self) -> float:
        return self.seconds

    def run(self, seconds: float, watts: float) -> None:
        self.seconds += seconds
        self.joules += seconds * watts


@dataclass
class Measurement:
    """What ``ZeusMonitor.end_window`` returns."""

    gpu_energy: dict[int, float]
    cpu_energy: dict[int, float] | None = None
    dram_energy: dict[int, float] | None = None


class ZeusMonitor:
    """Stands in for ``zeus.monitor.ZeusMonitor``: same arguments, same errors."""

    machine = Machine()
    packages = (0,)

    def __init__(
        self, gpu_indices: list[int] | None = None, cpu_indices: list[int] | None = None
    ) -> None:
        self.gpu_indices = [0] if gpu_indices is None else gpu_indices
        self.cpu_indices = list(self.packages) if cpu_indices is None else cpu_indices
        if self.gpu_indices not in ([], [0]):
            raise ValueError(f"no GPU {self.gpu_indices[0]}\nin this machine")
        self._open: dict[str, float] = {}

    def begin_window(self, key: str, sync_execution: bool = True) -> None:
        assert not sync_execution  # it would make a context on the GPU in this process
        if key in self._open:
            raise ValueError(f"Measurement window '{key}' already exists")
        self._open[key] = self.machine.joules

    def end_window(self, key: str, sync_execution: bool = True) -> Measurement:
        assert not sync_execution
        joules = self.machine.joules - self._open.pop(key)
        if self.gpu_indices:
            return Measurement({0: joules})
        return Measurement({}, {0: 0.75 * joules}, {0: 0.25 * joules})


class Process:
    """A side of the comparison whose steps take seconds and joules."""

    def __init__(self, machine: Machine, seconds: float, watts: float) -> None:
        self.machine, self.seconds, self.watts = machine, seconds, watts
        self.fails = False

    def step(self) -> float:
        if self.fails:
            raise OutOfMemoryError("no memory", needed="more", hint="less")
        self.machine.log.append(f"{self.seconds}")
        self.machine.run(self.seconds, self.watts)
        return self.seconds

    def first_steps(self) -> FirstSteps:
        return FirstSteps({Result(1, "loss"): "same"}, 16 * MIB, (), rows=4)

    def close(self) -> None:
        self.fails = True

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with Zeus, one GPU and one package of processors."""
    module: Any = ModuleType("zeus.monitor")
    module.ZeusMonitor = ZeusMonitor
    monkeypatch.setattr(ZeusMonitor, "machine", Machine())
    monkeypatch.setitem(sys.modules, "zeus", ModuleType("zeus"))
    monkeypatch.setitem(sys.modules, "zeus.monitor", module)
    return ZeusMonitor.machine


@pytest.fixture
def pair(machine: Machine) -> Iterator[tuple[StepPair, Process, Process]]:
    """Steps of 2 s at 100 W without the plan, of 2.5 s at 90 W with it."""
    sides = Process(machine, 2.0, 100.0), Process(machine, 2.5, 90.0)
    starts: list[Callable[..., Any]] = [lambda: sides[0], lambda: sides[1]]
    with ExitStack() as running:
        yield StepPair(starts, lambda: None, running), *sides


def silent(what: str, done: int, total: int) -> None:
    pass


def test_joules_are_those_of_the_counters_in_windows_of_at_least_five_seconds(
    machine: Machine, pair: tuple[StepPair, Process, Process]
) -> None:
    for device, name in (("cuda", "GPU 0"), ("cpu", "the processors and their memory")):
        machine.log.clear()
        told: list[str] = []
        found = measure_energy(
            energy_counters(device),
            pair[0],
            8,
            lambda what, done, total, told=told: told.append(what),  # type: ignore[misc]
            machine.clock,
        )
        assert found.planned_joules_per_step == pytest.approx((225.0,) * 3)
        assert found.unplanned_joules_per_step == pytest.approx((200.0,) * 3)
        assert found.added == pytest.approx((0.125,) * 3)
        assert (found.windows, found.counters) == (WINDOWS, name)
        # Two steps of 2.5 s, three of 2 s: whole steps, none shorter than a window.
        assert found.shortest_window_seconds == WINDOW_SECONDS == 5.0
        turns = ["2.0"] * 3 + ["2.5"] * 2 * 2 + ["2.0"] * 3
        assert machine.log[: len(turns)] == turns
        assert {*told} == {"measuring energy"}


def test_spread_is_of_the_windows(
    machine: Machine, pair: tuple[StepPair, Process, Process]
) -> None:
    both, _, planned = pair
    watts = iter([80.0, 80.0, 90.0, 90.0, 100.0, 100.0, 110.0, 110.0, 120.0, 120.0])
    step = planned.step

    def step_at_other_watts() -> float:
        planned.watts = next(watts)
        return step()

    planned.step = step_at_other_watts  # type: ignore[method-assign]
    found = measure_energy(energy_counters("cuda"), both, None, silent, machine.clock)
    assert found.planned_joules_per_step == pytest.approx((225.0, 250.0, 275.0))
    assert found.samples_per_step is None


def test_a_plan_alone_is_measured_where_both_do_not_fit(
    machine: Machine, pair: tuple[StepPair, Process, Process]
) -> None:
    both, unplanned, _ = pair
    unplanned.fails = True  # in its first step, as memory runs out
    found = measure_energy(energy_counters("cuda"), both, 8, silent, machine.clock)
    assert found.planned_joules_per_step.median == pytest.approx(225.0)
    assert found.unplanned_joules_per_step is found.added is None
    assert both.notes == [NOTE_NOT_TOGETHER]
    shown = render(verification_report(verification(energy=found)))
    assert "n/a" in shown[shown.index("Energy") :]


def test_counters_that_stand_still_are_no_measurement(
    machine: Machine, pair: tuple[StepPair, Process, Process]
) -> None:
    both, unplanned, planned = pair
    unplanned.watts = planned.watts = 0.0
    with pytest.raises(CkplanError, match=r"counters of GPU 0 stood still for 6\.0 s"):
        measure_energy(energy_counters("cuda"), both, 8, silent, machine.clock)


def test_a_machine_without_zeus_or_counters_says_so(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CkplanError, match="energy on cuda:3: no GPU 3 in this machine"):
        energy_counters("cuda:3")
    monkeypatch.setattr(ZeusMonitor, "packages", ())
    with pytest.raises(CkplanError, match="energy on cpu: no package") as caught:
        energy_counters("cpu")
    assert len(str(caught.value).splitlines()) == 3
    monkeypatch.setitem(sys.modules, "zeus.monitor", None)
    with pytest.raises(
        CkplanError, match="the package zeus is not installed"
    ) as caught:
        energy_counters("cpu")
    assert "pip install 'ckplan[energy]'" in caught.value.hint


def test_verify_measures_energy_if_it_is_asked_to(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def process(spec: object, plan: Plan | None, *_: object, one_thread: bool) -> Any:
        return Process(machine, *((2.0, 100.0) if plan is None else (2.5, 90.0)))

    monkeypatch.setattr(verifying, "StepProcess", process)
    monkeypatch.setattr(energy, "WINDOW_SECONDS", 1e-9)  # of this machine's clock
    found = verifying.verify(
        WorkloadSpec("model.py"), Plan(), accumulate=2, steps=0, energy=True
    ).energy
    assert found is not None and found.added is not None
    assert found.added.median == pytest.approx(0.125)
    assert found.samples_per_step == 2 * 4
    monkeypatch.setitem(sys.modules, "zeus.monitor", None)
    monkeypatch.setattr(verifying, "StepProcess", None)  # nothing runs before that
    with pytest.raises(CkplanError, match="package zeus is not installed"):
        verifying.verify(WorkloadSpec("model.py"), Plan(), energy=True)


class WallMonitor(ZeusMonitor):
    """Counts 50 watts for as long as it takes."""

    def begin_window(self, key: str, sync_execution: bool = True) -> None:
        self.machine.joules = 50 * time.perf_counter()
        super().begin_window(key, sync_execution)

    def end_window(self, key: str, sync_execution: bool = True) -> Measurement:
        self.machine.joules = 50 * time.perf_counter()
        return super().end_window(key, sync_execution)


COMMAND = ("verify", "model.py", "plan.yaml", "--steps", "0", "--energy")


@pytest.mark.slow
def test_the_command_measures_real_steps(
    run: Run, folder: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["zeus.monitor"], "ZeusMonitor", WallMonitor)
    monkeypatch.setattr(energy, "WINDOW_SECONDS", 0.01)
    (folder / "plan.yaml").write_text("ckplan: 1\nregions: [{calls: '0'}]\n")
    ended = run(*COMMAND, "--json")
    found = json.loads(ended.out)["energy"]
    assert (ended.code, found["windows"]) == (0, WINDOWS)
    low, median, high = found["planned_joules_per_step"]
    assert 0 < low <= median <= high
    assert found["shortest_window_seconds"] >= 0.01


def test_the_command_says_what_it_needs_before_it_runs_anything(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zeus.monitor", None)
    monkeypatch.setattr(verifying, "StepProcess", None)
    (folder / "plan.yaml").write_text("ckplan: 1\nregions: [{calls: '0'}]\n")
    ended = run(*COMMAND)
    error = ended.err.splitlines()
    assert (ended.code, ended.out) == (1, "")
    assert error[0] == "error: cannot measure energy: the package zeus is not installed"
    assert [line[:10] for line in error[1:]] == ["  needed: ", "  try:    "]


def test_joules_are_printed_with_their_spread_and_are_in_the_json() -> None:
    planned, unplanned = Quartiles(220.0, 225.0, 230.0), Quartiles(195.0, 200.0, 205.0)
    measured = Energy(
        "GPU 0", 5, 5.25, planned, unplanned, Quartiles(0.1, 0.125, 0.15), 8
    )
    found = verification(energy=measured)
    shown = " ".join(render(verification_report(found)).split())
    for words in (
        "Energy, measured",
        "per step 225 J 220 J to 230 J 200 J 195 J to 205 J",
        "per sample 28.1 J 27.5 J to 28.8 J 25.0 J 24.4 J to 25.6 J",
        "added +12.5 % +10.0 % to +15.0 %",
        "5 windows a side in turns, the shortest of 5.25 s",
    ):
        assert words in shown
    plain = json.loads(json.dumps(found.as_json()))["energy"]
    assert plain["planned_joules_per_step"] == [220.0, 225.0, 230.0]
    assert plain["shortest_window_seconds"] == 5.25
    assert json.loads(json.dumps(verification().as_json()))["energy"] is None
    assert "Energy" not in render(verification_report(verification()))
