"""Verification: what differs is named, what is killed is said, nothing is left over."""

import gc
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from types import ModuleType
from typing import Any

import graphs
import pytest
import torch
from torch import nn

import ckplan
from ckplan.errors import CkplanError, VerifyError, WorkloadError
from ckplan.plan.plan import Plan, PlannedRegion, Prediction
from ckplan.plan.tiles import RowTiles, Tiles
from ckplan.report.tables import render
from ckplan.report.verification import verification_error, verification_report
from ckplan.simulating.simulate import simulate
from ckplan.tracing.costs.spread import NO_LOAD, Load
from ckplan.tracing.profile import profile_workload
from ckplan.training.allocator import log_allocations
from ckplan.training.loading import WorkloadSpec
from ckplan.training.step import Training, make_step
from ckplan.training.workload import Workload
from ckplan.verifying import compare_steps as pair
from ckplan.verifying import verify as verifying
from ckplan.verifying.closeness import Reference, difference
from ckplan.verifying.phases import PhaseSeconds, TimedStep
from ckplan.verifying.step_process import StepProcess, interleave
from ckplan.verifying.verify import Verification, verify
from ckplan.verifying.worker import (
    FIRST_STEPS,
    TIMED_STEP,
    FirstSteps,
    Job,
    OutOfMemoryError,
    Result,
    Worker,
)
from ckplan.verifying.worker_state import (
    cap_memory,
    digest,
    live_bytes_of,
    persistent_storages,
)

SLOW = pytest.mark.slow
MLP = WorkloadSpec(
    str(Path(__file__).parents[2] / "configs/workloads/mlp.py"),
    {"layers": 2, "width": 16, "batch": 8},
)

# A workload that brings its own `ckplan.applying`: to apply a plan is to do what the
# plan's model is called.
WORKLOAD = """
import os, signal, sys, types
import torch
from torch import nn

def do(action, rows=0):
    if action.startswith("hold at most "):
        action = "ask for too much" * (rows > int(action.split()[3]))
    if action == "draw a number":
        torch.rand(1)
    elif action == "be killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "ask for too much":
        torch.empty(2**60, dtype=torch.uint8)
    elif action == "fail":
        raise ValueError("no such luck\\nand more")
    elif action == "talk":
        print("printed by the model")
        os.system("echo printed by a child of the model")
        print(repr(sys.stdin.read()))

class Net(nn.Module):
    def __init__(self, action):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout()
        self.action = action

    def forward(self, x):
        do(self.action, len(x))
        if self.action == "count twice":
            with torch.no_grad():
                self.norm(x)
        return self.drop(self.norm(self.linear(x)))

def apply(model, plan, spill=None):
    model.action = plan.model

def status(model):
    regions = [("linear#0", 2), ("norm#0", 0)]
    return types.SimpleNamespace(
        regions=[types.SimpleNamespace(call=c, runs=n, kept=0, repeatable=True)
            for c, n in regions],
        spilled_bytes=0,
        host_bytes=0,
    )

sys.modules["ckplan.applying"] = types.ModuleType("ckplan.applying")
sys.modules["ckplan.applying"].__dict__.update(
    apply=apply, status=status, remove=lambda model: None
)

def build(*, when_built="", when_unplanned="", rows=8):
    do(when_built)
    return Net(when_unplanned), torch.randn(rows, 4)
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of that workload, and nothing left of it afterwards."""
    name = "ckplan.applying"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    path = tmp_path / "model.py"
    path.write_text(WORKLOAD)
    return str(path)


def _answer(
    target: str, plan: Plan | None = None, seed: int = 0, **options: str
) -> Any:
    job = Job(WorkloadSpec(target, options), plan, Training("none"), seed)
    return Worker(job).answer(FIRST_STEPS)


def _first_steps(peak_bytes: int = 100, **digests: str) -> FirstSteps:
    return FirstSteps(
        {Result(1, kind): value for kind, value in digests.items()}, peak_bytes, ()
    )


class _Scripted:
    """A process that answers from a list and raises what is an error in it."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers
        self.log: list[str] = []

    def first_steps(self) -> FirstSteps:
        return self._next()

    def timed_step(self) -> TimedStep:
        seconds = self._next()
        return TimedStep(seconds, PhaseSeconds(seconds / 4, seconds / 2, seconds / 4))

    def _next(self) -> Any:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def start(self) -> None:
        self.log.append("start")

    def close(self) -> None:
        self.log.append("close")

    def __enter__(self) -> "_Scripted":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Verification]:
    """``verify`` with an unplanned and a planned process that follow a script."""

    def run(
        unplanned: _Scripted,
        planned: _Scripted,
        plan: Plan,
        load: Load = NO_LOAD,
        **options: Any,
    ) -> Any:
        def process(
            spec: object, choice: Plan | None, *_: object, one_thread: bool
        ) -> _Scripted:
            del spec, one_thread
            return unplanned if choice is None else planned

        monkeypatch.setattr(verifying, "StepProcess", process)
        monkeypatch.setattr(verifying, "machine_load", lambda: load)
        return verify(MLP, plan, **options)

    return run


FULL = OutOfMemoryError("the step ran out of memory", needed="more", hint="less")


@pytest.mark.serial
def test_a_workload_equals_itself_in_two_processes():
    told: list[str] = []
    found = verify(MLP, None, steps=3, progress=lambda what, *_: told.append(what))
    assert (found.passed, found.different, found.fits) == (True, (), True)
    assert found.gradients_equal and found.buffers_equal and found.loss_equal
    assert found.measured_peak_bytes == found.unplanned_measured_peak_bytes > 0
    assert found.step_seconds and found.unplanned_step_seconds
    assert found.overhead is not None or found.timing_problem is not None
    measured = found.phases.measured
    assert measured is not None and found.phases.predicted is None
    assert min(measured.forward_seconds, measured.backward_seconds) > 0
    assert measured.optimizer_seconds > 0
    assert (
        found.budget_bytes,
        found.notes,
    ) == (None, ())
    stages = [
        "running steps without the plan",
        "running steps with the plan",
        "timing steps",
    ]
    assert stages == list(dict.fromkeys(told))


def test_a_plan_that_changes_the_results_and_exceeds_its_budget_does_not_pass(
    target: str,
):
    plan = Plan("draw a number", budget_bytes=1, predicted=Prediction(7, "", 0.5, 9))
    found = verify(WorkloadSpec(target), plan, optimizer="none", steps=0)
    assert (found.passed, found.fits) == (False, False)
    assert (found.gradients_equal, found.loss_equal) == (False, False)
    assert found.different[:2] == ("loss, step 1", "gradient of linear.weight, step 1")
    assert (
        found.predicted_peak_bytes,
        found.predicted_overhead,
        found.budget_bytes,
    ) == (7, 0.5, 1)
    assert (found.regions_ran, found.regions_idle) == (1, ("norm#0",))
    assert (found.step_seconds, found.overhead) == (None, None)
    assert {
        "passed",
        "gradients_equal",
        "buffers_equal",
        "loss_equal",
        "predicted_peak_bytes",
        "measured_peak_bytes",
        "unplanned_measured_peak_bytes",
        "step_seconds",
        "unplanned_step_seconds",
        "fits",
    } <= set(json.loads(json.dumps(found.as_json())))


def test_buffers_that_forward_changes_twice_are_named(target: str):
    before, after = _answer(target), _answer(target, Plan("count twice"))
    different = [
        str(key) for key in before.digests if before.digests[key] != after.digests[key]
    ]
    assert "buffer of norm.num_batches_tracked, step 1" in different
    assert not any("gradient" in name or "loss" in name for name in different)


def test_another_seed_gives_other_results_and_the_same_seed_the_same(target: str):
    first, same, other = (_answer(target, seed=seed) for seed in (0, 0, 1))
    assert first == same
    assert first.peak_bytes == other.peak_bytes
    assert "random state" in {
        key.kind for key in first.digests if first.digests[key] != other.digests[key]
    }


@pytest.mark.parametrize("action", ["draw a number", "count twice", ""])
def test_the_random_state_after_the_steps_is_compared(target: str, action: str):
    key = Result(2, "random state")
    before, after = _answer(target), _answer(target, Plan(action))
    assert (action != "draw a number") == (before.digests[key] == after.digests[key])


def test_garbage_of_before_is_no_part_of_the_peak(target: str):
    gc.disable()
    expected = _answer(target).peak_bytes
    with log_allocations():  # else the profiler does not know its size
        garbage: list[Any] = [torch.ones(1 << 20)]
    garbage.append(garbage)
    del garbage
    assert _answer(target).peak_bytes == expected


def test_what_the_model_prints_and_reads_stays_apart(target: str, capfd: Any):
    spec = WorkloadSpec(target, {"when_unplanned": "talk"})
    with StepProcess(spec, training=Training("none")) as process:
        assert process.first_steps().peak_bytes > 0
        assert process.step() > 0
    out, err = capfd.readouterr()
    assert out == ""
    assert 3 == err.count("printed by the model\n") == err.count("''\n")
    assert err.count("printed by a child of the model\n") == 3


def test_a_factory_that_raises_is_a_workload_error(target: str):
    spec = WorkloadSpec(target, {"when_built": "fail"})
    what = "ValueError: no such luck"
    with (
        pytest.raises(WorkloadError, match=what) as caught,
        StepProcess(spec) as process,
    ):
        process.first_steps()
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("last_words", "kind", "what"),
    [
        ("os.kill(os.getpid(), 9)", OutOfMemoryError, "the planned step was killed"),
        ("os.abort()", VerifyError, "the planned step ended its process with SIGABRT"),
        ("os._exit(3)", VerifyError, "ended its process with exit code 3"),
        ("os.write(1, b'chatter')", VerifyError, "with exit code 0"),
    ],
)
def test_a_process_that_dies_is_an_error(
    last_words: str, kind: type[CkplanError], what: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(StepProcess, "main", f"import os; {last_words}")
    with StepProcess(MLP, Plan()) as process:
        with pytest.raises(kind, match=what):
            process.first_steps()
        with pytest.raises(kind, match=what):
            process.step()


def test_an_unplanned_step_that_is_killed_leaves_nothing_to_compare_with(target: str):
    spec = WorkloadSpec(target, {"when_unplanned": "be killed", "rows": 2})
    found = verify(spec, Plan(), optimizer="none", steps=1)
    assert found.passed
    assert (
        found.gradients_equal,
        found.buffers_equal,
        found.loss_equal,
    ) == (None, None, None)
    assert (
        found.unplanned_measured_peak_bytes,
        found.unplanned_step_seconds,
        found.overhead,
    ) == (None, None, None)
    assert found.step_seconds and found.measured_peak_bytes
    assert found.notes == (pair.NOTE_NOT_COMPARED,)


@pytest.mark.parametrize(
    ("planned", "action", "kind", "what"),
    [
        (False, "fail", WorkloadError, "the unplanned step raised ValueError in fo"),
        (True, "fail", VerifyError, "the planned step raised ValueError in forw"),
        (True, "ask for too much", OutOfMemoryError, "the planned step ran out of mem"),
        (False, "ask for too much", OutOfMemoryError, "the unplanned step ran out of "),
    ],
)
def test_a_step_that_raises_is_an_error_of_three_lines(
    target: str, planned: bool, action: str, kind: type[CkplanError], what: str
):
    plan = Plan(action) if planned else None
    error = _answer(target, plan, when_unplanned="" if planned else action)
    assert kind is type(error)
    assert error.what.startswith(what)
    assert len(str(error).splitlines()) == 3
    if action == "fail":
        assert error.hint.startswith(f"look at {target}, line ")


def test_memory_that_runs_out_while_building_is_no_fault_of_the_workload(target: str):
    error = _answer(target, when_built="ask for too much")
    assert OutOfMemoryError is type(error)


def test_a_planned_step_that_does_not_fit_beside_the_other_runs_alone(
    scripted: Callable[..., Verification],
):
    unplanned = _Scripted([_first_steps(200, loss="a")])
    planned = _Scripted([FULL, _first_steps(100, loss="a"), 2.0, 3.0])
    found = scripted(unplanned, planned, Plan(budget_bytes=100), steps=2)
    assert (
        found.passed,
        found.loss_equal,
        found.unplanned_measured_peak_bytes,
    ) == (True, True, 200)
    assert (
        found.step_seconds,
        found.unplanned_step_seconds,
        found.overhead,
    ) == (2.5, None, None)
    assert found.notes == (pair.NOTE_NOT_TOGETHER,)
    assert planned.log == ["start", "start", "close"]


def test_a_planned_step_that_does_not_fit_alone_is_an_error(
    scripted: Callable[..., Verification],
):
    unplanned, planned = _Scripted([FULL]), _Scripted([FULL])
    with pytest.raises(OutOfMemoryError):
        scripted(unplanned, planned, Plan())
    assert "close" == unplanned.log[-1] == planned.log[-1]


def test_memory_that_runs_out_while_timing_costs_only_the_times(
    scripted: Callable[..., Verification],
):
    unplanned = _Scripted([_first_steps(), 1.0])
    planned = _Scripted([_first_steps(), FULL])
    found = scripted(unplanned, planned, Plan(), steps=5)
    assert (
        found.passed,
        found.step_seconds,
        found.notes,
    ) == (True, None, (pair.NOTE_NOT_TOGETHER,))


def test_steps_that_differ_by_chance_are_told_from_those_that_always_do(
    scripted: Callable[..., Verification],
):
    unplanned = _Scripted([_first_steps(loss=found) for found in "ab"])
    found = scripted(unplanned, _Scripted([_first_steps(loss="b")]), Plan(), steps=0)
    assert (found.passed, found.different) == (True, ())
    assert "2 runs without the plan gave 2 different results" in found.notes[0]
    always = [_Scripted([_first_steps(loss=found)] * 3) for found in "ab"]
    found = scripted(*always, Plan(), steps=0)
    assert (found.passed, found.different) == (False, ("loss, step 1",))
    assert found.notes == ()


def test_steps_that_never_agree_are_compared_on_one_thread(
    scripted: Callable[..., Verification],
):
    def differing(letters: str) -> list[_Scripted]:
        return [
            _Scripted([_first_steps(loss=one) for one in found])
            for found in letters.split()
        ]

    found = scripted(*differing("abcx defx"), Plan(), steps=0)
    assert (found.passed, found.different) == (True, ())
    assert "runs on one thread were compared" in found.notes[0]
    found = scripted(*differing("abcx defy"), Plan(), steps=0)
    assert (found.passed, found.different) == (False, ("loss, step 1",))


@pytest.mark.parametrize(
    ("bits", "losses", "end"),
    [
        ("same", "aa", "bits: same; all results have the same"),
        ("same", "ab", "bits: same, but results differ: do not train with this plan"),
        ("close", "aa", "bits: close; all results have the same"),
        ("close", "ab", "bits: close; results differ, how far is not known"),
    ],
)
def test_the_bits_that_a_plan_states_are_checked(
    scripted: Callable[..., Verification], bits: str, losses: str, end: str
):
    plan = Plan(regions=(PlannedRegion("head", "tiles", tiles=Tiles(2, 2, bits)),))
    sides = [_Scripted([_first_steps(loss=one)] * 3) for one in losses]
    found = scripted(*sides, plan, steps=0)
    assert found.notes == (f"head runs in tiles, the plan states {end}",)
    assert found.passed == (losses == "aa")
    if not found.passed:
        hint = verification_error(found).hint or ""
        assert ("--allow close" in hint, "bug" in hint) == (
            bits == "close",
            bits == "same",
        )


def test_same_bits_beside_close_ones_are_not_blamed(
    scripted: Callable[..., Verification],
):
    tiles = {"mlp": RowTiles(2, 2, "close", 1e-5), "other": RowTiles(2, 2)}
    regions = [PlannedRegion(one, "tiles", tiles=of) for one, of in tiles.items()]
    sides = [_Scripted([_first_steps(loss=one)] * 3) for one in "ab"]
    notes = scripted(*sides, Plan(regions=tuple(regions)), steps=0).notes
    assert any("other runs in tiles" in one and "close bits" in one for one in notes)
    assert not any("do not train" in one for one in notes)


CLOSE_HEAD = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(640, 16), nn.Linear(16, 640)

    def forward(self, ids):
        return cross_entropy(self.head(self.embedding(ids)), ids)


def build():
    return Model().bfloat16(), torch.arange(128) * 5
"""


def _plan_of_close_head(stated: float) -> Plan:
    tiles = Tiles(2, 4, "close", stated)
    return Plan(regions=(PlannedRegion("head", "tiles", tiles=tiles),))


@SLOW
def test_close_results_pass_within_what_the_plan_states(tmp_path: Path):
    (tmp_path / "model.py").write_text(CLOSE_HEAD)
    before = set(Path(gettempdir()).glob("ckplan-*"))
    for stated, passes in ((0.05, True), (1e-4, False), (0.0, False)):
        plan = _plan_of_close_head(stated)
        found = verify(tmp_path / "model.py", plan, optimizer="sgd", steps=0)
        assert found.passed == found.is_close == passes
        assert found.gradients_equal is False
        assert found.largest_difference and 1e-4 < found.largest_difference < 0.05
    assert set(Path(gettempdir()).glob("ckplan-*")) == before


def test_a_planned_process_measures_how_far_its_results_are(tmp_path: Path):
    (tmp_path / "model.py").write_text(CLOSE_HEAD)
    spec = WorkloadSpec(str(tmp_path / "model.py"))
    file = tmp_path / "results.pt"
    plain, close, again = (
        Worker(
            Job(spec, plan, Training("sgd"), 0, reference=Reference(file, is_planned))
        ).answer(FIRST_STEPS)
        for plan, is_planned in (
            (None, False),
            (_plan_of_close_head(0.05), True),
            (None, True),
        )
    )
    assert plain.differences == {}
    assert {*again.differences.values()} == {0.0}
    assert close.differences.keys() == again.differences.keys()
    assert close.differences["loss"] == close.differences["embedding.weight"] == 0.0
    assert 1e-4 < close.differences["head.weight"] < 0.05
    assert again.digests == plain.digests != close.digests


@pytest.mark.parametrize(
    ("stated", "far", "kinds", "passes"),
    [
        (0.05, 3.04e-3, "gradient", True),
        (3e-3, 3.04e-3, "gradient", False),
        (0.05, float("inf"), "gradient", False),
        (0.0, 3.04e-3, "gradient", False),
        (0.05, 3.04e-3, "buffer", False),
    ],
)
def test_close_results_are_held_to_what_the_plan_states(
    scripted: Callable[..., Verification],
    stated: float,
    far: float,
    kinds: str,
    passes: bool,
):
    one, other = (_first_steps(loss=text, **{kinds: text}) for text in "ab")
    other = replace(other, differences={"loss": 0.0, "head.weight": far})
    sides = _Scripted([one] * 3), _Scripted([other] * 3)
    found = scripted(*sides, _plan_of_close_head(stated), steps=0)
    assert found.passed == passes
    assert found.largest_difference == far
    assert f"; found up to {far:.1e}, in head.weight" in found.notes[0]
    shown = render(verification_report(found))
    assert ("close, as the plan states" in shown) == found.is_close
    if passes:
        return
    error = str(verification_error(found))
    assert error.count("\n") == 2
    if stated == 3e-3:
        assert "by 3.0e-03 of the largest value" in error
        assert "at most 3.0e-03, as the plan states" in error
        assert "difference: 3.2e-03 in the plan" in error


def test_differences_are_relative_to_the_largest_value():
    one = torch.tensor([1.0, -4.0, 2.0])
    assert difference(one, one.clone()) == 0.0
    assert difference(one, one + torch.tensor([0.0, 0.0, 1.0])) == 0.25
    assert difference(None, None) == 0.0
    for other in (None, one[:2], one.double(), one * float("nan")):
        assert difference(one, other) == float("inf")
    assert difference(torch.zeros(2), torch.ones(2)) == float("inf")


def test_overhead_is_the_median_of_ratios(scripted: Callable[..., Verification]):
    unplanned = _Scripted([_first_steps(), 1.0, 10.0, 1.0])
    planned = _Scripted([_first_steps(), 1.375, 12.5, 1.1875])
    found = scripted(unplanned, planned, Plan(), steps=3)
    assert found.step_seconds == 1.375
    assert found.unplanned_step_seconds == 1.0
    assert found.overhead == 0.25
    assert found.overhead_quartiles == (0.21875, 0.3125)
    assert found.timing_problem is None
    added = found.phases.added_seconds
    assert added is not None and added.median == 0.75 * 0.375


@pytest.mark.parametrize(
    ("planned", "load", "problem"),
    [
        ([0.3, 1.5, 1.6], NO_LOAD, "the quartiles of the rounds are 65.0 points apart"),
        ([1.1, 1.1, 1.1], Load(2.6, 2), "the machine is busy (load average 2.6, 2 "),
        ([1.1, 1.1], NO_LOAD, "a spread needs at least 3 rounds, not 2"),
    ],
)
def test_no_overhead_is_given_if_time_cannot_be_measured(
    scripted: Callable[..., Verification],
    planned: list[float],
    load: Load,
    problem: str,
):
    unplanned = _Scripted([_first_steps(), *(1.0 for _ in planned)])
    sides = unplanned, _Scripted([_first_steps(), *planned])
    found = scripted(*sides, Plan(), load, steps=len(planned))
    assert found.passed
    assert found.timing_problem is not None
    assert found.timing_problem.startswith(problem)
    assert (found.overhead, found.overhead_quartiles) == (None, None)
    assert found.phases.added_seconds is None
    text = render(verification_report(found))
    assert "time could not be measured: " in text
    assert "-70" not in text and "+10.0 %" not in text


def test_a_busy_machine_is_no_matter_if_no_step_is_timed(
    scripted: Callable[..., Verification],
):
    sides = _Scripted([_first_steps()]), _Scripted([_first_steps()])
    found = scripted(*sides, Plan(), Load(99.0, 2), steps=0)
    assert found.timing_problem is None


def test_steps_alternate_who_goes_first():
    order: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self._name = name

        def step(self) -> float:
            order.append(self._name)
            return float(len(order))

    seconds = interleave([Named("a"), Named("b")], rounds=3)
    assert "".join(order) == "abbaab"
    assert seconds == [[1.0, 4.0, 5.0], [2.0, 3.0, 6.0]]


def test_interrupted_processes_are_gone(monkeypatch: pytest.MonkeyPatch):
    started: list[int] = []
    start = StepProcess.start

    def remember(process: StepProcess) -> None:
        start(process)
        started.append(process.pid)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StepProcess, "start", remember)
    with pytest.raises(KeyboardInterrupt):
        verify(MLP, None, progress=interrupt)
    assert len(started) == 2
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_held_bytes_are_each_storage_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model.table = [torch.zeros(10)]  # neither a parameter nor a buffer
    step = make_step(Workload(model, torch.randn(8, 4)[:2]), Training("adamw"))
    weights, norm, batch = 4 * (16 + 4 + 4), 4 * (4 + 4), 4 * 8 * 4
    others = 4 * (4 + 4) + 8 + 4 * 10  # running statistics, their count, the table
    assert weights + norm + others + batch == live_bytes_of(persistent_storages(step))
    step.run()
    step.zero_grad()
    adam = 2 * (weights + norm) + 4 * 5  # two moments, and a count per parameter
    assert weights + norm + others + batch + adam == live_bytes_of(
        persistent_storages(step)
    )


def test_what_functions_of_the_loss_hold_is_held():
    model, noise, target = nn.Linear(4, 4), torch.randn(2, 4), torch.randn(2, 4)
    weighing = nn.CrossEntropyLoss(weight=torch.rand(4))
    known = 4 * (16 + 4) + 2 * 4 * 4  # the model, and the batch

    def held_beyond(loss: Any) -> int:
        step = make_step(Workload(model, torch.randn(2, 4), loss), Training("none"))
        return live_bytes_of(persistent_storages(step)) - known

    def far_from(one: Any, other: Any, out: Any, batch: Any) -> Any:
        return weighing(one + out, other)

    assert held_beyond(lambda out, batch: (out - target).square().mean()) == 4 * 8
    assert held_beyond(weighing) == held_beyond(far_from) == 4 * 4
    assert held_beyond(partial(far_from, noise, other=target)) == 4 * (4 + 8 + 8)
    assert held_beyond(partial(torch.sub, alpha=2)) == 0


def test_the_peak_is_what_the_step_holds_and_allocates(tmp_path: Path):
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\n"
        "def build():\n"
        "    model = torch.nn.Linear(1000, 100, bias=False)\n"
        "    return {'model': model, 'batch': torch.randn(10, 1000),\n"
        "            'loss': lambda output, batch: output.sum()}\n"
    )
    found = Worker(Job(WorkloadSpec(str(path)), None, Training("none"), 0)).answer(
        FIRST_STEPS
    )
    weight, batch, output, loss = 400_000, 40_000, 4_000, 4
    at_least = weight + batch + output + loss + weight  # with the gradient
    assert at_least <= found.peak_bytes <= at_least + 2 * output


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.zeros(0), torch.zeros(0, 3)),
        (torch.zeros(2), None),
        (torch.arange(4.0).view(2, 2), torch.arange(4.0).view(2, 2).t()),
        (torch.tensor([True]), torch.tensor([False])),
        (torch.tensor([1j]), torch.tensor([1j]).conj()),
    ],
)
def test_digests_differ_where_a_bit_a_shape_or_a_type_does(
    one: torch.Tensor, other: torch.Tensor | None
):
    assert digest(one) != digest(other)
    assert digest(one) == digest(one.clone())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_digests_are_of_the_values_and_not_of_how_they_lie(dtype: torch.dtype):
    values = torch.arange(6).to(dtype).view(2, 3)
    turned = values.t().contiguous().t()
    assert turned.stride() != values.stride()
    assert digest(values) == digest(turned) == digest(values.to_sparse())


def test_a_timed_step_follows_the_first_ones(target: str):
    worker = Worker(Job(WorkloadSpec(target), None, Training("none"), 0))
    worker.answer(FIRST_STEPS)
    assert worker.answer(TIMED_STEP).seconds > 0


@pytest.mark.slow
def test_a_script_without_a_main_guard_may_verify(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "from ckplan.training.loading import WorkloadSpec\n"
        "from ckplan.verifying.verify import verify\n"
        f"spec = WorkloadSpec({MLP.target!r}, {dict(MLP.options)!r})\n"
        "print(verify(spec, None, steps=1).passed)\n"
    )
    root = str(Path(__file__).parents[2])
    found = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "True\n"


def test_an_unplanned_step_that_does_not_fit_is_compared_with_every_layer_run_again(
    monkeypatch: pytest.MonkeyPatch,
):
    def run(planned: str, other: Any) -> Verification:
        plan = Plan(regions=(PlannedRegion("1"),))
        scripts = {
            "unplanned": _Scripted([FULL]),
            "planned": _Scripted([_first_steps(60, loss=planned), 1.0]),
            "other": _Scripted([other]),
        }

        def process(
            spec: object, choice: Plan | None, *how: object, one_thread: bool
        ) -> _Scripted:
            assert not one_thread
            if how[-3]:
                return _Scripted([VerifyError("no rows", needed="rows", hint="more")])
            if choice is None:
                return scripts["unplanned"]
            if choice is plan:
                return scripts["planned"]
            assert choice.regions == (PlannedRegion("h.[0..2]", "rerun"),)
            return scripts["other"]

        monkeypatch.setattr(verifying, "StepProcess", process)
        found = verify(MLP, plan, steps=1, trace=graphs.chain(3))
        assert found.unplanned_measured_peak_bytes is None
        assert (found.unplanned_step_seconds, found.overhead) == (None, None)
        assert (found.measured_peak_bytes, found.step_seconds) == (60, 1.0)
        return found

    same, differs = run("a", _first_steps(loss="a")), run("b", _first_steps(loss="a"))
    assert (same.loss_equal, same.passed) == (True, True)
    assert pair.NOTE_INSTEAD in same.notes
    assert (differs.loss_equal, differs.passed) == (False, False)
    neither = run("a", FULL)
    assert (neither.loss_equal, neither.passed) == (None, True)
    assert pair.NOTE_NOT_COMPARED in neither.notes


def test_an_unplanned_step_that_does_not_fit_is_compared_at_the_largest_half_that_does(
    target: str,
):
    spec = WorkloadSpec(target, {"when_unplanned": "hold at most 3 rows", "rows": 9})
    found = verify(spec, Plan("", budget_bytes=2**20), optimizer="none", steps=1)
    assert found.notes == (pair.NOTE_FEWER.format(2, 9),)
    assert found.passed and found.gradients_equal and found.random_state_equal
    assert found.unplanned_measured_peak_bytes is None
    assert found.unplanned_step_seconds is found.overhead is None
    assert found.step_seconds


@pytest.mark.parametrize("fits_at", [1, 2])
def test_a_difference_at_a_smaller_batch_counts(
    monkeypatch: pytest.MonkeyPatch, fits_at: int
):
    def process(
        spec: object, choice: Plan | None, *how: Any, one_thread: bool
    ) -> _Scripted:
        assert not one_thread
        name = f"{how[-3]}, {choice is None}" if how[-3] else "whole"
        fits = choice is not None or how[-3] == fits_at
        return _Scripted([_first_steps(60, loss=name), 1.0] if fits else [FULL])

    monkeypatch.setattr(verifying, "StepProcess", process)
    found = verify(MLP, Plan(), steps=1)
    assert (found.loss_equal, found.passed) == (False, False)
    assert found.different == ("loss, step 1",)
    assert found.measured_peak_bytes == 60


def test_a_cap_is_for_gpus_and_becomes_a_share_of_theirs(
    monkeypatch: pytest.MonkeyPatch,
):
    with pytest.raises(CkplanError, match="cannot cap the memory of cpu") as caught:
        verify(MLP, None, cap_bytes=1000)
    assert len(str(caught.value).splitlines()) == 3
    told: list[tuple[float, int]] = []
    card = types.SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, number: told.append((share, number)),
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    for cap_bytes in (20 * 2**30, 100 * 2**30, None):
        cap_memory(cap_bytes, torch.device("cuda", 1))
    cap_memory(20 * 2**30, torch.device("cuda"))
    assert told == [(0.25, 1), (1.0, 1), (0.25, 2)]  # torch wants a number


def test_what_a_model_holds_from_step_to_step_is_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(HOLDING)
    spec = WorkloadSpec(str(path))
    graph = profile_workload(spec)
    found = verify(spec, Plan(), trace=graph)
    assert found.measured_peak_bytes == simulate(graph).peak_bytes


HOLDING = """
import torch
from torch import nn

class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(64, 64), []

    def forward(self, x):
        self.seen.clear()
        for _ in range(4):
            x = torch.tanh(self.linear(x))
            self.seen.append(x.detach().clone())
        return x

def build():
    return Holding(), torch.randn(512, 64)
"""


def test_what_the_first_step_lets_go_is_counted_no_more(tmp_path: Path) -> None:
    """As torch's older weight norm does with the weight that it begins with."""
    path = tmp_path / "model.py"
    path.write_text(HOLDING.replace(", []", ", [torch.zeros(512, 1024)]"))
    spec = WorkloadSpec(str(path))
    graph = profile_workload(spec)
    found = verify(spec, Plan(), trace=graph, steps=0)
    assert found.measured_peak_bytes == simulate(graph).peak_bytes


FORWARDS = {
    # Masks that let an eighth through, to be read and to be written.
    "masks": """
        mask = torch.arange(len(x)) % 8 == 0
        y = torch.sin(self.linear(x)[mask])
        return torch.zeros_like(x).index_put((mask,), y)
    """,
    # A function that looks at what it saved, and runs no op on it.
    "looks": """
        return torch.tanh(Looks.apply(self.linear(x)))
    """,
    "looks last": """
        return torch.tanh(Looks.apply(self.linear.weight.exp()))
    """,
    # Another buffer in the place of one.
    "replaces": """
        x = torch.tanh(self.linear(x) + self.state)
        self.state = self.state * 0.9 + x.detach() * 0.1
        return x
    """,
}
DOING = """
import torch
from torch import nn

class Looks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.round()
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad.view(y.shape)

class Doing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(256, 256)
        self.register_buffer("state", torch.zeros(512, 256))

    def forward(self, x):
        FORWARD

def build():
    return nn.Sequential(Doing(), Doing()), torch.randn(512, 256)
"""


@pytest.mark.parametrize(
    "what",
    [
        what if what in ("looks", "replaces") else pytest.param(what, marks=SLOW)
        for what in FORWARDS
    ],
)
def test_the_peak_is_the_measured_one_where_a_forward(
    tmp_path: Path, what: str
) -> None:
    path = tmp_path / "model.py"
    path.write_text(DOING.replace("FORWARD", FORWARDS[what].strip()))
    spec = WorkloadSpec(str(path))
    graph = profile_workload(spec, replay=False)
    with StepProcess(spec) as process:
        measured_bytes = process.first_steps().peak_bytes
    assert -0.001 <= simulate(graph).peak_bytes / measured_bytes - 1 <= 0.003


DRAWN = """
import random

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)
        )
        self.cell = nn.LSTM(64, 16, batch_first=True)

    def forward(self, x, lengths):
        for layer in self.layers:
            if torch.rand(()) < 0.5 and random.random() < 0.9:
                x = layer(x)
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        return self.cell(packed)[0].data.square().mean()

def build():
    lengths = torch.randint(8, 64, (32,)).sort(descending=True).values
    return Drawn(), (torch.randn(32, 64, 64), lengths)
"""


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_step_that_follows_random_numbers_is_the_one_that_was_profiled(
    tmp_path: Path, seed: int
) -> None:
    path = tmp_path / "drawn.py"
    path.write_text(DRAWN)
    spec = WorkloadSpec(str(path))
    graph = profile_workload(spec, seed=seed, replay=False)
    found = verify(spec, Plan(), seed=seed, steps=0)
    error = simulate(graph).peak_bytes / found.measured_peak_bytes - 1
    assert -0.001 <= error <= 0.003
    other = profile_workload(spec, seed=seed + 2, replay=False)
    assert len(other.ops) != len(graph.ops)


BY_TURNS = """
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

around = nullcontext

class ByTurns(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.step = nn.Linear(64, 64), 0

    def forward(self, x):
        self.step += 1
        x = self.linear(x)
        with around():
            return torch.tanh(x).exp() if self.step % 2 else torch.sigmoid(x).cos()

def build(rows=256):
    return nn.Sequential(*(ByTurns() for _ in range(4))), torch.randn(rows, 64)
"""


def test_a_step_whose_ops_differ_keeps_to_its_budget(tmp_path: Path) -> None:
    path = tmp_path / "by_turns.py"
    path.write_text(BY_TURNS)
    spec = WorkloadSpec(str(path))
    graph = profile_workload(spec, training=Training("none"))
    found = verify(spec, ckplan.solve(graph, budget="75%"), optimizer="none", steps=0)
    assert found.fits and not found.regions_kept


def test_what_keeps_a_step_from_its_budget_is_named(tmp_path: Path) -> None:
    path = tmp_path / "by_turns.py"
    path.write_text(BY_TURNS.replace("around = nullcontext", "around = Watching"))
    spec = WorkloadSpec(str(path))
    graph = profile_workload(spec, training=Training("none"))
    plan = ckplan.solve(graph, budget="75%")
    found = verify(spec, plan, optimizer="none", steps=0)
    assert found.gradients_equal
    assert not found.fits
    assert found.regions_kept and not found.other
    hint = f"leave out {found.regions_kept[0]}, whose ops vary"
    assert hint in str(verification_error(found).hint)

    larger = WorkloadSpec(str(path), {"rows": 512})
    other = verify(larger, plan, optimizer="none", steps=0)
    assert not other.fits
    assert other.other == ("batch.0: plan float32[256,64], here float32[512,64]",)
    assert "profile and solve" in str(verification_error(other).hint)
