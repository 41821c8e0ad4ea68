"""A trace takes the path that training takes, and says where it does not."""

from __future__ import annotations

import multiprocessing
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import form_models
import pytest
import torch
from forms import CARD, facts_of, of_file
from measured import peak_bytes_of
from torch import nn
from torch._subclasses import fake_tensor

from ckplan.graph.graph import Graph
from ckplan.simulating.simulate import simulate
from ckplan.tracing.faking.asked_device import asked_device
from ckplan.tracing.faking.fake_mode import fake_tensors
from ckplan.tracing.faking.hollow import hollow_tensors
from ckplan.tracing.path_check import MOST_BYTES, NOTE_NOT, NOTE_SAME, NOTE_VARIES
from ckplan.tracing.profile import profile
from ckplan.tracing.recording.recorder import StepRecorder
from ckplan.tracing.trace import (
    NOTE_DRAWN,
    NOTE_FAKE,
    NOTE_HOLLOW,
    NOTE_ONE_DRAW,
)
from ckplan.training.randomness import seed_everything
from ckplan.training.step import DEFAULT_TRAINING, make_step
from ckplan.training.workload import Workload

# Masks of grouped queries, experts, an encoder and a decoder, a convolution.
FEW = ("qwen3_moe", "whisper")
ASKING = """
import torch
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import FakeTensor as Renamed, is_fake
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

def ask(x):
    return [
        isinstance(x, FakeTensor),
        isinstance(x, Renamed),
        isinstance(x, torch._subclasses.FakeTensor),
        isinstance(x, getattr(torch, "_subclasses").fake_tensor.FakeTensor),
        issubclass(type(x), Renamed),
        type(x) is Renamed,
        is_fake(x),
        torch._subclasses.fake_tensor.is_fake(x),
        detect_fake_mode([x]) is not None,
        is_in_torch_dispatch_mode(),
        torch.compiler.is_compiling(),
        torch.compiler.is_dynamo_compiling(),
        torch.jit.is_tracing(),
        torch.jit.is_scripting(),
        isinstance(x, torch.fx.Proxy),
        x.is_meta,
        torch.is_inference(x),
    ]
"""


def library(name: str) -> ModuleType:
    """A loaded module, outside torch, that asks whether tensors are fake."""
    module = ModuleType(name)
    sys.modules[name] = module
    exec(ASKING, module.__dict__)
    return module


# -- questions -------------------------------------------------------------------------


def test_a_library_cannot_ask_whenever_it_was_imported() -> None:
    before = library("asking_before")
    try:
        with fake_tensors():
            fake = torch.ones(2)
            during = library("asking_during")
            assert not any(before.ask(fake) + during.ask(fake))
        assert before.ask(fake)[:8] == [True] * 8
        assert during.ask(fake)[:5] == [True] * 5
        assert before.FakeTensor is fake_tensor.FakeTensor
        assert not any(before.ask(torch.ones(2)) + during.ask(torch.ones(2)))
    finally:
        del sys.modules["asking_before"], sys.modules["asking_during"]


def test_torch_itself_still_knows_that_tensors_are_fake() -> None:
    with fake_tensors():
        torchs = library("torch.asking")
        del sys.modules["torch.asking"]
        assert torchs.ask(torch.ones(2))[:5] == [True] * 5


def test_transformers_sees_no_tracing() -> None:
    from transformers.utils import import_utils

    with fake_tensors():
        assert not import_utils.is_tracing(torch.ones(2))
        assert not import_utils.is_fake_tensor(torch.ones(2))


# -- the proof -------------------------------------------------------------------------


class Suspicious(nn.Module):
    """Takes another path for tensors of a class that is not torch's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden = hidden.relu() if type(hidden) is torch.Tensor else hidden.sigmoid()
        out: torch.Tensor = self.second(hidden)
        return out.sum()


def profiled(model: nn.Module, batch: Any, device: str = "cpu") -> Graph:
    how = {"device": device, "gpu": CARD, "replay": False}
    return profile(model, batch, optimizer="sgd", **how)


def names_of(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops[: graph.num_forward]]


@pytest.mark.parametrize(("width", "what"), [(8, "real"), (6000, "hollow")])
def test_another_path_is_said_and_the_real_one_is_taken(width: int, what: str) -> None:
    assert (MOST_BYTES < 4 * 2 * 6000 * 6000) and MOST_BYTES > 4 * 2 * 8 * 8
    graph = profiled(Suspicious(width), (torch.ones(2, width),))
    assert "relu" in names_of(graph)
    assert "sigmoid" not in names_of(graph)
    said = next(note for note in graph.notes if "another path" in note)
    assert f"first aten::sigmoid -> 2x{width} in the model, not aten::relu" in said
    assert (NOTE_HOLLOW in said) == (what == "hollow")
    assert NOTE_FAKE not in graph.notes


class Rarely(nn.Module):
    """Leaves a layer out by chance, as models with layer drop do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.first(x)
        return hidden.sum() if torch.rand([]) < 1e-9 else self.second(hidden).sum()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_draw_that_decides_is_told(device: str) -> None:
    graph = profiled(Rarely(), (torch.ones(2, 8),), device=device)
    assert names_of(graph).count("addmm") == 2
    assert NOTE_DRAWN in graph.notes
    assert any(note.startswith(NOTE_SAME) for note in graph.notes)


class RarelyByValue(Rarely):
    """Asks for the value of a result, so that no fake tensors do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out if out.item() < 1e30 else -out


def test_one_draw_of_many_is_told() -> None:
    graph = profiled(RarelyByValue(), (torch.ones(2, 8),))
    assert NOTE_FAKE not in graph.notes
    assert NOTE_ONE_DRAW in graph.notes
    assert NOTE_DRAWN not in graph.notes


def test_another_path_for_cuda_is_said() -> None:
    graph = profiled(Suspicious(8), (torch.ones(2, 8),), device="cuda")
    said = next(note for note in graph.notes if "another path" in note)
    assert "first torch.Tensor.sigmoid -> 2x8 in the model, not" in said
    assert "torch.Tensor.relu" in said


class Undecided(nn.Module):
    """Takes one of many paths by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.chance = random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.chance.randrange(1000)):
            x = x.relu()
        out: torch.Tensor = self.layer(x)
        return out.sum()


def test_a_path_by_chance_is_not_taken_for_a_difference() -> None:
    class Recreated(Undecided):
        def __deepcopy__(self, memo: object) -> Undecided:
            del memo
            copied = Undecided()
            copied.chance = self.chance
            return copied

    graph = profiled(Recreated(), (torch.ones(2, 8),))
    assert NOTE_VARIES in graph.notes
    assert NOTE_FAKE in graph.notes


def test_what_cannot_be_compared_is_said() -> None:
    class Raising(Suspicious):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if type(x) is torch.Tensor:
                raise KeyError("no way")
            return super().forward(x)

    graph = profiled(Raising(8), (torch.ones(2, 8),))
    assert f"{NOTE_NOT} that fails (KeyError: 'no way')" in graph.notes


# -- hollow tensors --------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_hollow_tensors_are_plain_and_take_no_memory() -> None:
    before = resident_bytes()
    with hollow_tensors():
        layer = nn.Linear(20_000, 20_000)  # 1.5 GiB
        x = torch.randn(10_000, 20_000)
        out = layer(x).relu()
        out.sum().backward()
        assert type(out) is torch.Tensor
        assert type(layer.weight) is nn.Parameter
        assert out.data_ptr() != x.data_ptr() != 0
        assert out.untyped_storage().nbytes() == 10_000 * 20_000 * 4
        assert layer.weight.grad is not None
        assert resident_bytes() - before < 200 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_recorder_saves_of_hollow_tensors_takes_no_memory() -> None:
    before = resident_bytes()
    with hollow_tensors():
        model, cpu = nn.Sequential(nn.Linear(64, 4096), nn.GELU()), torch.device("cpu")
        recorder = StepRecorder(model, cpu, fake=False, on_cuda=False)
        with recorder.watching():
            out = model(torch.randn(30_000, 64))  # GELU saves 469 MiB
        assert recorder.recording.saved
        assert resident_bytes() - before < 100 << 20
    del out


def is_in_heap(tensor: torch.Tensor) -> bool:
    """Whether its memory is what the allocator of C takes piece by piece."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    (heap,) = (line.split()[0] for line in maps if line.endswith("[heap]"))
    start, end = (int(number, 16) for number in heap.split("-"))
    return start <= tensor.data_ptr() < end


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_hollow_tensors_leaves_no_hole_in_the_heap() -> None:
    for _ in range(2):  # the allocator of C learns that 31 MiB are of the heap
        kept = torch.ones(31, 1 << 18)
        del kept
    plain = torch.empty(16, 1 << 18)
    with hollow_tensors():
        hollow = torch.empty(16, 1 << 18)
    assert is_in_heap(plain)
    assert not is_in_heap(hollow)


def test_small_hollow_tensors_have_values_and_large_ones_refuse() -> None:
    with hollow_tensors():
        assert torch.arange(5).sum().item() == 10
        mask = torch.ones(2, 4)
        mask[:, 1:] = 0
        assert mask.tolist() == [[1, 0, 0, 0]] * 2
        assert torch.tensor([0, 1, 1]).nonzero().flatten().tolist() == [1, 2]
        large = torch.ones(1000, 1000)
        with pytest.raises(RuntimeError, match="_local_scalar_dense"):
            large.sum().item()
        view = large[:2, :2]
        assert view.untyped_storage()._cdata == large.untyped_storage()._cdata
        assert large.add_(1) is large
        assert torch.ones(2000, 1000).t_().shape == (1000, 2000)  # as in a GRU


# -- four forms ------------------------------------------------------------------------


def facts_inside(names: Sequence[str]) -> list[dict[str, Any]]:
    """Facts of models whose factories are the first to import their libraries."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("transformers", "diffusers"):
            del sys.modules[name]
    found = []
    for name in names:
        assert found or "transformers" not in sys.modules
        found += [of_file("form_models.py", way, name) for way in ("cpu", "cuda")]
    return found


def test_four_forms_of_a_model_run_the_same_ops() -> None:
    check_four_forms(FEW)


@pytest.mark.slow
@pytest.mark.timeout(900)  # on a machine that may be busy
def test_four_forms_of_every_model_run_the_same_ops() -> None:
    check_four_forms([one.__name__ for one in form_models.MODELS])


def check_four_forms(names: Sequence[str]) -> None:
    with multiprocessing.get_context("fork").Pool(1) as process:
        later = process.apply_async(facts_inside, (names,))
        given = []
        for name in names:
            seed_everything(0)
            model, batch = getattr(form_models, name)()
            given.append(facts_of(profiled(model, batch)))
            assert of_file("form_models_top.py", "cpu", name) == given[-1]
        inside = later.get()
    assert inside[::2] == given
    for name, facts, on_card in zip(names, given, inside[1::2], strict=True):
        ops = facts["num_forward"]
        assert facts["fake"], name
        assert facts["path"] == [f"{NOTE_SAME} real tensors: {ops} ops"], name
        # Other kernels run on a card, for the same functions of torch.
        (path,) = on_card["path"]
        assert path.startswith(f"{NOTE_SAME} tensors of torch without content"), name


def test_timm() -> None:
    pytest.importorskip("timm")
    model, batch = form_models.timm_vit()
    notes = profiled(model, batch).notes
    assert any(note.startswith(NOTE_SAME) for note in notes)


# -- measured --------------------------------------------------------------------------


def test_grouped_queries_have_the_peak_that_is_measured() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).train()
    ids = torch.randint(0, 256, (8, 256))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    predicted_bytes = simulate(profile(model, batch, replay=False)).peak_bytes
    step = make_step(Workload(model, batch), DEFAULT_TRAINING)
    assert step.optimizer is not None
    step.run()
    held = [*model.parameters(), *model.buffers(), *batch.values()]
    held += [x for state in step.optimizer.state.values() for x in state.values()]
    step.zero_grad()
    measured_bytes = peak_bytes_of(step.run, held)
    assert predicted_bytes == pytest.approx(measured_bytes, rel=1e-3)


class _Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grads[0]


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(_Cubed.apply(self.one(x))).mean()


def test_what_is_saved_by_own_functions_is_no_function_of_the_model() -> None:
    graph = profile(_Own(), torch.randn(4, 8), gpu=CARD, device="cuda", replay=False)
    assert any(note.startswith(NOTE_SAME) for note in graph.notes), graph.notes


def test_the_first_mode_that_is_asked_for_a_device_answers() -> None:
    ask, real = torch.ops.prim.device.default, torch.zeros(2)
    with fake_tensors() as (fake, _):
        x = torch.zeros(2)
        assert asked_device(ask, (x,)) == torch.device("cpu")
        assert asked_device(torch.ops.aten.neg.default, (x,)) is None
        assert asked_device(ask, (real,)) is None
        with mock.patch.object(fake, "in_kernel_invocation", True):
            assert asked_device(ask, (x,)) == torch.device("meta")
