"""Torch's own CUDA code beside what is said of it, on a GPU that computes nothing.

The whole table is ``scripts/allocated.py``. Skipped by name where torch has no CUDA, or
where there is a real GPU: that one has tests of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ckplan import gpus

ROOT = Path(__file__).parents[3]
ON_DUMMY_GPU = str(ROOT / "tests" / "helpers" / "on_dummy_gpu.py")
MOVING = str(ROOT / "tests" / "helpers" / "moving_on_dummy_gpu.py")


def _dummy_gpu() -> ModuleType:
    path = ROOT / "scripts" / "_dummy_gpu.py"
    spec = util.spec_from_file_location("_dummy_gpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dummy = _dummy_gpu()
pytestmark = pytest.mark.skipif(bool(dummy.why_not()), reason=dummy.why_not() or "none")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = dummy.build(tmp_path_factory.mktemp("gpu"))
    return found


def run(environment: Mapping[str, str], *argv: str) -> None:
    done = subprocess.run(
        [sys.executable, *argv],
        env={**environment, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("card", ["T4", "A100 40GB", "RTX 4090", "H100"])
def test_reductions_put_aside_what_torch_asks_for(library: Path, card: str) -> None:
    there = dummy.environment(library, gpus.find(card))
    run(there, ON_DUMMY_GPU, "reductions")


@pytest.mark.parametrize("card", ["T4", "A100 40GB", "RTX 4090", "H100", "B200"])
def test_attention_takes_the_kernel_that_torch_takes(library: Path, card: str) -> None:
    there = dummy.environment(library, gpus.find(card))
    run(there, ON_DUMMY_GPU, "attention")


@pytest.mark.parametrize("card", ["T4", "A100 40GB", "RTX 4090", "H100"])
def test_attention_asks_for_what_is_said(library: Path, card: str) -> None:
    there = dummy.environment(library, gpus.find(card))
    run(
        there,
        ON_DUMMY_GPU,
        "attention_workspaces",
    )


@pytest.mark.parametrize("ops", ["losses", "copies", "group_norm"])
def test_ops_ask_for_what_is_said(library: Path, ops: str) -> None:
    there = dummy.environment(library, gpus.find("A100 40GB"))
    run(there, ON_DUMMY_GPU, ops)


@pytest.mark.parametrize("card", ["T4", "A100 40GB", "H100"])
def test_sorting_asks_for_what_is_said(library: Path, card: str) -> None:
    there = dummy.environment(library, gpus.find(card))
    run(there, ON_DUMMY_GPU, "sorting")


@pytest.mark.parametrize("card", ["A100 40GB", "H100"])
def test_multiplications_keep_what_is_said(library: Path, card: str) -> None:
    there = dummy.environment(library, gpus.find(card))
    run(there, ON_DUMMY_GPU, "cublas")


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize(
    "argv",
    [
        ("caching_allocator", "80"),
        ("full_card", "1.5", "0"),
        ("full_card", "1.5", "2"),
    ],
)
def test_the_caching_allocator_is_torchs(
    library: Path, argv: tuple[str, ...], expandable: bool
) -> None:
    test, gigabytes, *seed = argv
    there = dict(dummy.environment(library, gpus.find("A100 40GB")))
    there["DUMMY_GPU_BYTES"] = str(round(float(gigabytes) * 1e9))
    if expandable:
        there["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    path = ON_DUMMY_GPU
    run(there, path, test, *seed, *(["--expandable"] if expandable else []))


def test_what_is_rebuilt_waits_for_other_streams(library: Path) -> None:
    there = dummy.environment(library, gpus.find("A100 40GB"))
    run(there, ON_DUMMY_GPU, "streams")


def test_a_card_is_measured_as_it_goes(library: Path, tmp_path: Path) -> None:
    """Bytes are torch's own; what kernels would compute, bits too, is not there."""
    page, workload = tmp_path / "x.md", str(ROOT / "configs" / "workloads" / "mlp.py")
    small = ("--only", workload, "--set", "layers=4", "-o", str(page))
    there = dummy.environment(library, gpus.find("A100 40GB"))
    subprocess.run(
        [str(ROOT / "scripts" / "on_card"), *small],
        env={**there, "PYTHON": sys.executable},
        check=False,
    )
    rows = json.loads(page.with_suffix(".json").read_text())["rows"]
    assert len(rows) == 10
    for row in rows:
        assert row["done"], row
        assert not row["failed"], row
        predicted, found = row["predicted_bytes"], row["measured_bytes"]
        assert predicted[0] == pytest.approx(found[0], rel=0.01)
        assert predicted[1] == pytest.approx(found[1], rel=0.01)
        assert predicted[2] == pytest.approx(found[2], rel=0.03, abs=20 << 20)
        assert row["device_seconds"] is not None
        assert row["roofline"] is not None


@pytest.mark.parametrize("script", ["allocated", "workspaces"])
def test_a_step_takes_what_is_predicted(script: str) -> None:
    run(os.environ, str(ROOT / "scripts" / f"{script}.py"), "--only", "mlp")


# -- offload ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["to_the_host", "behind_the_host"])
def test_what_moves_comes_back(library: Path, where: str) -> None:
    run(dummy.environment(library, gpus.find("A100 40GB")), MOVING, where)


def test_a_host_that_pins_nothing_is_an_error(library: Path) -> None:
    there = dict(dummy.environment(library, gpus.find("A100 40GB")))
    there["DUMMY_GPU_PINNED_BYTES"] = "0"
    run(there, MOVING, "nothing_pinned")


@pytest.mark.parametrize("spill", [False, True])
def test_steps_that_move_tensors_take_what_is_predicted(
    spill: bool, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    script = str(ROOT / "scripts" / "allocated_offload.py")
    where = ("--spill", str(tmp_path)) if spill else ()
    run(os.environ, script, "--only", "mlp", "-o", str(page), *where)
    name = "allocated_spill" if spill else "allocated_offload"
    lines = page.with_suffix(f".{name}.jsonl").read_text().splitlines()
    assert len(lines) == 6
    for line in lines:
        row = json.loads(line)
        allocated, reserved, host, out, back = row["found"]
        assert out == back > 0
        assert row["predicted"][0] == pytest.approx(allocated, rel=0.01)
        assert row["predicted"][1] == pytest.approx(reserved, rel=0.01)
        assert row["predicted"][2] == pytest.approx(host, rel=0.05)


def test_the_command_moves_to_a_file_behind_the_host(
    library: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("ckplan: 1\nregions: [{calls: '0', offload: [1/addmm]}]")
    where = ("--spill", str(tmp_path), "--device", "cuda", "--set", "layers=2")
    workload = str(ROOT / "configs" / "workloads" / "mlp.py")
    done = subprocess.run(
        [sys.executable, "-m", "ckplan", "verify", workload, str(plan), *where],
        env={
            **dummy.environment(library, gpus.find("A100 40GB")),
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "8.00 MiB of host memory, pinned, and " in done.stdout, done.stderr
    assert "in a file" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(64), nn.Linear(64, 192)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        b, n, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, 4, 16).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        x = x + y.transpose(1, 2).reshape(b, n, w)
        y = self.down(nn.functional.gelu(self.up(x)))
        return x + nn.functional.dropout(y, 0.1)

class Model(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()

def build():
    return Model(Block(), Block()), torch.randn(256, 64, 64)
"""


@pytest.mark.parametrize("amp", [(), ("--amp", "bf16")])
def test_compiled_steps_take_what_is_replayed(
    library: Path, amp: tuple[str, ...], tmp_path: Path
) -> None:
    there = dummy.environment(library, gpus.find("RTX 4090"))
    (tmp_path / "model.py").write_text(MODEL)

    def verified(*words: str) -> dict[str, Any]:
        command = ("ckplan", "verify", *words, "--compile", "--steps", "0", "--json")
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=tmp_path,
            env={**there, "PYTHONPATH": str(ROOT), "CKPLAN_CACHE": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout, done.stderr[-2000:]  # values are none, so bits may differ
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    budget = ("--budget", "75%", "--device", "cuda", *amp)
    found = verified("model.py", *budget, "--save", "plan.yaml")
    for prefix in ("", "unplanned_"):
        replayed = found[f"{prefix}replayed_peak_bytes"]  # in blocks
        beyond = replayed - found[f"{prefix}measured_peak_bytes"]
        assert 0 <= beyond < 512 * 100
    assert found["fits"]
    assert found["measured_peak_bytes"] < found["unplanned_measured_peak_bytes"]
    again = verified("model.py", "plan.yaml", *amp)  # on the device of the plan
    assert again["replayed_peak_bytes"] == found["replayed_peak_bytes"]
    assert again["measured_peak_bytes"] == found["measured_peak_bytes"]
