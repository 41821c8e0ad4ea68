"""Compiled steps for CUDA on a machine without a card."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import Run
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ckplan
from ckplan import units
from ckplan.compiling import search
from ckplan.compiling.graph import as_graph
from ckplan.compiling.ledger import Ledger
from ckplan.compiling.lowering import DynamoGraph
from ckplan.compiling.partition import JointGraph
from ckplan.compiling.proposing import Proposer
from ckplan.compiling.refusals import check_inputs
from ckplan.compiling.step import parts_of, profile_compiled
from ckplan.errors import ApplyError, CkplanError, PlanError, WorkloadError
from ckplan.gpus import Gpu, find
from ckplan.graph.graph import Graph
from ckplan.graph.records import BEFORE_STEP
from ckplan.plan.file import load as load_plan
from ckplan.plan.resolve import resolve
from ckplan.simulating.simulate import simulate
from ckplan.tracing.cuda import compiled_as_cuda
from ckplan.tracing.cuda.memory import in_allocator_blocks
from ckplan.tracing.target import local_card
from ckplan.training.loading import WorkloadSpec
from ckplan.training.workload import Workload
from ckplan.units import in_blocks

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(nn.functional.gelu(self.up(x))))

class Model(nn.Sequential):
    def __init__(self):
        super().__init__(Block(), Block(), Block())

    def forward(self, x):
        return super().forward(x).square().mean()

def build(rows=16384, on_card=False):
    x = torch.randn(rows, 32)
    if on_card:
        assert torch.cuda.is_available()
        return Model().cuda(), x.to("cuda")
    return Model(), x
"""

ATTENDS = """
import torch
from torch import nn

class Attends(nn.Module):
    def __init__(self, amp):
        super().__init__()
        self.qkv, self.norm, self.amp = nn.Linear(32, 96), nn.RMSNorm(32), amp

    def forward(self, x):
        with torch.autocast("cuda", torch.bfloat16, enabled=self.amp):
            qkv = self.qkv(self.norm(x)).view(len(x), 64, 3, 2, 16)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return y.float().square().mean()

def build(amp=False, rows=2):
    return Attends(amp), torch.randn(rows, 64, 32)
"""

READS = """
import torch
from torch import nn

class Reads(nn.Linear):
    def forward(self, x):
        y = super().forward(x).sum()
        return y if y.item() > 0 else -y

class Moves(nn.Linear):
    def forward(self, x):
        return super().forward(x).to("cuda").sum()

class Recurs(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0].sum()

class Asks(nn.Linear):
    def forward(self, x):
        if torch.cuda.get_device_capability() >= (8, 0):
            x = x.bfloat16().float()
        return super().forward(x).sum()

def build(kind):
    return globals()[kind](3, 3), torch.randn(2, 2, 3)
"""

CARD, CUDA = "RTX 4090", torch.device("cuda", 0)


def gradients_of(call: Callable[..., Any], workload: Workload) -> list[torch.Tensor]:
    torch.manual_seed(0)
    workload.model.zero_grad()
    call(workload.batch).backward()
    return [p.grad for p in workload.model.parameters() if p.grad is not None]


@pytest.fixture
def model(folder: Path) -> str:
    (folder / "blocks.py").write_text(MODEL)
    return "blocks.py"


@pytest.fixture
def on_card(model: str) -> Graph:
    return profile_compiled(model, gpu=CARD)


def test_a_step_for_a_card_is_that_of_the_cpu_in_its_blocks_and_seconds(
    model: str, on_card: Graph
) -> None:
    # Nothing of this model differs on CUDA, so the CPU's own trace is the oracle.
    (planner,) = parts_of(WorkloadSpec(model).build()).planners.values()
    here = as_graph(planner.joint, "Model").graph
    assert len(on_card.ops) == len(here.ops)
    sizes = [in_blocks(one.bytes) for one in here.storages]
    assert [one.bytes for one in on_card.storages][: len(sizes)] == sizes
    workspaces = on_card.storages[len(sizes) :]  # cuBLAS's, one for each thread
    assert {one.bytes for one in workspaces} == {8320 << 10}
    assert {one.maker for one in workspaces} == {BEFORE_STEP}
    assert on_card.fingerprint["compiled"] == here.fingerprint["compiled"]
    assert on_card.fingerprint["device"] == "cuda"
    card = find(CARD)
    for one, other in zip(on_card.ops, here.ops, strict=True):
        assert (one.name, one.reads, one.outputs) == (
            other.name,
            other.reads,
            other.outputs,
        )
        kernels = one.launch_seconds / card.launch_seconds
        assert kernels == int(kernels) == (1 if one.flops else kernels)
        seconds = max(
            one.flops / card.flop_rates["fp32"], one.moved_bytes / card.bandwidth
        )
        assert one.seconds == pytest.approx(seconds)


def test_commands_take_such_a_step_and_say_that_it_is_simulated(
    run: Run, folder: Path, model: str
) -> None:
    words = (model, "--compile", "--gpu", CARD)
    shown = run("profile", *words, "--set", "on_card=true", "-o", "t.json.gz")
    assert "peaks are simulated, not replayed" in " ".join(shown.out.split())
    solved = run("solve", "t.json.gz", "--budget", "80%", "-o", "p.yaml")
    assert "no code was replayed" in " ".join(solved.err.split())
    peak = load_plan(folder / "p.yaml").predicted
    assert peak is not None
    assert peak.peak_bytes < (peak.unplanned_peak_bytes or 0)
    for command in ("frontier", "compare", "show"):
        found = json.loads(run(command, "t.json.gz", "--json").out)
        assert found
    more = run("profile", *words, "--set", "rows=32768", "-o", "more.json.gz")
    assert more.code == 0
    tuned = run("tune", "t.json.gz", "more.json.gz", "--gpu", CARD, "--json")
    assert tuned.code == 0, tuned.err


@pytest.mark.parametrize("amp", [False, True])
def test_a_plan_has_the_peak_of_the_division_that_it_gives(
    folder: Path, amp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "attends.py").write_text(ATTENDS)
    seen: list[JointGraph] = []
    trace = DynamoGraph.trace

    def watched(graph: DynamoGraph) -> JointGraph | None:
        seen.append(joint := trace(graph))
        return joint

    monkeypatch.setattr(DynamoGraph, "trace", watched)
    spec = WorkloadSpec("attends.py", {"amp": amp, "rows": 256})
    graph = profile_compiled(spec, gpu=CARD)
    plan = ckplan.solve(graph, goal="min-memory")
    assert plan.regions and not any(one.inner for one in plan.regions)
    step = as_graph(seen[-1], "Attends", gpu=find(CARD))
    proposer = Proposer(seen[-1], step, find(CARD))
    saved = proposer.candidate(resolve(plan, step.graph)).saved
    divided = seen[-1].divided(saved or ())
    # draws are saved whatever the plan names
    attention = next(
        one.name for one in divided.forward.graph.nodes if "attention" in one.name
    )
    assert not any(
        "attention" in str(n.target) and "backward" not in str(n.target)
        for n in divided.backward.graph.nodes
        if n.op == "call_function"
    )
    assert attention
    one = as_graph(divided, "Attends", gpu=find(CARD)).graph
    peak_bytes = simulate(in_allocator_blocks(one, (8, 9))).peak_bytes
    assert plan.predicted is not None
    assert plan.predicted.peak_bytes == peak_bytes


def test_what_compiled_code_cannot_do_on_another_card_is_said(on_card: Graph) -> None:
    with pytest.raises(CkplanError, match="tiles in the compiled step of 'Model'"):
        ckplan.solve(on_card, budget="80%", allow=["tiles"])
    with pytest.raises(CkplanError, match="seconds of RTX 4090") as refused:
        ckplan.solve(on_card, gpu="L4")
    assert refused.value.hint == "ckplan profile blocks.py --compile --gpu L4"


def test_another_processor_launches_at_its_own_speed(model: str) -> None:
    twice = profile_compiled(model, gpu=CARD, host=2.0)
    launch = find(CARD).launch_seconds
    assert {op.launch_seconds for op in twice.ops if op.flops} == {launch / 2}


@pytest.mark.parametrize(
    ("amp", "kernel"),
    [(False, "efficient"), (True, "flash")],
)
def test_attention_norms_and_autocast_are_as_cuda_does_them(
    folder: Path, amp: bool, kernel: str
) -> None:
    (folder / "attends.py").write_text(ATTENDS)
    spec = WorkloadSpec("attends.py", {"amp": amp})
    names = [op.name for op in profile_compiled(spec, gpu=CARD).ops]
    assert f"scaled_dot_product_{kernel}_attention" in names
    # and the CPU keeps its own kernels, whatever the compiler remembers
    here = [op.name for op in profile_compiled(WorkloadSpec("attends.py")).ops]
    assert not any("efficient" in one or one == "flash_attention" for one in here)
    again = [op.name for op in profile_compiled(spec, gpu=CARD).ops]
    assert again == names


def test_another_thread_compiles_for_the_cpu_meanwhile(folder: Path) -> None:
    (folder / "attends.py").write_text(ATTENDS)
    found: list[str] = []

    def compile_here() -> None:
        found.extend(op.name for op in profile_compiled("attends.py").ops)

    with compiled_as_cuda((8, 9)):
        thread = Thread(target=compile_here)
        thread.start()
        thread.join()
    assert "bmm" in found
    assert not any("efficient" in one for one in found)


@pytest.mark.filterwarnings("ignore:Error detected in CudnnRnn")
@pytest.mark.parametrize("kind", ["Reads", "Moves", "Recurs", "Asks"])
def test_what_fake_tensors_cannot_carry_is_said_in_three_lines(
    folder: Path, kind: str
) -> None:
    (folder / "reads.py").write_text(READS)
    spec = WorkloadSpec("reads.py", {"kind": kind})
    with (
        torch._dynamo.config.patch(allow_rnn=True),
        pytest.raises(WorkloadError, match="for RTX 4090 without a card: ") as said,
    ):
        profile_compiled(spec, gpu=CARD)
    assert len(str(said.value).splitlines()) == 3


def test_code_is_not_generated_for_a_card(run: Run) -> None:
    ended = run("profile", "model.py", "--compile", "--gpu", CARD, "--generate")
    assert ended.code == 2
    assert "--generate runs on the CPU" in " ".join(ended.err.split())


def test_bytes_of_the_cpu_have_no_seconds_of_a_card(run: Run, model: str) -> None:
    words = ("--compile", "--gpu", CARD, "--device", "cpu")
    ended = run("profile", model, *words)
    assert ended.code == 1
    assert "bytes of the CPU and seconds of RTX 4090" in ended.err


def test_a_plan_for_a_card_is_followed_and_a_budget_gets_one(
    on_card: Graph, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = WorkloadSpec(model).build()
    wanted = gradients_of(torch.compile(workload.model, fullgraph=True), workload)
    plan = ckplan.solve(on_card, budget="90%")
    assert plan.regions
    # A stand-in for a card: the graph of this model is the same there. A card itself is
    # in test_on_gpu.py, and its allocator in test_compiled_on_dummy_gpu.py.
    monkeypatch.setattr(search, "device_of", lambda inputs: CUDA)
    monkeypatch.setattr(search, "local_card", lambda device: find(CARD))
    torch._dynamo.reset()
    planned = ckplan.backend(plan)
    compiled = torch.compile(workload.model, fullgraph=True, backend=planned)
    found = gradients_of(compiled, workload)
    assert planned.plans == [plan]
    assert 0 < planned.peak_bytes < (plan.budget_bytes or 0)
    assert all(map(torch.equal, found, wanted))
    torch._dynamo.reset()
    planned = ckplan.backend("80%")
    compiled = torch.compile(workload.model, fullgraph=True, backend=planned)
    assert all(map(torch.equal, gradients_of(compiled, workload), wanted))
    (made,) = planned.plans
    assert made.fingerprint["compiled"] == plan.fingerprint["compiled"]
    assert made.fingerprint["device"] == "cuda"
    assert made.regions
    torch._dynamo.reset()
    with pytest.raises(PlanError, match="it is for the compiled graph"):
        ckplan.compile(nn.Linear(3, 3), plan)(torch.randn(2, 3))


def test_code_for_other_devices_or_in_cuda_graphs_is_refused() -> None:
    with FakeTensorMode():
        on_cuda, on_meta = (torch.empty(2, device=one) for one in ("cuda", "meta"))
    check_inputs([on_cuda, torch.zeros(2)], None, {})
    for mode, options in (
        ("reduce-overhead", {}),
        (None, {"triton.cudagraphs": True}),
    ):
        with pytest.raises(ApplyError, match="cannot plan CUDA graphs"):
            check_inputs([on_cuda], mode, options)
    with pytest.raises(ApplyError, match="compiled code for meta"):
        check_inputs([on_meta], None, {})
    with pytest.raises(ApplyError, match="compiled code for cuda:0, meta"):
        check_inputs([on_cuda, on_meta], None, {})


def test_bytes_on_a_card_are_blocks_and_what_is_beside_it_takes_none() -> None:
    ledger = Ledger("cuda")
    with FakeTensorMode():
        held = torch.empty(3, device="cuda")
        assert ledger.ignore(held) == 512
        made = [torch.empty(200, device=one) for one in ("cuda", "cpu")]
        for one in made:
            ledger.count(one)
        assert ledger.live_bytes == 1024
        ledger.count(seed := torch.empty((), device="cuda"), 0)
        assert ledger.live_bytes == 1024
        del made, one, seed
    assert (ledger.live_bytes, ledger.peak_bytes) == (0, 1024)


def test_a_card_that_no_table_has_is_like_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def here(name: str, capability: tuple[int, int], count: int, size: str) -> Gpu:
        properties = SimpleNamespace(
            name=name,
            major=capability[0],
            minor=capability[1],
            multi_processor_count=count,
            total_memory=units.parse_bytes(size),
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        return local_card(CUDA)

    assert here("NVIDIA GeForce RTX 4090", (8, 9), 128, "24GiB") == find("RTX 4090")
    found = here("NVIDIA A100-SXM4-80GB", (8, 0), 108, "79GiB")
    assert found.flop_rates == find("A100 80GB").flop_rates
    assert found.capacity_bytes == units.parse_bytes("79GiB")
    assert here("Some Card", (7, 5), 40, "15GiB").bandwidth == find("T4").bandwidth


def test_a_plan_for_a_card_is_not_for_the_cpu(on_card: Graph, model: str) -> None:
    workload = WorkloadSpec(model).build()
    plan = ckplan.solve(on_card, budget="90%")
    torch._dynamo.reset()
    with pytest.raises(PlanError, match="for cuda, and the model is on cpu"):
        ckplan.compile(workload.model, plan)(workload.batch)
