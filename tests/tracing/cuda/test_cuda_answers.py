"""What a workload may ask of a GPU that is not here, and what it hears."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ckplan
from ckplan.errors import WorkloadError
from ckplan.gpus import find
from ckplan.graph.graph import Graph
from ckplan.tracing.cuda import cpu_as_cuda, fake_cuda_without_gpu
from ckplan.tracing.faking.fake_mode import fake_tensors
from ckplan.tracing.profile import profile_workload
from ckplan.training.loading import WorkloadSpec

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
GPU = "A100 40GB"
ImportedStream, ImportedEvent = torch.cuda.Stream, torch.cuda.Event


class Asking(nn.Module):
    def __init__(self, ask: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.inner, self.ask = nn.Linear(64, 64), ask

    def forward(self, x: torch.Tensor) -> Any:
        return self.ask(self.inner(x), x)


def streams(y: Any, x: Any) -> Any:
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        y = y * 2
    with ImportedStream(device=x.device, priority=-1):
        y.record_stream(stream)
    assert isinstance(stream, torch.cuda.Stream)
    assert stream.query()
    return y


def events(y: Any, x: Any) -> Any:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    end.record(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_event(ImportedEvent())
    end.synchronize()
    assert isinstance(begin, ImportedEvent)
    assert begin.elapsed_time(end) > 0
    return y


def devices(y: Any, x: Any) -> Any:
    with torch.cuda.device(0), torch.cuda.device(x.device), torch.cuda.device_of(x):
        torch.cuda.synchronize(x.device)
        assert x.get_device() == torch.cuda.current_device() == 0
    with torch.device("cuda"):
        y = y * torch.ones(64)
    torch.set_default_device("cuda")
    y = y + torch.ones(64)
    torch.set_default_device(None)
    return y + torch.arange(64, device="cuda") + torch.ones(64, device=0)


def moves(y: Any, x: Any) -> Any:
    y = y.cuda().to("cuda").to(x.device, non_blocking=True).to(0).cuda(0)
    pinned = torch.ones(64).pin_memory()
    assert pinned.is_pinned()
    assert not torch.ones(64).is_pinned()
    y = y + pinned.to("cuda", non_blocking=True)
    y = y + torch.ones(64, pin_memory=True).cuda(non_blocking=True)
    return nn.Linear(64, 64).to(0)(y) + nn.Linear(64, 64, device="cuda")(y)


def card(y: Any, x: Any) -> Any:
    known = torch.cuda.get_device_properties(x.device)
    assert torch.cuda.get_device_name(0) == known.name == GPU
    assert torch.cuda.get_device_capability() == (known.major, known.minor) == (8, 0)
    free, total = torch.cuda.mem_get_info()
    assert free == find(GPU).usable_bytes
    assert total == known.total_memory == find(GPU).capacity_bytes
    assert torch.cuda.is_bf16_supported()
    assert torch.cuda.get_arch_list() == ["sm_80"]
    return y


def memory(y: Any, x: Any) -> Any:
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated(0) == 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
    assert not torch.cuda.memory_summary()
    return y


def seeds(y: Any, x: Any) -> Any:
    torch.cuda.manual_seed(0)
    torch.cuda.manual_seed_all(torch.cuda.initial_seed())
    state = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state)
    with torch.random.fork_rng(devices=[0]):
        y = y * torch.rand_like(y)
    return checkpoint(lambda y: F.dropout(y, 0.1), y, use_reentrant=False)


def generators(y: Any, x: Any) -> Any:
    one = torch.Generator(device="cuda").manual_seed(3)
    other = torch.Generator(x.device)
    assert one.device == x.device
    assert isinstance(one, torch.Generator)
    assert isinstance(torch.Generator(), torch.Generator)
    assert torch.Generator().device.type == "cpu"
    y = y + torch.randn(64, device="cuda", generator=one)
    return y + torch.empty_like(y).normal_(generator=other)


def amp(y: Any, x: Any) -> Any:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = y @ y.t()
        assert y.dtype == torch.bfloat16
    return torch.amp.GradScaler("cuda").scale(y.float())


def accelerator(y: Any, x: Any) -> Any:
    assert torch.accelerator.is_available()
    torch.accelerator.synchronize()
    device = torch.accelerator.current_accelerator()
    return y + torch.ones(64, device=device)


def marks(y: Any, x: Any) -> Any:
    torch.cuda.nvtx.range_push("a")
    torch.cuda.nvtx.range_pop()
    torch.cuda.nvtx.mark("b")
    assert torch.cuda.is_initialized()
    assert not torch.cuda.is_current_stream_capturing()
    return y


ASKS = (
    streams,
    events,
    devices,
    moves,
    card,
    memory,
    seeds,
    generators,
    amp,
    accelerator,
    marks,
)


@pytest.fixture(params=["fake CUDA", "translated"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "translated":
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    elif not torch.backends.cuda.is_built():
        pytest.skip("needs a build of torch with CUDA")
    return str(request.param)


def on_cuda(ask: Callable[[Any, Any], Any]) -> Graph:
    return ckplan.profile(Asking(ask), torch.randn(8, 64), device="cuda", gpu=GPU)


@pytest.mark.parametrize("ask", ASKS)
def test_common_questions_are_answered(
    ask: Callable[[Any, Any], Any], way: str
) -> None:
    graph = on_cuda(ask)
    assert any(way in note for note in graph.notes)
    assert "addmm" in {op.name for op in graph.ops}


def properties(y: Any, x: Any) -> Any:
    return y * torch.cuda.get_device_properties(0).multi_processor_count


def legacy(y: Any, x: Any) -> Any:
    return y.type(torch.cuda.FloatTensor)


@pytest.mark.parametrize(
    ("ask", "said"), [(properties, "multi_processor_count"), (legacy, "")]
)
def test_what_only_a_gpu_knows_is_said_in_three_lines(
    ask: Callable[[Any, Any], Any], said: str, way: str
) -> None:
    with pytest.raises(WorkloadError, match=f"asks the GPU itself .*{said}") as caught:
        on_cuda(ask)
    what, needed, hint = str(caught.value).splitlines()
    assert len(what) < 200
    assert "its name, memory, streams and seeds" in needed
    line = ask.__code__.co_firstlineno + 1
    assert f"{__file__}, line {line}, or " in hint
    assert ("a build of torch with CUDA" in hint) == (way == "translated")


def to_the_host(y: Any, x: Any) -> Any:
    return y + y.detach().to("cpu").sum().to(y.device)


def from_the_host(y: Any, x: Any) -> Any:
    return y + torch.ones(64, device="cpu").to(y.device)


@pytest.mark.parametrize("ask", [to_the_host, from_the_host])
def test_the_translation_says_that_it_knows_no_host(
    ask: Callable[[Any, Any], Any], way: str
) -> None:
    told = any(
        "counts as if it were on the card" in note for note in on_cuda(ask).notes
    )
    assert told == (way == "translated")


SOURCE = """
import torch
from torch import nn

{above}

class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64, device="cuda")
        self.stream = torch.cuda.Stream()

    def forward(self, x):
        with torch.cuda.stream(self.stream):
            return self.inner(x) * torch.ones(64, device="cuda")

def build():
    return Fixed(), torch.randn(8, 64, device="cuda")
"""


@pytest.mark.parametrize("above", ["", "torch.set_default_device('cuda')"])
def test_a_file_may_want_a_gpu_in_its_factory(
    above: str, tmp_path: Path, way: str
) -> None:
    path = tmp_path / "model.py"
    path.write_text(SOURCE.format(above=above))
    try:
        graph = profile_workload(WorkloadSpec(str(path)), device="cuda")
        with pytest.raises(WorkloadError, match="with --device cuda none"):
            profile_workload(WorkloadSpec(str(path)), device="cpu")
    finally:
        torch.set_default_device(None)
    assert any(way in note for note in graph.notes)


@pytest.mark.parametrize("above", ["nn.Linear(4, 4).cuda()", "torch.cuda.init()"])
def test_a_file_that_wants_a_gpu_when_it_is_imported_is_told_where_to_ask(
    above: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.py"
    path.write_text(SOURCE.format(above=above))
    with pytest.raises(WorkloadError, match="if only the factory asks for one"):
        profile_workload(WorkloadSpec(str(path)), device="cuda")


def replaced() -> list[object]:
    of_cuda = {**vars(torch.cuda)}
    of_torch = {name: getattr(torch, name) for name in ("Stream", "Generator")}
    stream = vars(torch.cuda.Stream)["__new__"]
    pins = (torch.Tensor.record_stream, torch._C._nn._parse_to)
    return [of_cuda, of_torch, stream, pins, torch.get_default_device()]


@pytest.mark.parametrize("scope", [cpu_as_cuda, fake_cuda_without_gpu])
def test_nothing_is_left_behind(scope: Any) -> None:
    before = replaced()
    with fake_tensors(), scope((8, 0), find(GPU)):
        assert replaced() != before
        torch.set_default_device("cuda")
    assert replaced() == before
    assert not torch.overrides._get_current_function_mode_stack()
