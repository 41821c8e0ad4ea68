"""Planned models under DeepSpeed, where it is installed: pip install deepspeed."""

from __future__ import annotations

from pathlib import Path

import pytest
from two_ranks import run_two

pytest.importorskip("deepspeed")

TRAIN = """
stage, one = sys.argv[2], str(rank)
os.environ.update(RANK=one, LOCAL_RANK=one, WORLD_SIZE="2", DS_ACCELERATOR="cpu")
import deepspeed
import ckplan
from ckplan.plan.plan import Plan, PlannedRegion
from rank_model import build, loss_of

BLOCKS = Plan(regions=(PlannedRegion("h.[0..3]"),))
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {
        "stage": int(stage),
        "reduce_bucket_size": 10000,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    },
}

def trained(planned):
    model, batch = build()
    if planned:
        ckplan.apply(model, BLOCKS)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    torch.manual_seed(rank)
    losses = []
    for _ in range(3):
        loss = loss_of(engine(batch), batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())
    if planned:
        print([region.dropped_bytes > 0 for region in ckplan.status(model).regions])
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=stage == "3"):
        return [*losses, *(p.detach().clone() for p in parameters)]

assert all(map(torch.equal, trained(False), trained(True))), "training differs"
"""


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_trains_the_same_with_a_plan(stage: int, tmp_path: Path) -> None:
    for out in run_two(tmp_path, TRAIN, str(stage)):
        assert "[True, True, True, True]" in out
