"""Profiles with a card in place of a clock: every second follows from the figures."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

import ckplan
from ckplan import gpus
from ckplan.cli import app
from ckplan.encodings import LAUNCHES, decode, encode
from ckplan.errors import CkplanError
from ckplan.graph.file import save
from ckplan.graph.graph import Graph
from ckplan.graph.records import Op
from ckplan.simulating.allocations import reserved_bytes
from ckplan.simulating.simulate import simulate
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec

T4, A100 = gpus.find("T4"), gpus.find("A100 80GB")


def op_named(graph: Graph, name: str) -> Op:
    return next(op for op in graph.ops if op.name == name)


def profiled(model: nn.Module, x: torch.Tensor, gpu: gpus.Gpu, **how: Any) -> Graph:
    return ckplan.profile(model, x, device="cpu", gpu=gpu.name, **how)


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [(torch.float32, 8.1e12), (torch.float16, 65e12), (torch.bfloat16, 8.1e12)],
)
def test_a_large_matmul_computes_at_the_rate_of_its_type(
    dtype: torch.dtype, rate: float
) -> None:
    model = nn.Linear(1024, 2048, bias=False, dtype=dtype)
    found = op_named(profiled(model, torch.ones(512, 1024, dtype=dtype), T4), "mm")
    assert found.flops == 2 * 512 * 1024 * 2048
    assert found.seconds == pytest.approx(found.flops / rate, abs=1e-9)
    assert found.launch_seconds == T4.launch_seconds


def test_a_pointwise_op_moves_its_bytes_and_counts_no_flops() -> None:
    model = nn.Sequential(nn.Linear(16, 1 << 10), nn.Tanh())
    found = op_named(profiled(model, torch.ones(1 << 10, 16), A100), "tanh")
    assert (found.flops, found.moved_bytes) == (0, 8 << 20)
    assert found.seconds == pytest.approx((8 << 20) / 2039e9, abs=1e-9)


def test_tensor_cores_take_fp32_of_convolutions_but_not_of_matmuls() -> None:
    conv = op_named(
        profiled(nn.Conv2d(64, 64, 3), torch.ones(4, 64, 64, 64), A100), "convolution"
    )
    assert conv.seconds == pytest.approx(conv.flops / 156e12, abs=1e-9)
    linear = nn.Linear(2048, 2048, bias=False)
    matmul = op_named(profiled(linear, torch.ones(2048, 2048), A100), "mm")
    assert matmul.seconds == pytest.approx(matmul.flops / 19.5e12, abs=1e-9)


FOREACH = """
import torch
def build():
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    return {"model": model, "batch": torch.ones(4, 256), "optimizer": optimizer}
"""


def test_an_optimizer_that_returns_nothing_reads_and_writes(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FOREACH)
    spec = WorkloadSpec(str(tmp_path / "model.py"))
    graph = profile_workload(spec, device="cpu", gpu="T4")
    update = op_named(graph, "_foreach_add_")
    assert update.moved_bytes == 3 * 4 * (
        256 * 256 + 256
    )  # gradients; parameters twice


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(x * self.scale, x, x)


def test_attention_on_a_cpu_has_flops_in_both_directions() -> None:
    graph = profiled(Attention(), torch.ones(2, 3, 32, 16), T4)
    one_matmul = 2 * 2 * 3 * 32 * 32 * 16
    attention = [op.flops for op in graph.ops if "attention" in op.name]
    assert attention == [2 * one_matmul, 5 * one_matmul]  # the scores are made again


def test_small_ops_take_as_long_as_launching_them() -> None:
    graph = profiled(nn.Linear(8, 8), torch.ones(2, 8), A100)
    assert graph.step_seconds == pytest.approx(len(graph.ops) * A100.launch_seconds)
    assert sum(op.seconds for op in graph.ops) < graph.step_seconds / 10


def test_the_file_and_the_screen_say_where_seconds_come_from(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\ndef build():\n"
        "    return torch.nn.Linear(8, 8), torch.ones(2, 8)\n"
    )
    trace = str(tmp_path / "trace.json")
    argv = ["profile", f"{tmp_path}/model.py", "--gpu", "rtx 4090", "-o", trace]
    shown = CliRunner().invoke(app, [*argv, "--device", "cpu"]).stdout
    assert re.search(r"\ncosts +roofline RTX 4090\n", shown)
    found = json.loads(CliRunner().invoke(app, ["show", trace, "--json"]).stdout)
    assert found["costs"] == "roofline RTX 4090"
    graph = ckplan.load_graph(Path(trace))
    assert graph.options["gpu"] == "RTX 4090"
    assert any("as on a CPU" in note for note in graph.notes)
    assert ckplan.profile(nn.Linear(8, 8), torch.ones(2, 8)).costs == "measured"


def test_what_is_reserved_stands_beside_the_peak_on_cards_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    layers = [nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(6)]
    graph = profiled(nn.Sequential(*layers), torch.ones(4096, 512), T4)
    save(graph, tmp_path / "card.json")
    save(replace(graph, options={}), tmp_path / "cpu.json")
    peak = simulate(graph).peak_bytes
    keys = ("reserved_peak_bytes", "reserved_peak_bytes_expandable_segments")

    def run(*argv: str) -> Any:
        return CliRunner().invoke(app, [*argv, "--force"] if "solve" in argv else argv)

    shown = json.loads(run("show", "card.json", "--json").stdout)
    assert shown["peak_bytes"] == peak
    assert all(peak <= shown[key] < 1.5 * peak for key in keys)
    assert shown[keys[0]] == reserved_bytes(simulate(graph))
    assert "\nreserved  " in run("show", "card.json").stdout
    none = json.loads(run("show", "cpu.json", "--json").stdout)
    assert [none[key] for key in keys] == [None, None]
    assert "reserved" not in run("show", "cpu.json").stdout

    tight = ("solve", "card.json", "--min-memory")
    found = json.loads(run(*tight, "--json").stdout)
    assert (
        found["peak_bytes"] <= found["budget_bytes"] < found[keys[0]] < shown[keys[0]]
    )
    assert "warning: PyTorch's allocator runs out of memory" in run(*tight).stderr
    assert "warning" not in run("solve", "card.json", "--budget", "300%").stderr


def test_naming_a_card_means_its_bytes_too(tmp_path: Path) -> None:
    model, x = nn.Linear(8, 8), torch.ones(2, 8)
    assert ckplan.profile(model, x, gpu="T4").fingerprint["device"] == "cuda"
    assert profiled(model, x, T4).fingerprint["device"] == "cpu"
    (tmp_path / "model.py").write_text(
        "import torch\ndef build():\n"
        "    return torch.nn.Linear(8, 8), torch.ones(2, 8)\n"
    )
    spec = WorkloadSpec(str(tmp_path / "model.py"))
    assert profile_workload(spec, gpu="T4").fingerprint["device"] == "cuda"
    assert profile_workload(spec).fingerprint["device"] == "cpu"


def test_a_card_that_nobody_knows_is_refused() -> None:
    with pytest.raises(CkplanError, match="no card is called 'RTX 1'"):
        ckplan.profile(nn.Linear(8, 8), torch.ones(2, 8), gpu="RTX 1")


def test_small_masks_take_as_long_as_launching_what_packs_them() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh())
    graph = profiled(model, torch.ones(2, 8), A100)
    (one,) = graph.encodings
    assert one.encode_seconds == one.decode_seconds
    assert one.encode_seconds == pytest.approx(LAUNCHES * A100.launch_seconds)
    counter = _Counted()
    small = encode(one.name, torch.ones(2, 8, dtype=torch.bool))
    with counter:
        assert small is not None
        decode(small)
    assert 0 < counter.launches <= LAUNCHES
    with counter:
        counter.launches = 0
        encode(one.name, torch.ones(2, 8, dtype=torch.bool))
    assert 0 < counter.launches <= LAUNCHES + 1  # to make the ones


class _Counted(TorchDispatchMode):
    """Counts ops that run a kernel."""

    launches = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        empty = func.overloadpacket.__name__.startswith(("empty", "detach"))
        self.launches += not (func.is_view or empty)
        return func(*args, **(kwargs or {}))
