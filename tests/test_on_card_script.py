"""``scripts/on_card`` without a card: every part of it runs on the CPU.

On a GPU that computes nothing it runs in ``tracing/cuda/test_dummy_gpu.py``.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ckplan.errors import CkplanError
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec
from ckplan.training.step import Training
from ckplan.verifying.worker import FIRST_STEPS, FirstSteps, Job, Result, status_of

ROOT = Path(__file__).parents[1]
SMALL = ("--set", "layers=2", "--set", "width=32", "--set", "batch=64")
MACHINE = {"card": "NVIDIA X1", "driver": "1", "torch": "2.13.0"}
WAYS = [
    "unplanned",
    "every layer rerun",
    *(f"planned, {share}% down" for share in (25, 50, 75)),
]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module


def on_card(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts" / "on_card"), *argv],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )


# -- the whole of it -----------------------------------------------------------------


@pytest.mark.slow  # the dummy GPU goes through them, too
def test_a_small_model_goes_through_all_rows_on_the_cpu(tmp_path: Path) -> None:
    page, workload = tmp_path / "x.md", "configs/workloads/mlp.py"
    only = "--device", "cpu", "--only", str(ROOT / workload)
    done = on_card(*only, *SMALL, "-o", str(page))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert page.read_text() in done.stdout
    assert "**Kept.**" in page.read_text()
    rows = json.loads(page.with_suffix(".json").read_text())["rows"]
    named = [(row["model"], row["types"], row["step"]) for row in rows]
    assert named == [("mlp", types, way) for types in ("bf16", "fp32") for way in WAYS]
    for row in rows:
        assert row["done"], row
        assert row["bits"] == ("" if row["step"] == "unplanned" else "yes")
        assert row["measured_bytes"][0] == pytest.approx(
            row["predicted_bytes"][0], rel=0.003
        )
        assert len(row["seconds"]) == len(row["unplanned_seconds"]) >= 5
        assert row["predicted"]["step_seconds"] > 0
    again = on_card(*only, *SMALL, "-o", str(page))
    assert again.returncode == 0
    assert "mlp, bf16: " not in again.stderr, "nothing is left to measure"
    assert json.loads(page.with_suffix(".json").read_text())["rows"] == rows
    peaks = [row["measured_bytes"][0] for row in rows[-3:]]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] < rows[5]["measured_bytes"][0]


@pytest.mark.parametrize(
    ("argv", "what", "hint"),
    [
        (["--only", "gpt3", "-o", "x.md"], "the model 'gpt3'", "--only gpt2"),
        (["-o", "x.json"], "cannot write the page to 'x.json'", "-o x.md"),
        ([], "cannot tell where to write", "-o /tmp/on_card.md"),
    ],
)
def test_what_cannot_be_done_is_said(
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    what: str,
    hint: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["on_card", "--device", "cpu", *argv])
    with pytest.raises(CkplanError, match=what) as caught:
        load("on_card").main()
    assert caught.value.hint == hint


@pytest.mark.parametrize("wrong", ["0", "-1", "inf", "nan", "ten"])
def test_minutes_are_above_zero(
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["on_card", f"--minutes={wrong}"])
    with pytest.raises(SystemExit):
        load("on_card").main()
    assert f"minutes above zero, not '{wrong}'" in capsys.readouterr().err


def test_a_machine_that_lacks_something_is_told_so(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    script, session = load("on_card"), load("_card_session")
    for old in ("2.10.1+cu128", "1.13"):
        with pytest.raises(CkplanError, match="too old"):
            script.check_torch(old)
    for new in ("2.11.0", "2.13.0+cpu", "3.0", ""):
        script.check_torch(new)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CkplanError, match="cannot measure on a card"):
        session.check_card("cuda")
    session.check_card("cpu")
    there = script.find_spec
    monkeypatch.setattr(
        script,
        "find_spec",
        lambda name: None if name == "transformers" else there(name),
    )
    with pytest.raises(CkplanError, match="no package 'transformers'"):
        script.check_packages()


# -- the order of work, and its end --------------------------------------------------


class Recorded:
    """Stands for a session; notes what is asked of it."""

    def __init__(self, script: ModuleType, slow: str = "", broken: str = "") -> None:
        self.results = script.sys.modules["_card_results"]
        self.tests = (str(ROOT / "tests" / "none.py"),)
        self.slow, self.broken = slow, broken
        self.asked: list[str] = []
        self.pages: list[str] = []
        self.book: Any = None

    def engine(self) -> list[Any]:
        self.asked.append("engine")
        return [self.results.EngineRow("by: rerun", 1e-4, 2e-4)]

    def steps(self, model: Any, types: str, seconds: float, write: Any) -> None:
        key = f"{model.name}, {types}"
        self.asked.append(key)
        rows = [self.results.Row(model.name, types, way) for way in WAYS]
        write(rows)
        self.pages.append(self.book.page_path.read_text())
        if key == self.broken:
            raise ValueError("no such kernel\nand more")
        if key == self.slow:
            time.sleep(60)
        write([replace(row, done=True, seconds=(1.0, 2.0)) for row in rows])


@pytest.fixture
def work(
    load: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Measures with a recorded session, from what is in the file."""
    script = load("on_card")
    models = load("_card_steps").MODELS[:2]
    path = tmp_path / "page.md"
    ran = load("_card_results").TestRow("a.py::test_it", "passed")
    monkeypatch.setattr(script, "run_tests", lambda seconds, tests: [ran])

    def measured(minutes: float = 10, **how: str) -> Any:
        session = Recorded(script, **how)
        results = script.load(script.rows_path(path), MACHINE)
        keys = [f"{m.name}, {t}" for t in script.TYPES_IN_ORDER for m in models]
        keys = [script.TESTS_KEY, script.ENGINE_KEY, *keys]
        session.book = script.Book(results, path, keys)
        script.measure(session.book, session, models, script.Clock(minutes))
        return session

    return measured


def test_all_is_measured_in_order_and_not_again(work: Callable[..., Any]) -> None:
    session = work()
    models = ["gpt2, bf16", "resnet50, bf16", "gpt2, fp32", "resnet50, fp32"]
    assert session.asked == ["engine", *models]
    page = session.book.page_path.read_text()
    assert "Not reached" not in page
    assert "a.py::test_it" in page
    assert "NVIDIA X1" in page
    assert work().asked == []


def test_a_cut_run_leaves_what_it_had_and_the_next_goes_on(
    work: Callable[..., Any],
) -> None:
    start = time.monotonic()
    session = work(minutes=0.04, slow="resnet50, bf16")
    assert time.monotonic() - start < 10
    page = session.book.page_path.read_text()
    assert "Not reached: resnet50, bf16; gpt2, fp32; resnet50, fp32." in page
    assert "Kept" not in page
    assert "Not reached: gpt2, bf16" in session.pages[0], "written as it goes"
    assert work().asked == ["resnet50, bf16", "gpt2, fp32", "resnet50, fp32"]


def test_a_row_that_fails_says_why_and_the_others_are_measured(
    work: Callable[..., Any],
) -> None:
    session = work(broken="gpt2, bf16")
    assert session.asked[-1] == "resnet50, fp32"
    page = session.book.page_path.read_text()
    assert "ValueError: no such kernel " in page
    assert len(session.book.results.broken()) == len(WAYS)
    assert "**Broken:**" in page
    assert work().asked == [], "it would fail again: --fresh measures it anew"


def test_a_model_that_takes_too_long_is_left(
    work: Callable[..., Any],
    load: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load("on_card"), "MODEL_SECONDS", 0.5)
    session = work(slow="gpt2, bf16")
    assert session.asked[-1] == "resnet50, fp32"
    assert "took longer than 0 s" in session.book.page_path.read_text()


def test_a_file_of_something_else_is_refused(
    work: Callable[..., Any], load: Callable[[str], ModuleType]
) -> None:
    results = load("_card_results")
    path = work().book.page_path.with_suffix(".json")
    with pytest.raises(CkplanError, match=r"another machine \(torch\)"):
        results.load(path, {**MACHINE, "torch": "2.14.0"})
    whole = path.read_text()
    for cut in (whole[: len(whole) // 2], "[]", "{}", whole.replace("types", "type")):
        path.write_text(cut)
        with pytest.raises(CkplanError, match="no file of results") as caught:
            results.load(path, MACHINE)
        assert "--fresh" in caught.value.hint


# -- tests ---------------------------------------------------------------------------


def test_tests_run_until_their_time_is_up(
    load: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest, time\n"
        "def test_passes(): pass\n"
        "@pytest.mark.parametrize('x', ['a b'])\n"
        "def test_fails(x): assert False, 'as it must'\n"
        "def test_skips(): pytest.skip('no card')\n"
        "def test_hangs(): time.sleep(60)\n"
    )
    found = load("_card_tests").run_tests(8.0, [str(tmp_path)])
    assert [row.outcome for row in found] == ["passed", "failed", "skipped", "skipped"]
    assert found[1].name == "test_it.py::test_fails[a b]"
    assert found[2].why == "no card"
    assert found[3].why == "not reached within 8 s"


def test_the_tests_of_the_card_exist(load: Callable[[str], ModuleType]) -> None:
    ours = load("_card_tests")
    text = (ROOT / ours.FILE).read_text()
    for name in ours.TESTS:
        assert f"def {name}(" in text


def test_why_a_test_failed_is_in_its_row(load: Callable[[str], ModuleType]) -> None:
    text = (
        "tests/a.py::test_x[1] PASSED [ 50%]\n"
        "tests/a.py::test_y FAILED            [100%]\n"
        "FAILED tests/a.py::test_y - AssertionError: 1 != 2\n"
    )
    found = load("_card_tests").outcomes(text, "")
    assert [(row.name, row.outcome, row.why) for row in found] == [
        ("a.py::test_x[1]", "passed", ""),
        ("a.py::test_y", "failed", "AssertionError: 1 != 2"),
    ]
    (none,) = load("_card_tests").outcomes("ERROR: no such file\n", "exit code 4")
    assert (none.outcome, none.why) == ("failed", "exit code 4: ERROR: no such file")


# -- steps ---------------------------------------------------------------------------


class Preset:
    """A process whose results are known."""

    def __init__(self, gradient: str = "a", error: str = "", seconds: float = 1.0):
        kinds = {Result(1, "loss"): "a", Result(1, "gradient", "w"): gradient}
        self._first = FirstSteps(kinds, 100, ())
        self._error, self._seconds = error, seconds

    def __enter__(self) -> Preset:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def carry(self, plan: object) -> None:
        pass

    def first_steps(self) -> FirstSteps:
        if self._error:
            raise CkplanError(self._error, needed="memory", hint="less of it")
        return self._first

    def step(self) -> float:
        return self._seconds

    def device_time(self) -> Any:
        return SimpleNamespace(seconds=self._seconds / 4, is_exact=False)


def measured(
    steps: ModuleType, processes: Sequence[Preset], again: Sequence[Preset] = ()
) -> list[Any]:
    """Rows after the steps of known processes; ``again`` with deterministic kernels."""
    rows = tuple(
        replace(steps.Row("m", "fp32", way), budget_bytes=150 if i > 1 else None)
        for i, way in zip(range(len(processes)), WAYS, strict=False)
    )
    found: list[Any] = []
    prepared = steps.Prepared(rows, (None,) * len(rows))
    one = steps.Measurement(prepared, WorkloadSpec("x.py"), "cpu", found.append)
    left = iter(again)
    one._start = lambda kind: next(left)
    one.run(processes, 0.0)
    return list(found[-1])


def test_bits_that_differ_by_chance_are_told_from_those_of_a_plan(
    load: Callable[[str], ModuleType],
) -> None:
    steps = load("_card_steps")
    processes = [Preset(), Preset(), Preset("b"), Preset("c")]
    again = [Preset(), Preset(), Preset(), Preset("d")]
    rows = measured(steps, processes, again)
    assert [row.bits for row in rows] == [
        "",
        "yes",
        "yes, with deterministic kernels",
        "no: gradient",
    ]
    assert [bool([*row.broken()]) for row in rows] == [False, False, False, True]


def test_a_process_that_fails_is_a_row_and_the_others_are_timed(
    load: Callable[[str], ModuleType],
) -> None:
    steps = load("_card_steps")
    rows = measured(steps, [Preset(), Preset(error="ran out"), Preset(seconds=1.5)])
    assert [row.failed for row in rows] == ["", "ran out", ""]
    assert all(row.done for row in rows)
    assert set(rows[2].overheads) == {0.5}
    assert rows[1].seconds == ()
    assert rows[2].launch_bound == 0.75
    assert rows[2].time_cells()[-3:] == ["<= 375.00 ms", "n/a", ">= 75.0 %"]
    over = replace(rows[2], budget_bytes=99)
    assert [*over.broken()] == [f"{over.name}: the measured peak is above the budget"]
    without = measured(steps, [Preset(error="ran out"), Preset()])
    assert without[1].overheads == []
    assert without[1].bits == ""


def test_a_card_has_rows_of_its_allocator_and_its_roofline(
    load: Callable[[str], ModuleType],
) -> None:
    steps = load("_card_steps")
    spec = WorkloadSpec(str(ROOT / "configs/workloads/mlp.py"), {"layers": 3})
    graph = profile_workload(spec, device="cuda", gpu="H100")
    prepared = steps.planned("mlp", "fp32", graph)
    assert [row.step for row in prepared.rows] == WAYS
    for row in prepared.rows:
        peak_bytes, allocated_bytes, reserved_bytes = row.predicted_bytes
        assert peak_bytes <= allocated_bytes <= reserved_bytes
        assert row.budget_bytes is None or peak_bytes <= row.budget_bytes
    for row in steps.add_roofline(prepared, spec, "H100").rows:  # as was profiled
        assert row.roofline == row.predicted
    slower = steps.add_roofline(prepared, spec, "T4").rows
    assert all(
        a.roofline.step_seconds > b.predicted.step_seconds
        for a, b in zip(slower, prepared.rows, strict=True)
    )
    assert steps.card_like(85_000_000_000, (9, 0)) == "H100"
    assert steps.card_like(150_000_000_000, (9, 0)) == "H200"
    assert steps.card_like(1, (3, 5)) is None


def test_small_cards_get_smaller_batches(load: Callable[[str], ModuleType]) -> None:
    steps = load("_card_steps")
    halvings = steps.halvings_for
    assert [halvings(int(gb * 1e9)) for gb in (140, 85, 42, 25, 16)] == [0, 0, 1, 2, 3]
    assert halvings(None) == 0
    first = steps.MODELS[0]
    whole, half = (first.spec(times, {}).options["batch"] for times in (0, 1))
    assert whole == 2 * half
    for model in steps.MODELS:  # options of the workloads as they are
        model.spec(0, {}).load()


def test_deterministic_processes_are_that(
    load: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    workload = tmp_path / "chosen.py"
    workload.write_text(
        "import torch\n"
        "def build():\n"
        "    assert torch.are_deterministic_algorithms_enabled(), 'by chance'\n"
        "    return torch.nn.Linear(2, 2), torch.ones(1, 2)\n"
    )
    steps, worker = load("_card_steps"), load("_card_worker")
    spec = WorkloadSpec(str(workload))
    with steps.start(spec, "fp32", "cpu", worker.DeterministicProcess) as process:
        assert process.first_steps().peak_bytes > 0
        assert process.device_time() is None
    with (
        steps.start(spec, "fp32", "cpu") as process,
        pytest.raises(CkplanError, match="by chance"),
    ):
        process.first_steps()


def test_a_process_that_is_ended_ends_no_session(
    load: Callable[[str], ModuleType],
) -> None:
    with load("_card_session").Session("cpu") as session:
        with pytest.raises(CkplanError, match="was ended"):
            session._elsewhere(os._exit, 3)
        assert session._elsewhere(divmod, 7, 2) == (3, 1)
        with pytest.raises(CkplanError, match="ZeroDivisionError: "):
            session._elsewhere(divmod, 7, 0)
        assert session.machine() == {"card": "cpu", "torch": torch.__version__}


def test_the_driver_is_what_nvidia_smi_says(
    load: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said = load("_card_session").driver
    assert said() == "not known" or Path("/proc/driver/nvidia/version").exists()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 580.65.06\n")
    tool.chmod(0o755)
    assert said() == "580.65.06"


# -- the device's part of a step -----------------------------------------------------


class Simulated:
    """A GPU that runs kernels one after the other, and a processor that launches."""

    def __init__(self, launch_seconds: float, kernel_seconds: float) -> None:
        self.launch, self.kernel = launch_seconds, kernel_seconds
        self.now = self.free = 0.0  # of the processor; when the device is done

    def kernels(self, number: int) -> None:
        for _ in range(number):
            self.now += self.launch
            self.free = max(self.now, self.free) + self.kernel

    def sleep(self, cycles: int) -> None:
        self.free = max(self.now, self.free) + cycles / 1e9

    def synchronize(self, device: object = None) -> None:
        self.now = max(self.now, self.free)

    def event(self, enable_timing: bool) -> Any:
        at = SimpleNamespace(when=0.0)
        at.record = lambda: setattr(at, "when", max(self.now, self.free))
        at.query = lambda: self.now >= at.when
        at.elapsed_time = lambda other: 1e3 * (other.when - at.when)
        return at


@pytest.fixture
def simulated(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    worker = load("_card_worker")

    def device_time(launch: float, kernel: float, waits: bool = False) -> Any:
        gpu = Simulated(launch, kernel)
        monkeypatch.setattr(torch.cuda, "_sleep", gpu.sleep, raising=False)
        monkeypatch.setattr(torch.cuda, "Event", gpu.event)
        monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
        monkeypatch.setattr(
            worker, "time", SimpleNamespace(perf_counter=lambda: gpu.now)
        )

        def forward() -> tuple[int, int, str]:
            gpu.kernels(50)
            if waits:
                gpu.synchronize()
            gpu.kernels(50)
            return 1, 2, ""

        step = SimpleNamespace(
            zero_grad=lambda: None,
            forward=forward,
            backward=lambda loss: gpu.kernels(200),
            update=lambda: gpu.kernels(10),
        )
        return worker.device_time(step, worker.Queue(torch.device("cuda")))

    yield device_time


@pytest.mark.parametrize("kernel", [1e-6, 1e-5, 1e-3])
def test_the_device_is_busy_as_long_as_its_kernels_take(
    simulated: Callable[..., Any], kernel: float
) -> None:
    found = simulated(launch=1e-5, kernel=kernel)
    assert found.seconds == pytest.approx(310 * kernel)
    assert found.is_exact


def test_a_step_that_waits_for_a_value_says_that_gaps_may_be_counted(
    simulated: Callable[..., Any],
) -> None:
    found = simulated(launch=1e-5, kernel=1e-6, waits=True)
    assert not found.is_exact
    assert found.seconds > 310e-6


# -- the engine ----------------------------------------------------------------------


def test_the_engine_is_divided_by_what_a_layer_has(
    load: Callable[[str], ModuleType],
) -> None:
    engine = load("_card_engine")
    taken = {
        engine.STEP: [(1.0, 2.0), (1.5, 2.0), (1.0, 2.0)],
        engine.BY_HAND: [(1.2, 2.8), (1.7, 2.8), (1.2, 2.8)],
        engine.RERUN_ALL: [(1.2, 3.2), (1.7, 3.2), (1.2, 3.2)],
        engine.KEPT: [(1.4, 2.2), (1.9, 2.2), (1.4, 2.2)],
        engine.NOTHING_SAVED: [(1.4, 3.2), (1.9, 3.2), (1.4, 3.2)],
    }
    step, by_hand, rerun, kept, nothing = engine.rows_of(
        taken, engine.Counts(layers=2, calls=10, saved=5, rebuilt=20)
    )
    assert (step.forward_seconds, step.backward_seconds) == (0.5, 1.0)
    assert by_hand.of_checkpoint == 1.0
    assert rerun.of_checkpoint == pytest.approx(1.4)
    assert rerun.backward_seconds == pytest.approx(0.6)
    assert kept.per_call_seconds == pytest.approx(0.2 / 10)
    assert kept.per_saved_seconds == pytest.approx(0.3 / 5)
    assert nothing.per_rebuilt_seconds == pytest.approx((0.8 - 0.3) / 20)


def test_the_engine_is_timed_in_every_way(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, worker = load("_card_engine"), load("_card_worker")
    workers: list[Any] = []

    class Here(Preset):
        """The same requests, answered in this process."""

        def __init__(
            self, spec: Any, plan: Any, training: Training, seed: int, device: str
        ) -> None:
            self._worker = worker.CardWorker(Job(spec, plan, training, seed, device))
            workers.append((plan, self._worker))

        def first_steps(self) -> Any:
            return self._worker.handle(FIRST_STEPS)

        def phases(self) -> Any:
            return self._worker.handle(worker.PHASES)

    monkeypatch.setattr(engine, "CardProcess", Here)
    monkeypatch.setattr(engine, "at_once", map)
    rows = engine.engine_rows("cpu", rounds=3, settings={"layers": 2})
    assert [row.way for row in rows] == [
        engine.STEP,
        engine.BY_HAND,
        engine.RERUN_ALL,
        engine.KEPT,
        engine.NOTHING_SAVED,
    ]
    assert min(rows[0].forward_seconds, rows[0].backward_seconds) > 0
    assert all(len(row.cells()) == len(load("_card_results").ENGINE) for row in rows)
    regions = [status_of(plan, one.step.workload.model)[0] for plan, one in workers]
    assert [len(found) for found in regions] == [0, 0, 2, 2, 2]
    assert all(region.runs for found in regions for region in found)
    spec = WorkloadSpec(str(ROOT / "configs/workloads/gpt2.py"), engine.TINY)
    assert 40 < engine.calls_of(spec, engine.LAYER) < 80  # 58 with transformers 5
