"""Costs kept on disk: measured once, made anew, out of date, damaged."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import ckplan
from ckplan.graph.graph import Graph
from ckplan.tracing.costs import calibrate as calibrating
from ckplan.tracing.costs import op_arguments, timing
from ckplan.tracing.costs.cost_cache import (
    BRIEF_SECONDS,
    LONGEST_SECONDS,
    MOST_RUNS,
    Cost,
    CostCache,
    cost_cache,
)
from ckplan.tracing.costs.spread import OtherPrograms
from ckplan.tracing.recording.recording import RawOp, TensorMeta

CPU = torch.device("cpu")
COST = Cost(3.0, 100, 50, measured=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CKPLAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def cache(folder: Path, now: float = 0.0, *, fresh: bool = False) -> CostCache:
    return CostCache(folder / "costs.json", fresh, now)


def profiled(*, fresh: bool = False) -> Graph:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.Linear(16, 8))
    return ckplan.profile(model, torch.ones(4, 8), fresh=fresh)


def test_what_was_learned_is_known_to_the_next_process(folder: Path) -> None:
    assert cache(folder).known(["mm"]) == {}
    assert cache(folder).learn({"mm": COST}) == {"mm": COST}
    assert cache(folder).known(["mm", "add"]) == {"mm": COST}


def test_the_median_of_the_last_runs_counts(folder: Path) -> None:
    for run, seconds in enumerate([1.0, 9.0, 8.0, 7.0, 6.0, 5.0]):
        found = cache(folder, run).learn({"mm": replace(COST, seconds=seconds)})
        assert found == cache(folder, run).known(["mm"])
    assert MOST_RUNS == 5  # so the first one is forgotten
    assert found["mm"].seconds == 7.0


def test_runs_go_out_of_date(folder: Path) -> None:
    cache(folder, now=0).learn({"mm": replace(COST, seconds=1.0)})
    cache(folder, now=100).learn({"mm": replace(COST, seconds=2.0)})
    later = LONGEST_SECONDS + 50
    assert cache(folder, later).known(["mm"])["mm"].seconds == 2.0
    assert cache(folder, later + 100).known(["mm"]) == {}


def test_runs_beside_other_programs_count_for_an_hour(folder: Path) -> None:
    now = 2 * LONGEST_SECONDS
    cache(folder, now).learn({"mm": replace(COST, seconds=9.0)}, busy=True)
    cache(folder, now).learn_runs({"add": [8.0, 9.0]}, busy=True)
    soon, later = (now + BRIEF_SECONDS + more for more in (-1, 1))
    assert cache(folder, soon).known(["mm"])["mm"].seconds == 9.0
    assert cache(folder, soon).known_runs("add") == (8.0, 9.0)
    assert cache(folder, later).known(["mm", "add"]) == {}
    cache(folder, now).learn({"mm": COST})
    cache(folder, now + 1).learn({"mm": replace(COST, seconds=9.0)}, busy=True)
    assert cache(folder, later + 1).known(["mm"])["mm"] == COST


@pytest.mark.parametrize("busy", [True, False])
def test_ops_that_were_measured_beside_other_programs_are_measured_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    monkeypatch.setattr(OtherPrograms, "are_busy", lambda _: busy)
    seconds = iter((2.0, 1.0))
    monkeypatch.setattr(calibrating, "time_runs", lambda *_: next(seconds))
    now = time.time()
    found = [
        calibrating.calibrate([recorded()], CPU, None, cache(folder, now + later))[0]
        for later in (0.0, BRIEF_SECONDS / 2, 2 * BRIEF_SECONDS)
    ]
    assert [one.seconds for one in found] == [2.0, 2.0, 1.0 if busy else 2.0]


def test_two_processes_do_not_undo_each_other(folder: Path) -> None:
    first, second = cache(folder), cache(folder)
    assert first.known(["mm"]) == second.known(["mm"]) == {}
    first.learn({"mm": COST})
    second.learn({"add": COST})
    assert set(cache(folder).known(["mm", "add"])) == {"mm", "add"}


def test_fresh_knows_nothing_and_adds_a_run(folder: Path) -> None:
    cache(folder).learn({"mm": COST})
    anew = cache(folder, 1, fresh=True)
    assert anew.known(["mm"]) == {}
    assert anew.learn({"mm": replace(COST, seconds=1.0)})["mm"].seconds == 1.0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00",
        b"[1]",
        b'{"ckplan_costs": 2, "costs": {}}',
        b'{"ckplan_costs": 1, "costs": {"a": [1, 2, []]}}',
        b'{"ckplan_costs": 1, "costs": {"a": [1, 2, [[0, -1]]]}}',
        b'{"ckplan_costs": 1, "costs": {"a": [1, 2, [["x", "y"]]]}}',
    ],
)
def test_a_damaged_file_is_said_to_be_and_written_anew(
    content: bytes, folder: Path
) -> None:
    folder.mkdir()
    (folder / "costs.json").write_bytes(content)
    found = cache(folder)
    assert found.known(["mm"]) == {}
    assert "could not be read" in found.notes[0]
    found.learn({"mm": COST})
    assert cache(folder).known(["mm"]) == {"mm": COST}


def test_a_folder_that_cannot_be_written_costs_a_note_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = cache(tmp_path / "file")
    assert found.learn({"mm": COST}) == {"mm": COST}
    assert found.learn({"mm": COST}) == {"mm": COST}
    assert [note for note in found.notes if "are not kept" in note] == found.notes[-1:]


def test_a_second_profile_measures_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = profiled()
    (path,) = folder.iterdir()
    before = path.read_bytes()

    def measured(*args: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(calibrating, "_measure", measured)
    second = profiled()
    assert second == first
    assert path.read_bytes() == before
    with pytest.raises(AssertionError, match="measured again"):
        profiled(fresh=True)


def test_fresh_adds_a_run_of_every_op(folder: Path) -> None:
    profiled()
    profiled(fresh=True)
    (path,) = folder.iterdir()
    rows = json.loads(path.read_text())["costs"].values()
    assert {len(runs) for _, _, runs in rows} == {2}


def test_other_threads_have_other_costs(folder: Path) -> None:
    threads = torch.get_num_threads()
    try:
        paths = set()
        for number in (1, 2):
            torch.set_num_threads(number)
            paths.add(cost_cache(CPU).path)
    finally:
        torch.set_num_threads(threads)
    assert len(paths) == 2
    assert all(path.parent == folder for path in paths)


def test_another_order_of_sums_has_other_costs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = set()
    for order in ("", "AUTO,STRICT", "COMPATIBLE"):
        monkeypatch.setenv("MKL_CBWR", order)
        kept.add(cost_cache(CPU).path)
    assert len(kept) == 3


def test_another_precision_of_matmuls_has_other_costs(folder: Path) -> None:
    usual = cost_cache(CPU).path
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert cost_cache(CPU).path != usual
    finally:
        torch.set_float32_matmul_precision(before)


def test_costs_are_kept_where_the_user_keeps_such_things(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CKPLAN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cost_cache(CPU).path.parent == tmp_path / "ckplan"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cost_cache(CPU).path.parent == tmp_path / ".cache" / "ckplan"
    monkeypatch.setenv("CKPLAN_CACHE", "~/costs")
    assert cost_cache(CPU).path.parent == tmp_path / "costs"
    assert cost_cache(CPU).now == pytest.approx(time.time(), abs=60)


@pytest.mark.parametrize("named", ["", "~nobody-at-all/costs"])
def test_who_has_no_home_keeps_no_costs(
    named: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(path: str) -> str:
        return path  # as os.path.expanduser does without HOME and a passwd entry

    monkeypatch.setenv("CKPLAN_CACHE", named)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", unknown)
    graph = profiled()
    assert any(op.seconds for op in graph.ops)
    assert sum("no home folder was found" in note for note in graph.notes) == 1
    assert not folder.exists()


@pytest.mark.parametrize(("share", "copies"), [(1, 1), (3, 3), (4096, 32)])
def test_an_op_never_finds_its_input_in_the_cache(
    share: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many copies take turns that other bytes pass between two runs of one."""
    monkeypatch.setattr(timing, "_PATIENCE_SECONDS", 60.0)
    prepared: list[int] = []
    ran: list[int] = []

    def prepare() -> Callable[[], None]:
        number = len(prepared)
        prepared.append(number)
        return lambda: ran.append(number)

    job = timing.Job(prepare, timing.COLD_BYTES // share)
    timing.time_runs(job, job.prepare(), CPU)
    assert len(prepared) == copies
    assert ran == [turn % copies for turn in range(len(ran))]
    assert len(ran) == timing._MOST_REPEATS


@pytest.mark.parametrize(
    ("memory", "num_bytes"),
    [(timing.Memory.USED, timing.COLD_BYTES), (timing.Memory.CACHED, 0)],
)
def test_an_op_may_be_measured_in_memory_that_it_had(
    memory: timing.Memory, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many other bytes are written before each run."""
    written: list[int] = []
    empty = torch.empty

    def noted(size: int, **how: Any) -> torch.Tensor:
        written.append(size)
        return empty(size, **how)

    def never() -> Callable[[], None]:
        raise AssertionError("it has its memory")

    monkeypatch.setattr(timing.torch, "empty", noted)
    ran: list[None] = []
    job = timing.Job(never, 1, memory)
    assert timing.time_runs(job, lambda: ran.append(None), CPU) > 0
    assert len(ran) == timing._MOST_REPEATS
    assert written == [num_bytes]


def test_long_ops_are_measured_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []

    def seconds(*_: object) -> tuple[float, None]:
        taken.append(0.04)
        return 0.04, None

    monkeypatch.setattr(timing, "seconds_of", seconds)
    job = timing.Job(lambda: lambda: None, 1, timing.Memory.CACHED)
    assert timing.time_runs(job, lambda: None, CPU) == 0.04
    assert len(taken) == 3


def test_costs_in_other_memory_are_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where memory is new does a contraction make a new tensor."""
    assert folder
    seconds = iter((1.0, 2.0, 3.0))

    def timed(job: timing.Job, run: Callable[[], object], _: object) -> float:
        assert (run() is run()) == (job.memory is not timing.Memory.NEW)
        return next(seconds)

    monkeypatch.setattr(calibrating, "time_runs", timed)
    cache = cost_cache(CPU)
    for _ in range(2):
        found = [
            calibrating.calibrate([recorded()], CPU, None, cache, memory)[0].seconds
            for memory in timing.Memory
        ]
        assert found == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm", "add"])
def test_what_an_op_writes_into_memory_is_what_it_returns(name: str) -> None:
    func = getattr(torch.ops.aten, name)
    overload = func.Tensor if name == "add" else func.default
    shape = (2, 8, 8) if "b" in name else (8, 8)
    op = recorded(overload, shape, 3 if name.startswith(("addmm", "baddbmm")) else 2)
    writes, makes = op_arguments.make_writer(op, CPU), op_arguments.make_runner(op, CPU)
    found, expected = writes(), makes()
    assert isinstance(found, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(found, expected)
    assert (writes() is found) == (name != "add")


def recorded(
    func: Any = torch.ops.aten.mm.default,
    shape: tuple[int, ...] = (8, 8),
    count: int = 2,
) -> RawOp:
    """An op of some equal tensors."""
    strides = torch.empty(shape).stride()
    one = TensorMeta(shape, strides, torch.float32)
    leaves, spec = pytree.tree_flatten(((one,) * count, {}))
    nothing: tuple[int, ...] = ()
    return RawOp(
        *(func, -1, nothing, nothing, nothing, tuple(leaves), spec, (one,), 1024, 768),
        accumulates=False,
        in_grad_mode=False,
    )


@pytest.mark.parametrize(("threads", "seconds"), [(1, 2.0), (2, 7.0)])
def test_seconds_of_other_programs_are_not_of_an_op(
    threads: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    walls, own = iter((1.0, 8.0)), iter((3.0, 5.0))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(walls))
    monkeypatch.setattr(timing.time, "process_time", lambda: next(own))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert timing.seconds_of(lambda: None, CPU) == (seconds, None)


def test_large_inputs_are_not_copied_even_if_nothing_of_them_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of ``empty_like``, of which there is one in every dropout."""
    monkeypatch.setattr(timing, "COLD_BYTES", 1 << 16)
    made: list[tuple[int, ...]] = []
    make = op_arguments.make_tensor

    def counting(leaf: Any, device: torch.device) -> Any:
        if isinstance(leaf, TensorMeta):
            made.append(leaf.shape)
        return make(leaf, device)

    monkeypatch.setattr(op_arguments, "make_tensor", counting)
    large = torch.ones(128, 256, requires_grad=True)
    ckplan.profile(nn.Dropout(), large, optimizer="none")
    assert 0 < made.count((128, 256)) < 32
