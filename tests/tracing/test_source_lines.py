"""Every op names the line that ran it, every storage the tensor that it was made as."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ckplan
from ckplan.graph.graph import Graph
from ckplan.tracing.profile import profile_workload
from ckplan.tracing.recording.source_lines import short_name
from ckplan.training.loading import WorkloadSpec

MODEL = """\
import torch
from torch import nn
from torch.nn import functional as F

from parts.squares import Square


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 4, dtype=torch.float64)

    def forward(self, x):
        y = self.up(x)  # addmm: float32[6,16]
        y = F.gelu(y)  # gelu, gelu_backward: float32[6,16]
        y = Square.apply(y)
        y = y.view(2, 3, 16).transpose(1, 2).contiguous()
        z = y.sin()  # sin, cos: float32[2,16,3]
        z[0].mul_(2)  # mul_: -
        w = (
            z.transpose(1, 2)
            .double()  # _to_copy: float64[2,3,16]
        )
        return self.down(w).argmax(-1), self.down(w)  # argmax: int64[2,3]


def loss(output, batch):
    return output[1].logsumexp(-1).sum()  # logsumexp: float64[2,3]


def build():
    return Model(), torch.ones(6, 8), loss
"""
SQUARES = """\
import torch


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        return (2 * grad).atan2(ctx.saved_tensors[0])
"""


@pytest.fixture
def workload(tmp_path: Path) -> Iterator[WorkloadSpec]:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "squares.py").write_text(SQUARES)
    (tmp_path / "mine.py").write_text(MODEL)
    yield WorkloadSpec(str(tmp_path / "mine.py"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "parts"]:
        del sys.modules[name]


def marked() -> dict[str, tuple[str, str]]:
    """Op -> the line and the tensor that the comments of ``MODEL`` say."""
    found = {}
    for number, text in enumerate(MODEL.splitlines(), 1):
        names, _, tensor = text.partition("# ")[2].partition(": ")
        for name in filter(None, names.split(", ")):
            found[name] = f"mine.py:{number}", tensor
    return found


def seen(graph: Graph) -> dict[str, tuple[str, str]]:
    """Op -> line and tensor of its first run."""
    found: dict[str, tuple[str, str]] = {}
    for op in graph.ops:
        tensors = [str(graph.storages[s].tensor) for s in op.creates] or ["-"]
        found.setdefault(op.name, (op.line, tensors[0]))
    return found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ops_name_their_lines_and_storages_their_tensors(
    workload: WorkloadSpec, device: str
) -> None:
    graph = profile_workload(workload, device=device, gpu="T4", replay=False)
    found = seen(graph)
    for name, expected in marked().items():
        assert found[name] == expected, name
    # Functions of a module beside the model, and code of its own in backward.
    assert found["pow"] == ("parts/squares.py:8", "float32[6,16]")
    assert found["atan2"] == ("parts/squares.py:12", "float32[6,16]")
    assert all(not op.line for op in graph.ops[graph.backward_stop :])
    assert not any(op.line.startswith(("/", "torch")) for op in graph.ops)
    kinds = {one.kind: str(one.tensor) for one in reversed(graph.storages)}
    assert kinds["parameter"] == "float32[16,8]"
    assert kinds["input"] == "float32[6,8]"


def test_backward_has_the_lines_of_forward(workload: WorkloadSpec) -> None:
    graph = profile_workload(workload, gpu="T4", device="cpu", replay=False)
    lines = [op.line for op in graph.ops[graph.num_forward : graph.backward_stop]]
    assert lines[0] == ""  # the gradient of the loss, of no node
    assert all(lines[1:])
    order = [int(line.partition(":")[2]) for line in lines if line.startswith("mine")]
    assert order == sorted(order, reverse=True)
    copied = [op.line for op in graph.ops if op.name == "copy_"]
    assert copied and set(copied) == {marked()["mul_"][0]}


class Checkpointed(nn.Module):
    """Reruns its forward in backward; its ops have one line each time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(checkpoint(self.block, x, use_reentrant=False)).sum()


def test_a_model_given_in_python_and_ops_that_it_runs_again() -> None:
    graph = ckplan.profile(
        Checkpointed(), torch.ones(2, 4), gpu="T4", device="cpu", replay=False
    )
    here = Path(__file__).name
    first = Checkpointed.block.__code__.co_firstlineno + 1
    tanh = {
        (graph.phase(i), op.line) for i, op in enumerate(graph.ops) if op.name == "tanh"
    }
    assert tanh == {(phase, f"{here}:{first}") for phase in ("forward", "backward")}
    relu = next(op for op in graph.ops if op.name == "threshold_backward")
    assert relu.line.startswith(f"{here}:") and relu.line != f"{here}:{first}"


def test_a_step_on_real_tensors_has_lines_too() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            return (y * 2 if y.sum().item() > 1 else y * 3).sum()

    graph = ckplan.profile(Asking(), torch.ones(2, 4), gpu="T4", device="cpu")
    assert any(note.startswith("traced on real tensors") for note in graph.notes)
    ran = Asking.forward.__code__.co_firstlineno
    lines = [op.line.partition(":")[2] for op in graph.ops[: graph.num_forward]]
    assert lines == [str(ran + 1), str(ran + 2), str(ran + 2), str(ran + 2)]


@pytest.mark.parametrize(
    ("file", "module", "expected"),
    [
        (
            "/v/site-packages/timm/layers/mlp.py",
            "timm.layers.mlp",
            "timm/layers/mlp.py",
        ),
        ("/v/site-packages/timm/__init__.py", "timm", "timm/__init__.py"),
        ("/home/me/model.py", "ckplan_workload_model_0a1b2c3d", "model.py"),
        ("/home/me/model.py", "__main__", "model.py"),
        ("/home/me/made.py", "not.this", "made.py"),
        ("<ipython-input-3>", "__main__", "<ipython-input-3>"),
    ],
)
def test_files_are_named_from_where_their_package_is(
    file: str, module: str, expected: str
) -> None:
    assert short_name(file, module) == expected
