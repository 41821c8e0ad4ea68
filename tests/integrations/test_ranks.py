"""One of two real ranks: what its allocator does beside what is predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_model import build, loss_of
from torch import nn
from two_ranks import run_two, train_two

import ckplan
from ckplan.errors import CkplanError
from ckplan.graph.sharding import Sharding, traffic_of
from ckplan.plan import file as plan_file
from ckplan.simulating.simulate import simulate

NEAR = 0.003


def ranks(folder: Path, scheme: str, accumulate: int, *plans: Path) -> list[list[int]]:
    """Measured peaks on every rank: with each plan, then without."""
    source = "from rank_model import make, units"
    found = train_two(folder, source, scheme, plans, accumulate=accumulate)
    for rank in found:
        assert len({step.digest for step in rank}) == 1, "other parameters than without"
    return [[step.peak_bytes for step in rank] for rank in found]


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
        plan_file.save(plan, files[-1], force=False)
    predicted.append(simulate(graph).peak_bytes)
    first, second = ranks(tmp_path, scheme, accumulate, *files)
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


COUNT = """
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from rank_model import build, loss_of, units

scheme, batches = sys.argv[2], int(sys.argv[3])
sent = 0

def count(names):
    name = next(name for name in names if hasattr(dist, name))
    real = getattr(dist, name)
    def counted(*args, **kwargs):
        global sent
        tensors = [one for one in (*args, *kwargs.values()) if torch.is_tensor(one)]
        sent += min(one.nbytes for one in tensors)  # a part, to the one other rank
        return real(*args, **kwargs)
    setattr(dist, name, counted)

def reduced(state, bucket):
    global sent
    sent += bucket.buffer().nbytes  # half of it is reduced, half is gathered
    return allreduce_hook(state, bucket)

model, ids = build()
if scheme == "ddp":
    model = nn.parallel.DistributedDataParallel(model, init_sync=False)
    model.register_comm_hook(None, reduced)
else:
    count(("all_gather_single", "all_gather_into_tensor"))
    count(("reduce_scatter_single", "reduce_scatter_tensor"))
    mesh = init_device_mesh("cpu", (2,))
    for unit in units(model):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
for batch in range(batches):
    if scheme == "ddp":
        model.require_backward_grad_sync = batch == batches - 1
    loss_of(model(ids), ids).backward()
print(sent)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "batches"), [("ddp", 2), ("fsdp2", 1), ("fsdp2", 2)]
)
def test_ranks_send_what_is_counted(scheme: str, batches: int, tmp_path: Path) -> None:
    model, batch = build()
    graph = ckplan.profile(model, batch, loss=loss_of, accumulate=batches)
    said = run_two(tmp_path, COUNT, scheme, str(batches))
    traffic = traffic_of(graph, Sharding(scheme, 2))
    assert [int(one) for one in said] == [traffic.step_bytes(batches)] * 2


def test_a_run_of_blocks_is_refused_under_fsdp2(tmp_path: Path) -> None:
    plan = plan_file.loads("ckplan: 1\nregions: [{run: [h.0, h.1]}]\n", "plan")
    plan_file.save(plan, tmp_path / "run.yaml", force=False)
    with pytest.raises(AssertionError, match="that is not gathered now"):
        ranks(tmp_path, "fsdp2", 1, tmp_path / "run.yaml")


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
            plan = plan_file.loads(
                "ckplan: 1\nregions: [{calls: 'h.[0..3]'}]\n", "plan"
            )
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
