"""Models that need values, and batches that do not fit in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from trained import measured_peak, train
from value_models import ROWS, Branching, Choosing, mean_square, workload

import ckplan
from ckplan import cli
from ckplan.errors import CkplanError, GraphError, WorkloadError
from ckplan.graph.extrapolate import extrapolate
from ckplan.graph.graph import Graph
from ckplan.simulating.simulate import simulate
from ckplan.tracing import trace as tracing
from ckplan.tracing import watched_step
from ckplan.training.workload import tensors_of


class Growing(Branching):
    """Takes more steps the larger the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.sum().item() < 1e30
        x = self.layers[0](x)
        for _ in range(len(x) // 1024):
            x = torch.tanh(self.layers[1](x))
        return x


def profiled(kind: type[Branching], rows: int = ROWS) -> Graph:
    made = workload(kind, rows)
    return ckplan.profile(made.model, made.batch, loss=mean_square, replay=False)


class AtMost(TorchDispatchMode):
    """Fails as the allocator does, for a tensor that is too large.

    A real limit depends on what malloc has left over from earlier tests.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes = num_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(t.untyped_storage().nbytes() > self.num_bytes for t in tensors_of(out)):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return out


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for half of the batch."""
    half = lambda num_bytes: AtMost(ROWS // 2 * 256 * 4)  # noqa: E731
    monkeypatch.setattr(tracing, "limited_memory", half)


@pytest.mark.parametrize("kind", [Branching, Choosing])
@pytest.mark.usefixtures("little_memory")
def test_a_batch_that_does_not_fit_is_drawn_on_from_two_that_do(
    kind: type[Branching],
) -> None:
    graph = profiled(kind)
    said = [note for note in graph.notes if note.startswith("extrapolated linearly")]
    assert len(said) == 1
    assert f"rows to {ROWS}: the step does not fit in memory" in said[0]
    assert graph.fingerprint["batch"] == {"0": f"float32[{ROWS},64]"}
    measured = measured_peak(workload(kind))
    assert simulate(graph).peak_bytes == pytest.approx(measured, rel=0.003)


@pytest.mark.usefixtures("little_memory")
def test_a_plan_of_a_step_drawn_on_holds_at_the_whole_batch() -> None:
    graph = profiled(Choosing)
    plan = ckplan.solve(graph, goal="min-memory")
    assert plan.regions and plan.predicted is not None
    planned = workload(Choosing)
    ckplan.apply(planned.model, plan)
    measured = measured_peak(planned)
    assert plan.predicted.peak_bytes == pytest.approx(measured, rel=0.003)
    small, same = workload(Choosing, 256), workload(Choosing, 256)
    ckplan.apply(same.model, plan)
    assert all(map(torch.equal, train(small), train(same)))


@pytest.mark.usefixtures("little_memory")
def test_a_step_that_runs_other_ops_at_another_batch_is_not_drawn_on() -> None:
    with pytest.raises(GraphError, match="it runs other ops at 2048 rows than at 4096"):
        profiled(Growing)


def test_no_memory_at_all_is_an_error_of_three_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "limited_memory", lambda num_bytes: AtMost(100))
    with pytest.raises(
        WorkloadError, match="the step does not fit in memory"
    ) as caught:
        profiled(Branching)
    assert len(str(caught.value).splitlines()) == 3
    assert "asks for the value of a tensor" in caught.value.needed


@pytest.mark.parametrize("kind", [Branching, Choosing])
def test_a_batch_that_fits_is_traced_whole(kind: type[Branching]) -> None:
    graph = profiled(kind, 512)
    assert any(note.startswith("traced on real tensors") for note in graph.notes)
    assert not any(note.startswith("extrapolated") for note in graph.notes)
    measured = measured_peak(workload(kind, 512))
    assert simulate(graph).peak_bytes == pytest.approx(measured, rel=0.003)


def test_small_tensors_of_a_card_are_drawn_on_by_their_type() -> None:
    def step_of(rows: int) -> Graph:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 32), nn.LayerNorm(32), nn.Linear(32, 4))
        batch = torch.zeros(rows, 3, dtype=torch.int64)
        return ckplan.profile(model, batch, loss=mean_square, gpu="RTX 4090")

    two, four, many = map(step_of, (2, 4, 258))  # all blocks of two are of 512 B
    assert extrapolate(two, four, (2, 4, 258)).storages == many.storages


def test_what_grows_is_drawn_on_and_what_does_not_stays() -> None:
    two, four, eight = (profiled(Branching, rows) for rows in (200, 400, 800))
    found = extrapolate(two, four, (200, 400, 800))
    assert found.storages == eight.storages
    for one, other in zip(found.ops, eight.ops, strict=True):
        assert (one.flops, one.moved_bytes) == (other.flops, other.moved_bytes)
    assert simulate(found).peak_bytes == pytest.approx(
        simulate(eight).peak_bytes, rel=0.003
    )


LIMITED = """
import torch
from ckplan.available import available_bytes
from ckplan.training.free_memory import limited_memory
try:
    with limited_memory(50 << 20):
        torch.empty(30 << 20, dtype=torch.uint8)
        torch.empty(100 << 20, dtype=torch.uint8)
except RuntimeError as error:
    print("allocate memory" in str(error), available_bytes() > 0)
torch.empty(100 << 20, dtype=torch.uint8)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux only")
def test_limited_memory_makes_allocations_fail_and_ends() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=True,
        capture_output=True,
        text=True,
    )
    assert ended.stdout == "True True\n"


@pytest.mark.usefixtures("little_memory")
def test_the_screen_and_json_say_that_a_step_was_drawn_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = "from value_models import Choosing, mean_square, workload\n"
    source += "def build():\n    made = workload(Choosing)\n"
    source += "    return made.model, made.batch, mean_square\n"
    (tmp_path / "model.py").write_text(source)
    monkeypatch.chdir(tmp_path)

    def run(*argv: str) -> str:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.app(list(argv), prog_name="ckplan")
        assert not ended.value.code
        return capfd.readouterr().out

    shown = json.loads(run("profile", "model.py", "--no-replay", "--json"))
    assert any(note.startswith("extrapolated linearly") for note in shown["notes"])
    assert "extrapolated linearly" in run("show", "traces/model.json.gz")


def test_a_batch_of_one_row_cannot_be_made_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*args: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(watched_step, "check_finite", full)
    with pytest.raises(CkplanError, match="does not fit in memory"):
        profiled(Branching, 1)
