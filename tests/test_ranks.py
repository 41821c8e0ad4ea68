"""One of two real ranks: what its allocator does beside what is predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckplan
from ckplan import plan as plans
from ckplan.errors import CkplanError
from ckplan.simulate import simulate

ROOT = Path(__file__).parent.parent
WIDTH = 63  # uneven: two ranks have 32 and 31 rows
NEAR = 0.003


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH + 1)
        self.down = nn.Linear(4 * WIDTH + 1, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.drop(self.down(hidden))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(301, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 301, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.h:
            x = block(x)
        return self.head(x)


def build() -> tuple[Model, torch.Tensor]:
    torch.manual_seed(0)
    return Model(), torch.randint(301, (4, 64))


def loss_of(output: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), ids.flatten())


RANK = """
import json, sys
from itertools import accumulate
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import record_function
sys.path[:0] = [{tests!r}, {root!r}]
import ckplan
from ckplan.training.allocator import log_allocations
from test_ranks import build, loss_of

rank, scheme, accumulate_steps = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
meet = "file://{meet}"
dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))

def wrapped(model):
    if scheme == "ddp":
        return nn.parallel.DistributedDataParallel(model, init_sync=False)
    for block in model.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)

def measured(plan):
    with log_allocations("step") as log:
        model, batch = build()
        if plan:
            ckplan.apply(model, plan)
        whole = wrapped(model)
        optimizer = torch.optim.AdamW(whole.parameters(), 1e-3)
        for step in range(6):
            optimizer.zero_grad()
            for _ in range(accumulate_steps - 1):
                (loss_of(whole(batch), batch) / accumulate_steps).backward()
            with record_function(f"step{{step}}"):
                output = whole(batch)
                loss = loss_of(output, batch) / accumulate_steps
                loss.backward()
                del output, loss
                optimizer.step()
    times = [when for when, _ in log.events]
    levels = list(accumulate(size for _, size in log.events))
    starts, tops = [], []
    for name, (start, stop) in sorted(log.spans.items())[1:]:
        first = sum(when < start for when in times)
        inside = levels[first : sum(when <= stop for when in times)]
        starts.append(levels[first - 1])
        tops.append(max(inside) - levels[first - 1])
    held = [*whole.parameters(), batch]
    held += [v for state in optimizer.state.values() for v in state.values()]
    held += [p.grad for p in whole.parameters()] * (accumulate_steps > 1)
    local = [getattr(t, "_local_tensor", t).untyped_storage() for t in held]
    held = sum({{s.data_ptr(): s.nbytes() for s in local}}.values())
    # Gloo lets go of tensors on threads of its own, where the profiler does not always
    # see it: levels only ever seem too high. DDP copies nothing there.
    return (min(starts) if scheme == "ddp" else held) + min(tops)

print(json.dumps([measured(plan) for plan in sys.argv[4:] + [None]]))
dist.destroy_process_group()
"""


def ranks(folder: Path, scheme: str, *args: str) -> list[list[int]]:
    """Measured peaks on every rank: with each plan, then without."""
    script = folder / "rank.py"
    places = {"tests": str(ROOT / "tests"), "root": str(ROOT), "meet": folder / "meet"}
    script.write_text(RANK.format(**places))
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), scheme, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=240) for process in processes]
    for process, (_, err) in zip(processes, said, strict=True):
        assert process.returncode == 0, err[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


@pytest.mark.parametrize(
    ("scheme", "accumulate"),
    [("ddp", 1), ("fsdp2", 1), pytest.param("fsdp2", 2, marks=pytest.mark.slow)],
)
def test_each_rank_needs_what_is_predicted(
    scheme: str, accumulate: int, tmp_path: Path
) -> None:
    graph = profiled(scheme, accumulate)
    files, predicted = [], []
    for budget in ("85%", "75%"):
        plan = ckplan.solve(graph, budget=budget)
        assert plan.regions
        assert plan.predicted is not None
        predicted.append(plan.predicted.peak_bytes)
        files.append(tmp_path / f"{budget}.yaml")
        plans.save(plan, files[-1], force=False)
    predicted.append(simulate(graph).peak_bytes)
    first, second = ranks(tmp_path, scheme, str(accumulate), *map(str, files))
    assert first == pytest.approx(predicted, rel=NEAR)
    assert all(other <= 1.001 * one for one, other in zip(first, second, strict=True))


def profiled(scheme: str, accumulate: int = 1) -> Any:
    model, batch = build()
    return ckplan.profile(
        model,
        batch,
        loss=loss_of,
        accumulate=accumulate,
        shard=scheme,
        world_size=2,
    )


def test_a_run_of_blocks_is_refused_under_fsdp2(tmp_path: Path) -> None:
    plan = plans.loads("ckplan: 1\nregions: [{run: [h.0, h.1]}]\n", "plan")
    plans.save(plan, tmp_path / "run.yaml", force=False)
    with pytest.raises(AssertionError, match="that is not gathered now"):
        ranks(tmp_path, "fsdp2", "1", str(tmp_path / "run.yaml"))


def moved(parameter: nn.Parameter) -> torch.Tensor:
    """The same numbers somewhere inside of a larger buffer."""
    buffer = torch.full((parameter.numel() + 7,), torch.nan)
    part = buffer[7:].view(parameter.shape)
    part.copy_(parameter.data)
    return part


def test_parameters_may_be_gathered_anew_for_backward() -> None:
    found = []
    for planned in (False, True):
        model, batch = build()
        if planned:
            plan = plans.loads("ckplan: 1\nregions: [{calls: 'h.[0..3]'}]\n", "plan")
            ckplan.apply(model, plan)
        for step in range(3):
            torch.manual_seed(step)
            loss = loss_of(model(batch), batch)
            for parameter in model.h.parameters():
                parameter.data = moved(parameter)
            loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
    loss = loss_of(model(batch), batch)
    for parameter in model.h.parameters():
        parameter.data = torch.empty(0)
    with pytest.raises(CkplanError, match="that is not gathered now"):
        loss.backward()
